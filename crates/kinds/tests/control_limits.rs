//! Limits the requests of a disk while a driver uses it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod control;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use control::{Rig, call};
use kickless_driver::{Disk, Options};
use kickless_testing::eventually;
use serde_json::{Value, json};

/// Adds a disk with these limits, and connects to it.
fn limited(rig: &Rig, name: &str, limits: Value) -> Disk {
    let mut config = rig.disk(name);
    config.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
    assert_eq!(call(&mut rig.client(), "device.add", config), Ok(json!({ "added": true })));
    Disk::connect(Options { reconnect_limit: Duration::ZERO, ..Options::new(rig.path(name)) }).unwrap()
}

/// Returns a counter of the only queue of a device. A queue that was not used yet is not shown.
fn counter(rig: &Rig, device: &str, name: &str) -> u64 {
    let stats = call(&mut rig.client(), "stats.get", json!({ "name": device })).unwrap();
    stats["devices"][0]["queues"][0].get(name).map_or(0, |value| value.as_u64().unwrap())
}

/// Writes from several threads until `requests` are done. Returns the time it took.
fn write(disk: &Disk, requests: u64) -> Duration {
    let (start, left) = (Instant::now(), AtomicU64::new(requests));
    let take = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while take() {
                    disk.write_at(&[7; 4096], 0).unwrap();
                }
            });
        }
    });
    start.elapsed()
}

#[test]
fn a_limit_is_kept_and_costs_no_spinning() {
    let rig = Rig::new();
    // 3000 requests need 2.9 s at least, because the bucket has a tenth of a second.
    let disk = limited(&rig, "a", json!({ "iops": 1000 }));
    let took = write(&disk, 3000);
    assert!(took >= Duration::from_millis(2850), "{took:?}");
    assert!(counter(&rig, "a", "throttled_ns") > 1_000_000_000);
    // A poll that finds no tokens follows each one that finds some. A busy machine adds short waits for the
    // driver. A spinning worker has more than one poll for each microsecond.
    let polls = counter(&rig, "a", "polls_without_work");
    assert!(u128::from(polls) < took.as_micros() / 10, "{polls}");
}

#[test]
fn bytes_reads_and_writes_are_limited_apart() {
    let rig = Rig::new();
    let disk = limited(&rig, "a", json!({ "bps-write": "1M" }));
    // 2 MiB of 4 KiB.
    let took = write(&disk, 512);
    assert!(took >= Duration::from_millis(1850), "{took:?}");
    let throttled = counter(&rig, "a", "throttled_ns");
    // The debt of the last write is over after a moment. Reads do not add to it.
    thread::sleep(Duration::from_millis(20));
    (0..1000).for_each(|_| disk.read_at(&mut [0; 4096], 0).unwrap());
    assert!(counter(&rig, "a", "throttled_ns") < throttled + 1_000_000_000);
}

#[test]
fn limits_change_while_requests_wait() {
    let rig = Rig::new();
    let mut client = rig.client();
    let disk = &limited(&rig, "a", json!({ "iops": 1 }));
    let over = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(move || {
            write(disk, 100);
            over.store(true, Ordering::Relaxed);
        });
        eventually("nothing is throttled", || counter(&rig, "a", "requests") >= 1);
        assert!(!over.load(Ordering::Relaxed));
        let shown = call(&mut client, "device.set", json!({ "name": "a", "iops": 100_000, "bps": "1G" }));
        let shown = shown.unwrap();
        assert_eq!((&shown["iops"], &shown["bps"]), (&json!(100_000), &json!("1073741824")));
        eventually("the new limit is not used", || over.load(Ordering::Relaxed));
    });
    let shown = call(&mut client, "device.set", json!({ "name": "a", "iops": null, "bps": null })).unwrap();
    assert!(shown.get("iops").is_none(), "{shown}");
    let mut same = rig.disk("a");
    assert_eq!(call(&mut client, "device.add", same.clone()), Ok(json!({ "added": false })));
    same["iops"] = json!(5);
    assert!(call(&mut client, "device.add", same).is_err());
    for (params, said) in [
        (json!({ "name": "a", "iops-max": 5 }), "iops: iops-max needs it"),
        (json!({ "name": "a", "iops": 0 }), "iops: it must be"),
        (json!({ "name": "a", "queue-size": 5 }), "queue-size: it cannot change while the device is served"),
        (json!({ "name": "a", "iop": 5 }), "\"iop\" is no key of this call: did you mean iops?"),
        (json!({ "name": "a", "iops": "5k" }), "write 5000 (without quotes)"),
        (json!({ "name": "a", "bps": 100 }), "it must be text, in quotes, such as \"100M\""),
        (json!({ "name": "b", "iops": 5 }), "no device b"),
        (json!({ "iops": 5 }), "name: "),
    ] {
        let refused = call(&mut client, "device.set", params.clone()).unwrap_err();
        assert!(refused.contains(said), "{params}: {refused}");
    }
}

#[test]
fn a_removal_does_not_wait_for_tokens() {
    let rig = Rig::new();
    let disk = &limited(&rig, "a", json!({ "iops": 1 }));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| while disk.write_at(&[7; 512], 0).is_ok() {});
        }
        eventually("nothing is throttled", || counter(&rig, "a", "requests") >= 2);
        let removed = call(&mut rig.client(), "device.remove", json!({ "name": "a", "mode": "drain" }));
        assert_eq!(removed, Ok(json!({ "removed": true })));
    });
}
