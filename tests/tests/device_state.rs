//! Moves a device's state from one process to another, and sends other bytes in its place.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use kickless_spec::blk;
use kickless_spec::vhost_user::TransferDirection;
use kickless_testing::pattern;
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{Answer, LIMIT};
use kickless_tests::with_each_engine;
use kickless_vhost_user::FrontendMessage as Message;

with_each_engine! {
    requests_not_taken_at_the_source_run_once
}

/// Offset of the version in a state.
const VERSION_AT: usize = 8;

fn wait_for_line(served: &Served, seen: usize, words: &str) {
    let said = |line: &str| line.contains(words).then_some(());
    served.daemon.log().wait_from(seen, words, LIMIT, said).unwrap();
}

/// At the destination, the front-end sends the driver's index, because it does not know the device's. The
/// state has the device's index, which counts.
fn requests_not_taken_at_the_source_run_once(engine: &str) {
    const LEFT: u16 = 3;
    for packed in [false, true] {
        let source = Served::start(engine, &[]).unwrap();
        let destination = source.beside(engine, &["--incoming"]).unwrap();
        let mut machine = Machine::start(source.socket(), &Shape { packed, ..Shape::default() }).unwrap();
        machine.frontend.set_writeback(false).unwrap();
        machine.write(0, 8, &pattern(1, 4096)).unwrap();
        let base = machine.frontend.stop(&mut machine.queues[0]).unwrap();

        let request_memory: Vec<RequestMemory> =
            (0..LEFT).map(|_| RequestMemory::new(&mut machine.ram, 4096).unwrap()).collect();
        let requests: Vec<Request> =
            (0..u64::from(LEFT)).map(|n| Request::write(64 + 8 * n, &pattern(2 + n, 4096))).collect();
        for (place, request) in request_memory.iter().zip(&requests) {
            let buffers = place.lay_out(&machine.ram, request, Layout::Usual).unwrap();
            machine.queues[0].submit(&machine.ram, &buffers, None).unwrap();
        }
        machine.queues[0].flush();
        let state = machine.frontend.save_state().unwrap();
        machine.move_to(destination.socket()).unwrap();
        assert_eq!(machine.frontend.load_state(&state).unwrap(), Answer::Done);
        assert_eq!(machine.frontend.config().unwrap().writeback, 0);

        // Each request has two descriptors.
        let ahead = u32::from(if packed { base + 2 * LEFT } else { base + LEFT });
        machine.queues[0].set_base(if packed { ahead << 16 | ahead } else { ahead });
        machine.resume().unwrap();
        for _ in 0..LEFT {
            machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
        }
        for ((place, request), n) in request_memory.iter().zip(&requests).zip(0..) {
            assert_eq!(place.outcome(&machine.ram, request, 1).unwrap().status, blk::S_OK);
            assert_eq!(source.on_disk(64 + 8 * n, 4096).unwrap(), pattern(2 + n, 4096));
        }
        assert_eq!(machine.read(0, 8, 4096).unwrap(), pattern(1, 4096));
        machine.stop().unwrap();
        drop(machine);
        let (status, log) = destination.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        let served =
            |line: &&String| line.contains("summary") && line.contains("requests=4 resubmitted=0 errors=0");
        assert_eq!(log.iter().filter(served).count(), 1, "{log:#?}");
        // The state has the driver's choice, so no warning is needed.
        assert!(!log.iter().any(|line| line.contains(" WARN ")), "{log:#?}");
        source.end_without_warnings().unwrap();
    }
}

#[test]
fn a_state_travels_through_a_socket_into_the_same_process() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape { queues: 4, ..Shape::default() }).unwrap();
    machine.write(2, 8, &pattern(1, 4096)).unwrap();
    machine.stop().unwrap();
    let state = machine.frontend.save_state().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, theirs.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    (&ours).write_all(&state).unwrap();
    drop(ours);
    assert_eq!(machine.frontend.attempt(&Message::CheckDeviceState).unwrap(), Answer::Done);
    assert_eq!(machine.frontend.save_state().unwrap(), state);
    machine.resume().unwrap();
    assert_eq!(machine.read(2, 8, 4096).unwrap(), pattern(1, 4096));
    machine.stop().unwrap();
    served.end_without_warnings().unwrap();
}

#[test]
fn invalid_states_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    machine.write(0, 8, &pattern(1, 4096)).unwrap();
    machine.stop().unwrap();
    let good = machine.frontend.save_state().unwrap();
    let mut future = good.clone();
    future[VERSION_AT] = 200;
    let mut foreign_device = good.clone();
    foreign_device[20] ^= 1;
    let cases: [(&[u8], &str); 6] = [
        (b"", "it ends in the middle"),
        (&good[..good.len() - 1], "it ends in the middle"),
        (&[good.as_slice(), b"x"].concat(), "1 bytes follow its end"),
        (b"this is something else, and long enough", "no state of a kickless device"),
        (&future, "it has version 200"),
        (&foreign_device, "no state of a block device"),
    ];
    for (bytes, words) in cases {
        let seen = served.daemon.log().len();
        assert_eq!(machine.frontend.load_state(bytes).unwrap(), Answer::Refused, "{words}");
        wait_for_line(&served, seen, words);
    }

    // The input has no end.
    let seen = served.daemon.log().len();
    let (from, mut to) = std::io::pipe().unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, from.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    let writer = thread::spawn(move || while to.write_all(&[0; 4096]).is_ok() {});
    assert_eq!(machine.frontend.attempt(&Message::CheckDeviceState).unwrap(), Answer::Refused);
    writer.join().unwrap();
    wait_for_line(&served, seen, "it is longer than");

    // Checks the state twice, the second time without a transfer.
    let seen = served.daemon.log().len();
    assert_eq!(machine.frontend.attempt(&Message::CheckDeviceState).unwrap(), Answer::Refused);
    wait_for_line(&served, seen, "no state has been transferred");

    // None of this changed anything.
    machine.resume().unwrap();
    assert_eq!(machine.read(0, 8, 4096).unwrap(), pattern(1, 4096));
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

#[test]
fn transfers_at_the_wrong_time_or_descriptor_are_refused() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    for direction in [TransferDirection::Save, TransferDirection::Load] {
        let seen = served.daemon.log().len();
        let (_, to) = std::io::pipe().unwrap();
        assert_eq!(machine.frontend.transfer(direction, to.into()).unwrap(), Answer::Refused);
        wait_for_line(&served, seen, "ring 0 is running");
    }
    machine.stop().unwrap();
    let seen = served.daemon.log().len();
    let file = File::open(served.image()).unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, file.into()).unwrap();
    assert_eq!(answer, Answer::Refused);
    wait_for_line(&served, seen, "neither a pipe nor a socket");

    // The state cannot be written to the pipe, because its other end is closed.
    let (from, to) = std::io::pipe().unwrap();
    drop(from);
    let seen = served.daemon.log().len();
    let answer = machine.frontend.transfer(TransferDirection::Save, to.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    assert_eq!(machine.frontend.attempt(&Message::CheckDeviceState).unwrap(), Answer::Refused);
    wait_for_line(&served, seen, "cannot be saved");

    // The ring has another format or size than the state's.
    let state = machine.frontend.save_state().unwrap();
    drop(machine);
    let mut other = Machine::prepare(served.socket(), &Shape { size: 64, ..Shape::default() }).unwrap();
    assert_eq!(other.frontend.load_state(&state).unwrap(), Answer::Done);
    let seen = served.daemon.log().len();
    assert!(other.resume().is_err());
    wait_for_line(
        &served,
        seen,
        "ring 0 is split of 64 entries, but the state that was loaded is of one that is split of 256",
    );
    drop(other);
    served.check_next_frontend().unwrap();
    served.end().unwrap();
}

/// A state that never comes delays its own session for a while. It does not delay SIGTERM.
#[test]
fn a_missing_state_times_out() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::prepare(served.socket(), &Shape::default()).unwrap();
    let (from, to) = std::io::pipe().unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, from.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    let seen = served.daemon.log().len();
    assert_eq!(machine.frontend.attempt(&Message::CheckDeviceState).unwrap(), Answer::Refused);
    wait_for_line(&served, seen.saturating_sub(1), "it is not complete after");
    drop(to);
    let (from, _to) = std::io::pipe().unwrap();
    let answer = machine.frontend.transfer(TransferDirection::Load, from.into()).unwrap();
    assert_eq!(answer, Answer::Done);
    served.end().unwrap();
}
