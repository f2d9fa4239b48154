//! Installs, upgrades and removes the Debian package in a machine with systemd and nothing of kickless, under
//! verified load. The packages hold the program that the other tests run. `KICKLESS_NEXT_BIN` is the program
//! of the second one, if it is another: the upgrade is then one from version to version.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kickless_tests::daemon::{check_sandbox, kickless_binary, repository};
use kickless_tests::systemd_machine::{Overlay, found};
use tempfile::TempDir;

/// The programs that make a package.
const MAKERS: [&str; 2] = ["dh_builddeb", "dh_apparmor"];

fn is_installed(program: &str) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(program).exists())
}

/// Makes a package of a program. Returns its path.
fn package(program: &Path, version: &str, out: &Path) -> PathBuf {
    let mut tool = Command::new(repository().join("tools/deb"));
    tool.env("PROGRAM", program).env("VERSION", version).env("OUT", out);
    let output = tool.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut files = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
    let is_made = |path: &PathBuf| path.extension() == Some(OsStr::new("deb"));
    files.find(is_made).unwrap()
}

#[test]
fn the_package_upgrades_under_load_and_leaves_nothing() {
    let Some(tree) = Overlay::new(&repository().join("tests/fixtures/package/trial")).unwrap() else {
        println!("skipped: this needs a root tree with systemd, which tools/systemd-root makes");
        return;
    };
    if let Some(missing) = MAKERS.into_iter().find(|program| !is_installed(program)) {
        println!("skipped: this needs {missing}, which `make deb` installs");
        return;
    }
    let out = TempDir::new().unwrap();
    let program = kickless_binary().unwrap();
    let next = env::var_os("KICKLESS_NEXT_BIN").map_or_else(|| program.clone(), PathBuf::from);
    for (name, program, version) in [("first", &program, "0.1.0-1"), ("second", &next, "0.1.1-1")] {
        let made = package(program, version, &out.path().join(name));
        tree.put(&made, &format!("packages/{name}.deb")).unwrap();
    }
    let lines = tree.boot().unwrap();
    let all = lines.join("\n");
    let expected = [
        "install 0 active enabled kickless",
        "confined kickless (enforce)",
        "sample 0 []",
        "configure 0 moved 660 kickless kvm 660 root kvm 660 root kvm",
        "loads good good active",
        "metrics active 1",
        "upgrade 0 active moved moved active",
        "version 0.1.1-1 \"version\":\"0.1.0\"",
        "loads good good",
        "metrics active 1",
        "restart 0 good good",
        "errors 0",
        "remove 0 inactive inactive inactive inactive 0",
        "reinstall 0 active active active",
        // Users stay, so that no other user gets files that they own.
        "purge 0 0 2",
        "over",
    ];
    assert_eq!(found(&lines), expected, "{all}");
    let left: Vec<_> = lines.iter().filter(|line| line.starts_with("LEFT ")).collect();
    assert!(left.is_empty(), "{left:?}");
    check_sandbox(&lines).unwrap();
}
