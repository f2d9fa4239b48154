//! Tests each row of the table "Who may touch an image, and when" of docs/disks.md, with QEMU's tools as the
//! other program.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;

use kickless_testing::eventually;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::qcow2::Qcow2Image;

const MIB: usize = 1 << 20;

/// An image that holds `byte` everywhere.
fn filled(byte: u8) -> Qcow2Image {
    let image = Qcow2Image::create(&[], MIB as u64).unwrap();
    write(&image, byte);
    image
}

/// Writes as another program does.
fn write(image: &Qcow2Image, byte: u8) {
    image.io(&[format!("write -q -P {byte} 0 1M")]).unwrap();
}

fn is_refused(image: &Qcow2Image) -> bool {
    let refused = image.io(&["write -q -P 99 0 512".into()]).err().map(|error| error.to_string());
    refused.is_some_and(|error| error.contains("lock"))
}

fn start(image: &Qcow2Image, arguments: &[&str]) -> Daemon {
    let arguments = arguments.iter().map(ToString::to_string).collect();
    Daemon::start(&DaemonConfig { arguments, ..image.config() }).unwrap()
}

fn guest(daemon: &Daemon) -> Machine {
    Machine::start(daemon.socket(), &Shape::default()).unwrap()
}

/// Checks that the guest reads `byte` everywhere.
fn reads(machine: &mut Machine, byte: u8) {
    for at in [0, MIB / 2, MIB - (64 << 10)] {
        let bytes = machine.read(0, (at / 512) as u64, 64 << 10).unwrap();
        assert!(bytes == vec![byte; 64 << 10], "{} at {at}, not {byte}", bytes[0]);
    }
}

fn sectors(machine: &mut Machine) -> u64 {
    machine.frontend.config().unwrap().capacity.get()
}

#[test]
fn before_the_first_guest_others_may_write() {
    for cache in ["--cache=none", "--cache=writeback"] {
        let image = filled(1);
        let daemon = start(&image, &[cache]);
        write(&image, 2);
        let mut machine = guest(&daemon);
        reads(&mut machine, 2);
        machine.stop().unwrap();
    }
}

#[test]
fn while_a_guest_runs_others_only_read() {
    let image = filled(1);
    let daemon = start(&image, &[]);
    let mut machine = guest(&daemon);
    assert!(is_refused(&image));
    image.img(&["snapshot", "-c", "now", "disk"]).unwrap_err();
    image.img(&["resize", "disk", "2M"]).unwrap_err();
    image.img(&["info", "-f", "qcow2", "disk"]).unwrap_err();
    image.img(&["info", "-U", "-f", "qcow2", "disk"]).unwrap();
    reads(&mut machine, 1);
    machine.stop().unwrap();
}

#[test]
fn while_a_guest_is_paused_nobody_protects_its_image() {
    for cache in ["--cache=none", "--cache=writeback"] {
        let image = filled(1);
        let daemon = start(&image, &[cache]);
        let mut machine = guest(&daemon);
        machine.write(0, 8, &[5; 512]).unwrap();
        machine.stop().unwrap();
        assert_eq!(image.contents().unwrap()[8 * 512..9 * 512], [5; 512]);
        write(&image, 2);
        machine.resume().unwrap();
        reads(&mut machine, 2);
        machine.stop().unwrap();
    }
}

/// A guest that is saved stops, and its front-end leaves. Another front-end, here or elsewhere, restores it.
#[test]
fn a_saved_guest_has_written_everything() {
    for cache in ["--cache=none", "--cache=writeback"] {
        let image = filled(1);
        let daemon = start(&image, &[cache]);
        let mut machine = guest(&daemon);
        machine.write(0, 0, &[6; 64 << 10]).unwrap();
        machine.stop().unwrap();
        let other = start(&image, &["--incoming", cache]);
        drop(machine.move_to(other.socket()).unwrap());
        assert!(image.contents().unwrap()[..64 << 10] == [6; 64 << 10]);
        machine.resume().unwrap();
        assert!(machine.read(0, 0, 64 << 10).unwrap() == [6; 64 << 10]);
        assert!(is_refused(&image));
        machine.stop().unwrap();
    }
}

#[test]
fn a_guest_that_moves_takes_the_image_along() {
    let image = filled(1);
    let [source, destination] = [start(&image, &[]), start(&image, &["--incoming"])];
    let mut machine = guest(&source);
    for round in 0..4 {
        assert!(is_refused(&image), "round {round}");
        let to = if round % 2 == 0 { &destination } else { &source };
        machine.write(0, 0, &[round + 10; 64 << 10]).unwrap();
        machine.stop().unwrap();
        drop(machine.move_to(to.socket()).unwrap());
        machine.resume().unwrap();
        assert!(machine.read(0, 0, 64 << 10).unwrap() == [round + 10; 64 << 10]);
    }
    machine.stop().unwrap();
}

#[test]
fn a_kill_frees_the_image_with_all_answered_writes() {
    for cache in ["--cache=none", "--cache=writeback"] {
        let image = filled(1);
        let mut daemon = start(&image, &[cache]);
        let mut machine = guest(&daemon);
        machine.write(0, 0, &[7; 64 << 10]).unwrap();
        let config = DaemonConfig { arguments: vec![cache.into()], ..image.config() };
        daemon.kill_and_restart(&config).unwrap();
        assert!(image.contents().unwrap()[..64 << 10] == [7; 64 << 10]);
        // The hypervisor is killed: kickless writes back and unlocks, without a message.
        let mut machine = guest(&daemon);
        machine.write(0, 0, &[8; 64 << 10]).unwrap();
        drop(machine);
        eventually("the image stays locked", || !is_refused(&image));
        assert!(image.contents().unwrap()[512..64 << 10] == [8; (64 << 10) - 512]);
    }
}

#[test]
fn between_two_guests_snapshots_sizes_and_names_change() {
    for cache in ["--cache=none", "--cache=writeback"] {
        let image = filled(1);
        image.img(&["snapshot", "-c", "first", "disk"]).unwrap();
        let daemon = start(&image, &[cache]);
        let mut machine = guest(&daemon);
        machine.write(0, 0, &[2; 64 << 10]).unwrap();
        machine.stop().unwrap();
        drop(machine);
        image.img(&["snapshot", "-a", "first", "disk"]).unwrap();
        let mut machine = guest(&daemon);
        reads(&mut machine, 1);
        machine.stop().unwrap();
        drop(machine);
        image.img(&["snapshot", "-d", "first", "disk"]).unwrap();
        for (words, expected) in
            [(&["resize", "-q", "disk", "4M"][..], 8192), (&["resize", "-q", "--shrink", "disk", "1M"], 2048)]
        {
            image.img(words).unwrap();
            let mut machine = guest(&daemon);
            assert_eq!(sectors(&mut machine), expected);
            reads(&mut machine, 1);
            machine.stop().unwrap();
        }
        // An external snapshot: what was the image is now under it, and keeps its contents.
        fs::rename(image.path(), image.dir().join("old")).unwrap();
        image.img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "old", "disk"]).unwrap();
        let before = fs::read(image.dir().join("old")).unwrap();
        let mut machine = guest(&daemon);
        reads(&mut machine, 1);
        machine.write(0, 0, &[3; 64 << 10]).unwrap();
        machine.stop().unwrap();
        drop(machine);
        assert!(fs::read(image.dir().join("old")).unwrap() == before, "the snapshot was written");
        assert!(image.contents().unwrap()[..64 << 10] == [3; 64 << 10]);
    }
}
