//! Runs cargo.

use std::env;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Returns the cargo that runs this program.
pub(crate) fn program() -> String {
    env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

/// Runs cargo with `arguments` in `dir`.
pub(crate) fn run(dir: &Path, arguments: &[&str]) -> Result<()> {
    succeed(Command::new(program()).args(arguments).current_dir(dir))
}

/// Runs `command`, which must succeed.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?} cannot be started"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Returns what `cargo metadata` prints for the workspace in `dir`.
pub(crate) fn metadata(dir: &Path, arguments: &[&str]) -> Result<serde_json::Value> {
    let mut command = Command::new(program());
    command.args(["metadata", "--format-version=1", "--locked", "--quiet"]).args(arguments).current_dir(dir);
    let output = command.output().context("cargo metadata cannot be started")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata gave no JSON")
}
