//! Checks the text of the sources: the length of files, the use of `unsafe`, paths of one machine, and names
//! of kinds of devices.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::tracked;

/// Largest number of lines of a source file, tests included.
const LINES_MAX: usize = 800;
/// Files and directories whose files may each allow unsafe code.
const ISLANDS: &[&str] = &[
    "crates/memory/",
    "crates/dirty-log/",
    "crates/virtqueue/",
    "crates/io/",
    "crates/disk/src/rbd/ffi.rs",
    "crates/driver/src/slots.rs",
    "crates/driver-c/",
    "crates/kickless/src/inherited.rs",
    "crates/net-port/src/tap/sys.rs",
    "crates/opener/src/kernel.rs",
    "crates/opener/src/tap.rs",
    // Calls that only tests make. No release build has it.
    "crates/sandbox/src/attack.rs",
    "crates/net-port/src/xdp/program.rs",
    "crates/net-port/src/xdp/rings.rs",
    "crates/sandbox/src/filter.rs",
    "crates/sandbox/src/landlock.rs",
    "crates/sandbox/src/process.rs",
    "crates/sandbox/src/trap.rs",
    "crates/sandbox/tests/common/",
    "tests/src/allocations.rs",
    "tests/benches/driver_vs_virtio_driver/peer.rs",
];
/// The directory of the kinds of devices, with a file for each.
const KINDS: &str = "crates/kinds/src/";
/// Crates that work with any kind, so that neither they nor their tests name one.
const WITHOUT_KINDS: [&str; 2] = ["crates/daemon/", "crates/control/"];
/// Beginnings of paths that exist on one machine only.
const PRIVATE_PATHS: [&str; 3] = ["/root/", "/home/", "/work/"];
/// Files that may have such text: lock files with hashes and addresses of the registry, and this list.
const EXEMPT: [&str; 3] = ["Cargo.lock", "fuzz/Cargo.lock", "xtask/src/sources.rs"];

/// Checks every file that git knows.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    let texts: Vec<_> = tracked::texts(root)?.collect();
    let kinds: Vec<&str> = texts.iter().filter_map(|(name, _)| kind(name)).collect();
    ensure!(!kinds.is_empty(), "{KINDS} has no kinds");
    for (name, text) in &texts {
        if WITHOUT_KINDS.iter().any(|without| name.starts_with(without)) {
            names_of_kinds(name, text, &kinds, &mut wrong);
        }
        if !EXEMPT.contains(&name.as_str()) {
            offences(name, text, &mut wrong);
        }
    }
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

fn offences(name: &str, text: &str, wrong: &mut Vec<String>) {
    for (number, line) in text.lines().enumerate() {
        if let Some(path) = PRIVATE_PATHS.iter().find(|path| begins_in(line, path)) {
            wrong.push(format!("{name}:{}: {path} is a path of one machine", number + 1));
        }
    }
    if name.ends_with(".rs") {
        let lines = text.lines().count();
        if lines > LINES_MAX {
            wrong.push(format!("{name}: {lines} lines; the limit is {LINES_MAX}"));
        }
        let lifted = ["allow(unsafe_code", "expect(unsafe_code"].iter().any(|lift| text.contains(lift));
        if lifted && !ISLANDS.iter().any(|island| name.starts_with(island)) {
            wrong.push(format!("{name}: unsafe code is not allowed here"));
        }
    }
    let ours = (name.starts_with("crates/") || name.starts_with("tests/")) && name.ends_with("/Cargo.toml");
    if ours && !text.contains("[lints]\nworkspace = true") {
        wrong.push(format!("{name}: the lints of the workspace are off"));
    }
}

/// Returns the kind that a file is about.
fn kind(name: &str) -> Option<&str> {
    name.strip_prefix(KINDS)?.strip_suffix(".rs").filter(|kind| *kind != "lib" && !kind.contains('/'))
}

/// Finds lines that name a kind: its text, its crates, or a type such as `NetConfig`.
fn names_of_kinds(name: &str, text: &str, kinds: &[&str], wrong: &mut Vec<String>) {
    for (number, line) in text.lines().enumerate() {
        let names = |kind: &&&str| {
            let (first, rest) = kind.split_at(1);
            let of_type = format!("{}{rest}", first.to_uppercase());
            let is_type = line.match_indices(&of_type).any(|(at, _)| {
                let (before, after) =
                    (line[..at].chars().next_back(), line[at + kind.len()..].chars().next());
                !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(|c| c.is_ascii_lowercase())
            });
            let texts = [
                format!("\"{kind}\""),
                format!("\"{kind}-"),
                format!("kickless_{kind}"),
                format!("kickless-{kind}"),
            ];
            is_type || texts.iter().any(|text| line.contains(text))
        };
        if let Some(kind) = kinds.iter().find(names) {
            wrong.push(format!("{name}:{}: it names the kind {kind}", number + 1));
        }
        if line.contains("kickless_kinds") || line.contains("kickless-kinds") {
            wrong.push(format!("{name}:{}: it names the list of kinds", number + 1));
        }
    }
}

/// Returns whether a path that begins with `path` is in `line`.
fn begins_in(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-/}$".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, text: &str) -> usize {
        let mut wrong = Vec::new();
        offences(name, text, &mut wrong);
        wrong.len()
    }

    #[test]
    fn names_of_kinds_are_found() {
        let kinds = ["blk.rs", "net.rs", "lib.rs"].map(|file| format!("{KINDS}{file}"));
        assert_eq!(kinds.each_ref().map(|file| super::kind(file)), [Some("blk"), Some("net"), None]);
        assert_eq!(super::kind("crates/net/src/device.rs"), None);
        let found = |line: &str| {
            let mut wrong = Vec::new();
            names_of_kinds("crates/daemon/src/a.rs", line, &["blk", "net"], &mut wrong);
            wrong.len()
        };
        for line in [
            "fn a(of: &BlkConfig) {}",
            "use kickless_net::Net;",
            "match \"net\" {",
            "{ \"blk-file\": 1 }",
            "kickless-net-port.workspace = true",
            "use kickless_kinds::kinds;",
        ] {
            assert_eq!(found(line), 1, "{line}");
        }
        for line in [
            "use std::os::unix::net::UnixStream;",
            "/// Network cards.",
            "use rustix::net::sockopt;",
            "Blkid",
        ] {
            assert_eq!(found(line), 0, "{line}");
        }
    }

    #[test]
    fn violations_are_found() {
        assert_eq!(found("crates/blk/src/a.rs", &"//\n".repeat(LINES_MAX)), 0);
        assert_eq!(found("crates/blk/src/a.rs", &"//\n".repeat(LINES_MAX + 1)), 1);
        assert_eq!(found("docs/a.md", &"line\n".repeat(LINES_MAX + 1)), 0);
        assert_eq!(found("docs/a.md", "see /home/me/a"), 1);
        assert_eq!(found("docs/a.md", "see $dir/root/a and target/root/a"), 0);
        assert_eq!(found("crates/io/src/a.rs", "#![expect(unsafe_code)]"), 0);
        assert_eq!(found("crates/blk/src/a.rs", "#![expect(unsafe_code)]"), 1);
        assert_eq!(found("crates/kickless/src/inherited.rs", "#[allow(unsafe_code)]"), 0);
        assert_eq!(found("crates/kickless/src/serve.rs", "#[allow(unsafe_code)]"), 1);
        assert_eq!(found("crates/blk/Cargo.toml", "[package]"), 1);
        assert_eq!(found("crates/blk/Cargo.toml", "[lints]\nworkspace = true\n"), 0);
    }
}
