//! Moves guests from one QEMU to another while they read, write and verify. Each QEMU has a daemon of its
//! own; both serve the same image.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;

use kickless_disk::lock::ImageLock;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::frontend::LIMIT;
use kickless_tests::guest::migration::{self, Destination};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::scratch::{Scratch, numbers};
use kickless_tests::handover::store::Store;
use rustix::process::Signal;
use serde_json::json;

/// Bytes per second. So slow that a guest does not arrive during the test.
const SLOW: u64 = 10 << 20;

/// Bytes of an image that a host reads before a guest moves to it.
const READ_AHEAD: u64 = 128 << 20;

/// Options of a machine and its daemons.
#[derive(Clone, Copy)]
struct Shape {
    engines: [&'static str; 2],
    properties: &'static str,
    poll: &'static str,
    cpus: u32,
}

const PLAIN: Shape = Shape { engines: ["io_uring", "io_uring"], properties: "", poll: "auto", cpus: 1 };

/// A disk that two daemons can serve, and the options of the machine that uses it.
struct Migration {
    shape: Shape,
    scratch: Scratch,
    /// The qcow2 image of two hosts that holds the disk, if it is not in the scratch file.
    store: Option<Store>,
    daemons: [Option<Daemon>; 2],
}

impl Migration {
    fn new(shape: &Shape) -> Migration {
        Migration::on(shape, Scratch::new().unwrap(), None)
    }

    fn on(shape: &Shape, scratch: Scratch, store: Option<Store>) -> Migration {
        let mut world = Migration { shape: *shape, scratch, store, daemons: [None, None] };
        (0..2).for_each(|number| world.serve(number));
        world
    }

    /// Starts this daemon, or restarts it.
    fn serve(&mut self, number: usize) {
        self.daemons[number] = None;
        let mut arguments = vec!["--incoming".to_owned(), format!("--poll={}", self.shape.poll)];
        let engine = Some(self.shape.engines[number].to_owned());
        let disk = match &self.store {
            Some(store) => {
                arguments.push("--cache=writeback".to_owned());
                store.disk(number)
            }
            None => self.scratch.path().into(),
        };
        let config = DaemonConfig { engine, arguments, ..DaemonConfig::new(disk) };
        self.daemons[number] = Some(Daemon::start(&config).unwrap());
    }

    fn daemon(&self, number: usize) -> &Daemon {
        self.daemons[number].as_ref().unwrap()
    }

    /// Returns the options of the machine with the disk of this daemon.
    fn machine(&self, daemon: usize) -> GuestConfig {
        let disk = DiskConfig::new(self.daemon(daemon).socket(), self.shape.properties);
        GuestConfig::new(migration::TASK, vec![disk]).cpus(self.shape.cpus)
    }

    /// Boots the machine and waits until it works.
    fn boot(&self) -> Guest {
        let guest = Guest::start(&self.machine(0)).unwrap();
        guest.wait_for("migrate=ready").unwrap();
        migration::wait_for_work(&guest, 0).unwrap();
        guest
    }

    /// Moves the guest to this daemon and waits until it has worked there.
    fn move_to(&self, mut guest: Guest, daemon: usize) -> Guest {
        if let Some(store) = &self.store {
            // The guest must not see later what the destination's page cache has now.
            store.read_ahead(daemon, READ_AHEAD).unwrap();
        }
        let destination = Destination::start(&self.machine(daemon)).unwrap();
        let (moved, finished) = destination.receive(&mut guest, |_| {}).unwrap();
        // Kills the source's QEMU, which has no guest any more.
        guest.kill().unwrap();
        migration::wait_for_work(&moved, 0).unwrap();
        println!(
            "moved in {:?}, {} rounds, {} MB; stood for {:?}",
            finished.total,
            finished.rounds,
            finished.bytes / 1_000_000,
            finished.downtime
        );
        moved
    }

    /// Returns whether another process could lock the image.
    fn is_free(&self) -> bool {
        let file = File::options().read(true).write(true).open(self.scratch.path()).unwrap();
        ImageLock::acquire(&file, false).is_ok()
    }

    /// Ends the machine's work and compares its results with the image. The daemons' logs must have no
    /// warning except those in `expected`.
    fn end(self, mut guest: Guest, expected: &[&str]) -> Results {
        guest.tell("stop").unwrap();
        let results = guest.finish().unwrap();
        if let Some(store) = &self.store {
            self.scratch.copy_back(store).unwrap();
        }
        self.scratch.compare(&results, "vda").unwrap();
        for kind in ["verified", "cached", "dirtied"] {
            assert!(numbers(&results, &format!("migrate.{kind}")).unwrap()[0] > 0, "{kind}: {results:?}");
        }
        println!(
            "{} verified runs of fio, {} of cached reads, {} of memory",
            results["migrate.verified"], results["migrate.cached"], results["migrate.dirtied"]
        );
        for daemon in self.daemons.into_iter().flatten() {
            let (status, log) = daemon.stop().unwrap();
            assert_eq!(status.code(), Some(0));
            let passes = |line: &str| {
                line.contains("every write is made durable") || expected.iter().any(|e| line.contains(e))
            };
            let troubles = log.iter().filter(|line| line.contains(" WARN ") || line.contains(" ERROR "));
            let troubles: Vec<&String> = troubles.filter(|line| !passes(line)).collect();
            assert!(troubles.is_empty(), "{troubles:#?}");
            let summaries = log.iter().filter(|line| line.contains("requests="));
            assert!(summaries.clone().all(|line| line.contains(" errors=0 ")), "{log:#?}");
        }
        results
    }
}

/// `KICKLESS_MIGRATIONS` is the number of moves. By default, the guest returns to its first daemon.
#[test]
fn a_guest_moves_there_and_back() {
    let times = std::env::var("KICKLESS_MIGRATIONS").map_or(4, |times| times.parse().unwrap());
    let world = Migration::new(&PLAIN);
    let mut guest = world.boot();
    for round in 1..=times {
        guest = world.move_to(guest, round % 2);
    }
    world.end(guest, &[]);
}

/// Moves a guest between two hosts with a page cache each, on a qcow2 image. `KICKLESS_MIGRATIONS` is the
/// number of moves.
#[test]
fn a_guest_moves_between_two_page_caches() {
    let times = std::env::var("KICKLESS_MIGRATIONS").map_or(3, |times| times.parse().unwrap());
    let scratch = Scratch::new().unwrap();
    let store = match scratch.to_two_hosts() {
        Ok(store) => store,
        Err(why) => return println!("SKIPPED: {why:#}"),
    };
    let engines = ["io_uring", "threads"];
    let world = Migration::on(&Shape { engines, ..PLAIN }, scratch, Some(store));
    let mut guest = world.boot();
    for round in 1..=times {
        guest = world.move_to(guest, round % 2);
    }
    world.end(guest, &[]);
}

/// Moves several packed rings between daemons with different engines. Kills the source's daemon after each
/// move, in both directions.
#[test]
fn packed_rings_move_and_the_source_is_killed() {
    let engines = ["io_uring", "threads"];
    let mut world = Migration::new(&Shape { engines, properties: "packed=on", cpus: 2, ..PLAIN });
    let mut guest = world.boot();
    for round in 1..=2 {
        let (from, to) = ((round + 1) % 2, round % 2);
        let destination = Destination::start(&world.machine(to)).unwrap();
        let (moved, _) = destination.receive(&mut guest, |_| {}).unwrap();
        world.daemon(from).signal(Signal::KILL).unwrap();
        guest.kill().unwrap();
        guest = moved;
        migration::wait_for_work(&guest, 0).unwrap();
        world.serve(from);
    }
    let results = world.end(guest, &[]);
    assert_eq!(results["vda.packed"], "1");
    assert_eq!(results["vda.mq"], "2");
}

#[test]
fn rings_that_are_always_polled_move() {
    let world = Migration::new(&Shape { engines: ["threads", "io_uring"], poll: "always", ..PLAIN });
    let guest = world.boot();
    let guest = world.move_to(guest, 1);
    let guest = world.move_to(guest, 0);
    world.end(guest, &[]);
}

/// Starts migrations that fail, then one that succeeds. The guest works on after each.
#[test]
fn a_migration_succeeds_after_failed_ones() {
    let mut world = Migration::new(&PLAIN);
    let mut guest = world.boot();
    let check_guest_works = |guest: &Guest, why: &str| {
        migration::wait_for_work(guest, guest.results().len()).unwrap();
        println!("the guest continued after this failure: {why}");
    };

    // No QEMU listens there.
    let _ = guest.qmp().execute("migrate", json!({ "uri": "unix:/nowhere/at/all" }));
    migration::wait_for_failure(&mut guest).unwrap();
    check_guest_works(&guest, "no QEMU received it");

    let begin = |world: &Migration, guest: &mut Guest| {
        let destination = Destination::start(&world.machine(1)).unwrap();
        destination.begin(guest, SLOW).unwrap();
        migration::wait_for(guest, "QEMU has sent some pages", |progress| {
            progress.rounds > 0 && progress.pages_left < progress.pages * 9 / 10
        })
        .unwrap();
        destination
    };
    let destination = begin(&world, &mut guest);
    destination.guest.kill().unwrap();
    migration::wait_for_failure(&mut guest).unwrap();
    check_guest_works(&guest, "the destination's QEMU was killed");

    let destination = begin(&world, &mut guest);
    world.daemon(1).signal(Signal::KILL).unwrap();
    guest.qmp().execute("migrate_cancel", json!({})).unwrap();
    migration::wait_for_failure(&mut guest).unwrap();
    drop(destination);
    world.serve(1);
    check_guest_works(&guest, "the destination's daemon was killed, and the migration cancelled");

    // At the last moment: the machine is paused, its rings have stopped and the image is unlocked.
    let capability = json!({ "capability": "pause-before-switchover", "state": true });
    guest.qmp().execute("migrate-set-capabilities", json!({ "capabilities": [capability] })).unwrap();
    let destination = Destination::start(&world.machine(1)).unwrap();
    destination.begin(&mut guest, migration::BANDWIDTH).unwrap();
    assert!(!world.is_free());
    migration::wait_for_status(&mut guest, "pre-switchover").unwrap();
    assert!(world.is_free());
    guest.qmp().execute("migrate_cancel", json!({})).unwrap();
    migration::wait_for_failure(&mut guest).unwrap();
    drop(destination);
    check_guest_works(&guest, "the migration was cancelled while the machine was paused");
    assert!(!world.is_free());
    let capability = json!({ "capability": "pause-before-switchover", "state": false });
    guest.qmp().execute("migrate-set-capabilities", json!({ "capabilities": [capability] })).unwrap();

    let guest = world.move_to(guest, 1);
    let told = |line: &str| line.contains("every write is made durable").then_some(());
    let log = world.daemon(1).log();
    log.wait_for("what it does about the write cache", LIMIT, told).unwrap();
    assert_eq!(log.grep("every write is made durable").len(), 1);
    world.end(guest, &["connection dropped"]);
}
