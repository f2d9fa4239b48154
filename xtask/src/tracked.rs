//! Lists the files of the source tree.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Returns the name and the text of each file that git tracks or would add.
///
/// Leaves out files that are not UTF-8 and files that were removed but are still listed.
pub(crate) fn texts(root: &Path) -> Result<impl Iterator<Item = (String, String)>> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root)
        .output()
        .context("git cannot be started")?;
    ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
    let names: Vec<String> = names.split_terminator('\0').map(str::to_owned).collect();
    Ok(names.into_iter().filter_map(move |name| {
        let text = fs::read_to_string(root.join(&name)).ok()?;
        Some((name, text))
    }))
}
