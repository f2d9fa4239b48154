//! Has a daemon read its configuration file again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::{Daemon, disk};
use kickless_testing::eventually;
use serde_json::{Value, json};

/// Connects a front-end to the socket of this name.
fn connect(daemon: &Daemon, name: &str) -> kickless_driver::Disk {
    let socket = daemon.path(&format!("{name}.sock"));
    kickless_driver::Disk::connect(kickless_driver::Options::new(socket)).unwrap()
}

fn all(names: &[&str]) -> String {
    names.iter().map(|name| disk(name, "")).collect()
}

/// Returns whether a device waits for its front-end to leave. `None` if there is no such device.
fn is_leaving(daemon: &Daemon, name: &str) -> Option<bool> {
    let listed = daemon.call("device.list", json!({}));
    let found = listed.as_array().unwrap().iter().find(|listed| listed["name"] == name)?;
    Some(found["leaving"] == true)
}

/// A device in use that has left the file stays until its front-end has left, or comes back into the file.
#[test]
fn a_device_in_use_is_not_taken_away() {
    let daemon = Daemon::serve(&all(&["a", "b", "c"]), &[]);
    daemon.wait_for("serving");
    let reload = |names: &[&str], params: Value| {
        daemon.rewrite(&all(names));
        daemon.call("daemon.reload", params)
    };
    let (a, b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    let reloaded = reload(&["d"], json!({}));
    assert_eq!(reloaded["leaving"], json!(["a", "b"]));
    assert_eq!((&reloaded["removed"], &reloaded["added"]), (&json!(["c"]), &json!(["d"])));
    assert_eq!((&reloaded["failed"], &reloaded["needs-restart"]), (&json!([]), &json!([])));
    assert!(daemon.wait_for("no longer in the configuration file").contains(" name=a"));
    for disk in [&a, &b] {
        disk.write_at(&[1; 512], 0).unwrap();
    }
    let shown = daemon.call("device.get", json!({ "name": "a" }));
    assert_eq!((&shown["state"], &shown["leaving"]), (&json!("connected"), &json!(true)));
    // It is a part of the daemon, so it is saved.
    assert!(daemon.call("config.save", json!({}))["toml"].as_str().unwrap().contains("a.sock"));

    // `a` is in the file again, and stays when its front-end leaves. `b` is still reported.
    let reloaded = reload(&["a", "d"], json!({}));
    assert_eq!((&reloaded["leaving"], &reloaded["added"]), (&json!(["b"]), &json!([])));
    assert_eq!([is_leaving(&daemon, "a"), is_leaving(&daemon, "b")], [Some(false), Some(true)]);
    drop(a);
    eventually("a is free", || daemon.states().contains(&("a".into(), "free".into())));
    connect(&daemon, "a").write_at(&[1; 512], 0).unwrap();
    // `b` is removed when its front-end leaves, with its socket.
    drop(b);
    eventually("b is removed", || is_leaving(&daemon, "b").is_none());
    assert!(daemon.wait_for("removed, because").contains(" device=b") && !daemon.path("b.sock").exists());

    // The name is free for another device.
    assert_eq!(reload(&["a", "b", "d"], json!({}))["added"], json!(["b"]));
    // With the explicit word, also a device that waits already.
    let b = connect(&daemon, "b");
    assert_eq!(reload(&["a", "d"], json!({}))["leaving"], json!(["b"]));
    let reloaded = reload(&["a", "d"], json!({ "remove-used": true }));
    assert_eq!((&reloaded["removed"], &reloaded["leaving"]), (&json!(["b"]), &json!([])));
    drop(b);
    // A call removes one that waits.
    let d = connect(&daemon, "d");
    assert_eq!(reload(&["a"], json!({}))["leaving"], json!(["d"]));
    assert_eq!(
        daemon.call("device.remove", json!({ "name": "d", "mode": "drain" })),
        json!({ "removed": true })
    );
    drop(d);
    assert_eq!(daemon.states(), [("a".into(), "free".into())]);
}

/// A file without any device takes none away, at a signal and at a call. Sizes are read all the same.
#[test]
fn an_emptied_file_is_refused() {
    // The image comes later.
    let image = "[[device]]\nsocket-path = 'DIR/a.sock'\nblk-file = 'DIR/a.img'\ncache = 'writeback'\n";
    for is_alone in [true, false] {
        let start = if is_alone { Daemon::serve_alone } else { Daemon::serve };
        let daemon = start(&(image.to_owned() + &disk("free", "")), &["--control-read-only=DIR/read.sock"]);
        daemon.wait_for("unavailable");
        let file = fs::File::create(daemon.path("a.img")).unwrap();
        file.set_len(1 << 20).unwrap();
        daemon.wait_for("a.img");
        let disk = connect(&daemon, "a");
        for (round, text) in ["", "  \n\n", "# nothing\n", "[pool]\npoll = 'never'\n"].iter().enumerate() {
            daemon.rewrite(text);
            let size = (2 + round as u64) << 20;
            file.set_len(size).unwrap();
            if is_alone {
                daemon.hang_up();
                let line = daemon.wait_for("nothing of it is used");
                assert!(line.contains("there is no device in it any more"), "{line}");
            } else {
                let refused = daemon.refused(&["daemon.reload"]);
                assert!(refused.contains("there is no device in it any more"), "{refused}");
            }
            eventually("the disk has grown", || disk.size().unwrap() == size);
        }
        let control = format!("--control={}", daemon.path("read.sock").display());
        let listed = daemon.ctl(&[&control, "device.list"]);
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        assert_eq!(
            listed,
            json!([{ "name": "free", "state": "free" }, { "name": "a", "state": "connected" }])
        );
        disk.write_at(&[1; 512], 0).unwrap();
    }
}

/// Without a control socket, a daemon goes on when a reload has left no device.
#[test]
fn a_reload_that_leaves_no_device_does_not_end_the_daemon() {
    let daemon = Daemon::serve_alone(&disk("a", ""), &[]);
    daemon.wait_for("serving");
    daemon.rewrite("[[device]]\nsocket-path = 'DIR/no/b.sock'\nblk-file = 'null:1M'\n");
    daemon.hang_up();
    daemon.wait_for("a change to the configuration file failed");
    daemon.wait_for("no device is left");
    daemon.rewrite(&disk("a", ""));
    daemon.hang_up();
    daemon.wait_for("added=a");
    connect(&daemon, "a").write_at(&[1; 512], 0).unwrap();
    // The last front-end of a device that is leaving does not end it either.
    let disk_a = connect(&daemon, "a");
    daemon.rewrite("[[device]]\nsocket-path = 'DIR/no/b.sock'\nblk-file = 'null:1M'\n");
    daemon.hang_up();
    daemon.wait_for("no longer in the configuration file");
    drop(disk_a);
    daemon.wait_for("removed, because");
    daemon.rewrite(&disk("a", ""));
    daemon.hang_up();
    daemon.wait_for("added=a");
    connect(&daemon, "a").write_at(&[1; 512], 0).unwrap();
}

#[test]
fn a_configuration_is_saved_as_a_whole_or_not_at_all() {
    let daemon = Daemon::serve(&disk("a", ""), &[]);
    daemon.wait_for("serving");
    let file = daemon.path("saved.toml");
    let output = format!("--output={}", file.display());
    let saved = || daemon.ctl(&["config.save", &output]);
    let made = saved();
    assert!(made.status.success() && made.stdout.is_empty(), "{made:?}");
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(daemon.call("config.save", json!({}))["toml"], text);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    fs::write(&file, "old").unwrap();
    assert!(saved().status.success());
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o640);

    // The link stays, and its target is replaced.
    let link = daemon.path("link.toml");
    fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert!(daemon.ctl(&["config.save", &format!("--output={}", link.display())]).status.success());
    assert!(link.is_symlink() && fs::read_to_string(&file).unwrap() == text);

    // A failure changes nothing.
    let directory = daemon.path("").display().to_string();
    for (arguments, said) in [
        (["config.save", "--control=/nonexistent/control.sock", &output], "/nonexistent/control.sock"),
        (["config.save", "{\"a\": 1}", &output], "\"a\" is no key of this call"),
        (["device.list", "{}", &output], "--output: only config.save"),
        (["config.save", "{}", "--output=/dev/null"], "no regular file"),
        (["config.save", "{}", &format!("--output={directory}")], "no regular file"),
        (["config.save", "{}", "--output=/nonexistent/file"], "there is no directory /nonexistent"),
    ] {
        let status = if said.starts_with("--output") { 2 } else { 1 };
        let refused = daemon.refused_with(status, &arguments);
        assert!(refused.contains(said), "{refused}");
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
    let mut names: Vec<_> =
        fs::read_dir(daemon.path("")).unwrap().map(|name| name.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.sock", "control.sock", "kickless.toml", "link.toml", "saved.toml"]);
}

#[test]
fn a_reload_changes_device_by_device() {
    let daemon = Daemon::serve(&all(&["a", "b", "c"]), &[]);
    daemon.wait_for("serving");
    let by_call = json!({ "socket-path": daemon.path("x.sock"), "blk-file": "null:1M" });
    assert_eq!(daemon.call("device.add", by_call), json!({ "added": true }));
    // A front-end uses `b`.
    let front_end = connect(&daemon, "b");

    // A wrong file changes nothing.
    daemon.rewrite(&(all(&["a"]) + "[[device]]\nblk-file = 'null:1'\n"));
    assert!(daemon.refused(&["daemon.reload"]).contains("kickless.toml:6: "));
    assert_eq!(daemon.states().len(), 4);

    // `a` goes, `b` is in use and changes, `c` is free and changes, `d` comes, `x` stays.
    let pool = "[pool]\nworkers = 2\npoll = 'never'\n";
    let config = [pool, &disk("b", "queue-size = 128"), &disk("c", "serial = 'c'"), &disk("d", "")].concat();
    daemon.rewrite(&config);
    let reloaded = daemon.call("daemon.reload", json!({}));
    let expected = json!({
        "added": ["d"],
        "removed": ["a"],
        "leaving": [],
        "replaced": ["c"],
        "needs-restart": [{ "keys": ["workers"] }, { "device": "b", "keys": ["queue-size"] }],
        "failed": [],
    });
    assert_eq!(reloaded, expected);
    assert_eq!(daemon.call("pool.get", json!({}))["poll"], "never");
    assert_eq!(daemon.call("device.get", json!({ "name": "c" }))["config"]["serial"], "c");
    front_end.write_at(&[1; 512], 0).unwrap();
    let mut names: Vec<String> = daemon.states().into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, ["b", "c", "d", "x"]);
    // Limits of a device in use change at once.
    let limited = config.replace("queue-size = 128", "iops = 100000\ngroup = 'g'");
    daemon.rewrite(&limited.replace("\ngroup = 'g'", ""));
    let reloaded = daemon.call("daemon.reload", json!({}));
    assert_eq!(reloaded["needs-restart"], json!([{ "keys": ["workers"] }]));
    assert_eq!(daemon.call("device.get", json!({ "name": "b" }))["config"]["iops"], 100_000);
    front_end.write_at(&[1; 512], 0).unwrap();
    daemon.rewrite(&limited);
    let reloaded = daemon.call("daemon.reload", json!({}));
    assert_eq!(reloaded["needs-restart"][1], json!({ "device": "b", "keys": ["group"] }));
    daemon.rewrite(&config);
    daemon.call("daemon.reload", json!({}));
    // The second time, nothing is left to do but the restart.
    let again = daemon.call("daemon.reload", json!({}));
    assert_eq!((&again["added"], &again["needs-restart"]), (&json!([]), &expected["needs-restart"]));
}

/// While a front-end uses one of two devices, neither gets the socket of the other one, and both are served.
#[test]
fn devices_exchange_their_sockets() {
    let pair = |a: &str, b: &str| disk(a, "name = 'a'") + &disk(b, "name = 'b'");
    let daemon = Daemon::serve(&pair("one", "two"), &[]);
    daemon.wait_for("serving");
    let reload = |config: &str| {
        daemon.rewrite(config);
        daemon.call("daemon.reload", json!({}))
    };
    let has_sockets = |sockets: [&str; 2]| {
        for (name, socket) in ["a", "b"].into_iter().zip(sockets) {
            let device = daemon.call("device.get", json!({ "name": name }));
            assert_eq!(device["config"]["socket-path"], json!(daemon.path(socket)));
        }
    };
    let reloaded = reload(&pair("two", "one"));
    assert_eq!((&reloaded["replaced"], &reloaded["failed"]), (&json!(["b", "a"]), &json!([])));
    has_sockets(["two.sock", "one.sock"]);
    let front_end = connect(&daemon, "two");
    let reloaded = reload(&pair("one", "two"));
    assert_eq!(reloaded["needs-restart"], json!([{ "device": "a", "keys": ["socket-path"] }]));
    assert_eq!((&reloaded["failed"][0]["device"], &reloaded["replaced"]), (&json!("b"), &json!([])));
    has_sockets(["two.sock", "one.sock"]);
    front_end.write_at(&[1; 512], 0).unwrap();
    drop(connect(&daemon, "one"));
}
