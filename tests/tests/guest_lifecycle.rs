//! Tests virtual machines that work while they end, crash, are reset, or lose and gain disks and memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, LIMIT, Results};
use kickless_tests::guest::scratch::{Scratch, numbers};
use kickless_tests::with_each_engine;

with_each_engine! {
    disks_plugged_and_unplugged_under_io
    memory_plugged_under_verified_io
}

fn serve(scratch: &Scratch, engine: &str) -> Daemon {
    let engine = Some(engine.to_owned());
    Daemon::start(&DaemonConfig { engine, ..DaemonConfig::new(scratch.path()) }).unwrap()
}

/// Ends a daemon. Its log must have no warning, and it must hold no resource of its guests.
fn end(daemon: Daemon, before: (usize, usize)) {
    daemon.returns_to(before).unwrap();
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    let trouble: Vec<&String> =
        log.iter().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).collect();
    assert!(trouble.is_empty(), "{trouble:#?}");
    if Program::from_environment() == Program::Kickless {
        let summary: Vec<&String> = log.iter().filter(|line| line.contains("requests=")).collect();
        assert!(!summary.is_empty(), "{log:#?}");
        assert!(summary.iter().all(|line| line.contains(" errors=0 ")), "{summary:#?}");
    }
}

fn start(task: &str, cpus: u32, daemon: &Daemon) -> Guest {
    let disk = DiskConfig::new(daemon.socket(), "");
    Guest::start(&GuestConfig { resets: true, ..GuestConfig::new(task, vec![disk]).cpus(cpus) }).unwrap()
}

/// A daemon for each engine. A guest has a disk of each of them, because booting it takes most of the time.
struct Daemons(Vec<Served>);

struct Served {
    scratch: Scratch,
    daemon: Daemon,
    before: (usize, usize),
}

impl Daemons {
    fn start() -> Daemons {
        let served = ["io_uring", "aio", "threads"].map(|engine| {
            let scratch = Scratch::new().unwrap();
            let daemon = serve(&scratch, engine);
            let before = daemon.holdings().unwrap();
            Served { scratch, daemon, before }
        });
        Daemons(served.into())
    }

    fn start_guest(&self, task: &str, cpus: u32) -> Guest {
        let disks = self.0.iter().map(|of| DiskConfig::new(of.daemon.socket(), "")).collect();
        Guest::start(&GuestConfig { resets: true, ..GuestConfig::new(task, disks).cpus(cpus) }).unwrap()
    }

    fn all_run(&mut self) {
        assert!(self.0.iter_mut().all(|of| of.daemon.is_running().unwrap()));
    }

    /// Compares what the guest found on each disk with the disk. Checks that each has an interrupt for each
    /// queue.
    fn compare(&self, results: &Results, cpus: u32) {
        for (of, disk) in self.0.iter().zip(["vda", "vdb", "vdc"]) {
            of.scratch.compare(results, disk).unwrap();
            let interrupts = numbers(results, &format!("{disk}.interrupts")).unwrap();
            println!("a guest with {cpus} CPUs: {disk} verified, interrupts {interrupts:?}");
            assert_eq!(interrupts.len(), cpus as usize);
        }
    }

    /// Boots a guest that verifies all disks.
    fn check(&self, cpus: u32) {
        let results = self.start_guest("kl.task=check kl.size=8", cpus).finish().unwrap();
        self.compare(&results, cpus);
    }

    fn end(self) {
        for of in self.0 {
            end(of.daemon, of.before);
        }
    }
}

#[test]
fn guests_in_turn_on_one_daemon() {
    let mut daemons = Daemons::start();
    for cpus in [4, 1, 2] {
        daemons.check(cpus);
        daemons.all_run();
    }
    daemons.end();
}

#[test]
fn a_guest_killed_in_the_middle_of_writes() {
    let mut daemons = Daemons::start();
    // Each guest has other queues than the one before it.
    for cpus in [4, 2, 1] {
        let guest = daemons.start_guest("kl.task=writes", cpus);
        guest.wait_for("writes=flowing").unwrap();
        guest.kill().unwrap();
        daemons.all_run();
        println!("a guest with {cpus} CPUs killed while it wrote");
    }
    daemons.check(2);
    println!("the next guest verified the disks");
    daemons.end();
}

#[test]
fn reset_under_io() {
    const RESETS: u32 = 3;
    const CPUS: u32 = 2;
    let mut daemons = Daemons::start();
    let mut guest = daemons.start_guest(&format!("kl.task=resets,check kl.rounds={RESETS} kl.size=8"), CPUS);
    for boot in 1..=RESETS {
        guest.wait_for(&format!("boots={boot}")).unwrap();
        // Each boot reports its own progress after its number.
        guest.results().wait_for("writes", LIMIT, flowing_after(boot)).unwrap();
        guest.reset().unwrap();
        println!("reset {boot} while it wrote");
    }
    let results = guest.finish().unwrap();
    assert_eq!(results["boots"], (RESETS + 1).to_string());
    daemons.compare(&results, CPUS);
    daemons.all_run();
    daemons.end();
}

fn flowing_after(boot: u32) -> impl FnMut(&str) -> Option<()> {
    let count = format!("KL: boots={boot}");
    let mut booted = false;
    move |line| {
        booted |= line == count;
        (booted && line == "KL: writes=flowing").then_some(())
    }
}

fn disks_plugged_and_unplugged_under_io(engine: &str) {
    const ROUNDS: u32 = 3;
    let scratch = Scratch::new().unwrap();
    let mut daemon = serve(&scratch, engine);
    let before = daemon.holdings().unwrap();
    let task = format!("kl.task=hotplug kl.rounds={ROUNDS} kl.size=8");
    let mut guest = Guest::start(&GuestConfig::new(&task, Vec::new()).cpus(2)).unwrap();
    let disk = DiskConfig::new(daemon.socket(), "");
    guest.wait_for("cpus=2").unwrap();
    for round in 1..=ROUNDS {
        guest.add_disk(&format!("hot{round}"), &disk).unwrap();
        guest.wait_for(&format!("hotplug=flowing {round}")).unwrap();
        guest.remove_disk(&format!("hot{round}")).unwrap();
        guest.wait_for(&format!("hotplug=gone {round}")).unwrap();
        assert!(daemon.is_running().unwrap());
        println!("disk {round} plugged, and unplugged while the guest wrote to it");
    }
    guest.add_disk("last", &disk).unwrap();
    let results = guest.finish().unwrap();
    scratch.compare(&results, "vda").unwrap();
    println!("the last one stayed and was verified");
    end(daemon, before);
}

fn memory_plugged_under_verified_io(engine: &str) {
    const DIMM_MIB: u64 = 512;
    let scratch = Scratch::new().unwrap();
    let mut daemon = serve(&scratch, engine);
    let before = daemon.holdings().unwrap();
    let mut guest = start("kl.task=memory,check kl.size=8", 2, &daemon);
    guest.wait_for("memory=ready").unwrap();
    guest.add_memory("dimm1", DIMM_MIB).unwrap();
    let results = guest.finish().unwrap();
    let added = numbers(&results, "memory.added").unwrap()[0];
    assert!(added > 0);
    // The buffers of the verified run take 16 MiB for each of the two CPUs.
    let pages = numbers(&results, "memory.movable_pages_used").unwrap()[0];
    assert!(pages > 4096, "the new memory was hardly used: {pages} pages");
    scratch.compare(&results, "vda").unwrap();
    assert!(daemon.is_running().unwrap());
    println!("{added} blocks plugged; verified I/O in {pages} of their pages");
    end(daemon, before);
}
