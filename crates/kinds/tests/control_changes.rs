//! Drains, resizes, weighs and watches devices of a daemon.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod control;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use control::{Rig, call};
use kickless_driver::{Disk, Options};
use kickless_testing::eventually;
use serde_json::{Value, json};

fn state(rig: &Rig) -> String {
    let shown = call(&mut rig.client(), "device.get", json!({ "name": "a" })).unwrap();
    shown["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_drained_device_keeps_requests_until_it_is_resumed() {
    let rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "device.add", rig.disk("a")).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    disk.write_at(&[7; 4096], 0).unwrap();
    assert_eq!(call(&mut client, "device.drain", json!({ "name": "a" })), Ok(json!({ "drained": true })));
    // Again, which changes nothing.
    assert_eq!(call(&mut client, "device.drain", json!({ "name": "a" })), Ok(json!({ "drained": true })));
    assert_eq!(state(&rig), "drained");
    let requests = || {
        let stats = call(&mut rig.client(), "stats.get", json!({ "name": "a" })).unwrap();
        stats["devices"][0]["operations"][1]["requests"].as_u64().unwrap()
    };
    // A request is counted after its answer, at the end of the worker's visit.
    let are_counted = |count| eventually("the statistics show the requests", || requests() == count);
    are_counted(1);
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            disk.write_at(&[8; 4096], 0).unwrap();
            is_done.store(true, Ordering::Release);
        });
        // A request that is answered too early would be so soon.
        thread::sleep(Duration::from_millis(150));
        assert!(!is_done.load(Ordering::Acquire));
        assert_eq!(requests(), 1);
        assert_eq!(
            call(&mut client, "device.resume", json!({ "name": "a" })),
            Ok(json!({ "resumed": true }))
        );
    });
    assert_eq!(call(&mut client, "device.resume", json!({ "name": "a" })), Ok(json!({ "resumed": false })));
    are_counted(2);
    assert_eq!(state(&rig), "connected");
    let mut read = [0; 4096];
    disk.read_at(&mut read, 0).unwrap();
    assert_eq!(read, [8; 4096]);
    // A drained device is removed as any other.
    call(&mut client, "device.drain", json!({ "name": "a" })).unwrap();
    assert_eq!(
        call(&mut client, "device.remove", json!({ "name": "a", "mode": "drain" })),
        Ok(json!({ "removed": true }))
    );
    for method in ["device.drain", "device.resume", "device.resize"] {
        assert!(call(&mut client, method, json!({ "name": "a" })).unwrap_err().contains("no device a"));
    }
}

#[test]
fn requests_that_stay_in_flight_fail_a_drain() {
    let rig = Rig::new();
    let mut client = rig.client();
    let mut config = rig.disk("a");
    config["blk-file"] = "fault:delay=1s-1s@read:mem:1M".into();
    call(&mut client, "device.add", config).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| disk.read_at(&mut [0; 512], 0).unwrap());
        eventually("the read is in flight", || {
            let stats = call(&mut rig.client(), "stats.get", json!({})).unwrap();
            stats["devices"][0]["in_flight"] == 1 && stats["devices"][0]["oldest_ns"].as_u64() > Some(0)
        });
        let refused =
            call(&mut client, "device.drain", json!({ "name": "a", "timeout": "10ms" })).unwrap_err();
        assert!(refused.contains("1 are still in flight"), "{refused}");
        assert_eq!(state(&rig), "drained");
        assert_eq!(call(&mut client, "device.drain", json!({ "name": "a" })), Ok(json!({ "drained": true })));
    });
    call(&mut client, "device.resume", json!({ "name": "a" })).unwrap();
    disk.read_at(&mut [0; 512], 0).unwrap();
}

/// A drain of a disk that has stopped does not wait for its timeout, and fails no request of the guest.
#[test]
fn requests_that_wait_for_the_end_of_an_error_fail_a_drain_at_once() {
    let rig = Rig::new();
    let mut client = rig.client();
    let mut config = rig.disk("a");
    config["blk-file"] = "fault:enospc@write+nth=1:mem:1M".into();
    config["on-error"] = "stop".into();
    call(&mut client, "device.add", config).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    thread::scope(|scope| {
        let write = scope.spawn(|| disk.write_at(&[7; 512], 0));
        eventually("the device has stopped", || state(&rig) == "stopped");
        let drain = json!({ "name": "a", "timeout": "1h" });
        let refused = call(&mut client, "device.drain", drain.clone()).unwrap_err();
        assert!(refused.contains("has stopped (write: No space left on device"), "{refused}");
        // It is drained nevertheless: one resume ends both.
        call(&mut client, "device.resume", json!({ "name": "a" })).unwrap();
        write.join().unwrap().unwrap();
        assert_eq!(call(&mut client, "device.drain", drain), Ok(json!({ "drained": true })));
    });
}

#[test]
fn a_disk_grows_with_its_file() {
    let rig = Rig::new();
    let mut client = rig.client();
    let file = rig.path("image");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let mut config = rig.disk("a");
    config["blk-file"] = file.to_str().unwrap().into();
    call(&mut client, "device.add", config).unwrap();
    let size = call(&mut client, "device.resize", json!({ "name": "a" }));
    assert_eq!(size, Ok(json!({ "size": 1 << 20 })));
    std::fs::File::options().write(true).open(&file).unwrap().set_len(2 << 20).unwrap();
    let size = call(&mut client, "device.resize", json!({ "name": "a" }));
    assert_eq!(size, Ok(json!({ "size": 2 << 20 })));
    let refused = call(&mut client, "device.resize", json!({ "name": "a", "size": "1M" })).unwrap_err();
    assert!(refused.contains("cannot shrink"), "{refused}");
    let refused = call(&mut client, "device.resize", json!({ "name": "a", "size": "4M" })).unwrap_err();
    assert!(refused.contains("blk-size"), "{refused}");
}

/// Another host may use an image while no guest of this daemon does.
#[test]
fn an_image_grows_when_a_guest_uses_it() {
    let rig = Rig::new();
    let mut client = rig.client();
    let file = rig.path("image");
    let mut make = std::process::Command::new("qemu-img");
    let made = make.args(["create", "-q", "-f", "qcow2"]).arg(&file).arg("1M").status();
    assert!(made.unwrap().success());
    let mut config = rig.disk("a");
    config["blk-file"] = format!("qcow2:{}", file.display()).into();
    call(&mut client, "device.add", config).unwrap();
    let mut grow = |size| call(&mut client, "device.resize", json!({ "name": "a", "size": size }));
    let refused = grow("2M").unwrap_err();
    assert!(refused.contains("still has 1048576 bytes: an image that no guest uses"), "{refused}");
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    eventually("the driver sees the new size", || disk.size().unwrap() == 2 << 20);
    assert_eq!(grow("3M"), Ok(json!({ "size": 3 << 20 })));
}

#[test]
fn the_weight_changes_while_a_guest_works() {
    let rig = Rig::new();
    let mut client = rig.client();
    call(&mut client, "device.add", rig.disk("a")).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    let shown =
        call(&mut client, "device.set", json!({ "name": "a", "weight": 7, "iops": 100_000 })).unwrap();
    assert_eq!((&shown["weight"], &shown["iops"]), (&json!(7), &json!(100_000)));
    disk.write_at(&[7; 4096], 0).unwrap();
    let shown = call(&mut client, "device.set", json!({ "name": "a", "weight": null })).unwrap();
    assert_eq!(shown["iops"], 100_000);
    assert_eq!(call(&mut client, "device.get", json!({ "name": "a" })).unwrap()["config"]["iops"], 100_000);
    assert!(call(&mut client, "device.set", json!({ "name": "a", "weight": 0 })).is_err());
}

#[test]
fn discards_change_while_a_guest_works() {
    let rig = Rig::new();
    let mut client = rig.client();
    let file = rig.path("image");
    let mut config = rig.disk("a");
    config["blk-file"] = file.to_str().unwrap().into();
    config["discard"] = "off".into();
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    std::fs::File::open(&file).unwrap().sync_all().unwrap();
    call(&mut client, "device.add", config.clone()).unwrap();
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    let space_after_discard = || {
        disk.write_at(&vec![7; 1 << 20], 0).unwrap();
        disk.discard(0, 1 << 20).unwrap();
        disk.flush().unwrap();
        std::fs::metadata(&file).unwrap().blocks() * 512
    };
    let mut set = |value: Value| {
        let shown = call(&mut client, "device.set", json!({ "name": "a", "discard": value }))?;
        let saved = call(&mut client, "config.save", json!({})).unwrap();
        let is_saved = saved["toml"].as_str().unwrap().contains(r#"discard = "off""#);
        assert_eq!(is_saved, shown["discard"] == "off", "{saved}");
        Ok(shown["discard"].clone())
    };
    assert!(space_after_discard() >= 1 << 20);
    for (value, shown) in [("on", "on"), ("off", "off")] {
        assert_eq!(set(json!(value)), Ok(json!(shown)));
        assert_eq!(space_after_discard() >= 1 << 20, value == "off");
    }
    // Other keys leave it as it is, and null is the default.
    assert_eq!(
        call(&mut rig.client(), "device.set", json!({ "name": "a", "weight": 2 })).unwrap()["discard"],
        "off"
    );
    assert!(space_after_discard() >= 1 << 20);
    assert_eq!(set(Value::Null), Ok(json!("on")));
    assert!(space_after_discard() < 1 << 16);
    let refused: Result<Value, String> = set(json!("ignore"));
    assert!(refused.unwrap_err().starts_with("discard: "));
}

/// Subscribes, and returns the lines that come.
fn subscribe(rig: &Rig, method: &str, params: &Value) -> impl Iterator<Item = Value> + use<> {
    let mut stream: UnixStream = rig.stream();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    writeln!(stream, "{}", json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params })).unwrap();
    let mut lines = BufReader::new(stream).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    let answer: Value = lines.next().unwrap();
    assert_eq!(answer["result"], json!({ "subscribed": true }), "{answer}");
    lines.map(|line: Value| line["params"].clone())
}

#[test]
fn events_come_to_those_who_subscribe() {
    let rig = Rig::new();
    let mut client = rig.client();
    let mut events = subscribe(&rig, "events.subscribe", &json!({}));
    let mut event = |word: &str| {
        let event = events.next().unwrap();
        assert_eq!((&event["device"], &event["event"]), (&json!("a"), &json!(word)), "{event}");
    };
    call(&mut client, "device.add", rig.disk("a")).unwrap();
    event("added");
    let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
    event("connected");
    call(&mut client, "device.drain", json!({ "name": "a" })).unwrap();
    event("drained");
    call(&mut client, "device.resume", json!({ "name": "a" })).unwrap();
    event("resumed");
    drop(disk);
    event("left");
    call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
    event("removed");
}

#[test]
fn counters_come_at_intervals_and_not_to_a_slow_client() {
    let rig = Rig::new();
    call(&mut rig.client(), "device.add", rig.disk("a")).unwrap();
    // This one never reads. It delays no other one, and its buffer stays small.
    let mut slow = rig.stream();
    let subscription =
        json!({ "jsonrpc": "2.0", "method": "stats.subscribe", "params": { "interval": "100ms" } });
    writeln!(slow, "{subscription}").unwrap();
    let mut stats = subscribe(&rig, "stats.subscribe", &json!({ "interval": "100ms" }));
    let times: Vec<u64> = stats.by_ref().take(3).map(|stats| stats["time_ns"].as_u64().unwrap()).collect();
    assert!(times.is_sorted_by(|a, b| b - a >= 50_000_000), "{times:?}");
    for interval in ["10ms", "2h", "x"] {
        assert!(call(&mut rig.client(), "stats.subscribe", json!({ "interval": interval })).is_err());
    }
}
