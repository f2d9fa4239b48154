//! Passes the cards of a switch with an uplink to a second process. Cards find switches and uplinks by their
//! names, so one process has each of them once.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, HandOver};
use kickless_handover::v1::{Final, Plan};
use kickless_handover::{Decision, FromOld, Giving, NewEnd, OldEnd};
use kickless_memory::Iov;
use kickless_net::Net;
use kickless_net_port::{Offloads, Tap, TapQueue};
use kickless_spec::net::Header;
use kickless_testing::{LIMIT, eventually, in_network_namespace, ip};
use rig::handing::{give, give_final, open, take};
use rig::switch::{EVERYBODY, RECEIVE, TRANSMIT, addressed};
use rig::{Kind, Rig, SIZE_MAX, counter};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use std::{env, io};
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const PORT: &str = "switch:lan,uplink=host";
/// Tells the second process that it is one.
const IS_TAKER: &str = "KICKLESS_TEST_TAKER";
/// The number of the peer, and of the cards of the second process.
const PEER: usize = 9;
const TAKER: usize = 7;
/// The frames that wait in the TAP while no process reads it.
const WAITING: u32 = 100;

fn frame(from: usize, number: u32) -> Vec<u8> {
    let mut frame = addressed(EVERYBODY, from);
    frame.extend(number.to_le_bytes());
    frame.resize(60, 0);
    frame
}

/// Returns the number in a frame from this sender.
fn number_in(frame: &[u8], from: usize) -> Option<u32> {
    let number = frame.get(14..)?.first_chunk()?;
    frame.starts_with(&addressed(EVERYBODY, from)).then(|| u32::from_le_bytes(*number))
}

fn start(card: &Arc<Net>, index: u16) -> Rig {
    Rig::start(card, index, SPLIT, SIZE_MAX, card.features())
}

/// Returns the numbers of the peer's frames that a ring has now.
fn take_numbers(rig: &mut Rig) -> Vec<u32> {
    while rig.offer(&[1530], true).is_some() {}
    rig.poll();
    std::iter::from_fn(|| rig.receive(12)).filter_map(|(_, frame)| number_in(&frame, PEER)).collect()
}

fn send_peer(peer: &mut TapQueue, numbers: std::ops::Range<u32>) {
    numbers.for_each(|number| peer.send_copy(&Header::default(), &frame(PEER, number)).unwrap());
}

#[test]
fn an_uplink_keeps_the_frames_in_its_tap() {
    in_network_namespace(|| {
        let peer = Tap::open("peer", 1).unwrap();
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        ip("link set dev bridge up");
        peer.set(Offloads::empty(), |_| true);
        ip("tuntap add dev host mode tap");
        for name in ["peer", "host"] {
            ip(&format!("link set dev {name} up master bridge"));
        }
        let mut peer = peer.queue(0).unwrap();
        let cards = [(); 2].map(|()| open(PORT, 1));
        cards.iter().for_each(|card| card.open().unwrap());
        let mut rings = [0, 1].map(|card: usize| start(&cards[card], RECEIVE));
        eventually("a frame passes the bridge", || {
            send_peer(&mut peer, 0..1);
            rings.iter_mut().all(|ring| !take_numbers(ring).is_empty())
        });
        // Earlier frames arrive before this one.
        send_peer(&mut peer, 1..2);
        rings.iter_mut().for_each(|ring| {
            eventually("the last frame arrives", || take_numbers(ring).last() == Some(&1));
        });
        // While the uplink is held, its frames wait.
        hold(&cards);
        send_peer(&mut peer, 2..52);
        assert!(rings.iter_mut().all(|ring| take_numbers(ring).is_empty()));
        cards.iter().for_each(|card| card.take_back().unwrap());
        for ring in &mut rings {
            let mut numbers = Vec::new();
            eventually("the frames arrive", || {
                numbers.extend(take_numbers(ring));
                numbers.len() >= 50
            });
            assert!(numbers.into_iter().eq(2..52));
        }
        hand_over(&cards, &mut peer);
        let mut bytes = vec![0; 2000];
        let got = std::iter::from_fn(|| {
            let len = peer.receive(&mut Header::default(), &mut Iov::default(), &mut bytes).ok()?;
            Some(number_in(&bytes[..len], TAKER))
        });
        assert_eq!(got.flatten().collect::<Vec<_>>(), [3], "the taker sends one frame");
        // The old process would end here without destructors.
        std::mem::forget((cards, rings));
    });
}

/// Holds the cards, and waits until the uplink is held.
fn hold(cards: &[Arc<Net>; 2]) {
    cards.iter().for_each(|card| card.hold());
    cards.iter().for_each(|card| drop(give_final(card)));
}

/// Passes the cards to another process, and waits for its end.
fn hand_over(cards: &[Arc<Net>; 2], peer: &mut TapQueue) {
    let deadline = Instant::now() + LIMIT;
    let (old, new) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut taker = Command::new(env::current_exe().unwrap());
    taker.args(["the_taker", "--exact", "--nocapture"]).env(IS_TAKER, "1").stdin(new);
    let mut child = taker.spawn().unwrap();
    drop(taker);
    let mut old = OldEnd::new(old);
    old.plan(2, Giving::default().record(&Plan::default()).unwrap(), deadline).unwrap();
    for (number, card) in (0..).zip(cards).chain((0..).zip(cards)) {
        old.device(number, give(card), deadline).unwrap();
    }
    hold(cards);
    send_peer(peer, 0..WAITING);
    for (number, card) in (0..).zip(cards) {
        old.final_record(number, give_final(card), deadline).unwrap();
    }
    assert!(matches!(old.offer(deadline), Decision::Taken(_)));
    assert!(child.wait().unwrap().success());
}

/// Does nothing in the first process.
#[test]
fn the_taker() {
    if env::var_os(IS_TAKER).is_none() {
        return;
    }
    let deadline = Instant::now() + LIMIT;
    let mut new = NewEnd::new(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let (mut made, mut finals) = (BTreeMap::new(), Vec::new());
    loop {
        match new.receive(deadline).unwrap() {
            FromOld::Plan(_) => {}
            FromOld::Device { number, record } => {
                let card = take(PORT, 1, record).unwrap();
                let receiving = start(&card, RECEIVE);
                // Each comes twice, as one that has changed. The first one is dropped then.
                made.insert(number, (card, receiving));
            }
            FromOld::Final { record, .. } => {
                finals.push(record);
                continue;
            }
            FromOld::Last => break,
            other => panic!("{other:?}"),
        }
        new.confirm(deadline).unwrap();
    }
    let (cards, mut rings): (Vec<Arc<Net>>, Vec<Rig>) = made.into_values().unzip();
    for (card, record) in cards.iter().zip(finals) {
        let (state, given): (Final, _) = record.read().unwrap();
        card.receive_final(state.own, &given).unwrap();
    }
    let before = counter(&cards[0], "uplink_received_frames");
    assert!(before >= 52 && rings.iter_mut().all(|ring| take_numbers(ring).is_empty()));
    new.take(deadline).unwrap();
    cards.iter().for_each(|card| card.begin());
    for ring in &mut rings {
        let mut numbers = Vec::new();
        eventually("the frames arrive", || {
            numbers.extend(take_numbers(ring));
            numbers.len() >= WAITING as usize
        });
        assert!(numbers.into_iter().eq(0..WAITING), "each frame comes once, in order");
    }
    // Both cards have one uplink.
    let counts = [0, 1].map(|card: usize| counter(&cards[card], "uplink_received_frames"));
    assert!(counts[0] == counts[1] && counts[0] >= before + u64::from(WAITING));
    let mut transmit = start(&cards[0], TRANSMIT);
    transmit.send(&[Header::default().as_bytes(), &frame(TAKER, 3)].concat(), 4096).unwrap();
    transmit.poll();
    eventually("the frame is sent", || counter(&cards[1], "uplink_sent_frames") >= 1);
}
