//! Runs the unit under a real systemd, in a machine that QEMU emulates: reloads, restarts and a crash under
//! verified load, and what the watchdog and the journal make of them. `KICKLESS_SYSTEMD_ROOT` is a root tree
//! that `tools/systemd-root` has made.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;

use kickless_tests::daemon::{check_sandbox, kickless_binary, repository};
use kickless_tests::systemd_machine::{Overlay, found};

const DEVICES: &str = r#"
[[device]]
name = "memory"
socket-path = "/run/kickless/memory.sock"
blk-file = "mem:1M"

[[device]]
name = "file"
socket-path = "/run/kickless/file.sock"
blk-file = "/var/lib/images/disk.img"

[[device]]
name = "card"
socket-path = "/run/kickless/card.sock"
port = "null"
"#;

#[test]
fn systemd_reloads_and_restarts_under_load() {
    let repository = repository();
    let Some(tree) = Overlay::new(&repository.join("tests/fixtures/systemd/trial")).unwrap() else {
        println!("skipped: this needs a root tree with systemd, which tools/systemd-root makes");
        return;
    };
    tree.put(&kickless_binary().unwrap(), "usr/bin/kickless").unwrap();
    for (file, to) in [
        ("kickless.service", "etc/systemd/system/kickless.service"),
        ("kickless.sysusers.conf", "etc/sysusers.d/kickless.conf"),
        ("kickless.tmpfiles.conf", "etc/tmpfiles.d/kickless.conf"),
    ] {
        tree.put(&repository.join("dist/systemd").join(file), to).unwrap();
    }
    fs::create_dir_all(tree.path("etc/kickless")).unwrap();
    fs::write(tree.path("etc/kickless/devices.toml"), DEVICES).unwrap();
    let lines = tree.boot().unwrap();
    let all = lines.join("\n");
    let found = found(&lines);
    let expected = [
        "start 0 active Serves 3 devices",
        "reload 1 0 moved active",
        "reload 2 0 moved active",
        "reexec 0 moved active",
        "failing 1 same active",
        "restart 1 0 moved active",
        "restart 2 0 moved active",
        "after 0 moved active",
        "store 0",
        "loads good good",
        "crash moved active",
        "again 0 moved active",
        // The watchdog is fed for longer than its interval, and bites a process that has stopped. The count
        // is that since the restart by an operator.
        "fed same active",
        "watchdog moved active",
        "restarts 1",
        "stop 0 inactive success 0 0",
        // The reload that failed, and no priority is left in a line.
        "errors 1 1 0",
        "over",
    ];
    assert_eq!(found, expected, "{all}");
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    // All restarts were by the store, and so was the stop.
    assert_eq!(
        (count("took over from the store devices=3"), count("stored for the next process")),
        (3, 4),
        "{all}"
    );
    assert_eq!(count("took over devices=3"), 5, "{all}");
    check_sandbox(&lines).unwrap();
}
