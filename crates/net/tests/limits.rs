//! Limits the frames of a card.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may")]

mod rig;

use kickless_device::{Device, Limit, Limiter, Limits, Next, Rate};
use kickless_net::{Net, NullPort};
use kickless_spec::net::Header;
use rig::{Kind, Rig, card, card_on, counter, kinds};
use std::sync::Arc;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
/// Units are so rare that none comes during a test. A bucket without units admits one more frame, and is in
/// debt then.
const RARE: u64 = 1;

fn frame(len: usize) -> Vec<u8> {
    let mut frame = Header::default().as_bytes().to_vec();
    frame.resize(12 + len, 0x5a);
    frame
}

fn limit(per_second: u64, burst: u64) -> Limit {
    Limit { sustained: Rate { per_second, burst }, peak: Rate::default() }
}

/// Returns limits of frames: all, to the driver, of the driver.
fn frames(all: Limit, receive: Limit, transmit: Limit) -> Limits {
    Limits { requests: [all, receive, transmit], ..Limits::default() }
}

fn set(rig: &Rig, limits: Limits) {
    rig.limiter.set(&limits);
}

/// Returns a card that returns the frames of its driver.
fn looping() -> Arc<Net> {
    card_on(1, "loop")
}

#[test]
fn frames_wait_in_the_ring() {
    for kind in kinds() {
        for card in [card(1, NullPort::default()), looping()] {
            let mut rig = Rig::start(&card, 1, kind, 128, card.features());
            set(&rig, frames(Limit::default(), Limit::default(), limit(RARE, 4)));
            (0..64).for_each(|_| _ = rig.send(&frame(60), 100).unwrap());
            assert_eq!((rig.poll(), counter(&card, "sent_frames")), (5, 5));
            let Next::Throttled { wait_ns } = rig.last else { panic!("{:?}", rig.last) };
            assert!(wait_ns > 0);
            // A stop does not wait for tokens. A changed limit is in force at the next poll.
            assert_eq!((rig.poll_once(0).next, rig.task.in_flight()), (Next::Idle, 0));
            set(&rig, frames(limit(RARE, 8), Limit::default(), Limit::default()));
            assert_eq!(rig.poll(), 9);
            set(&rig, Limits::default());
            assert_eq!((rig.poll(), rig.last), (50, Next::Idle));
            rig.stop();
        }
    }
}

/// Nothing is due to a driver that sends nothing, so its kicks are enabled.
#[test]
fn an_empty_ring_is_not_throttled() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    set(&rig, frames(Limit::default(), Limit::default(), limit(RARE, 1)));
    (0..2).for_each(|_| _ = rig.send(&frame(60), 100).unwrap());
    assert_eq!((rig.poll(), rig.last), (2, Next::Idle));
    rig.send(&frame(60), 100).unwrap();
    assert_eq!(rig.poll(), 0);
    assert!(matches!(rig.last, Next::Throttled { .. }), "{:?}", rig.last);
    rig.stop();
}

#[test]
fn a_disabled_ring_is_drained_without_limits() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    set(&rig, frames(limit(RARE, 1), Limit::default(), Limit::default()));
    rig.task.set_enabled(false);
    (0..20).for_each(|_| _ = rig.send(&frame(60), 100).unwrap());
    assert_eq!((rig.poll(), counter(&card, "sent_disabled")), (20, 20));
    rig.task.set_enabled(true);
    (0..3).for_each(|_| _ = rig.send(&frame(60), 100).unwrap());
    assert_eq!(rig.poll(), 2);
    rig.stop();
}

/// A frame may take more bytes than there are. Later frames repay them.
#[test]
fn bytes_are_limited() {
    let card = card(1, NullPort::default());
    let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
    let bytes = [Limit::default(), Limit::default(), limit(1000, 1)];
    set(&rig, Limits { bytes, ..Limits::default() });
    (0..9).for_each(|_| _ = rig.send(&frame(9000), 4096).unwrap());
    let polled = rig.poll_once(1);
    assert_eq!((polled.served, polled.next), (1, Next::More));
    assert_eq!(rig.poll(), 0);
    // 9 seconds of debt. The task looks again ten times a second, because the limit may change.
    assert_eq!(rig.last, Next::Throttled { wait_ns: 100_000_000 });
    rig.stop();
}

/// The frames wait at the port, and the other direction goes on.
#[test]
fn received_frames_wait_at_the_port() {
    let card = looping();
    let mut transmit = Rig::start(&card, 1, SPLIT, 128, card.features());
    let mut receive = Rig::start(&card, 0, SPLIT, 128, card.features());
    (0..64).for_each(|_| _ = receive.offer(&[2048], true).unwrap());
    receive.poll();
    transmit.limiter = receive.limiter.clone();
    set(&receive, frames(Limit::default(), limit(RARE, 2), Limit::default()));
    (0..10).for_each(|_| _ = transmit.send(&frame(60), 100).unwrap());
    assert_eq!((transmit.poll(), transmit.last), (10, Next::Idle));
    receive.poll();
    assert_eq!(counter(&card, "received_frames"), 3);
    assert!(matches!(receive.last, Next::Throttled { .. }), "{:?}", receive.last);
    // A change of the memory takes the credit of a throttled ring.
    receive.change_memory();
    set(&receive, Limits::default());
    receive.poll();
    assert_eq!(counter(&card, "received_frames"), 10);
    transmit.stop();
    receive.stop();
}

/// Cards of a group share their limits.
#[test]
fn a_group_has_one_limit() {
    let limiter = Arc::<Limiter>::default();
    let mut rigs = Vec::new();
    for _ in 0..2 {
        let card = card(1, NullPort::default());
        let mut rig = Rig::start(&card, 1, SPLIT, 128, card.features());
        rig.limiter = limiter.clone();
        (0..10).for_each(|_| _ = rig.send(&frame(60), 100).unwrap());
        rigs.push(rig);
    }
    limiter.set(&frames(limit(RARE, 11), Limit::default(), Limit::default()));
    assert_eq!(rigs.iter_mut().map(Rig::poll).collect::<Vec<_>>(), [10, 2]);
    rigs.into_iter().for_each(|rig| _ = rig.stop());
}
