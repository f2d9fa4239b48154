//! Guests move from one QEMU to another while they read, write and verify, each QEMU with a daemon of its own on the same image.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::migration::Destination;
use kickless_tests::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::scratch::{Scratch, numbers};

/// A disk that two daemons can serve, and the machine that uses it.
struct World {
    scratch: Scratch,
    daemons: [Daemon; 2],
    properties: &'static str,
    cpus: u32,
}

/// How a machine and its daemons are made.
#[derive(Clone, Copy)]
struct Shape {
    engines: [&'static str; 2],
    properties: &'static str,
    poll: &'static str,
    cpus: u32,
}

const PLAIN: Shape = Shape { engines: ["io_uring", "io_uring"], properties: "", poll: "auto", cpus: 1 };

fn daemon(scratch: &Scratch, engine: &str, arguments: &[String]) -> Daemon {
    let (engine, arguments) = (Some(engine.to_owned()), arguments.to_vec());
    Daemon::start(&DaemonConfig { engine, arguments, ..DaemonConfig::new(scratch.path()) }).unwrap()
}

impl World {
    fn new(shape: &Shape) -> World {
        let scratch = Scratch::new().unwrap();
        let arguments = ["--incoming".to_owned(), format!("--poll={}", shape.poll)];
        let daemons = shape.engines.map(|engine| daemon(&scratch, engine, &arguments));
        World { scratch, daemons, properties: shape.properties, cpus: shape.cpus }
    }

    /// The machine on the disk of this daemon.
    fn machine(&self, daemon: usize) -> GuestConfig {
        let disk = DiskConfig::new(self.daemons[daemon].socket(), self.properties);
        GuestConfig::new("kl.task=migrate,check kl.size=8", vec![disk]).cpus(self.cpus)
    }

    /// Boots it, and returns once it is at work.
    fn boot(&self) -> Guest {
        let guest = Guest::start(&self.machine(0)).unwrap();
        guest.wait_for("migrate=ready").unwrap();
        guest
    }

    /// Ends the machine's work, and compares what it found with the image.
    fn end(self, mut guest: Guest) -> Results {
        guest.tell("stop").unwrap();
        let results = guest.finish().unwrap();
        self.scratch.compare(&results, "vda").unwrap();
        for kind in ["verified", "cached", "dirtied"] {
            assert!(numbers(&results, &format!("migrate.{kind}")).unwrap()[0] > 0, "{kind}: {results:?}");
        }
        for daemon in self.daemons {
            let (status, log) = daemon.stop().unwrap();
            assert_eq!(status.code(), Some(0));
            let trouble: Vec<&String> = log
                .iter()
                .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
                .filter(|line| !line.contains("every write is made durable"))
                .collect();
            assert!(trouble.is_empty(), "{trouble:#?}");
        }
        results
    }
}

/// Moves a guest to and fro.
fn move_often(shape: &Shape, times: u32) {
    let world = World::new(shape);
    let mut guest = world.boot();
    for round in 1..=times {
        let destination = Destination::start(&world.machine(round as usize % 2)).unwrap();
        let (moved, finished) = destination.receive(&mut guest, |_| {}).unwrap();
        // What is left of the source dies like this.
        guest.kill().unwrap();
        guest = moved;
        println!("migration {round}: {finished:?}");
    }
    let results = world.end(guest);
    println!(
        "moved {times} times: {} verified runs of fio, {} of cached reads, {} of memory",
        results["migrate.verified"], results["migrate.cached"], results["migrate.dirtied"]
    );
}

#[test]
fn a_guest_moves_to_and_fro() {
    let times = std::env::var("KICKLESS_MIGRATIONS").map_or(4, |times| times.parse().unwrap());
    move_often(&PLAIN, times);
}
