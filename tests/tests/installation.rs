//! Installs the files of `make install` below a directory, and removes them again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kickless_tests::daemon::{kickless_binary, repository};

fn install(destination: &Path) {
    let mut install = Command::new(repository().join("dist/install"));
    install.arg(kickless_binary().unwrap()).env("DESTDIR", destination);
    assert!(install.status().unwrap().success());
}

/// Returns the paths of all files in a tree, relative to it.
fn files(tree: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![tree.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            } else {
                found.insert(entry.path().strip_prefix(tree).unwrap().to_owned());
            }
        }
    }
    found
}

#[test]
fn uninstalling_leaves_what_others_have_written() {
    let (system, list) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    install(system.path());
    assert!(files(system.path()).contains(Path::new("usr/local/libexec/kickless-blk")));
    let config = system.path().join("etc/kickless/devices.toml");
    fs::write(&config, "[pool]\n").unwrap();
    let foreign = "usr/local/share/man/man1/other.1";
    fs::write(system.path().join(foreign), "").unwrap();

    // A second installation, such as that of the next version, keeps the configuration.
    install(system.path());
    assert_eq!(fs::read_to_string(&config).unwrap(), "[pool]\n");

    install(list.path());
    let mut uninstall = Command::new(repository().join("dist/uninstall"));
    let said = uninstall.arg(list.path()).env("DESTDIR", system.path()).output().unwrap();
    assert!(said.status.success(), "{said:?}");
    let left = ["etc/apparmor.d/kickless", "etc/kickless/devices.toml", foreign];
    assert_eq!(files(system.path()), left.into_iter().map(PathBuf::from).collect());
    assert!(!system.path().join("usr/local/share/doc/kickless").exists());
    assert!(String::from_utf8_lossy(&said.stdout).contains(config.to_str().unwrap()), "{said:?}");
}
