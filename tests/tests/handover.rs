//! Hands an image from one process to another, as a migration does. Two processes must never write at the
//! same time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use kickless_disk::lock::ImageLock;
use kickless_testing::pattern;
use kickless_tests::daemon::Daemon;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{Answer, LIMIT, descriptor};
use kickless_vhost_user::FrontendMessage as Message;

const INCOMING: &[&str] = &["--incoming"];

fn open(image: &Path) -> File {
    File::options().read(true).write(true).open(image).unwrap()
}

fn count_lines(daemon: &Daemon, words: &[&str]) -> usize {
    let lines = daemon.log().lines();
    lines.iter().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

/// Sends the last message that starts the only queue, which is enabled. Returns the answer.
fn start_ring(machine: &mut Machine) -> Answer {
    let kick = descriptor(&machine.queues[0], machine.queues[0].kick_fd().as_fd()).unwrap();
    machine.frontend.attempt(&Message::SetVringKick(kick)).unwrap()
}

#[test]
fn the_destination_starts_while_the_source_works_and_takes_the_image_when_it_stops() {
    for packed in [false, true] {
        let source = Served::start("io_uring", &[]).unwrap();
        let shape = Shape { packed, ..Shape::default() };
        let mut machine = Machine::start(source.socket(), &shape).unwrap();
        let destination = source.beside("threads", INCOMING).unwrap();
        let data = pattern(1, 8192);
        machine.write(0, 8, &data).unwrap();
        assert_eq!(count_lines(&destination, &["still"]), 0);

        // The image is free after the base of the last queue was read.
        machine.stop().unwrap();
        drop(ImageLock::acquire(&open(source.image()), false).unwrap());
        let mut left = machine.move_to(destination.socket()).unwrap();
        machine.resume().unwrap();
        assert!(ImageLock::acquire(&open(source.image()), false).is_err());
        assert_eq!(machine.read(0, 8, data.len()).unwrap(), data);
        machine.write(0, 64, &data).unwrap();
        let durable = "every write is made durable";
        let says = |line: &str| line.contains(durable).then_some(());
        destination.log().wait_for("saying that writes are durable", LIMIT, says).unwrap();
        assert_eq!(count_lines(&destination, &[durable]), 1);

        // The source cannot start again now.
        let seen = source.daemon.log().len();
        std::mem::swap(&mut machine.frontend, &mut left);
        assert_eq!(start_ring(&mut machine), Answer::Refused);
        let said = |line: &str| line.contains("the image cannot be locked: another process").then_some(());
        source.daemon.log().wait_from(seen, "saying why", LIMIT, said).unwrap();
        machine.frontend.ask(&Message::GetVringBase { index: 0 }).unwrap();
        std::mem::swap(&mut machine.frontend, &mut left);
        assert_eq!(machine.read(0, 64, data.len()).unwrap(), data);

        // The migration is cancelled: the source continues.
        machine.stop().unwrap();
        machine.frontend = left;
        machine.resume().unwrap();
        machine.write(0, 8, &pattern(2, 4096)).unwrap();
        assert!(ImageLock::acquire(&open(source.image()), false).is_err());
        machine.stop().unwrap();
        let (status, _) = destination.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        source.end().unwrap();
    }
}

#[test]
fn a_destination_waits_for_a_late_source() {
    let source = Served::start("io_uring", &[]).unwrap();
    let destination = source.beside("io_uring", INCOMING).unwrap();
    let file = open(source.image());
    let late = ImageLock::acquire(&file, false).unwrap();
    let mut machine = Machine::prepare(destination.socket(), &Shape::default()).unwrap();
    thread::scope(|scope| {
        let resumed = scope.spawn(|| machine.resume());
        let waits = |line: &str| line.contains("waiting for the image's lock").then_some(());
        destination.log().wait_for("waiting", LIMIT, waits).unwrap();
        drop(late);
        resumed.join().unwrap().unwrap();
    });
    machine.write(0, 8, &pattern(3, 4096)).unwrap();
    machine.stop().unwrap();
    source.end_without_warnings().unwrap();
}

/// A killed process keeps its lock until the kernel has ended its I/O. Its successor may start before that.
#[test]
fn a_start_waits_for_a_lock_released_late() {
    let served = Served::start("io_uring", &[]).unwrap();
    let file = open(served.image());
    let late = ImageLock::acquire(&file, false).unwrap();
    thread::scope(|scope| {
        let started = scope.spawn(|| served.beside("io_uring", &[]));
        // This gives the second process time to find the lock taken. If it is slower, the test passes too.
        thread::sleep(Duration::from_millis(200));
        drop(late);
        started.join().unwrap().unwrap();
    });
    served.end_without_warnings().unwrap();
}

/// Readers share an image. No process can write meanwhile.
#[test]
fn readers_share_an_image() {
    let served = Served::start("io_uring", &["--read-only"]).unwrap();
    let beside = |arguments: &[&str]| served.beside("threads", arguments);
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let reader = beside(&["--read-only"]).unwrap();
    let mut other = Machine::start(reader.socket(), &Shape::default()).unwrap();
    assert_eq!(machine.read(0, 8, 4096).unwrap(), other.read(0, 8, 4096).unwrap());
    let refused = beside(&[]).err().unwrap().to_string();
    assert!(refused.contains("another process"), "{refused}");
    for machine in [&mut machine, &mut other] {
        machine.stop().unwrap();
    }
    drop((machine, other));
    assert_eq!(reader.stop().unwrap().0.code(), Some(0));
    served.end_without_warnings().unwrap();
}

/// The destination is killed while it works. The kernel then unlocks the image for the source.
#[test]
fn the_source_continues_after_the_destination_has_died() {
    let source = Served::start("threads", &[]).unwrap();
    let mut machine = Machine::start(source.socket(), &Shape::default()).unwrap();
    let destination = source.beside("io_uring", INCOMING).unwrap();
    machine.stop().unwrap();
    let left = machine.move_to(destination.socket()).unwrap();
    machine.resume().unwrap();
    machine.write(0, 8, &pattern(4, 4096)).unwrap();
    drop(destination);
    // The dead destination cannot report where it stopped, so the used index is the base.
    for queue in &mut machine.queues {
        queue.set_base(queue.next_used().into());
    }
    machine.frontend = left;
    machine.frontend.share(&[&machine.ram]).unwrap();
    machine.resume().unwrap();
    assert_eq!(machine.read(0, 8, 4096).unwrap(), pattern(4, 4096));
    machine.stop().unwrap();
    source.end_without_warnings().unwrap();
}
