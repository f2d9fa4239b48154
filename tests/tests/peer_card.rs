//! Cards whose port is another back-end: a second card of kickless, and hostile ones.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{
    Card, CardOptions, Checksum, Choice, Interest, Offload, Outgoing, Protocol, QueuePair, Segmentation,
};
use kickless_spec::vhost_user::FrontendRequest as Code;
use kickless_testing::eventually;
use kickless_tests::daemon::{CardConfig, Daemon, card_counter};
use kickless_tests::hostile_backend::faults::{AnswerFault, RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, LIMIT, returns_in_time};
use std::path::Path;

fn chained_to(socket: &Path) -> CardConfig {
    CardConfig::new(&format!("vhost-user:{}", socket.display()))
}

fn connect(daemon: &Daemon) -> (Card, QueuePair) {
    let options = CardOptions { receive_offloads: Choice::Auto, ..CardOptions::new(daemon.socket()) };
    let card = Card::connect(options).unwrap();
    let pair = card.pair(0).unwrap();
    (card, pair)
}

fn frame(len: usize, number: u64) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame.extend(number.to_le_bytes());
    frame.extend((frame.len()..len).map(|n| n as u8));
    frame
}

/// Sends frames until one with this length and number is back.
fn echo(pair: &mut QueuePair, len: usize, number: u64) {
    let sent = frame(len, number);
    let mut is_back = false;
    eventually("the frame is back", || {
        pair.send(&[Outgoing::from(&sent[..])]).unwrap();
        pair.receive(64, |frame| is_back |= frame.to_vec() == sent).unwrap();
        is_back
    });
}

#[test]
fn frames_pass_through_a_chain_of_cards() {
    let config = CardConfig::new("loop");
    let mut last = Daemon::start_card(&config).unwrap();
    let first = Daemon::start_card(&chained_to(last.socket())).unwrap();
    let (card, mut pair) = connect(&first);
    echo(&mut pair, 60, 0);
    // None is lost or changed while both are connected.
    while pair.wait(Interest::Receive, Some(std::time::Duration::from_millis(50))).unwrap() {
        pair.receive(64, |_| {}).unwrap();
    }
    for (number, len) in (1..).zip([30, 60, 1514, 9000, 65_000]) {
        let sent = frame(len, number);
        assert_eq!(pair.send(&[Outgoing::from(&sent[..])]).unwrap(), 1);
        let mut received = Vec::new();
        while received.is_empty() {
            assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes");
            pair.receive(1, |frame| received = frame.to_vec()).unwrap();
        }
        assert!(received == sent, "{len}");
    }
    // The back-end is killed and comes back.
    last.kill_and_restart_card(&config).unwrap();
    echo(&mut pair, 61, 100);
    drop((pair, card));
    // A driver connects anew, and the port with it.
    let (_card, mut pair) = connect(&first);
    echo(&mut pair, 62, 101);
    let (status, log) = first.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    // Each frame counts once.
    for (counter, queue) in [("received_frames", 0), ("sent_frames", 1)] {
        let of_queue = format!(" summary queue={queue} requests=");
        let summary = log.iter().find_map(|line| line.split_once(&of_queue)).unwrap().1;
        let requests = summary.split_whitespace().next().unwrap();
        assert_eq!(card_counter(&log, counter).unwrap().to_string(), requests, "{counter}");
    }
    assert_eq!(log.iter().filter(|line| line.contains("panicked")).count(), 0);
}

/// Returns a packet of TCP with this payload, whose checksum is partial.
fn tcp(payload: usize) -> Vec<u8> {
    let mut frame = [&[2, 0, 0, 0, 0, 2][..], &[2, 0, 0, 0, 0, 1], &[8, 0, 0x45, 0]].concat();
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 80, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|n| n as u8));
    frame
}

#[test]
fn offloads_pass_or_are_undone() {
    const PAYLOAD: usize = 10_000;
    const SIZE: u16 = 1000;
    let checksum = Checksum::Partial { start: 34, offset: 16 };
    let segmentation = Segmentation { protocol: Protocol::TcpV4, size: SIZE, header_len: 54, ecn: false };
    let packet = tcp(PAYLOAD);
    for (offload, accepts) in [("on", true), ("off", false)] {
        let last =
            Daemon::start_card(&CardConfig::new("loop").with(&[&format!("--offload={offload}")])).unwrap();
        let first = Daemon::start_card(&chained_to(last.socket())).unwrap();
        let (_card, mut pair) = connect(&first);
        echo(&mut pair, 60, 0);
        let work = Offload { checksum, segmentation: Some(segmentation) };
        assert_eq!(pair.send(&[Outgoing { bytes: &packet, offload: work }]).unwrap(), 1);
        let (mut frames, mut payload) = (Vec::new(), Vec::<u8>::new());
        eventually("the whole packet is back", || {
            pair.receive(64, |frame| {
                let bytes = frame.to_vec();
                if bytes[12..14] == [8, 0] {
                    payload.extend(&bytes[54..]);
                    frames.push(frame.offload());
                }
            })
            .unwrap();
            payload.len() >= PAYLOAD
        });
        assert!(payload == packet[54..], "{offload}");
        match accepts {
            true => assert_eq!(frames, [work]),
            false => assert_eq!(frames, [Offload::default(); PAYLOAD / SIZE as usize]),
        }
    }
}

#[test]
fn a_hostile_back_end_costs_frames_only() {
    returns_in_time(|| {
        let answer = |code, fault| Rules { answers: vec![(code, fault)], ..Rules::card(1) };
        let ring = |fault| Rules { ring: Some((270, fault)), ..Rules::card(1) };
        let mut all = vec![
            answer(Code::GetFeatures, AnswerFault::Closed),
            answer(Code::GetFeatures, AnswerFault::Huge),
            answer(Code::SetVringAddr, AnswerFault::Refused),
            answer(Code::SetVringKick, AnswerFault::Half),
            answer(Code::GetConfig, AnswerFault::Less),
        ];
        let rings = [
            RingFault::IdOutOfRange,
            RingFault::Twice,
            RingFault::TooLong,
            RingFault::IndexJump,
            RingFault::Buffers(0),
            RingFault::Buffers(u16::MAX),
            RingFault::NoHeader,
            RingFault::Header,
            RingFault::RingError,
            RingFault::Closed,
        ];
        all.extend(rings.map(ring));
        all.extend((0..4).map(|seed| Rules { chaos: Some(seed), ..Rules::card(1) }));
        for rules in all {
            let words = format!("{:?} {:?} {:?}", rules.answers, rules.ring, rules.chaos);
            let hostile = HostileBackend::start(rules).unwrap();
            let daemon = Daemon::start_card(&chained_to(hostile.socket())).unwrap();
            let (card, mut pair) = connect(&daemon);
            eventually("the port is connected", || hostile.connections() > 0);
            for number in 0..300 {
                // The card goes on, whatever becomes of the frames.
                while pair.send(&[Outgoing::from(&frame(60, number)[..])]).unwrap() == 0 {
                    assert!(pair.wait(Interest::Send, Some(LIMIT)).unwrap(), "{words}");
                }
                pair.receive(64, |_| {}).unwrap();
            }
            assert!(pair.flush(Some(LIMIT)).unwrap(), "{words}");
            drop((pair, card));
            let (status, log) = daemon.stop().unwrap();
            assert_eq!(status.code(), Some(0), "{words}: {log:?}");
        }
    });
}

/// A back-end that never answers delays neither a driver that connects nor the end of the program for long.
#[test]
fn a_silent_back_end_is_left() {
    returns_in_time(|| {
        let rules = Rules { answers: vec![(Code::SetFeatures, AnswerFault::Silence)], ..Rules::card(1) };
        let silent = HostileBackend::start(rules).unwrap();
        let daemon = Daemon::start_card(&chained_to(silent.socket())).unwrap();
        let (card, mut pair) = connect(&daemon);
        eventually("the port is connected", || silent.connections() > 0);
        assert_eq!(pair.send(&[Outgoing::from(&frame(60, 0)[..])]).unwrap(), 1);
        assert!(pair.flush(Some(LIMIT)).unwrap());
        drop((pair, card));
        let (status, log) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        assert_eq!(card_counter(&log, "sent_down").unwrap(), 1);
    });
}
