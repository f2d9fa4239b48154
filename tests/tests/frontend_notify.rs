//! Tests front-ends that change the eventfds that they share, and the calls of rings that start or stop.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use kickless_spec::features::Features;
use kickless_testing::pattern;
use kickless_tests::driver::Eventfd;
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::served::Served;
use kickless_tests::frontend::{LIMIT, addresses, descriptor};
use kickless_vhost_user::{FrontendMessage as Message, VringFd, VringState};
use rustix::fs::{OFlags, fcntl_setfl};

/// Returns an eventfd with a full counter. Writes to it block.
fn full() -> Eventfd {
    let full = Eventfd::new().unwrap();
    rustix::io::write(full.as_fd(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fcntl_setfl(full.as_fd(), OFlags::empty()).unwrap();
    full
}

#[test]
fn a_full_call_counter_does_not_block() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine =
        Machine::start(served.socket(), &Shape { queues: 2, event_idx: false, ..Shape::default() }).unwrap();
    let full = full();
    machine
        .frontend
        .order(&Message::SetVringCall(descriptor(&machine.queues[0], full.as_fd()).unwrap()))
        .unwrap();
    // The back-end may have set O_NONBLOCK again.
    fcntl_setfl(full.as_fd(), OFlags::empty()).unwrap();
    let (queue, place) = (&mut machine.queues[0], &machine.request_memory[0]);
    for sector in 0..100 {
        let buffers =
            place.lay_out(&machine.ram, &Request::write(sector, &pattern(sector, 512)), Layout::Usual);
        queue.submit(&machine.ram, &buffers.unwrap(), None).unwrap();
        queue.flush();
        let deadline = Instant::now() + LIMIT;
        while queue.take_used().unwrap().is_none() {
            assert!(Instant::now() < deadline, "request {sector} does not come back");
            std::thread::yield_now();
        }
    }
    // The same worker serves the other queue.
    machine.write(1, 200, &pattern(200, 512)).unwrap();
    machine.stop().unwrap();
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
}

#[test]
fn a_drained_kick_counter_does_not_block() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    for round in 0..20 {
        machine.write(0, round, &pattern(round, 512)).unwrap();
        let queue = &mut machine.queues[0];
        queue.kick_fd().take();
        fcntl_setfl(queue.kick_fd().as_fd(), OFlags::empty()).unwrap();
        machine.frontend.stop(queue).unwrap();
        machine.frontend.start(&machine.queues[0]).unwrap();
    }
    drop(machine);
    served.check_next_frontend().unwrap();
    served.end_without_warnings().unwrap();
}

#[test]
fn only_eventfds_are_taken() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    let others: [fn() -> OwnedFd; 3] = [
        || File::open("/dev/zero").unwrap().into(),
        || rustix::pipe::pipe().unwrap().0,
        || rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap(),
    ];
    for other in others {
        let fd = || VringFd { index: 0, fd: Some(other()) };
        for message in [Message::SetVringKick(fd()), Message::SetVringCall(fd()), Message::SetVringErr(fd())]
        {
            assert!(machine.frontend.order(&message).is_err(), "{message:?}");
        }
    }
    machine.write(0, 1, &pattern(1, 512)).unwrap();
    drop(machine);
    served.check_next_frontend().unwrap();
    assert!(served.end().unwrap().iter().any(|line| line.contains("no eventfd")));
}

/// The last call of the earlier run may have gone to an eventfd that the driver did not read.
#[test]
fn a_ring_that_starts_calls_once() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    for _ in 0..3 {
        assert!(machine.queues[0].call().wait(Instant::now() + LIMIT).unwrap());
        machine.write(0, 1, &pattern(1, 512)).unwrap();
        machine.stop().unwrap();
        machine.queues[0].call().take();
        machine.frontend.start(&machine.queues[0]).unwrap();
    }
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// The next device may never write the flag.
#[test]
fn a_ring_that_stops_asks_for_kicks() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine =
        Machine::start(served.socket(), &Shape { event_idx: false, ..Shape::default() }).unwrap();
    for sector in 0..20 {
        machine.write(0, sector, &pattern(sector, 512)).unwrap();
        machine.stop().unwrap();
        assert!(machine.queues[0].is_asked_for_kicks());
        machine.frontend.start(&machine.queues[0]).unwrap();
    }
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// RESET_DEVICE drops the set-up of the rings, but not their call eventfds.
#[test]
fn call_eventfds_survive_a_reset() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    machine.write(0, 1, &pattern(1, 512)).unwrap();
    machine.frontend.order(&Message::ResetDevice).unwrap();
    let queue = &mut machine.queues[0];
    let (index, size, base) = (queue.index().into(), queue.size().into(), queue.next_avail().into());
    machine.frontend.order(&Message::SetVringNum(VringState { index, num: size })).unwrap();
    machine.frontend.order(&Message::SetVringBase(VringState { index, num: base })).unwrap();
    machine.frontend.order(&Message::SetVringAddr(addresses(queue))).unwrap();
    machine.frontend.set_kick(queue).unwrap();
    machine.frontend.enable(queue, true).unwrap();
    assert_eq!(machine.read(0, 1, 512).unwrap(), pattern(1, 512));
    drop(machine);
    served.end_without_warnings().unwrap();
}

/// A front-end that clears vhost-user's own feature bit has no SET_VRING_ENABLE any more.
#[test]
fn without_protocol_features_rings_are_enabled() {
    let served = Served::start("io_uring", &[]).unwrap();
    let mut machine = Machine::start(served.socket(), &Shape::default()).unwrap();
    machine.write(0, 1, &pattern(1, 512)).unwrap();
    machine.frontend.enable(&machine.queues[0], false).unwrap();
    let without = machine.frontend.features() - Features::PROTOCOL_FEATURES;
    machine.frontend.set_features(without).unwrap();
    assert_eq!(machine.read(0, 1, 512).unwrap(), pattern(1, 512));
    drop(machine);
    served.end_without_warnings().unwrap();
}
