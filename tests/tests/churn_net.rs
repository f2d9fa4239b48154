//! Network cards and disks come and go in a registry while others are under load.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_daemon::{AddOutcome, Notation, PoolConfig, Registry, RemoveMode, values};
use kickless_driver::Options;
use kickless_kinds::kinds;
use kickless_testing::Resources;
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::card::{Card, CardShape};
use kickless_worker::WorkerPool;
use serde_json::{Value, json};
use tempfile::TempDir;

const DEVICES_MAX: usize = 16;
/// Threads that add and remove devices. Each has a device of its own.
const CHURNERS: usize = 3;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// A registry, and a directory for its sockets.
struct Rig {
    registry: Registry,
    dir: TempDir,
}

impl Rig {
    fn new() -> Self {
        kickless_memory::fault::guard().unwrap();
        let pool = PoolConfig { workers: Some(2), ..PoolConfig::default() };
        let options = pool.worker_options(DEVICES_MAX as u32, Notation::Keys).unwrap();
        let registry = Registry::new(DEVICES_MAX, kinds()).unwrap();
        registry.set_pool(WorkerPool::start(&options).unwrap());
        Self { registry, dir: tempfile::tempdir().unwrap() }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Adds a device with this key and value.
    fn add(&self, name: &str, key: &str, value: &str) {
        let mut config = json!({ "name": name, "socket-path": self.socket(name) });
        config[key] = Value::from(value);
        let config = self.registry.kinds().read(&values(config.as_object().unwrap())).unwrap();
        assert_eq!(self.registry.add(config).unwrap(), AddOutcome::New);
    }

    fn disk(&self, name: &str) -> kickless_driver::Disk {
        let connect_timeout = LIMIT;
        let reconnect_limit = Duration::ZERO;
        let options = Options { reconnect_limit, connect_timeout, ..Options::new(self.socket(name)) };
        kickless_driver::Disk::connect(options).unwrap()
    }
}

/// Receives and sends on a card until it is over. Each test frame is whole, and none is missing. Returns the
/// number of frames.
fn exchange(card: &mut Card, over: &AtomicBool) -> u64 {
    let mut next = 0;
    card.fill(RECEIVE).unwrap();
    while !over.load(Ordering::Relaxed) || next == 0 {
        assert_eq!(card.receive(RECEIVE).unwrap(), next);
        next += 1;
        card.fill(RECEIVE).unwrap();
        card.send(TRANSMIT).unwrap();
    }
    next
}

/// Writes and reads the blocks of a disk until it is over.
fn verify(disk: &kickless_driver::Disk, over: &AtomicBool) {
    let mut version = 0u64;
    while !over.load(Ordering::Relaxed) || version == 0 {
        let data = [version as u8; 4096];
        let mut read = [0; 4096];
        let at = version % 64 * 4096;
        disk.write_at(&data, at).unwrap();
        disk.read_at(&mut read, at).unwrap();
        assert!(read == data, "version {version}");
        version += 1;
    }
}

/// Adds a card, uses it, and removes it under load.
fn card_comes_and_goes(rig: &Rig, name: &str, round: usize) {
    rig.add(name, "port", ["null", "null,rate=20000"][round % 2]);
    if round % 5 == 4 {
        // No front-end has connected.
        assert!(rig.registry.remove(name, RemoveMode::Refuse, LIMIT).unwrap());
        return;
    }
    let mut card = Card::start(&rig.socket(name), CardShape::BOTH[round / 2 % 2]).unwrap();
    card.fill(RECEIVE).unwrap();
    card.send(TRANSMIT).unwrap();
    let how = if round.is_multiple_of(3) { RemoveMode::Force } else { RemoveMode::Drain };
    let gone = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(rig.registry.remove(name, how, LIMIT).unwrap());
            gone.store(true, Ordering::Release);
        });
        card.send_until(TRANSMIT, || gone.load(Ordering::Acquire)).unwrap();
    });
}

/// Adds a disk, writes to it, and removes it under load.
fn disk_comes_and_goes(rig: &Rig, name: &str) {
    rig.add(name, "blk-file", "mem:256K");
    let disk = rig.disk(name);
    disk.write_at(&[1; 4096], 0).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| while disk.write_at(&[2; 4096], 4096).is_ok() {});
        assert!(rig.registry.remove(name, RemoveMode::Drain, LIMIT).unwrap());
    });
}

/// Runs each churner for this number of rounds. The device of a churner is a card in some rounds and a disk
/// in the others.
fn churn(rig: &Rig, rounds: usize) {
    thread::scope(|scope| {
        for churner in 0..CHURNERS {
            scope.spawn(move || {
                let name = format!("churn-{churner}");
                for round in 0..rounds {
                    if (round + churner).is_multiple_of(3) {
                        disk_comes_and_goes(rig, &name);
                    } else {
                        card_comes_and_goes(rig, &name, round);
                    }
                    assert!(!rig.socket(&name).exists(), "{name} leaves its socket behind");
                }
            });
        }
    });
}

#[test]
fn cards_and_disks_come_and_go_under_load() {
    let rig = Rig::new();
    let shapes = [("split", CardShape::BOTH[0]), ("packed", CardShape::BOTH[1])];
    let mut cards = shapes.map(|(name, shape)| {
        rig.add(name, "port", "null,rate=2000");
        Card::start(&rig.socket(name), shape).unwrap()
    });
    rig.add("disk", "blk-file", "mem:256K");
    let disk = rig.disk("disk");
    // After these rounds, the process has the threads and heaps that it keeps.
    churn(&rig, 15);
    let before = Resources::now();
    let over = AtomicBool::new(false);
    let frames = thread::scope(|scope| {
        let over = &over;
        let exchanging = cards.each_mut().map(|card| scope.spawn(move || exchange(card, over)));
        let verifying = scope.spawn(|| verify(&disk, over));
        churn(&rig, 60);
        over.store(true, Ordering::Relaxed);
        verifying.join().unwrap();
        exchanging.map(|card| card.join().unwrap())
    });
    assert!(frames.iter().all(|frames| *frames > 0), "{frames:?}");
    // `before` may have counted threads of an earlier round that had just ended, so less is fine too.
    before.wait_until_back();
    let names = rig.registry.list().into_iter().filter_map(|listed| listed.config.identity.name);
    assert_eq!(names.collect::<Vec<_>>(), ["split", "packed", "disk"]);
}
