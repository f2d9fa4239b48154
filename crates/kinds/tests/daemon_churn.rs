//! Adds and removes devices hundreds of times while others are under load.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod daemon;

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use daemon::{BLOCK, Disk, LIMIT, Rig, content};
use kickless_daemon::{AddOutcome, RemoveMode};
use kickless_testing::Resources;

/// Blocks of a device.
const BLOCKS: u64 = 64;
/// Threads that add and remove devices. Each has its own devices.
const CHURNERS: u64 = 3;

/// Writes and verifies all blocks again and again until `over` is set. Returns the number of rounds.
fn verify(device: u64, disk: &Disk, over: &AtomicBool) -> u64 {
    let mut read = vec![0; BLOCK];
    let mut version = 0;
    while !over.load(Ordering::Relaxed) || version == 0 {
        for block in 0..BLOCKS {
            let at = block * BLOCK as u64;
            if version > 0 {
                disk.read_at(&mut read, at).unwrap();
                assert!(read == content(device, block, version), "device {device}, block {block}");
            }
            disk.write_at(&content(device, block, version + 1), at).unwrap();
        }
        version += 1;
    }
    version
}

/// Adds a device, uses it, and removes it under load.
fn add_use_remove(rig: &Rig, churner: u64, round: u64) {
    let name = format!("churn-{churner}");
    let disk = match round % 3 {
        0 => "mem:256K".to_owned(),
        1 => rig.dir.path().join(format!("{name}.img")).display().to_string(),
        _ => "null:256K".to_owned(),
    };
    assert_eq!(rig.registry.add(rig.config(&name, &disk)).unwrap(), AddOutcome::New);
    if round % 5 == 4 {
        // No front-end is connected.
        assert!(rig.registry.remove(&name, RemoveMode::Refuse, LIMIT).unwrap());
    } else {
        let used = rig.connect(&name);
        used.write_at(&content(churner, 0, round), 0).unwrap();
        let written = AtomicU64::new(0);
        thread::scope(|scope| {
            let load = scope.spawn(|| {
                while used.write_at(&content(churner, 1, round), BLOCK as u64).is_ok() {
                    written.fetch_add(1, Ordering::Relaxed);
                }
            });
            while written.load(Ordering::Relaxed) == 0 && !load.is_finished() {
                thread::yield_now();
            }
            assert!(!load.is_finished(), "no write succeeded");
            let how = if round.is_multiple_of(2) { RemoveMode::Drain } else { RemoveMode::Force };
            assert!(rig.registry.remove(&name, how, LIMIT).unwrap());
        });
    }
    assert!(!rig.socket(&name).exists());
}

/// Runs all churners for `rounds` rounds.
fn churn(rig: &Rig, rounds: u64) {
    thread::scope(|scope| {
        for churner in 0..CHURNERS {
            scope.spawn(move || (0..rounds).for_each(|round| add_use_remove(rig, churner, round)));
        }
    });
}

#[test]
fn devices_are_added_and_removed_under_load() {
    let rig = Rig::new(2, 16);
    for image in ["file", "churn-0", "churn-1", "churn-2"] {
        let file = File::create(rig.dir.path().join(format!("{image}.img"))).unwrap();
        file.set_len(BLOCKS * BLOCK as u64).unwrap();
    }
    let image = rig.dir.path().join("file.img").display().to_string();
    for (name, disk) in [("memory", "mem:256K"), ("file", &image)] {
        rig.registry.add(rig.config(name, disk)).unwrap();
    }
    let disks = ["memory", "file"].map(|name| rig.connect(name));
    let over = AtomicBool::new(false);
    // The first rounds start threads and heaps that the process keeps.
    churn(&rig, 20);
    let before = Resources::now();
    thread::scope(|scope| {
        let loads: Vec<_> = (1..)
            .zip(&disks)
            .map(|(device, disk)| {
                scope.spawn({
                    let over = &over;
                    move || verify(device, disk, over)
                })
            })
            .collect();
        churn(&rig, 150);
        over.store(true, Ordering::Relaxed);
        for load in loads {
            assert!(load.join().unwrap() > 1);
        }
    });
    // `before` may have counted threads of an earlier round that had just ended, so less is fine too.
    let after = before.wait_until_back();
    // The number of heaps of threads varies.
    assert!(after.mappings < before.mappings + 50, "{before:?}, {after:?}");
    let left: Vec<_> =
        rig.registry.list().into_iter().filter_map(|listed| listed.config.identity.name).collect();
    assert_eq!(left, ["memory", "file"]);
}
