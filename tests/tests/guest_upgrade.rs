//! Upgrades daemons again and again while a Linux guest verifies its disks and sends through its cards. One
//! TCP connection through each card lasts all the time. `UPGRADES` is the number of upgrades for each test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::thread;
use std::time::Duration;

use kickless_testing::{add_uplink, has_passt, in_network_namespace};
use kickless_tests::daemon::{Daemon, check_log};
use kickless_tests::guest::migration::{self, BANDWIDTH, Destination};
use kickless_tests::guest::network::{Iperf, network, serve_echo};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, LIMIT, NicConfig};
use kickless_tests::guest::scratch::{Scratch, numbers};
use kickless_tests::qcow2::Qcow2Image;

/// The upgrades of each test, unless `UPGRADES` says another number.
const UPGRADES: u32 = 5;
/// The work of the guest that is to go on, by the names of its reports.
const WORK: [&str; 4] = ["vda.verified", "vdb.verified", "echoed", "eth1.talked"];
/// The properties of devices behind a vIOMMU.
const BEHIND_VIOMMU: &str = ",iommu_platform=on,ats=on,disable-legacy=on";

fn upgrades() -> u32 {
    std::env::var("UPGRADES").map_or(UPGRADES, |upgrades| upgrades.parse().unwrap())
}

/// Waits until the guest has completed each kind of its work twice from now on. The first time may have begun
/// before.
fn wait_for_work(guest: &Guest) {
    let seen = guest.results().len();
    for name in WORK {
        let (mut times, prefix) = (0, format!("KL: progress.{name}="));
        let twice = |line: &str| {
            assert!(line != "KL: end=failed", "{}", guest.last_words());
            times += u32::from(line.starts_with(&prefix));
            (times == 2).then_some(())
        };
        guest.results().wait_from(seen, name, LIMIT, twice).unwrap_or_else(|error| {
            panic!("{error:#}\n{}", guest.last_words());
        });
    }
}

/// Upgrades a daemon of two disks and two cards under a guest with such rings.
fn goes_on(rings: &str, viommu: bool) {
    if !has_passt() {
        return println!("skipped: there is no passt");
    }
    in_network_namespace(|| {
        add_uplink();
        network(0, &["vm"], "").unwrap();
        serve_echo("127.0.0.1").unwrap();
        let iperf = Iperf::start("10.77.0.1").unwrap();
        let scratches = [(); 2].map(|()| Scratch::new().unwrap());
        let raws = scratches.each_ref().map(|scratch| scratch.path().to_str().unwrap());
        let image = Qcow2Image::empty().unwrap();
        image.img(&["convert", "-f", "raw", "-O", "qcow2", raws[1], "disk"]).unwrap();
        let devices = [
            ("file", format!("blk-file = \"{}\"", raws[0])),
            ("qcow2", format!("blk-file = \"qcow2:{}\"", image.path().display())),
            ("tap", "port = \"tap:vm\"".to_owned()),
            ("user", "port = \"user,-4\"".to_owned()),
        ];
        let devices = devices.each_ref().map(|(name, lines)| (*name, lines.as_str()));
        let mut daemon = Daemon::serve_with(&["--control"], "", &devices).unwrap();
        let disks = ["file", "qcow2"].map(|name| DiskConfig::new(&daemon.socket_of(name), rings));
        let nics = [("tap", 10), ("user", 11)].map(|(name, mac)| {
            NicConfig::new(&daemon.socket_of(name), 1, &format!("mac=52:54:00:00:00:{mac},{rings}"))
        });
        let task = "ipv6.disable=1 kl.task=upgrades,check kl.dhcp=eth1 kl.kib=40 kl.size=4";
        let config = GuestConfig { nics: nics.into(), viommu, ..GuestConfig::new(task, disks.into()) };
        let mut guest = Guest::start(&config).unwrap();
        guest.wait_for("upgrades=ready").unwrap();
        wait_for_work(&guest);
        let mut stalls = Vec::new();
        for round in 1..=upgrades() {
            // The same moments in each run.
            thread::sleep(Duration::from_millis(u64::from(round) * 7919 % 400));
            check_log(&daemon.upgrade().unwrap()).unwrap();
            stalls.push(daemon.stall_ms().unwrap());
            if round % 5 == 0 || round == upgrades() {
                wait_for_work(&guest);
                iperf.wait_for_data().unwrap();
            }
        }
        assert_eq!(iperf.connections(), 1, "iperf3 has connected anew");
        guest.tell("enough").unwrap();
        let results = guest.finish().unwrap();
        let packed = if rings.contains("packed=on") { "1" } else { "0" };
        for device in ["vda", "vdb", "eth0", "eth1"] {
            assert_eq!(results[&format!("{device}.packed")], packed, "{device}");
        }
        for key in ["rx_errors", "tx_errors", "tx_dropped"] {
            for nic in ["eth0", "eth1"] {
                assert_eq!(numbers(&results, &format!("{nic}.{key}")).unwrap()[0], 0, "{nic}.{key}");
            }
        }
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        check_log(&log).unwrap();
        assert_eq!(image.check().unwrap().corruptions, 0);
        image.img(&["convert", "-f", "qcow2", "-O", "raw", "disk", raws[1]]).unwrap();
        scratches[0].compare(&results, "vda").unwrap();
        scratches[1].compare(&results, "vdb").unwrap();
        stalls.sort_by(f64::total_cmp);
        let work = WORK.map(|name| format!("{name} {}", results[&format!("progress.{name}")])).join(", ");
        let [median, longest] = [stalls.len() / 2, stalls.len() - 1].map(|at| stalls[at]);
        println!(
            "{rings}: {} upgrades, pause median {median} ms, longest {longest} ms; {work}",
            stalls.len()
        );
    });
}

#[test]
fn split() {
    goes_on("packed=off", false);
}

/// The cards have no in-flight buffer: QEMU has none for cards.
#[test]
fn packed() {
    goes_on("packed=on", false);
}

#[test]
fn behind_a_viommu() {
    goes_on(&format!("packed=off{BEHIND_VIOMMU}"), true);
}

/// The daemons at both ends are upgraded while a guest moves. The log of written pages is on at the source,
/// and the guest compares pages that only the disk has written.
#[test]
fn in_a_migration() {
    let scratch = Scratch::new().unwrap();
    let lines = format!("blk-file = \"{}\"\nincoming = true", scratch.path().display());
    let serve = |()| Daemon::serve_with(&["--control"], "", &[("disk", &lines)]).unwrap();
    let mut daemons = [(); 2].map(serve);
    let machine = |daemon: &Daemon| {
        GuestConfig::new(migration::TASK, vec![DiskConfig::new(&daemon.socket_of("disk"), "")])
    };
    let mut guest = Guest::start(&machine(&daemons[0])).unwrap();
    guest.wait_for("migrate=ready").unwrap();
    migration::wait_for_work(&guest, 0).unwrap();
    for (from, to) in [(0, 1), (1, 0)] {
        let destination = Destination::start(&machine(&daemons[to])).unwrap();
        let mut in_this_try = 0;
        // So slowly that an upgrade ends before the first round of the migration does.
        let (moved, finished) = destination
            .receive_at(BANDWIDTH / 3, &mut guest, |progress| {
                if progress.rounds == 0 || progress.pages_left > progress.pages * 9 / 10 {
                    in_this_try = 0;
                } else if progress.rounds == 1 && in_this_try < 2 {
                    for daemon in &mut daemons {
                        check_log(&daemon.upgrade().unwrap()).unwrap();
                    }
                    in_this_try += 1;
                }
            })
            .unwrap();
        assert!(in_this_try > 0, "no upgrade while the log was on");
        guest.kill().unwrap();
        guest = moved;
        migration::wait_for_work(&guest, 0).unwrap();
        println!("moved from {from} in {:?} with {in_this_try} upgrades of each daemon", finished.total);
    }
    check_log(&daemons[0].upgrade().unwrap()).unwrap();
    migration::wait_for_work(&guest, guest.results().len()).unwrap();
    guest.tell("stop").unwrap();
    let results = guest.finish().unwrap();
    scratch.compare(&results, "vda").unwrap();
    for daemon in daemons {
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        check_log(&log).unwrap();
    }
}
