//! Compares the public items of the published crates with those of an earlier commit, by the rules of
//! semantic versioning. `cargo-semver-checks` does the work.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cargo;

/// The version of cargo-semver-checks that was tried. Each one knows a range of compilers.
const TOOL: &str = "cargo-semver-checks@0.51.0";

/// Compares with the commit `baseline`, or with the last release.
///
/// # Errors
/// A crate has a version that its changes do not allow, the tool is missing, or the commit is.
pub(crate) fn run(root: &Path, baseline: Option<&str>) -> Result<()> {
    let baseline = match baseline {
        Some(commit) => commit.to_owned(),
        None => match last_release(root)? {
            Some(tag) => tag,
            None => {
                eprintln!("xtask: semver: there is no release yet: name a commit with --baseline=COMMIT");
                return Ok(());
            }
        },
    };
    let tool = Command::new("cargo").args(["semver-checks", "--version"]).output().context("cargo")?;
    ensure!(tool.status.success(), "cargo-semver-checks is missing: cargo install --locked {TOOL}");
    let metadata = cargo::metadata(root, &["--no-deps"])?;
    let packages = published(&metadata)?;
    let mut arguments = vec!["semver-checks", "--baseline-rev", &baseline];
    arguments.extend(packages.iter().flat_map(|name| ["-p", name]));
    cargo::run(root, &arguments)
}

/// Returns the newest tag of a release before this commit.
fn last_release(root: &Path) -> Result<Option<String>> {
    let mut git = Command::new("git");
    git.args(["describe", "--tags", "--abbrev=0", "--match=v[0-9]*"]).current_dir(root);
    let output = git.output().context("git")?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned()))
}

/// Returns the packages that may be published.
fn published(metadata: &Value) -> Result<Vec<&str>> {
    let packages = metadata["packages"].as_array().context("no packages")?;
    let names: Vec<&str> =
        packages.iter().filter(|p| p["publish"].is_null()).filter_map(|p| p["name"].as_str()).collect();
    if names.is_empty() {
        bail!("no package may be published");
    }
    Ok(names)
}
