//! Tests `kickless serve`: one process with many devices.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Disk, Options};
use kickless_testing::pattern;
use kickless_tests::daemon::Daemon;
use kickless_tests::hostile_backend::returns_in_time;
use rustix::process::Signal;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(30);
const BLOCK: usize = 4096;
/// Blocks of a disk.
const BLOCKS: u64 = 256;
/// Threads that drive a disk. Each uses blocks of its own.
const THREADS: u64 = 3;

/// Defines tests that fail if they hang, because a driver waits forever for a lost request.
macro_rules! tests_with_limit {
    ($($name:ident)*) => {
        mod serve {
            $(#[test] fn $name() { super::returns_in_time(super::$name); })*
        }
    };
}

tests_with_limit! {
    many_devices_at_once
    a_stop_under_load_loses_nothing
    a_front_end_that_sends_rubbish_harms_its_own_device_only
}

/// Starts three devices on two workers, one of each kind. The last one is an image in `dir`.
fn start(dir: &Path) -> Daemon {
    let image = dir.join("disk.img");
    File::create_new(&image).unwrap().set_len(BLOCKS * BLOCK as u64).unwrap();
    let file = format!("blk-file = '{}'\ncache = 'writeback'\nweight = 100\nnum-queues = 4", image.display());
    let devices = [
        ("null", "blk-file = 'null:1G'"),
        ("memory", "blk-file = 'mem:1M'\nnum-queues = 2\nqueue-size = 128"),
        ("file", &file),
    ];
    Daemon::serve("workers = 2", &devices).unwrap()
}

fn connect(daemon: &Daemon, device: &str) -> Disk {
    let options = Options {
        queues: 2,
        queue_size: 64,
        reconnect_limit: Duration::ZERO,
        connect_timeout: LIMIT,
        ..Options::new(daemon.socket_of(device))
    };
    Disk::connect(options).unwrap()
}

/// Returns the content of a block in version `version`. Version 0 is empty.
fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; BLOCK] } else { pattern(version << 32 | block, BLOCK) }
}

/// Writes `rounds` versions of each block of this disk on several threads, and reads each back. If the disk
/// stores no data, only checks the statuses.
fn drive(disk: &Disk, rounds: u64, stores: bool) {
    thread::scope(|scope| {
        for first in 0..THREADS {
            scope.spawn(move || {
                let mut read = vec![0; BLOCK];
                for version in 1..=rounds {
                    for block in (first..BLOCKS).step_by(THREADS as usize) {
                        let written = content(block, version);
                        disk.write_at(&written, block * BLOCK as u64).unwrap();
                        disk.read_at(&mut read, block * BLOCK as u64).unwrap();
                        assert!(!stores || read == written, "block {block}, version {version}");
                    }
                }
                disk.flush().unwrap();
            });
        }
    });
}

/// Returns the sum of a counter of this device over all lines of this kind.
fn counted(lines: &[String], kind: &str, device: &str, key: &str) -> u64 {
    let (kind, device, key) = (format!(" {kind} "), format!(" device={device}"), format!("{key}="));
    let ours = lines.iter().filter(|line| line.contains(&kind) && line.contains(&device));
    let words = ours.flat_map(|line| line.split_whitespace());
    words.filter_map(|word| word.strip_prefix(&key)?.parse::<u64>().ok()).sum()
}

fn many_devices_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let names = ["null", "memory", "file"];
    let disks = names.map(|name| connect(&daemon, name));
    const ROUNDS: u64 = 4;
    thread::scope(|scope| {
        for (name, disk) in names.into_iter().zip(&disks) {
            scope.spawn(move || drive(disk, ROUNDS, name != "null"));
        }
        // A request for the counters disturbs no device.
        let seen = daemon.log().len();
        daemon.signal(Signal::USR1).unwrap();
        for name in names {
            let of = format!(" device={name}");
            let told = |line: &str| (line.contains(&of) && line.contains(" counters queue")).then_some(());
            daemon.log().wait_from(seen, "counters", LIMIT, told).unwrap();
        }
    });
    let requests = 2 * ROUNDS * BLOCKS + THREADS;
    let seen = daemon.log().len();
    daemon.signal(Signal::USR1).unwrap();
    // The lines of the file's queues come last.
    let mut sum = 0;
    let last = |line: &str| {
        sum += counted(&[line.to_owned()], "counters", "file", "requests");
        (sum == requests).then_some(())
    };
    daemon.log().wait_from(seen, "all counters", LIMIT, last).unwrap();
    let lines = daemon.log().lines();
    for name in names {
        assert_eq!(counted(&lines[seen..], "counters", name, "requests"), requests, "{name}: {lines:#?}");
        assert_eq!(counted(&lines[seen..], "counters", name, "errors"), 0, "{name}");
    }
    drop(disks);
    let sockets = names.map(|name| daemon.socket_of(name));
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    for (name, socket) in names.into_iter().zip(sockets) {
        assert_eq!(counted(&log, "summary", name, "requests"), requests, "{name}: {log:#?}");
        assert!(!socket.exists());
    }
    let image = fs::read(dir.path().join("disk.img")).unwrap();
    for (block, found) in (0..).zip(image.chunks(BLOCK)) {
        assert!(found == content(block, ROUNDS), "block {block}");
    }
}

/// Writes until the disk is gone. Each thread stores the acknowledged version of each of its blocks.
fn write_until_gone(disk: &Disk, acknowledged: &[AtomicU64], started: &AtomicU64) {
    thread::scope(|scope| {
        for first in 0..THREADS {
            scope.spawn(move || {
                for version in 1.. {
                    for block in (first..BLOCKS).step_by(THREADS as usize) {
                        if disk.write_at(&content(block, version), block * BLOCK as u64).is_err() {
                            return;
                        }
                        acknowledged[block as usize].store(version, Ordering::Relaxed);
                    }
                    started.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
}

fn a_stop_under_load_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let names = ["null", "memory", "file"];
    let disks = names.map(|name| connect(&daemon, name));
    let acknowledged: Vec<[AtomicU64; BLOCKS as usize]> =
        names.iter().map(|_| [const { AtomicU64::new(0) }; BLOCKS as usize]).collect();
    let rounds = [const { AtomicU64::new(0) }; 3];
    let (status, log) = thread::scope(|scope| {
        for ((disk, acknowledged), rounds) in disks.iter().zip(&acknowledged).zip(&rounds) {
            scope.spawn(move || write_until_gone(disk, acknowledged, rounds));
        }
        // Waits until every disk has done several rounds.
        while rounds.iter().any(|rounds| rounds.load(Ordering::Relaxed) < 2 * THREADS) {
            thread::sleep(Duration::from_millis(1));
        }
        daemon.stop().unwrap()
    });
    assert_eq!(status.code(), Some(0), "{log:#?}");
    let trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    assert_eq!(log.iter().find(trouble), None);
    for (name, acknowledged) in names.iter().zip(&acknowledged) {
        let writes: u64 = acknowledged.iter().map(|version| version.load(Ordering::Relaxed)).sum();
        // Per thread, one more request may have completed without the thread's knowledge.
        let requests = counted(&log, "summary", name, "requests");
        assert!((writes..=writes + THREADS).contains(&requests), "{name}: {writes}, {requests}");
        assert_eq!(counted(&log, "summary", name, "errors"), 0);
    }
    let image = File::open(dir.path().join("disk.img")).unwrap();
    let mut found = vec![0; BLOCK];
    for (block, version) in (0..).zip(&acknowledged[2]) {
        image.read_exact_at(&mut found, block * BLOCK as u64).unwrap();
        let version = version.load(Ordering::Relaxed);
        assert!(found == content(block, version) || found == content(block, version + 1), "block {block}");
    }
}

fn a_front_end_that_sends_rubbish_harms_its_own_device_only() {
    let dir: TempDir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let (memory, file) = (connect(&daemon, "memory"), connect(&daemon, "file"));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let good = scope.spawn(|| {
            thread::scope(|scope| {
                scope.spawn(|| drive(&memory, 6, true));
                scope.spawn(|| drive(&file, 6, true));
            });
            done.store(true, Ordering::Relaxed);
        });
        for seed in 1.. {
            let seen = daemon.log().len();
            let mut connection = UnixStream::connect(daemon.socket_of("null")).unwrap();
            connection.set_read_timeout(Some(LIMIT)).unwrap();
            // The daemon may close the connection before it has read all bytes.
            let _ = connection.write_all(&pattern(seed, 100 + seed as usize % 5000));
            // The device serves another front-end only after this.
            let mut rest = Vec::new();
            let _ = connection.read_to_end(&mut rest);
            let told = |line: &str| {
                (line.contains(" device=null") && line.contains("connection dropped")).then_some(())
            };
            daemon.log().wait_from(seen, "dropping the connection", LIMIT, told).unwrap();
            if done.load(Ordering::Relaxed) || good.is_finished() {
                break;
            }
        }
    });
    // The device itself serves the next front-end.
    drive(&connect(&daemon, "null"), 1, false);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    for name in ["memory", "file"] {
        let dropped = |line: &&String| line.contains(&format!("device={name}")) && line.contains("WARN");
        assert_eq!(log.iter().find(dropped), None);
        assert_eq!(counted(&log, "summary", name, "requests"), 12 * BLOCKS + THREADS);
    }
}
