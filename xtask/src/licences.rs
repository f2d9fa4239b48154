//! Licences of what we depend on: those that `deny.toml` allows, and no others.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::spdx;

/// Checks every package that the workspace, or the fuzz targets, use on Linux.
pub(crate) fn check(root: &Path) -> Result<()> {
    let allowed = allowed(&fs::read_to_string(root.join("deny.toml")).context("deny.toml")?)?;
    let mut wrong = Vec::new();
    for workspace in [root.to_owned(), root.join("fuzz")] {
        for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
            let metadata = crate::metadata(&workspace, &["--filter-platform", target])?;
            wrong.extend(offences(&metadata, &allowed)?);
        }
    }
    wrong.sort();
    wrong.dedup();
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// The list `allow` of the section `[licenses]`, one entry a line.
fn allowed(config: &str) -> Result<Vec<String>> {
    let (_, rest) =
        config.split_once("[licenses]\nallow = [").context("deny.toml has no [licenses] allow")?;
    let (list, _) = rest.split_once(']').context("the list does not end")?;
    Ok(list
        .lines()
        .map(|line| line.trim().trim_matches([',', '"']).to_owned())
        .filter(|l| !l.is_empty())
        .collect())
}

fn offences(metadata: &Value, allowed: &[String]) -> Result<Vec<String>> {
    let used: Vec<&str> = metadata["resolve"]["nodes"]
        .as_array()
        .context("cargo metadata resolved nothing")?
        .iter()
        .filter_map(|node| node["id"].as_str())
        .collect();
    let packages = metadata["packages"].as_array().context("no packages")?;
    let used = packages.iter().filter(|package| package["id"].as_str().is_some_and(|id| used.contains(&id)));
    let mut wrong = Vec::new();
    for package in used {
        let licence = package["license"].as_str().unwrap_or_default();
        if !spdx::satisfied(licence, |name| allowed.iter().any(|allowed| allowed == name)) {
            wrong.push(format!("{} {}: licence {licence:?}", package["name"], package["version"]));
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read() {
        let config = "[x]\n\n[licenses]\nallow = [\n    \"MIT\",\n    \"ISC\",\n]\n\n[bans]\n";
        assert_eq!(allowed(config).unwrap(), ["MIT", "ISC"]);
        assert!(allowed("[bans]").is_err());
    }
}
