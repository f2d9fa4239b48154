//! Runs a Linux guest behind a vIOMMU on disks of the daemon. The IOMMU maps rings and buffers, and
//! invalidates the mapping of a buffer after each request.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::Scratch;

/// Returns a number from the line that a session logs about its translations.
fn count(lines: &[String], what: &str) -> u64 {
    let line = lines.iter().find(|line| line.contains("translations of a vIOMMU")).unwrap();
    let (_, rest) = line.split_once(&format!("{what}=")).unwrap_or_else(|| panic!("{what} in {line}"));
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// Boots a guest with a disk per entry of `rings`. It writes, reads and compares each disk.
fn check(cpus: u32, rings: &[&str]) {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: QEMU's daemon offers no vIOMMU");
        return;
    }
    let mut served = Vec::new();
    let mut disks = Vec::new();
    for properties in rings {
        let scratch = Scratch::new().unwrap();
        let daemon =
            Daemon::start(&DaemonConfig { queues: cpus as u16, ..DaemonConfig::new(scratch.path()) })
                .unwrap();
        let properties = format!("num-queues={cpus},iommu_platform=on,ats=on,disable-legacy=on,{properties}");
        disks.push(DiskConfig::new(daemon.socket(), &properties));
        served.push((scratch, daemon, properties));
    }
    let config = GuestConfig::new("kl.task=check kl.size=4", disks).cpus(cpus);
    let guest = Guest::start(&GuestConfig { viommu: true, ..config }).unwrap();
    let results = guest.finish().unwrap();
    for (disk, (scratch, daemon, properties)) in ["vda", "vdb", "vdc", "vdd"].iter().zip(served) {
        scratch.compare(&results, disk).unwrap();
        let packed = if properties.contains("packed=on") { "1" } else { "0" };
        assert_eq!(results[&format!("{disk}.packed")], packed, "{disk}");
        let (status, lines) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0), "{disk}: the daemon's status after SIGTERM");
        let [misses, updates, invalidations, refusals] =
            ["misses", "updates", "invalidations", "refusals"].map(|what| count(&lines, what));
        assert!(misses > 100 && updates >= misses, "{disk}: {misses} misses, {updates} updates");
        assert!(invalidations > 100, "{disk}: {invalidations} invalidations");
        println!(
            "{disk}: {properties}: verified; {misses} misses, {refusals} refused, {updates} updates, {invalidations} invalidations"
        );
    }
}

#[test]
fn split_and_packed_rings_of_one_queue() {
    check(
        1,
        &[
            "packed=off",
            "packed=on",
            "packed=off,event_idx=off,indirect_desc=off",
            "packed=on,event_idx=off,indirect_desc=off",
        ],
    );
}

#[test]
fn split_and_packed_rings_of_two_queues() {
    // Each ring has several pages, which need not be contiguous in guest memory.
    check(2, &["packed=off,queue-size=1024", "packed=on,queue-size=1024"]);
}
