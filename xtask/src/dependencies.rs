//! Checks which crates each crate of the workspace may depend on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cargo;

/// Each crate with the crates of this workspace on which it may depend. It may also depend on the crates on
/// which these may depend. Dependencies of tests are not checked.
///
/// A crate that is not in the list is a kind of device: see [`KIND`] and [`KINDS`].
const MAY_NAME: &[(&str, &[&str])] = &[
    ("sync", &[]),
    ("spec", &[]),
    ("values", &[]),
    ("opener", &["values"]),
    ("sandbox", &[]),
    ("handover", &["spec"]),
    ("memory", &["spec", "sync", "opener"]),
    ("dirty-log", &["memory"]),
    ("virtqueue", &["memory"]),
    ("vhost-user", &["spec"]),
    ("io", &["memory"]),
    ("device", &["virtqueue", "io", "handover"]),
    ("worker", &["device"]),
    ("qcow2", &["sync"]),
    ("disk", &["io", "qcow2", "handover"]),
    ("blk", &["device", "disk"]),
    ("scsi", &["device", "disk"]),
    ("net-port", &["memory", "handover"]),
    ("net", &["device", "net-port"]),
    ("vhost", &["device", "vhost-user"]),
    ("driver", &["virtqueue", "vhost-user", "io"]),
    ("driver-c", &["driver"]),
    ("bench", &["driver", "values"]),
    ("daemon", &["worker", "vhost"]),
    ("control", &["daemon"]),
    ("kinds", &["daemon", "blk", "net"]),
    ("kickless", &["control", "kinds", "bench", "sandbox"]),
];
/// The crates on which a kind of device may depend, unless it has a line in the list.
const KIND: &[&str] = &["device"];
/// The crate that may depend on kinds of devices without a line. No other crate may, except for its tests.
const KINDS: &str = "kinds";
/// Packages that only test and check. They may depend on each crate. No other crate may depend on them,
/// except for its tests.
const OUTSIDE: [&str; 3] = ["kickless-testing", "kickless-tests", "xtask"];
const PREFIX: &str = "kickless-";

/// Checks the dependencies of the crates of this workspace on one another.
pub(crate) fn check(root: &Path) -> Result<()> {
    let wrong = offences(&cargo::metadata(root, &["--no-deps"])?)?;
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// Returns the line of a crate in the list.
fn listed(name: &str) -> Option<&'static [&'static str]> {
    MAY_NAME.iter().find(|(known, _)| *known == name).map(|(_, direct)| *direct)
}

/// Returns all crates of the list on which the crate `name` may depend.
fn reachable(name: &str) -> BTreeSet<&'static str> {
    let direct = listed(name).unwrap_or(KIND);
    direct.iter().copied().chain(direct.iter().flat_map(|next| reachable(next))).collect()
}

/// Returns whether the crate `name` may depend on the crate `dependency`.
fn may_name(name: &str, dependency: &str) -> bool {
    reachable(name).contains(dependency) || (name == KINDS && listed(dependency).is_none())
}

fn offences(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("no packages")?;
    let mut named: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let dependencies = package["dependencies"].as_array().context("no dependencies")?;
        // The kind of an ordinary dependency is null.
        let ours = dependencies.iter().filter(|d| d["kind"] != "dev").filter_map(|d| d["name"].as_str());
        named.insert(name, ours.filter(|name| name.starts_with("kickless") || *name == "xtask").collect());
    }
    let mut wrong = Vec::new();
    for (name, dependencies) in named {
        if OUTSIDE.contains(&name) {
            continue;
        }
        let own = name.strip_prefix(PREFIX).unwrap_or(name);
        for dependency in dependencies {
            let is_tool = OUTSIDE.contains(&dependency);
            if is_tool || !dependency.strip_prefix(PREFIX).is_some_and(|short| may_name(own, short)) {
                wrong.push(format!("{name} must not name {dependency}"));
            }
        }
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn workspace(name: &str, dependency: &str, kind: Option<&str>) -> Value {
        json!({ "packages": [{ "name": name, "dependencies": [{ "name": dependency, "kind": kind }] }] })
    }

    #[test]
    fn edges_are_transitive() {
        assert!(may_name("kickless", "spec"));
        assert!(may_name("blk", "virtqueue"));
        assert!(!may_name("blk", "vhost"));
    }

    #[test]
    fn only_the_crate_of_kinds_names_a_crate_without_a_line() {
        assert!(may_name("kinds", "new"));
        assert!(!may_name("daemon", "new") && !may_name("kickless", "new") && !may_name("new", "newer"));
        assert!(may_name("new", "virtqueue"));
        assert!(!may_name("new", "disk") && !may_name("new", "vhost"));
    }

    #[test]
    fn forbidden_edges_are_found() {
        let wrong = |name, dependency, kind| offences(&workspace(name, dependency, kind)).unwrap().len();
        assert_eq!(wrong("kickless-blk", "kickless-disk", None), 0);
        assert_eq!(wrong("kickless-blk", "kickless-worker", None), 1);
        assert_eq!(wrong("kickless-blk", "kickless-worker", Some("build")), 1);
        assert_eq!(wrong("kickless-blk", "kickless-worker", Some("dev")), 0);
        assert_eq!(wrong("kickless-blk", "serde", None), 0);
        assert_eq!(wrong("kickless-new", "kickless-vhost", None), 1);
        assert_eq!(wrong("kickless-tests", "kickless-blk", None), 0);
        assert_eq!(wrong("kickless-blk", "kickless-tests", None), 1);
        assert_eq!(wrong("kickless-blk", "kickless-testing", None), 1);
        assert_eq!(wrong("kickless-blk", "kickless-testing", Some("dev")), 0);
    }
}
