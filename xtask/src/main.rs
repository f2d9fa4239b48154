//! Runs the project's own checks: CI runs `cargo xtask check` before any test, and
//! `cargo xtask bench-instructions` beside the tests.

mod cargo;
mod circles;
mod dependencies;
mod imports;
mod instructions;
mod licences;
mod pages;
mod prose;
mod quotes;
mod semver;
mod site;
mod sources;
mod spdx;
mod tracked;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

const USAGE: &str =
    "usage: cargo xtask check [fmt|clippy|doc|dependencies|circles|licences|sources|prose|pages]...
       cargo xtask bench-instructions [--bless]
       cargo xtask semver [--baseline=COMMIT]
       cargo xtask site MDBOOK";

/// A check and its name on the command line.
struct Check {
    name: &'static str,
    run: fn(&Path) -> Result<()>,
}

const CHECKS: [Check; 9] = [
    Check { name: "fmt", run: fmt },
    Check { name: "sources", run: sources::check },
    Check { name: "prose", run: prose::check },
    Check { name: "pages", run: pages_and_quotes },
    Check { name: "dependencies", run: dependencies::check },
    Check { name: "circles", run: circles::check },
    Check { name: "licences", run: licences::check },
    Check { name: "clippy", run: clippy },
    Check { name: "doc", run: doc },
];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let Some((command, wanted)) = words.split_first() else { bail!("{USAGE}") };
    if command == "bench-instructions" {
        ensure!(wanted.iter().all(|word| word == "--bless"), "{USAGE}");
        return instructions::run(&root(), !wanted.is_empty());
    }
    if command == "semver" {
        let baseline = wanted.first().and_then(|word| word.strip_prefix("--baseline="));
        ensure!(wanted.len() == usize::from(baseline.is_some()), "{USAGE}");
        return semver::run(&root(), baseline);
    }
    if command == "site" {
        let [mdbook] = wanted else { bail!("{USAGE}") };
        return site::run(&root(), Path::new(mdbook));
    }
    ensure!(command == "check" && wanted.iter().all(|word| CHECKS.iter().any(|c| c.name == word)), "{USAGE}");
    let root = root();
    for check in
        CHECKS.iter().filter(|check| wanted.is_empty() || wanted.iter().any(|word| word == check.name))
    {
        let start = Instant::now();
        (check.run)(&root).with_context(|| format!("check {} failed", check.name))?;
        eprintln!("xtask: {:<13} ok {:6.1} s", check.name, start.elapsed().as_secs_f32());
    }
    Ok(())
}

/// Returns the root of the source tree.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

fn fmt(root: &Path) -> Result<()> {
    cargo::run(root, &["fmt", "--all", "--check"])?;
    cargo::run(&root.join("fuzz"), &["fmt", "--check"])
}

fn pages_and_quotes(root: &Path) -> Result<()> {
    pages::check(root)?;
    quotes::check(root)
}

fn clippy(root: &Path) -> Result<()> {
    // The second one checks the code behind features. It links nothing, so librbd need not be installed. Both
    // are for the whole workspace: then they share the dependencies.
    for features in ["", "kickless/rbd,kickless-blk/rbd"] {
        let with = ["clippy", "--quiet", "--locked", "--workspace", "--all-targets", "--features", features];
        cargo::run(root, &[&with[..], &["--", "-D", "warnings"]].concat())?;
    }
    Ok(())
}

fn doc(root: &Path) -> Result<()> {
    let flags = format!("{} -D warnings", env::var("RUSTDOCFLAGS").unwrap_or_default());
    let mut command = Command::new(cargo::program());
    command.args(["doc", "--quiet", "--locked", "--workspace", "--no-deps", "--document-private-items"]);
    command.args(["--features", "kickless/rbd"]);
    cargo::succeed(command.env("RUSTDOCFLAGS", flags.trim()).current_dir(root))
}
