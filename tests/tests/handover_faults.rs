//! Tests what the next owner of a disk is told when the last one could not write everything back, or when the
//! image is not the same any more.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::thread;

use kickless_disk::lock::{ImageLock, check};
use kickless_spec::blk;
use kickless_testing::{LosingDevice, pattern};
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::{Answer, LIMIT};
use kickless_tests::qcow2::Qcow2Image;
use kickless_vhost_user::FrontendMessage as Message;
use tempfile::TempDir;

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn flush(machine: &mut Machine) -> u8 {
    machine.perform(0, &Request::flush(), Layout::Usual).unwrap().status
}

/// Acknowledged writes cannot be written back when the guest stops: its front-end gets no answer, the image
/// stays locked, the next flush fails, and the program ends with 1.
#[test]
fn a_disk_that_cannot_be_written_back_is_not_given_up() {
    for is_qcow2 in [false, true] {
        let losing = match LosingDevice::new() {
            Ok(losing) => losing,
            Err(why) => return println!("SKIPPED: no device that loses writes: {why}"),
        };
        let path = losing.path().to_str().unwrap().to_owned();
        if is_qcow2 {
            let words = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", &path, "6M"];
            assert!(Command::new("qemu-img").args(words).status().unwrap().success());
        }
        let disk = if is_qcow2 { format!("qcow2:{path}") } else { path.clone() };
        let arguments = vec!["--cache=writeback".to_owned()];
        let daemon = Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new(disk) }).unwrap();
        let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
        for chunk in 0..64 {
            machine.write(0, chunk * 128, &pattern(chunk, 64 << 10)).unwrap();
        }
        for queue in 1..machine.queues.len() as u32 {
            machine.frontend.ask(&Message::GetVringBase { index: queue }).unwrap();
        }
        let answer = machine.frontend.attempt(&Message::GetVringBase { index: 0 }).unwrap();
        assert_eq!(answer, Answer::Dropped, "qcow2: {is_qcow2}");
        assert!(check(&open(losing.path()), true).is_err(), "another program could take the disk");
        drop(machine);
        // The same guest comes back, or another one. What it reads is what was written.
        let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
        assert_eq!(flush(&mut machine), blk::S_IOERR, "qcow2: {is_qcow2}");
        drop(machine);
        let said = |line: &str| line.contains("did not reach the disk").then_some(());
        daemon.log().wait_for("saying that writes are lost", LIMIT, said).unwrap();
        let (status, _) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(1), "qcow2: {is_qcow2}");
    }
}

/// A configuration that is read again does not end a device that keeps its disk, and its guest can come back.
#[test]
fn a_reload_leaves_a_device_that_keeps_its_disk() {
    let losing = match LosingDevice::new() {
        Ok(losing) => losing,
        Err(why) => return println!("SKIPPED: no device that loses writes: {why}"),
    };
    let with_serial = |serial: &str| {
        format!("blk-file = \"{}\"\ncache = \"writeback\"\nserial = \"{serial}\"", losing.path().display())
    };
    let daemon = Daemon::serve("", &[("a", &with_serial("one"))]).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    for chunk in 0..64 {
        machine.write(0, chunk * 128, &pattern(chunk, 64 << 10)).unwrap();
    }
    machine.stop().unwrap_err();
    drop(machine);
    // A device that still has a front-end answers otherwise.
    let ended = |line: &str| line.contains("connection dropped").then_some(());
    daemon.log().wait_for("the end of the connection", LIMIT, ended).unwrap();
    let said = |line: &str| line.contains("keeps its disk").then_some(());
    for config in [&[("a", &*with_serial("two"))][..], &[("b", "blk-file = \"null:1M\"")]] {
        let seen = daemon.log().len();
        daemon.reload("", config).unwrap();
        daemon.log().wait_from(seen, "saying why nothing changes", LIMIT, said).unwrap();
    }
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    assert_eq!(flush(&mut machine), blk::S_IOERR);
    drop(machine);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(1));
}

/// Another program writes to an image under the image, until it unlocks it. A guest that starts meanwhile
/// reads what was written last, and copies that.
#[test]
fn a_backing_image_is_read_after_it_was_locked() {
    const LEN: usize = 1 << 20;
    for cache in ["none", "writeback"] {
        let image = Qcow2Image::empty().unwrap();
        let data = pattern(7, LEN);
        fs::write(image.dir().join("raw"), &data).unwrap();
        image.img(&["create", "-q", "-f", "qcow2", "base", "1M"]).unwrap();
        image.img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "full"]).unwrap();
        image.img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base", "disk"]).unwrap();
        let arguments = vec!["--incoming".to_owned(), format!("--cache={cache}")];
        let daemon = Daemon::start(&DaemonConfig { arguments, ..image.config() }).unwrap();
        let base = open(&image.dir().join("base"));
        let lock = ImageLock::acquire(&base, false).unwrap();
        let mut machine = Machine::prepare(daemon.socket(), &Shape::default()).unwrap();
        thread::scope(|scope| {
            let started = scope.spawn(|| machine.resume());
            let waits = |line: &str| line.contains("waiting for the image's lock").then_some(());
            daemon.log().wait_for("waiting", LIMIT, waits).unwrap();
            fs::write(image.dir().join("base"), fs::read(image.dir().join("full")).unwrap()).unwrap();
            drop(lock);
            started.join().unwrap().unwrap();
        });
        assert!(machine.read(0, 0, 64 << 10).unwrap() == data[..64 << 10], "{cache}: old bytes");
        // The rest of a cluster is copied.
        machine.write(0, 256, &[9; 512]).unwrap();
        let copied = machine.read(0, 256, 64 << 10).unwrap();
        assert!(
            copied[512..] == data[(128 << 10) + 512..][..(64 << 10) - 512],
            "{cache}: old bytes were copied"
        );
        machine.stop().unwrap();
        drop(machine);
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}

/// The image is replaced by rename between two guests, and under one. Each new guest gets the file that has
/// the name when it connects, and the old one is not written.
#[test]
fn the_next_guest_gets_the_file_that_has_the_name() {
    let dir = TempDir::new().unwrap();
    let [disk, new, old] = ["disk", "new", "old"].map(|name| dir.path().join(name));
    let make = |path: &Path, byte, sectors: usize| fs::write(path, vec![byte; sectors * 512]).unwrap();
    make(&disk, 1, 2048);
    let daemon = Daemon::start(&DaemonConfig::new(&disk)).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    make(&new, 2, 4096);
    fs::rename(&disk, &old).unwrap();
    fs::rename(&new, &disk).unwrap();
    assert_eq!(machine.read(0, 8, 512).unwrap(), [1; 512]);
    // SIGHUP says so, and leaves the guest its file.
    daemon.signal(rustix::process::Signal::HUP).unwrap();
    let said = |line: &str| line.contains("names another file now").then_some(());
    daemon.log().wait_for("saying that the file was replaced", LIMIT, said).unwrap();
    machine.write(0, 8, &[3; 512]).unwrap();
    machine.stop().unwrap();
    drop(machine);
    let before = fs::read(&old).unwrap();
    assert_eq!(before[8 * 512..9 * 512], [3; 512]);
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    assert_eq!(machine.frontend.config().unwrap().capacity.get(), 4096);
    assert_eq!(machine.read(0, 8, 512).unwrap(), [2; 512]);
    machine.write(0, 4095, &[4; 512]).unwrap();
    // A paused guest keeps its file, because it knows what is there.
    machine.stop().unwrap();
    make(&new, 5, 2048);
    fs::rename(&new, &disk).unwrap();
    daemon.signal(rustix::process::Signal::HUP).unwrap();
    machine.resume().unwrap();
    assert_eq!(machine.read(0, 4095, 512).unwrap(), [4; 512]);
    machine.stop().unwrap();
    drop(machine);
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    assert_eq!(machine.read(0, 8, 512).unwrap(), [5; 512]);
    assert_eq!(machine.frontend.config().unwrap().capacity.get(), 2048);
    machine.stop().unwrap();
    drop(machine);
    assert!(fs::read(&old).unwrap() == before, "the old file was written");
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}
