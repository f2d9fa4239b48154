//! The directories in which the sandbox allows files, derived from the files that the operator named.
//!
//! Everything here runs in the main thread at the start, before the process loses its paths.

use std::io;
use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, ensure};
use kickless_opener::{Calls, PathUse, Root, Target, Want, explained, is_narrow};

/// Returns the roots of a process: the directories of the files that `named` has, those that the service
/// manager has `prepared` for sockets, and those of `--allow-root`. Without calls, an image finds its backing
/// images beside itself, and below the last ones.
///
/// # Errors
/// An `allowed` directory is none, or the working directory is gone. The error is one sentence.
pub(crate) fn roots<'a>(
    named: impl IntoIterator<Item = &'a Target>,
    allowed: &[PathBuf],
    prepared: &[PathBuf],
    calls: Calls,
) -> Result<Vec<Root>> {
    let mut roots = Vec::new();
    for target in named {
        if let Some((usage, path)) = file_of(target) {
            let path = absolute(path).context("there is no working directory")?;
            add_file(&mut roots, usage, &path, calls != Calls::Nothing);
        }
    }
    for directory in prepared {
        // A directory that is missing is that of another service.
        if let Ok(directory) = canonical(directory) {
            add(&mut roots, directory, &[PathUse::Socket], true);
        }
    }
    for directory in allowed {
        let option = || format!("--allow-root={}", directory.display());
        // The path of a name in it, so that the sentence is about the directory.
        let found =
            canonical(directory).map_err(|error| explained(&directory.join("file"), Want::Read, error));
        let found = found.with_context(option)?;
        ensure!(is_directory(&found), "{}: it is no directory", option());
        add(&mut roots, found, &[PathUse::Image, PathUse::Socket, PathUse::Capture], true);
    }
    Ok(roots)
}

/// Returns the path of a thing that is a file, or is made as one.
fn file_of(target: &Target) -> Option<(PathUse, &Path)> {
    match target {
        Target::Image { path, .. } => Some((PathUse::Image, path)),
        Target::Socket { path, .. } => Some((PathUse::Socket, path)),
        Target::Capture { path } => Some((PathUse::Capture, path)),
        Target::Unix { .. }
        | Target::Tcp { .. }
        | Target::Tap { .. }
        | Target::Passt { .. }
        | Target::Backing
        | Target::Library { .. } => None,
    }
}

/// Adds the directory of a file, and that of the file that its links lead to.
///
/// For a file that is not there yet, both may come with a file system that is mounted later. The kernel does
/// not look at the rule of a directory that is under a mount point, so the directory above is added too, for
/// this file alone.
fn add_file(roots: &mut Vec<Root>, usage: PathUse, path: &Path, has_calls: bool) {
    let directory = path.parent().unwrap_or(path);
    let file = canonical(path).ok();
    let existing = directory.ancestors().find_map(|at| Some((canonical(at).ok()?, at == directory)));
    let mut add = |directory: &Path, for_calls: bool| {
        match directory.parent() {
            Some(_) => add(roots, directory.to_owned(), &[usage], for_calls),
            // A root of all files would be none. An image is the root of itself, and cannot be replaced.
            None if usage == PathUse::Image => {
                if let Some(file) = file.as_deref().filter(|file| file.parent() == Some(directory)) {
                    add(roots, file.to_owned(), &[usage], false);
                }
            }
            None => add(roots, directory.to_owned(), &[usage], false),
        }
    };
    if let Some((existing, is_its_own)) = existing {
        add(&existing, has_calls && is_its_own && is_narrow(&existing));
        if file.is_none() && usage == PathUse::Image && is_narrow(&existing) {
            existing.parent().into_iter().for_each(|above| add(above, false));
        }
    }
    if let Some(real) = file.as_deref().and_then(Path::parent) {
        add(real, has_calls && is_narrow(real));
    }
}

/// Adds a root, to the one with the same directory if there is one.
fn add(roots: &mut Vec<Root>, directory: PathBuf, uses: &[PathUse], for_calls: bool) {
    let is_same = |root: &&mut Root| root.directory == directory && root.for_calls == for_calls;
    let Some(root) = roots.iter_mut().find(is_same) else {
        return roots.push(Root { directory, uses: uses.into(), for_calls });
    };
    root.uses.extend(uses.iter().filter(|usage| !root.uses.contains(usage)).copied().collect::<Vec<_>>());
}

#[expect(clippy::disallowed_methods, reason = "the main thread at the start, which still has its paths")]
pub(super) fn canonical(path: &Path) -> io::Result<PathBuf> {
    path.canonicalize()
}

#[expect(clippy::disallowed_methods, reason = "the main thread at the start, which still has its paths")]
fn is_directory(path: &Path) -> bool {
    path.is_dir()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    fn image(path: impl Into<PathBuf>) -> Target {
        Target::Image { path: path.into(), writes: true, chain: true }
    }

    fn root(directory: impl Into<PathBuf>, usage: PathUse, for_calls: bool) -> Root {
        Root { directory: directory.into(), uses: vec![usage], for_calls }
    }

    fn of(named: &[Target]) -> Vec<Root> {
        roots(named, &[], &[], Calls::All).unwrap()
    }

    #[test]
    fn a_file_has_its_directory_and_that_of_its_target() {
        let dir = TempDir::new().unwrap();
        let top = dir.path().canonicalize().unwrap();
        for name in ["a", "b"] {
            fs::create_dir(top.join(name)).unwrap();
            fs::write(top.join(name).join("disk"), "").unwrap();
        }
        symlink("../b/disk", top.join("a/link")).unwrap();
        symlink("a", top.join("c")).unwrap();
        let [a, b] = ["a", "b"].map(|name| root(top.join(name), PathUse::Image, true));
        assert_eq!(of(&[image(top.join("a/disk"))]), std::slice::from_ref(&a));
        assert_eq!(of(&[image(top.join("a/link"))]), [a.clone(), b.clone()]);
        assert_eq!(of(&[image(top.join("c/link")), image(top.join("b/disk"))]), [a, b]);
        let socket = Target::Socket { path: top.join("a/s"), mode: None, group: None };
        let both =
            Root { directory: top.join("a"), uses: vec![PathUse::Image, PathUse::Socket], for_calls: true };
        assert_eq!(of(&[image(top.join("a/disk")), socket]), [both]);
    }

    #[test]
    fn a_disk_that_comes_later_has_the_directory_above() {
        let dir = TempDir::new().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let above = top.parent().unwrap();
        let expected = [root(&top, PathUse::Image, true), root(above, PathUse::Image, false)];
        assert_eq!(of(&[image(top.join("disk"))]), expected);
        // No call may name the neighbours of a directory that is to come.
        let expected = [root(&top, PathUse::Image, false), root(above, PathUse::Image, false)];
        assert_eq!(of(&[image(top.join("to/come/disk"))]), expected);
        let socket = Target::Socket { path: top.join("s"), mode: None, group: None };
        assert_eq!(of(&[socket]), [root(&top, PathUse::Socket, true)]);
    }

    #[test]
    fn neighbours_in_wide_directories_are_not_for_calls() {
        assert_eq!(of(&[image("/dev/null")]), [root("/dev", PathUse::Image, false)]);
        // No root has all files.
        assert_eq!(
            of(&[image("/no-such-disk"), image("/no/such/disk"), image("/proc/no-such-disk")]),
            [root("/proc", PathUse::Image, true)]
        );
        assert_eq!(of(&[image("/dev/no-such-disk")]), [root("/dev", PathUse::Image, false)]);
        let shm = Target::Capture { path: "/dev/fd/c".into() };
        assert!(of(&[shm]).iter().all(|root| !root.for_calls || !root.directory.starts_with("/dev")));
        assert_eq!(of(&[Target::Tap { name: "tap0".into() }]), []);
    }

    #[test]
    fn without_calls_only_the_operators_directories_have_backing_images() {
        let dir = TempDir::new().unwrap();
        let top = dir.path().canonicalize().unwrap();
        fs::write(top.join("disk"), "").unwrap();
        let named = [image(top.join("disk"))];
        assert_eq!(roots(&named, &[], &[], Calls::Nothing).unwrap(), [root(&top, PathUse::Image, false)]);
        assert_eq!(roots(&named, &[], &[], Calls::Files).unwrap(), [root(&top, PathUse::Image, true)]);
        let both = roots(&named, std::slice::from_ref(&top), &[], Calls::Nothing).unwrap();
        assert_eq!(both.iter().map(|root| root.for_calls).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn the_operator_adds_directories() {
        let dir = TempDir::new().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let uses = vec![PathUse::Image, PathUse::Socket, PathUse::Capture];
        let all = Root { directory: top.clone(), uses, for_calls: true };
        assert_eq!(
            roots(&[], &[top.join("../").join(top.file_name().unwrap())], &[], Calls::All).unwrap(),
            [all]
        );
        let prepared = [top.clone(), "/no/such".into()];
        let sockets = root(&top, PathUse::Socket, true);
        assert_eq!(roots(&[], &[], &prepared, Calls::All).unwrap(), [sockets]);
        for (path, why) in
            [("/no/such", "there is no directory /no: make it first"), ("/dev/null", "no directory")]
        {
            let refused = format!("{:#}", roots(&[], &[path.into()], &[], Calls::All).unwrap_err());
            assert!(refused.starts_with(&format!("--allow-root={path}: ")), "{refused}");
            assert!(refused.contains(why), "{refused}");
        }
    }
}
