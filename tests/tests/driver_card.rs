//! Our driver of network cards with the real daemon: frames in both directions, several queue pairs, all
//! kinds of rings, sleeping owners, commands, and daemons that are killed under traffic.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use kickless_driver::{
    Card, CardOptions, Choice, Error, Frame, Interest, Invalid, Outgoing, QueuePair, Waiting,
};
use kickless_spec::features::Features;
use kickless_spec::net::NetFeatures;
use kickless_testing::parse_test_frame;
use kickless_tests::daemon::{CardConfig, Daemon, card_counter};
use kickless_tests::hostile_backend::{LIMIT, returns_in_time};
use rustix::net::{SocketAddrUnix, getpeername};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

fn options(daemon: &Daemon) -> CardOptions {
    CardOptions { connect_timeout: LIMIT, reconnect_limit: LIMIT, ..CardOptions::new(daemon.socket()) }
}

/// Returns options for each kind of ring.
fn shapes(daemon: &Daemon) -> Vec<CardOptions> {
    let choice = |on| if on { Choice::On } else { Choice::Off };
    let mut shapes = Vec::new();
    for packed in [false, true] {
        for (event_idx, indirect, in_order, mergeable) in
            [(true, true, false, true), (false, false, false, true), (true, false, true, false)]
        {
            shapes.push(CardOptions {
                packed: choice(packed),
                event_idx: choice(event_idx),
                indirect: choice(indirect),
                in_order: choice(in_order),
                mergeable: choice(mergeable),
                queue_size: 64,
                ..options(daemon)
            });
        }
    }
    shapes
}

/// Checks a test frame. Returns its number.
fn number_of(frame: &Frame<'_>, pair: usize) -> u64 {
    let (of_pair, number) = parse_test_frame(&frame.to_vec()).unwrap();
    assert_eq!(usize::from(of_pair), pair);
    number
}

/// Receives `count` frames, and sleeps between them. Returns their numbers.
fn receive(pair: &mut QueuePair, count: usize) -> Vec<u64> {
    let index = pair.index();
    let mut numbers = Vec::new();
    while numbers.len() < count {
        assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes");
        pair.receive(count - numbers.len(), |frame| numbers.push(number_of(frame, index))).unwrap();
    }
    numbers
}

/// Sends `count` frames of this length, and waits until the card has taken them.
fn send(pair: &mut QueuePair, count: usize, len: usize) {
    let bytes = vec![7; len];
    let mut left = count;
    while left > 0 {
        let batch = vec![Outgoing::from(&bytes[..]); left.min(32)];
        left -= pair.send(&batch).unwrap();
        if left > 0 {
            assert!(pair.wait(Interest::Send, Some(LIMIT)).unwrap(), "no room");
        }
    }
    assert!(pair.flush(Some(LIMIT)).unwrap(), "frames stay in flight");
}

#[test]
fn frames_pass_in_both_directions() {
    returns_in_time(|| {
        let config = CardConfig::new("null,rate=20000,length=60-1514");
        for shape in 0..6 {
            let daemon = Daemon::start_card(&config).unwrap();
            let card = Card::connect(shapes(&daemon).swap_remove(shape)).unwrap();
            let mut pair = card.pair(0).unwrap();
            assert!(card.pair(0).is_none() && card.pair(1).is_none());
            let numbers = receive(&mut pair, 500);
            assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
            send(&mut pair, 1000, 60);
            send(&mut pair, 100, 1514);
            let counters = pair.counters();
            assert_eq!((counters.sent_frames, counters.sent_bytes), (1100, 60_000 + 151_400));
            assert_eq!((counters.received_frames, counters.received_invalid), (500, 0));
            drop((pair, card));
            let (status, log) = daemon.stop().unwrap();
            assert_eq!(status.code(), Some(0));
            assert_eq!(card_counter(&log, "sent_frames").unwrap(), 1100);
            assert_eq!(card_counter(&log, "sent_bytes").unwrap(), 211_400);
            assert_eq!(card_counter(&log, "sent_invalid").unwrap(), 0);
        }
    });
}

#[test]
fn long_frames_take_several_buffers() {
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("null,rate=2000,length=60-65550")).unwrap();
        for options in shapes(&daemon) {
            let receive_offloads = Choice::On;
            let card = Card::connect(CardOptions { receive_offloads, ..options }).unwrap();
            assert!(card.net_features().contains(NetFeatures::GUEST_TSO4));
            let mut pair = card.pair(0).unwrap();
            receive(&mut pair, 100);
            let longest = pair.frame_len_max();
            assert_eq!(longest, 65_550);
            send(&mut pair, 50, longest);
            let frame = vec![0; longest + 1];
            let error = pair.send(&[Outgoing::from(&frame[..])]).unwrap_err();
            assert!(matches!(error, Error::Invalid(Invalid::FrameLength { len: 65_551, .. })), "{error}");
            let error = pair.send(&[Outgoing::from(&frame[..13])]).unwrap_err();
            assert!(matches!(error, Error::Invalid(Invalid::FrameLength { len: 13, .. })), "{error}");
        }
    });
}

/// Returns a frame with this number in its first bytes.
fn pattern(number: usize) -> Vec<u8> {
    let len = 60 + number * 97 % 1455;
    let mut frame: Vec<u8> = (0..len).map(|at| (at + number * 7) as u8).collect();
    frame[..8].copy_from_slice(&number.to_le_bytes());
    frame
}

/// Checks a frame of [`pattern`]. Returns its number.
fn checked(frame: &Frame<'_>) -> usize {
    let frame = frame.to_vec();
    let number = usize::from_le_bytes(frame[..8].try_into().unwrap());
    assert!(pattern(number) == frame, "frame {number} has changed");
    number
}

#[test]
fn a_loop_returns_each_frame() {
    const FRAMES: usize = 1000;
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("loop")).unwrap();
        for options in shapes(&daemon) {
            let card = Card::connect(options).unwrap();
            let mut pair = card.pair(0).unwrap();
            let mut sent = 0;
            // The number of times that each frame was received. Each goes round twice.
            let mut rounds = vec![0; FRAMES];
            let (mut first, mut second) = (0, 0);
            while second < FRAMES {
                // Fewer frames than the ring has buffers, so that the card drops none.
                while sent < FRAMES && sent < second + 16 {
                    sent += pair.send(&[Outgoing::from(&pattern(sent)[..])]).unwrap();
                }
                assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes back");
                pair.forward(32, |frame| {
                    let number = checked(frame);
                    rounds[number] += 1;
                    // Frames keep their order in each round.
                    let next = if rounds[number] == 1 { &mut first } else { &mut second };
                    assert_eq!(*next, number);
                    *next += 1;
                    rounds[number] == 1
                })
                .unwrap();
            }
            assert!(rounds.iter().all(|count| *count == 2));
            assert_eq!(pair.counters().forward_dropped, 0);
        }
    });
}

#[test]
fn each_pair_has_its_own_frames() {
    returns_in_time(|| {
        let daemon =
            Daemon::start_card(&CardConfig::new("null,rate=5000").with(&["--num-queue-pairs=4"])).unwrap();
        let card = Card::connect(CardOptions { pairs: 3, ..options(&daemon) }).unwrap();
        assert_eq!(card.pairs(), 3);
        assert!(card.features().contains(Features::RING_PACKED));
        let mut pairs: Vec<_> = (0..3).map(|index| card.pair(index).unwrap()).collect();
        std::thread::scope(|scope| {
            for pair in &mut pairs {
                scope.spawn(|| {
                    receive(pair, 200);
                    send(pair, 300, 60);
                });
            }
        });
        // A card that uses fewer pairs delivers nothing to the others.
        card.set_pairs(1).unwrap();
        for pair in &mut pairs[1..] {
            while pair.receive(64, |_| {}).unwrap() > 0 {}
        }
        receive(&mut pairs[0], 200);
        for pair in &mut pairs[1..] {
            assert_eq!(pair.receive(64, |_| {}).unwrap(), 0, "pair {}", pair.index());
        }
        assert!(matches!(card.set_pairs(5), Err(Error::CommandRefused)));
        card.set_pairs(3).unwrap();
        receive(&mut pairs[2], 200);
    });
}

/// As many pairs as cards of hypervisors have. Their number changes while frames come.
#[test]
fn sixty_four_pairs_are_switched_on_and_off() {
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("null,rate=100")).unwrap();
        let card = Card::connect(CardOptions { pairs: 64, queue_size: 32, ..options(&daemon) }).unwrap();
        let mut pairs: Vec<_> = (0..64).map(|index| card.pair(index).unwrap()).collect();
        for used in [64, 5, 64] {
            card.set_pairs(used).unwrap();
            for pair in &mut pairs[..used.into()] {
                // Some of them may be from before the command.
                receive(pair, 40);
                send(pair, 2, 60);
            }
        }
    });
}

#[test]
fn the_configuration_of_the_card_is_known() {
    returns_in_time(|| {
        let config = CardConfig::new("null").with(&["--mac=52:54:00:12:34:56", "--mtu=9000"]);
        let daemon = Daemon::start_card(&config).unwrap();
        let card = Card::connect(options(&daemon)).unwrap();
        assert_eq!(card.mac().unwrap(), Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
        assert_eq!(card.mtu().unwrap(), 9000);
        assert!(card.is_link_up().unwrap());
        drop(card);
        let card = Card::connect(CardOptions { mtu: Some(1400), ..options(&daemon) }).unwrap();
        assert_eq!(card.mtu().unwrap(), 1400);
        card.close();
        assert!(matches!(card.mtu(), Ok(1400)), "known without the back-end");
        let mut pair = card.pair(0).unwrap();
        assert!(matches!(pair.receive(1, |_| {}), Err(Error::Dead(_))));
        assert!(matches!(pair.wait(Interest::Any, None), Err(Error::Dead(_))));
    });
}

#[test]
fn each_way_of_waiting_sees_each_frame() {
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("null,rate=1000")).unwrap();
        for waiting in [Waiting::Auto, Waiting::Sleep, Waiting::Spin(Duration::MAX)] {
            let card = Card::connect(CardOptions { waiting, ..options(&daemon) }).unwrap();
            let mut pair = card.pair(0).unwrap();
            receive(&mut pair, 100);
            let calls = pair.counters().calls;
            assert!(calls > 0 || waiting != Waiting::Sleep, "{waiting:?}");
            // Nothing is received in no time at all, and there is room.
            while pair.receive(64, |_| {}).unwrap() > 0 {}
            assert!(pair.wait(Interest::Any, Some(Duration::ZERO)).unwrap());
        }
        // The owner can sleep on a descriptor of its own.
        let card = Card::connect(options(&daemon)).unwrap();
        let mut pair = card.pair(0).unwrap();
        let mut got = 0;
        while got < 50 {
            if pair.arm(Interest::Receive).unwrap() {
                let mut fds = [rustix::event::PollFd::new(&pair, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
            }
            got += pair.receive(64, |_| {}).unwrap();
        }
    });
}

#[test]
fn a_card_works_on_after_its_daemon_was_killed() {
    const KILLS: u64 = 20;
    returns_in_time(|| {
        let config = CardConfig::new("null,rate=20000").with(&["--num-queue-pairs=2"]);
        let mut daemon = Daemon::start_card(&config).unwrap();
        let card = Card::connect(CardOptions { pairs: 2, ..options(&daemon) }).unwrap();
        let mut pairs = [card.pair(0).unwrap(), card.pair(1).unwrap()];
        let bytes = [7; 60];
        let batch = [Outgoing::from(&bytes[..]); 32];
        for _ in 0..KILLS {
            for pair in &mut pairs {
                receive(pair, 20);
                pair.send(&batch).unwrap();
            }
            daemon.kill_and_restart_card(&config).unwrap();
            for pair in &mut pairs {
                // The first frames after the kill are the rest of those before it, or numbers from 0 on.
                receive(pair, 100);
                send(pair, 100, 60);
            }
        }
        for pair in &pairs {
            let counters = pair.counters();
            assert!(counters.sent_frames >= KILLS * 132, "{counters:?}");
            assert!(counters.lost_sent <= KILLS * 132, "{counters:?}");
        }
        assert!(card.failure().is_none());
    });
}

/// Returns copies of this process's connections to a socket.
fn copies_of_connections(path: &Path) -> Vec<OwnedFd> {
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = fds.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap());
    let copies = numbers.filter_map(|fd| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let is_to = |copy: &OwnedFd| {
        let peer = getpeername(copy).ok().and_then(|peer| SocketAddrUnix::try_from(peer?).ok());
        peer.is_some_and(|peer| peer.path_bytes() == Some(path.as_os_str().as_bytes()))
    };
    copies.filter(is_to).collect()
}

/// A process that forks has copies of the connection until it executes a program. They neither look like the
/// end of the next connection, nor keep the back-end from serving it.
#[test]
fn copies_of_a_lost_connection_change_nothing() {
    returns_in_time(|| {
        let config = CardConfig::new("null,rate=20000").with(&["--num-queue-pairs=2"]);
        let mut daemon = Daemon::start_card(&config).unwrap();
        let card = Card::connect(CardOptions { pairs: 2, ..options(&daemon) }).unwrap();
        let mut pair = card.pair(0).unwrap();
        let mut copies = Vec::new();
        for _ in 0..3 {
            receive(&mut pair, 20);
            let new = copies_of_connections(daemon.socket());
            assert!(!new.is_empty());
            copies.extend(new);
            daemon.kill_and_restart_card(&config).unwrap();
            // The frames of before may be enough, so that the driver does not know of the kill yet.
            receive(&mut pair, 100);
            while let Err(error) = card.set_pairs(1) {
                assert!(matches!(error, Error::Closed), "{error}");
                receive(&mut pair, 1);
            }
        }
        drop((pair, card));
        let card = Card::connect(options(&daemon)).unwrap();
        receive(&mut card.pair(0).unwrap(), 20);
    });
}

#[test]
fn a_back_end_that_does_not_come_back_ends_the_card() {
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("null")).unwrap();
        let limit = Duration::from_millis(100);
        for reconnect_limit in [limit, Duration::ZERO] {
            let daemon = Daemon::start_card(&CardConfig::new("null")).unwrap();
            let card = Card::connect(CardOptions { reconnect_limit, ..options(&daemon) }).unwrap();
            let mut pair = card.pair(0).unwrap();
            drop(daemon);
            let error = pair.wait(Interest::Receive, Some(LIMIT)).unwrap_err();
            assert!(matches!(error, Error::Dead(_)), "{error}");
            assert!(pair.send(&[]).is_err());
            assert!(card.failure().is_some());
        }
        drop(daemon);
    });
}
