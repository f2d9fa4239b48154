//! Makes calls on a daemon.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod control;

use std::fs::File;
use std::sync::atomic::Ordering;
use std::time::Duration;

use control::{Rig, call};
use kickless_control::Client;
use kickless_driver::{Disk, Options};
use kickless_testing::eventually;
use serde_json::json;

#[test]
fn devices_come_and_go() {
    let rig = Rig::new();
    let mut client = rig.client();
    assert_eq!(call(&mut client, "device.list", json!({})), Ok(json!([])));
    assert_eq!(call(&mut client, "device.add", rig.disk("a")), Ok(json!({ "added": true })));
    assert_eq!(call(&mut client, "device.add", rig.disk("a")), Ok(json!({ "added": false })));
    let mut other = rig.disk("a");
    other["weight"] = json!(7);
    let refused = call(&mut client, "device.add", other).unwrap_err();
    assert!(refused.starts_with("name: there is a device a already"), "{refused}");
    assert_eq!(call(&mut client, "device.list", json!({})), Ok(json!([{ "name": "a", "state": "free" }])));
    let shown = call(&mut client, "device.get", json!({ "name": "a" })).unwrap();
    assert_eq!((&shown["config"]["blk-file"], &shown["config"]["kind"]), (&json!("mem:1M"), &json!("blk")));
    let refused = call(&mut client, "device.get", json!({ "name": "b" })).unwrap_err();
    assert!(refused.contains("no device b"), "{refused}");
    let removed = call(&mut client, "device.remove", json!({ "name": "a" }));
    assert_eq!(removed, Ok(json!({ "removed": true })));
    assert!(!rig.path("a").exists());
    let removed = call(&mut client, "device.remove", json!({ "name": "a" }));
    assert_eq!(removed, Ok(json!({ "removed": false })));
}

#[test]
fn a_device_in_use_is_removed_as_asked() {
    let rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "device.add", rig.disk("a")).unwrap();
    let options = Options { reconnect_limit: Duration::ZERO, ..Options::new(rig.path("a")) };
    let disk = Disk::connect(options).unwrap();
    disk.write_at(&[7; 4096], 0).unwrap();
    let shown = call(&mut client, "device.get", json!({ "name": "a" })).unwrap();
    assert_eq!(shown["state"], "connected");
    // A request is counted after its answer, at the end of the worker's visit.
    eventually("the statistics show the request", || {
        let stats = call(&mut client, "stats.get", json!({ "name": "a" })).unwrap();
        stats["devices"][0]["queues"][0]["requests"].as_u64() >= Some(1)
    });
    let refused = call(&mut client, "device.remove", json!({ "name": "a", "mode": "refuse" })).unwrap_err();
    assert!(refused.contains("a front-end is connected"), "{refused}");
    let removed = call(&mut client, "device.remove", json!({ "name": "a", "mode": "drain" }));
    assert_eq!(removed, Ok(json!({ "removed": true })));
    assert!(disk.write_at(&[7; 4096], 0).is_err());
}

#[test]
fn the_read_only_socket_changes_nothing() {
    let rig = Rig::new();
    let mut reader = Client::connect(&rig.path("read-only.sock")).unwrap();
    for (method, params) in [
        ("device.add", rig.disk("a")),
        ("device.remove", json!({ "name": "a" })),
        ("daemon.stop", json!({})),
        ("pool.set", json!({ "poll": "never" })),
        ("log.set", json!({ "filter": "info" })),
    ] {
        let refused = call(&mut reader, method, params).unwrap_err();
        assert!(refused.contains("read-only"), "{refused}");
    }
    assert!(rig.registry.list().is_empty() && !rig.is_stopping.load(Ordering::Relaxed));
    let info = call(&mut reader, "daemon.info", json!({})).unwrap();
    assert_eq!((&info["devices"], &info["devices-max"]), (&json!(0), &json!(control::DEVICES_MAX)));
    let snapshot = call(&mut reader, "daemon.snapshot", json!({})).unwrap();
    assert!(snapshot["stats"]["devices"].is_array() && snapshot["pool"]["engine"] == "auto", "{snapshot}");
    assert!(call(&mut reader, "rpc.discover", json!({})).unwrap()["methods"].is_array());
}

#[test]
fn the_daemon_is_asked_to_stop_and_the_log_to_change() {
    let rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "log.set", json!({ "filter": "info" })).unwrap();
    assert_eq!(call(&mut client, "log.set", json!({ "filter": "loud" })), Err("no filter".into()));
    call(&mut client, "daemon.stop", json!({})).unwrap();
    assert!(rig.is_stopping.load(Ordering::Relaxed));
}

#[test]
fn the_polling_rule_changes_while_a_guest_works() {
    let rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "device.add", rig.disk("a")).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    for (rule, key) in [
        (json!({ "poll": "always" }), "always"),
        (json!({ "poll-stop-idle": "1s" }), "rate"),
        (json!({ "poll": "never" }), "never"),
        (json!({ "poll": "auto", "poll-latency": "1ms" }), "auto"),
    ] {
        let shown = call(&mut client, "pool.set", rule.clone()).unwrap();
        assert_eq!(shown, call(&mut client, "pool.get", json!({})).unwrap());
        // A key that implies the rule is shown instead of it.
        assert!(shown["poll"] == key || rule.get("poll").is_none(), "{shown}");
        disk.write_at(&[7; 4096], 0).unwrap();
    }
}

#[test]
fn a_saved_configuration_describes_the_daemon() {
    let rig = Rig::new();
    let mut client = rig.client();
    for name in ["a", "b"] {
        call(&mut client, "device.add", rig.disk(name)).unwrap();
    }
    call(&mut client, "pool.set", json!({ "poll": "never" })).unwrap();
    let saved = call(&mut client, "config.save", json!({})).unwrap();
    let saved: toml::Table = saved["toml"].as_str().unwrap().parse().unwrap();
    assert_eq!(saved["pool"]["poll"].as_str(), Some("never"));
    let devices = saved["device"].as_array().unwrap();
    for (device, name) in devices.iter().zip(["a", "b"]) {
        // The file has the keys of a call.
        let again = serde_json::to_value(device).unwrap();
        assert_eq!(call(&mut client, "device.add", again), Ok(json!({ "added": false })), "{name}");
    }
    assert_eq!(devices.len(), 2);
}

/// Defaults are left out, and sizes have units.
#[test]
fn a_saved_configuration_is_what_a_person_would_write() {
    let rig = Rig::new();
    let mut client = rig.client();
    let mut saved =
        || call(&mut client, "config.save", json!({})).unwrap()["toml"].as_str().unwrap().to_owned();
    assert_eq!(saved(), "");
    let (socket, image) = (rig.path("a"), rig.path("image"));
    File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
    let config = json!({
        "name": "a", "socket-path": &socket, "blk-file": &image, "cache": "none", "weight": 1, "num-queues": 2,
        "bps": "104857600", "cache-size": "4096K", "iops": 5000, "read-only": true, "kind": "blk",
    });
    call(&mut rig.client(), "device.add", config).unwrap();
    call(&mut rig.client(), "pool.set", json!({ "poll": "never" })).unwrap();
    let expected = format!(
        "[pool]
poll = \"never\"

[[device]]
name = \"a\"
socket-path = \"{}\"
blk-file = \"{}\"
read-only = true
num-queues = 2
cache-size = \"4M\"
iops = 5000
bps = \"100M\"
",
        socket.display(),
        image.display()
    );
    assert_eq!(saved(), expected);
}

#[test]
fn a_server_that_ends_leaves_nothing() {
    let mut rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "daemon.info", json!({})).unwrap();
    rig.end_server();
    assert!(!rig.path("control.sock").exists());
    assert!(client.call("daemon.info", Default::default()).is_err());
}
