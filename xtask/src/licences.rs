//! Checks that `deny.toml` allows the licence of each dependency, either for all crates or as an exception
//! for this dependency.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{cargo, spdx};

/// Checks the packages that the workspace and the fuzz targets use on Linux.
pub(crate) fn check(root: &Path) -> Result<()> {
    let config = fs::read_to_string(root.join("deny.toml")).context("deny.toml")?;
    let rules = Rules { allowed: allowed(&config)?, exceptions: exceptions(&config)? };
    let mut wrong = Vec::new();
    for workspace in [root.to_owned(), root.join("fuzz")] {
        for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"] {
            let metadata = cargo::metadata(&workspace, &["--filter-platform", target])?;
            wrong.extend(offences(&metadata, &rules)?);
        }
    }
    wrong.sort();
    wrong.dedup();
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// Licences that packages may have.
struct Rules {
    allowed: Vec<String>,
    /// Names of crates, each with a licence that only this crate may have.
    exceptions: Vec<(String, String)>,
}

/// Reads the list `allow` of the section `[licenses]`, which has one entry a line.
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

/// Reads the list `exceptions`, if there is one. A line has one entry, with one licence.
fn exceptions(config: &str) -> Result<Vec<(String, String)>> {
    let Some((_, rest)) = config.split_once("\nexceptions = [\n") else { return Ok(Vec::new()) };
    let (list, _) = rest.split_once("\n]").context("the list of exceptions does not end")?;
    let entries = list.lines().map(|line| match line.split('"').collect::<Vec<_>>()[..] {
        [_, name, _, licence, _] => Ok((name.to_owned(), licence.to_owned())),
        _ => bail!("not an exception for one crate and one licence: {line}"),
    });
    entries.collect()
}

fn offences(metadata: &Value, rules: &Rules) -> Result<Vec<String>> {
    let used: Vec<&str> = metadata["resolve"]["nodes"]
        .as_array()
        .context("the output of cargo metadata has no dependencies")?
        .iter()
        .filter_map(|node| node["id"].as_str())
        .collect();
    let packages = metadata["packages"].as_array().context("no packages")?;
    let used = packages.iter().filter(|package| package["id"].as_str().is_some_and(|id| used.contains(&id)));
    let mut wrong = Vec::new();
    for package in used {
        let (name, licence) = (&package["name"], package["license"].as_str().unwrap_or_default());
        let allows = |wanted: &str| {
            rules.allowed.iter().any(|allowed| allowed == wanted)
                || rules.exceptions.iter().any(|(of, allowed)| name == of.as_str() && allowed == wanted)
        };
        if !spdx::satisfied(licence, allows) {
            wrong.push(format!("{} {}: licence {licence:?}", name, package["version"]));
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_list_is_read() {
        let config = "[x]\n\n[licenses]\nallow = [\n    \"MIT\",\n    \"ISC\",\n]\n\n[bans]\n";
        assert_eq!(allowed(config).unwrap(), ["MIT", "ISC"]);
        assert!(allowed("[bans]").is_err());
    }

    #[test]
    fn an_exception_is_for_one_crate() {
        let config = "]\nexceptions = [\n    { crate = \"a\", allow = [\"X\"] },\n]\n";
        let rules = Rules { allowed: vec!["MIT".into()], exceptions: exceptions(config).unwrap() };
        let found = |name, licence| {
            let package = json!({ "id": "i", "name": name, "version": "1", "license": licence });
            let metadata = json!({ "packages": [package], "resolve": { "nodes": [{ "id": "i" }] } });
            offences(&metadata, &rules).unwrap().len()
        };
        assert_eq!([found("a", "X"), found("a", "MIT"), found("b", "MIT")], [0, 0, 0]);
        assert_eq!([found("b", "X"), found("a", "Y")], [1, 1]);
        assert!(exceptions("").unwrap().is_empty());
        assert!(exceptions("\nexceptions = [\n    { crate = \"a\" },\n]").is_err());
    }
}
