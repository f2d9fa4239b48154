//! Finds files of a crate that import one another in a circle.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cargo;
use crate::imports::{self, Imports};

/// Checks that the imports between the files of each crate run one way.
pub(crate) fn check(root: &Path) -> Result<()> {
    let metadata = cargo::metadata(root, &["--no-deps"])?;
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().context("no packages")? {
        for target in package["targets"].as_array().context("no targets")? {
            let is_product = |kind: &Value| ["lib", "staticlib", "bin"].iter().any(|known| kind == known);
            let source = target["src_path"].as_str().context("a target without a file")?;
            if target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(is_product)) {
                let imports = imports::read(Path::new(source))?;
                wrong.extend(circles(&imports).iter().map(|circle| describe(circle, &imports, root)));
            }
        }
    }
    ensure!(wrong.is_empty(), "files that import one another in a circle:\n{}", wrong.join("\n"));
    Ok(())
}

/// Returns the largest sets of files in which each file imports each other one, directly or through others.
fn circles(imports: &Imports) -> Vec<BTreeSet<PathBuf>> {
    let reached: Vec<_> = imports.keys().map(|file| (file, reachable(imports, file))).collect();
    let mut circles = BTreeSet::new();
    for (file, from) in &reached {
        let circle: BTreeSet<_> = reached
            .iter()
            .filter(|(other, back)| from.contains(*other) && back.contains(*file))
            .map(|(other, _)| (*other).clone())
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable(imports: &Imports, from: &Path) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    let mut left = vec![from];
    while let Some(file) = left.pop() {
        for next in imports.get(file).into_iter().flatten() {
            if reached.insert(next.clone()) {
                left.push(next);
            }
        }
    }
    reached
}

/// Returns a line for each import within the circle.
fn describe(circle: &BTreeSet<PathBuf>, imports: &Imports, root: &Path) -> String {
    let short = |file: &Path| file.strip_prefix(root).unwrap_or(file).display().to_string();
    let mut lines = vec![format!("{} files:", circle.len())];
    for file in circle {
        let named: Vec<_> = imports[file].intersection(circle).map(|file| short(file)).collect();
        lines.push(format!("  {} -> {}", short(file), named.join(", ")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the circles of a crate with these files; the first is its root.
    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let imports = imports::read(&dir.path().join(files[0].0)).unwrap();
        let name = |file: &PathBuf| file.strip_prefix(dir.path()).unwrap().display().to_string();
        circles(&imports).iter().map(|circle| circle.iter().map(name).collect()).collect()
    }

    /// Returns the number of circles between two files, `a.rs` and `b.rs`.
    fn two(a: &str, b: &str) -> usize {
        found(&[("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;"), ("a.rs", a), ("b.rs", b)]).len()
    }

    #[test]
    fn imports_that_run_one_way() {
        assert_eq!(two("pub struct A;", "use crate::a::A; pub struct B(A);"), 0);
        // The root re-exports both, and imports neither.
        assert_eq!(two("pub struct A;", "use crate::A; pub struct B(A);"), 0);
        // A variable is no module.
        assert_eq!(two("pub struct A; fn f() { let b = 1; g(b); }", "use crate::A; pub struct B(A);"), 0);
        let with_test = "pub struct A; #[cfg(test)] mod tests { use crate::B; }";
        assert_eq!(two(with_test, "use crate::A; pub struct B(A);"), 0);
    }

    #[test]
    fn imports_that_run_in_a_circle() {
        let b = "use crate::a::A; pub struct B(A); pub fn g() {}";
        assert_eq!(two("use crate::b::B; pub struct A(B);", b), 1);
        assert_eq!(two("use crate::B as C; pub struct A(C);", b), 1);
        assert_eq!(two("use super::*; pub struct A(B);", b), 1);
        assert_eq!(two("pub struct A; fn f() { crate::b::g() }", b), 1);
        assert_eq!(two("pub struct A; fn f() { assert!(crate::b::g()) }", b), 1);
        assert_eq!(two("pub struct A; mod inner { use super::super::b::{self}; }", b), 1);
        let through_three = [
            ("main.rs", "mod a; mod c;"),
            ("a/mod.rs", "mod b; pub struct A(b::B);"),
            ("a/b.rs", "use crate::c::C; pub struct B(C);"),
            ("c.rs", "use crate::a::A; pub struct C(A);"),
        ];
        assert_eq!(found(&through_three), [["a/b.rs", "a/mod.rs", "c.rs"]]);
        let of_a_parent_and_its_child = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod b; pub struct A; use b::B;"),
            ("a/b.rs", "use super::A; pub struct B(A);"),
        ];
        assert_eq!(found(&of_a_parent_and_its_child), [["a/b.rs", "a.rs"]]);
    }

    /// A function and a module of one name, of which the function is known above the module.
    #[test]
    fn imports_through_a_module_that_has_the_name_of_its_function() {
        let root = ("lib.rs", "mod a; mod c; pub use a::watch;");
        let child = ("a/watch.rs", "use crate::c::C; pub struct Watch(C); pub fn watch() {}");
        for parent in [
            "mod watch; pub use watch::watch; use watch::Watch; pub struct A(Watch);",
            "pub mod watch; pub use watch::watch; pub struct A;",
        ] {
            for c in [
                "use crate::a::watch::Watch; pub struct C(Watch);",
                "pub struct C; fn f() { crate::watch() }",
            ] {
                let files = [root, ("a/mod.rs", parent), child, ("c.rs", c)];
                assert_eq!(found(&files), [["a/watch.rs", "c.rs"]], "{parent} {c}");
            }
        }
        let parent = ("a/mod.rs", "mod watch; pub use watch::watch; use watch::Watch; pub struct A(Watch);");
        let c = ("c.rs", "use crate::a::A; pub struct C(A);");
        assert_eq!(found(&[root, parent, child, c]), [["a/mod.rs", "a/watch.rs", "c.rs"]]);
    }
}
