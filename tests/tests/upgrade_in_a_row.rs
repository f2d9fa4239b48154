//! Upgrades a daemon many times in a row under verified load. `UPGRADES` is the number.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Choice, Disk, Options};
use kickless_tests::daemon::Daemon;
use kickless_tests::guest::image_dir;
use kickless_tests::verified_load::{BLOCK, drive_disk};

/// The upgrades in a row, unless `UPGRADES` says another number.
const IN_A_ROW: u32 = 12;
const QUEUES: u16 = 2;
/// The requests of a queue in flight.
const DEPTH: u64 = 24;
const DISK_LEN: u64 = QUEUES as u64 * DEPTH * BLOCK as u64;

/// Upgrades a daemon, and calls `each` after each upgrade.
fn upgrade_often(disk: &str, upgrades: u32, mut each: impl FnMut(u32)) {
    let mut daemon = Daemon::serve_with(&["--control"], "workers = 1", &[("disk", disk)]).unwrap();
    let options = Options { queues: QUEUES, packed: Choice::On, ..Options::new(daemon.socket_of("disk")) };
    let disk = Disk::connect(options).unwrap();
    let is_over = AtomicBool::new(false);
    let requests: u64 = thread::scope(|scope| {
        let drivers: Vec<_> = (0..usize::from(QUEUES))
            .map(|queue| {
                let (queue, is_over) = (disk.queue(queue), &is_over);
                scope.spawn(move || drive_disk(&queue, DEPTH, is_over))
            })
            .collect();
        for _ in 0..upgrades {
            thread::sleep(Duration::from_millis(50));
            let upgraded = daemon.upgrade();
            if upgraded.is_err() {
                is_over.store(true, Ordering::Relaxed);
            }
            upgraded.unwrap();
            each(daemon.pid());
        }
        is_over.store(true, Ordering::Relaxed);
        drivers.into_iter().map(|driver| driver.join().unwrap()).sum()
    });
    // The connection is the one from the beginning.
    disk.flush().unwrap();
    drop(disk);
    let (status, _) = daemon.stop().unwrap();
    assert!(status.success(), "{status}");
    println!("{requests} requests");
}

/// The descriptors, the threads without those that the engine keeps for the next call, and the memory in KiB
/// that a process has for itself, with its share of what it shares.
fn holdings(pid: u32) -> (usize, usize, u64) {
    let of_process = |of: &str| fs::read_dir(format!("/proc/{pid}/{of}")).unwrap().flatten();
    let is_of_engine = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("io-"))
    };
    let memory = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let pss = memory.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
    let threads = of_process("task").filter(|task| !is_of_engine(task)).count();
    (of_process("fd").count(), threads, pss.unwrap().trim().parse().unwrap())
}

#[test]
fn the_last_process_is_as_the_first() {
    let upgrades = std::env::var("UPGRADES").map_or(IN_A_ROW, |upgrades| upgrades.parse().unwrap());
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
    let disk = format!("blk-file = \"{}\"", image.display());
    let mut all = Vec::new();
    let note = |pid| {
        // Its load has run for a moment.
        thread::sleep(Duration::from_millis(50));
        all.push(holdings(pid));
    };
    upgrade_often(&disk, upgrades, note);
    let (first, last) = (all[0], all[all.len() - 1]);
    println!("descriptors, threads, Pss in KiB: {first:?} after one upgrade, {last:?} after {upgrades}");
    assert!(last.0 <= first.0 && last.1 <= first.1, "{first:?}, {last:?}");
    assert!(last.2 <= first.2 * 5 / 4 + 2048, "{first:?}, {last:?}");
}
