//! Guests move from one QEMU to another while they read, write and verify, each QEMU with a daemon of its own on the same image.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;

use kickless_disk::lock::ImageLock;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::guest::migration::{self, Destination};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::scratch::{Scratch, numbers};
use rustix::process::Signal;
use serde_json::json;

/// Bytes a second: so slow that a guest does not arrive meanwhile.
const SLOW: u64 = 10 << 20;

/// How a machine and its daemons are made.
#[derive(Clone, Copy)]
struct Shape {
    engines: [&'static str; 2],
    properties: &'static str,
    poll: &'static str,
    cpus: u32,
}

const PLAIN: Shape = Shape { engines: ["io_uring", "io_uring"], properties: "", poll: "auto", cpus: 1 };

/// A disk that two daemons can serve, and the machine that uses it.
struct World {
    shape: Shape,
    scratch: Scratch,
    daemons: [Option<Daemon>; 2],
}

impl World {
    fn new(shape: &Shape) -> World {
        let scratch = Scratch::new().unwrap();
        let mut world = World { shape: *shape, scratch, daemons: [None, None] };
        (0..2).for_each(|number| world.serve(number));
        world
    }

    /// Starts this daemon, anew if it has been there.
    fn serve(&mut self, number: usize) {
        self.daemons[number] = None;
        let arguments = vec!["--incoming".to_owned(), format!("--poll={}", self.shape.poll)];
        let engine = Some(self.shape.engines[number].to_owned());
        let config = DaemonConfig { engine, arguments, ..DaemonConfig::new(self.scratch.path()) };
        self.daemons[number] = Some(Daemon::start(&config).unwrap());
    }

    fn daemon(&self, number: usize) -> &Daemon {
        self.daemons[number].as_ref().unwrap()
    }

    /// The machine on the disk of this daemon.
    fn machine(&self, daemon: usize) -> GuestConfig {
        let disk = DiskConfig::new(self.daemon(daemon).socket(), self.shape.properties);
        GuestConfig::new(migration::TASK, vec![disk]).cpus(self.shape.cpus)
    }

    /// Boots it, and returns once it is at work.
    fn boot(&self) -> Guest {
        let guest = Guest::start(&self.machine(0)).unwrap();
        guest.wait_for("migrate=ready").unwrap();
        migration::works_on(&guest, 0).unwrap();
        guest
    }

    /// Moves the guest to this daemon, and returns once it has worked there.
    fn arrive(&self, mut guest: Guest, daemon: usize) -> Guest {
        let destination = Destination::start(&self.machine(daemon)).unwrap();
        let (moved, finished) = destination.receive(&mut guest, |_| {}).unwrap();
        // What is left of the source dies like this.
        guest.kill().unwrap();
        migration::works_on(&moved, 0).unwrap();
        println!(
            "moved in {:?}, {} rounds, {} MB; stood for {:?}",
            finished.total,
            finished.rounds,
            finished.bytes / 1_000_000,
            finished.downtime
        );
        moved
    }

    /// Whether the image could be had by somebody else.
    fn is_free(&self) -> bool {
        let file = File::options().read(true).write(true).open(self.scratch.path()).unwrap();
        ImageLock::acquire(&file, false).is_ok()
    }

    /// Ends the machine's work, and compares what it found with the image. The daemons have said nothing of trouble but what
    /// `expected` lets pass.
    fn end(self, mut guest: Guest, expected: &[&str]) -> Results {
        guest.tell("stop").unwrap();
        let results = guest.finish().unwrap();
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

/// `KICKLESS_MIGRATIONS` says how often; as many are enough for the first to return.
#[test]
fn a_guest_moves_to_and_fro() {
    let times = std::env::var("KICKLESS_MIGRATIONS").map_or(4, |times| times.parse().unwrap());
    let world = World::new(&PLAIN);
    let mut guest = world.boot();
    for round in 1..=times {
        guest = world.arrive(guest, round % 2);
    }
    world.end(guest, &[]);
}

/// Packed rings, several of them, and daemons with different engines. The source's daemon is killed when the guest has arrived at
/// the other, then the other way round.
#[test]
fn packed_rings_move_and_the_sources_die() {
    let engines = ["io_uring", "threads"];
    let mut world = World::new(&Shape { engines, properties: "packed=on", cpus: 2, ..PLAIN });
    let mut guest = world.boot();
    for round in 1..=2 {
        let (from, to) = ((round + 1) % 2, round % 2);
        let destination = Destination::start(&world.machine(to)).unwrap();
        let (moved, _) = destination.receive(&mut guest, |_| {}).unwrap();
        world.daemon(from).signal(Signal::KILL).unwrap();
        guest.kill().unwrap();
        guest = moved;
        migration::works_on(&guest, 0).unwrap();
        world.serve(from);
    }
    let results = world.end(guest, &[]);
    assert_eq!(results["vda.packed"], "1");
    assert_eq!(results["vda.mq"], "2");
}

#[test]
fn rings_that_are_always_polled_move() {
    let world = World::new(&Shape { engines: ["threads", "io_uring"], poll: "always", ..PLAIN });
    let guest = world.boot();
    let guest = world.arrive(guest, 1);
    let guest = world.arrive(guest, 0);
    world.end(guest, &[]);
}

/// Migrations that come to nothing, one after the other, then one that is done. The guest works on each time.
#[test]
fn given_up_half_way_and_then_done() {
    let mut world = World::new(&PLAIN);
    let mut guest = world.boot();
    let goes_on = |guest: &Guest, why: &str| {
        migration::works_on(guest, guest.results().len()).unwrap();
        println!("went on after {why}");
    };

    // Nobody is there.
    let _ = guest.qmp().execute("migrate", json!({ "uri": "unix:/nowhere/at/all" }));
    migration::comes_to_nothing(&mut guest).unwrap();
    goes_on(&guest, "nobody was there to receive it");

    let begin = |world: &World, guest: &mut Guest| {
        let destination = Destination::start(&world.machine(1)).unwrap();
        destination.begin(guest, SLOW).unwrap();
        migration::wait_for(guest, "some pages have gone", |progress| {
            progress.rounds > 0 && progress.pages_left < progress.pages * 9 / 10
        })
        .unwrap();
        destination
    };
    let destination = begin(&world, &mut guest);
    destination.guest.kill().unwrap();
    migration::comes_to_nothing(&mut guest).unwrap();
    goes_on(&guest, "the destination's QEMU was killed");

    let destination = begin(&world, &mut guest);
    world.daemon(1).signal(Signal::KILL).unwrap();
    guest.qmp().execute("migrate_cancel", json!({})).unwrap();
    migration::comes_to_nothing(&mut guest).unwrap();
    drop(destination);
    world.serve(1);
    goes_on(&guest, "the destination's daemon was killed, and the migration cancelled");

    // At the last moment: the machine stands, its rings have stopped and the image is anybody's.
    let capability = json!({ "capability": "pause-before-switchover", "state": true });
    guest.qmp().execute("migrate-set-capabilities", json!({ "capabilities": [capability] })).unwrap();
    let destination = Destination::start(&world.machine(1)).unwrap();
    destination.begin(&mut guest, migration::BANDWIDTH).unwrap();
    assert!(!world.is_free());
    migration::wait_for_status(&mut guest, "pre-switchover").unwrap();
    assert!(world.is_free());
    guest.qmp().execute("migrate_cancel", json!({})).unwrap();
    migration::comes_to_nothing(&mut guest).unwrap();
    drop(destination);
    goes_on(&guest, "it was cancelled when it stood");
    assert!(!world.is_free());
    let capability = json!({ "capability": "pause-before-switchover", "state": false });
    guest.qmp().execute("migrate-set-capabilities", json!({ "capabilities": [capability] })).unwrap();

    let guest = world.arrive(guest, 1);
    assert_eq!(world.daemon(1).log().grep("every write is made durable").len(), 1);
    world.end(guest, &["connection dropped"]);
}
