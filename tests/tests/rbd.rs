//! Runs sessions, a driver and a guest on images of a Ceph cluster: with a stopped cluster, with two
//! daemons for one image, and with images that grow. `make test-rbd` sets the cluster up and runs these
//! tests one after the other.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use kickless_spec::blk;
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::disk_size::{connect, wait_for_size};
use kickless_tests::driver::request::Request;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::Scratch;
use kickless_tests::remote_disks::ceph::{CephImage, StoppedOsd};

const MIB: u64 = 1 << 20;

fn config(image: &CephImage, arguments: &[&str]) -> DaemonConfig {
    let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
    DaemonConfig { program: Program::Kickless, arguments, ..DaemonConfig::new(image.text().unwrap()) }
}

fn serve(image: &CephImage, arguments: &[&str]) -> Daemon {
    Daemon::start(&config(image, arguments)).unwrap()
}

fn shapes() -> [Shape; 2] {
    [false, true].map(|packed| Shape { queues: 2, packed, ..Shape::default() })
}

#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn a_stopped_cluster_delays_requests_but_no_stop() {
    for shape in shapes() {
        let image = CephImage::create(16).unwrap();
        let daemon = serve(&image, &[]);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        let data = pattern(1, 4096);
        machine.write(0, 8, &data).unwrap();
        let read = Request::read(8, 4096);

        let stopped = StoppedOsd::stop().unwrap();
        machine.submit(0, &read).unwrap();
        drop(stopped);
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_OK);

        let stopped = StoppedOsd::stop().unwrap();
        machine.submit(0, &read).unwrap();
        machine.submit(1, &Request::write(64, &data)).unwrap();
        stopped.kill().unwrap();
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_OK);
        assert_eq!(machine.status(1, &Request::write(64, &data)).unwrap(), blk::S_OK);

        // With nothing to lose, the disk can be given up.
        let flush = Request::flush();
        machine.submit(0, &flush).unwrap();
        assert_eq!(machine.status(0, &flush).unwrap(), blk::S_OK);
        let stopped = StoppedOsd::stop().unwrap();
        machine.submit(0, &read).unwrap();
        machine.submit(1, &Request::write(64, &data)).unwrap();
        machine.stop().unwrap();
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_IOERR);
        assert_eq!(machine.status(1, &Request::write(64, &data)).unwrap(), blk::S_IOERR);
        drop(machine);
        // The cluster does not delay the end of the process either.
        let (ended, log) = daemon.stop().unwrap();
        assert_eq!(ended.code(), Some(0), "{log:#?}");
        drop(stopped);
    }
}

#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn two_daemons_take_turns() {
    let image = CephImage::create(16).unwrap();
    let data = pattern(2, 4096);
    for shape in shapes() {
        let one = serve(&image, &[]);
        let mut machine = Machine::start(one.socket(), &shape).unwrap();
        machine.write(0, 8, &data).unwrap();
        let refused = Daemon::start(&config(&image, &[])).err().unwrap().to_string();
        assert!(
            refused.contains("another client of the cluster") && refused.contains("using it"),
            "{refused}"
        );
        let other = serve(&image, &["--incoming"]);
        assert!(Machine::start(other.socket(), &shape).is_err());
        // The virtual machine moves. The daemon at its old host keeps running.
        machine.write(1, 16, &data).unwrap();
        machine.stop().unwrap();
        let before = machine.move_to(other.socket()).unwrap();
        machine.resume().unwrap();
        assert_eq!(machine.read(0, 16, 4096).unwrap(), data);
        machine.write(0, 24, &data).unwrap();
        machine.stop().unwrap();
        drop((before, machine));
        for daemon in [one, other] {
            let (ended, log) = daemon.stop().unwrap();
            assert_eq!(ended.code(), Some(0));
            // The refused daemon has no lock to release.
            assert!(!log.iter().any(|line| line.contains("could not be released")), "{log:#?}");
        }
    }
}

/// The next daemon takes the lock of a killed process as soon as it is certain that the process has ended.
#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn a_killed_daemon_has_a_successor() {
    let image = CephImage::create(16).unwrap();
    let mut daemon = serve(&image, &[]);
    for (round, shape) in shapes().into_iter().enumerate() {
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        let data = pattern(round as u64, 4096);
        machine.write(0, 8, &data).unwrap();
        daemon.kill_and_restart(&config(&image, &[])).unwrap();
        drop(machine);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        assert_eq!(machine.read(0, 8, 4096).unwrap(), data);
        machine.write(0, 8, &data).unwrap();
        machine.stop().unwrap();
    }
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn an_image_grows_under_a_driver() {
    let image = CephImage::create(8).unwrap();
    let daemon = serve(&image, &[]);
    let disk = connect(daemon.socket()).unwrap();
    assert_eq!(disk.size().unwrap(), 8 * MIB);
    image.resize(16).unwrap();
    // No signal is needed: the cluster reports the new size.
    wait_for_size(&disk, 16 * MIB).unwrap();
    disk.write_at(&[7; 512], 16 * MIB - 512).unwrap();
    let mut last = [0; 512];
    disk.read_at(&mut last, 16 * MIB - 512).unwrap();
    assert_eq!(last, [7; 512]);
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A Linux guest sees the new size too.
#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn an_image_grows_under_a_guest() {
    let image = CephImage::create(64).unwrap();
    let daemon = serve(&image, &[]);
    let disk = DiskConfig::new(daemon.socket(), "");
    let guest = Guest::start(&GuestConfig::new("kl.task=resize", vec![disk])).unwrap();
    guest.wait_for(&format!("vda.sectors={}", 64 * MIB / 512)).unwrap();
    image.resize(96).unwrap();
    assert_eq!(guest.finish().unwrap()["vda.grown"], (96 * MIB / 512).to_string());
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// The image's name can contain all settings of the configuration.
#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn no_configuration_is_needed() {
    let image = CephImage::create(8).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let wrapper = dir.path().join("alone");
    let script = format!("#!/bin/sh\nunset CEPH_CONF CEPH_ARGS\nHOME={} exec \"$@\"\n", dir.path().display());
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, Permissions::from_mode(0o755)).unwrap();
    let alone = |settings| {
        let disk = image.text_alone(settings).unwrap();
        let wrapper = Some(wrapper.clone());
        Daemon::start(&DaemonConfig { disk: disk.into(), wrapper, ..config(&image, &[]) })
    };
    let daemon = alone(true).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    assert_eq!(machine.read(0, 0, 4096).unwrap(), [0; 4096]);
    machine.stop().unwrap();
    drop(machine);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    if Path::new("/etc/ceph/ceph.conf").exists() {
        return println!("SKIPPED: this machine has a configuration of Ceph");
    }
    let refused = alone(false).err().unwrap().to_string();
    assert!(refused.contains("no configuration of Ceph's is found"), "{refused}");
}

/// fio verifies data in the guest, and the test compares the image afterwards, in both ring formats, with
/// and without librbd's cache.
#[test]
#[ignore = "needs a Ceph cluster: make test-rbd"]
fn verified_from_both_ends() {
    let scratches = [(); 2].map(|()| Scratch::new().unwrap());
    let images = [0, 1].map(|number: usize| CephImage::import(scratches[number].path()).unwrap());
    let daemons = [serve(&images[0], &[]), serve(&images[1], &["--cache=writeback"])];
    let disks = daemons
        .iter()
        .zip(["packed=off", "packed=on"])
        .map(|(daemon, rings)| DiskConfig::new(daemon.socket(), &format!("num-queues=2,{rings}")));
    let guest = Guest::start(&GuestConfig::new("kl.task=check kl.size=16", disks.collect()).cpus(2)).unwrap();
    let results = guest.finish().unwrap();
    for daemon in daemons {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
    for ((image, scratch), disk) in images.iter().zip(&scratches).zip(["vda", "vdb"]) {
        image.export(scratch.path()).unwrap();
        scratch.compare(&results, disk).unwrap();
    }
    assert_eq!(["vda", "vdb"].map(|disk| results[&format!("{disk}.packed")].as_str()), ["0", "1"]);
}
