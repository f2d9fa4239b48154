//! Upgrades a daemon under verified load: one process after another takes over. `UPGRADES` is the number of
//! upgrades in a row in `the_last_process_is_as_the_first`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Choice, Disk, Options};
use kickless_tests::daemon::Daemon;
use kickless_tests::guest::image_dir;
use kickless_tests::hostile_backend::returns_in_time;
use kickless_tests::verified_load::{BLOCK, drive_disk};

/// The upgrades of each kind of ring.
const UPGRADES: u32 = 3;
/// The upgrades in a row, unless `UPGRADES` says another number.
const IN_A_ROW: u32 = 12;
const QUEUES: u16 = 2;
/// The requests of a queue in flight.
const DEPTH: u64 = 24;
const DISK_LEN: u64 = QUEUES as u64 * DEPTH * BLOCK as u64;

/// The kinds of rings: packed and in order.
const KINDS: [(Choice, Choice); 4] = [
    (Choice::Off, Choice::Off),
    (Choice::On, Choice::Off),
    (Choice::Off, Choice::On),
    (Choice::On, Choice::On),
];

/// Upgrades a daemon with this disk again and again, while a driver writes and reads.
fn upgrade_disk(disk: &str, pool: &str) {
    for kind in KINDS {
        upgrade_often(disk, pool, kind, UPGRADES, |_| ());
    }
}

/// Upgrades a daemon, and calls `each` after each upgrade.
fn upgrade_often(
    disk: &str,
    pool: &str,
    (packed, in_order): (Choice, Choice),
    upgrades: u32,
    mut each: impl FnMut(u32),
) {
    let mut daemon = Daemon::serve_with(&["--control"], pool, &[("disk", disk)]).unwrap();
    let options = Options { queues: QUEUES, packed, in_order, ..Options::new(daemon.socket_of("disk")) };
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
    println!("packed {packed:?}, in order {in_order:?}: {requests} requests");
}

#[test]
fn a_disk_in_memory_goes_on() {
    returns_in_time(|| upgrade_disk(&format!("blk-file = \"mem:{DISK_LEN}\""), ""));
}

#[test]
fn a_disk_without_polling_goes_on() {
    returns_in_time(|| upgrade_disk(&format!("blk-file = \"mem:{DISK_LEN}\""), "poll = \"never\""));
}

#[test]
fn a_file_goes_on() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("disk.img");
        File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
        let disk = format!("blk-file = \"{}\"", image.display());
        for engine in ["auto", "aio", "threads"] {
            upgrade_disk(&disk, &format!("engine = \"{engine}\""));
        }
        upgrade_disk(&format!("{disk}\ncache = \"writeback\""), "");
    });
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
    upgrade_often(&disk, "workers = 1", (Choice::On, Choice::Off), upgrades, note);
    let (first, last) = (all[0], all[all.len() - 1]);
    println!("descriptors, threads, Pss in KiB: {first:?} after one upgrade, {last:?} after {upgrades}");
    assert!(last.0 <= first.0 && last.1 <= first.1, "{first:?}, {last:?}");
    assert!(last.2 <= first.2 * 5 / 4 + 2048, "{first:?}, {last:?}");
}
