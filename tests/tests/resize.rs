//! Tests disks that grow under a driver or a Linux guest. The daemon reports the new size.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kickless_driver::{Disk, Options};
use kickless_testing::eventually;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::disk_size::{connect, wait_for_size};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::{image_dir, make_image};
use kickless_vhost_user::{
    BackendMessage, Error, FrontendMessage as Message, FrontendResponder, Received, Wait,
};
use rustix::process::Signal;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);

fn serve(disk: &Path) -> Daemon {
    Daemon::start(&DaemonConfig { program: Program::Kickless, ..DaemonConfig::new(disk) }).unwrap()
}

/// Serves an image of so many MiB. Returns its directory, its path and the daemon.
fn served(mib: u64) -> (TempDir, PathBuf, Daemon) {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk");
    make_image(&image, mib, 0).unwrap();
    let daemon = serve(&image);
    (dir, image, daemon)
}

fn resize(image: &Path, bytes: u64) {
    File::options().write(true).open(image).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_driver_is_told_and_a_disk_does_not_shrink() {
    let (_dir, image, daemon) = served(8);
    let disk = connect(daemon.socket()).unwrap();
    assert_eq!(disk.size().unwrap(), 8 * MIB);
    for grown in [16 * MIB, 24 * MIB + 4096] {
        resize(&image, grown);
        daemon.signal(Signal::HUP).unwrap();
        wait_for_size(&disk, grown).unwrap();
        disk.write_at(&[7; 512], grown - 512).unwrap();
        let mut last = [0; 512];
        disk.read_at(&mut last, grown - 512).unwrap();
        assert_eq!(last, [7; 512]);
    }
    // Direct I/O may ignore a partial block at the end.
    let size = disk.size().unwrap();
    resize(&image, 4 * MIB);
    daemon.signal(Signal::HUP).unwrap();
    daemon.log().wait_for("a refusal", LIMIT, |line| line.contains("cannot shrink").then_some(())).unwrap();
    assert_eq!(disk.size().unwrap(), size);
    assert!(disk.read_at(&mut [0; 512], 8 * MIB).is_err());
    disk.read_at(&mut [0; 512], 0).unwrap();
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// A driver that only asks for the size sees the new one.
#[test]
fn a_driver_that_asks_for_the_size_is_told() {
    let (_dir, image, daemon) = served(8);
    let disk = Disk::connect(Options { reactor: false, ..Options::new(daemon.socket()) }).unwrap();
    assert_eq!(disk.size().unwrap(), 8 * MIB);
    resize(&image, 16 * MIB);
    daemon.signal(Signal::HUP).unwrap();
    eventually("the driver sees the new size", || disk.size().unwrap() == 16 * MIB);
}

/// A disk also grows without a connection. The next driver sees the new size.
#[test]
fn a_disk_grows_between_two_drivers() {
    let (_dir, image, daemon) = served(8);
    connect(daemon.socket()).unwrap().close();
    resize(&image, 16 * MIB);
    daemon.signal(Signal::HUP).unwrap();
    daemon.log().wait_for("growth", LIMIT, |line| line.contains("has grown").then_some(())).unwrap();
    let disk = connect(daemon.socket()).unwrap();
    wait_for_size(&disk, 16 * MIB).unwrap();
    disk.close();
}

/// Another host may have made the disk larger, and then no signal comes.
#[test]
fn a_start_reads_the_size_again() {
    let (_dir, image, daemon) = served(8);
    for grown in [16 * MIB, 24 * MIB] {
        resize(&image, grown);
        let disk = connect(daemon.socket()).unwrap();
        wait_for_size(&disk, grown).unwrap();
        disk.close();
    }
}

/// A front-end is told at each start of its device, because it may have read the size before. It is not
/// told earlier, because QEMU does not listen then.
#[test]
fn a_front_end_is_told_at_each_start() {
    const SOON: Duration = Duration::from_millis(100);
    let (_dir, image, daemon) = served(8);
    let grow = |bytes| {
        resize(&image, bytes);
        daemon.signal(Signal::HUP).unwrap();
    };
    let mut machine = Machine::prepare(daemon.socket(), &Shape::default()).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    machine.frontend.order(&Message::SetBackendReqFd(theirs.into())).unwrap();
    let mut channel = FrontendResponder::new(ours);
    let mut told = |within| match channel.recv(&Wait::FOREVER.at_most(within)) {
        Ok(Some(Received { message: BackendMessage::ConfigChange, .. })) => true,
        Err(Error::Interrupted) => false,
        other => panic!("{other:?}"),
    };
    grow(16 * MIB);
    daemon.log().wait_for("growth", LIMIT, |line| line.contains("has grown").then_some(())).unwrap();
    assert!(!told(SOON), "too early");
    for _ in 0..2 {
        machine.resume().unwrap();
        assert!(told(LIMIT));
        assert!(!told(SOON), "the device was told more than once");
        assert_eq!(machine.frontend.config().unwrap().capacity.get(), 16 * MIB / 512);
        machine.stop().unwrap();
    }
    machine.resume().unwrap();
    assert!(told(LIMIT));
    grow(24 * MIB);
    assert!(told(LIMIT));
    assert_eq!(machine.frontend.config().unwrap().capacity.get(), 24 * MIB / 512);
    machine.stop().unwrap();
    drop(machine);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// For a block device, the kernel reports the new size. No signal is needed.
#[test]
fn a_block_device_grows_without_a_signal() {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk");
    make_image(&image, 8, 0).unwrap();
    let losetup = |arguments: &[&str]| Command::new("losetup").args(arguments).output();
    let device = match losetup(&["--find", "--show", image.to_str().unwrap()]) {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap(),
        other => return println!("SKIPPED: no loop device: {other:?}"),
    };
    let device = device.trim();
    let daemon = serve(Path::new(device));
    // Detaching takes effect when the daemon closes the loop device.
    let detach = || assert!(losetup(&["--detach", device]).unwrap().status.success());
    let disk = connect(daemon.socket()).unwrap();
    resize(&image, 16 * MIB);
    let resized = losetup(&["--set-capacity", device]).unwrap().status.success();
    detach();
    assert!(resized);
    wait_for_size(&disk, 16 * MIB).unwrap();
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

#[test]
fn a_guest_is_told() {
    let (_dir, image, daemon) = served(64);
    let disk = DiskConfig::new(daemon.socket(), "");
    let guest = Guest::start(&GuestConfig::new("kl.task=resize", vec![disk])).unwrap();
    guest.wait_for(&format!("vda.sectors={}", 64 * MIB / 512)).unwrap();
    resize(&image, 96 * MIB);
    daemon.signal(Signal::HUP).unwrap();
    let results = guest.finish().unwrap();
    assert_eq!(results["vda.sectors"], (64 * MIB / 512).to_string());
    assert_eq!(results["vda.grown"], (96 * MIB / 512).to_string());
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}
