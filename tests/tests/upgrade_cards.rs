//! Upgrades a daemon while frames pass through its cards: one process after another takes over. `UPGRADES` is
//! the number of upgrades of each card.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Card, CardOptions, Choice, Interest, Outgoing, QueuePair};
use kickless_testing::{in_network_namespace, parse_pcapng};
use kickless_tests::arp;
use kickless_tests::daemon::{Daemon, check_log};
use kickless_tests::hostile_backend::{LIMIT, returns_within};

/// The upgrades of each card, unless `UPGRADES` says another number.
const UPGRADES: u32 = 3;
/// The frames on their way at a time. Rings and ports have room for them.
const WINDOW: u32 = 32;
/// The time after which frames that did not come are lost.
const LOST_AFTER: Duration = Duration::from_millis(500);

/// The longest time of an upgrade on a busy machine.
const UPGRADE_LIMIT: Duration = Duration::from_secs(5);

/// The kinds of rings: packed and in order.
const KINDS: [(Choice, Choice); 3] =
    [(Choice::Off, Choice::Off), (Choice::On, Choice::Off), (Choice::On, Choice::On)];

fn upgrades() -> u32 {
    std::env::var("UPGRADES").map_or(UPGRADES, |upgrades| upgrades.parse().unwrap())
}

/// Fails if a test hangs. The machine can be busy, and there can be many upgrades.
fn in_time(test: impl FnOnce() + Send + 'static) {
    returns_within(LIMIT + UPGRADE_LIMIT * upgrades() * KINDS.len() as u32, test);
}

/// The frames that a driver has sent, by their fate.
#[derive(Clone, Debug, Default)]
struct Passed {
    sent: u32,
    came: u32,
    /// The numbers of those that did not come.
    lost: BTreeSet<u32>,
}

/// Sends frames and receives what comes of them, until it is over. Frames come in order, and none twice.
/// `number_of` checks a frame, and returns the number of the one that it is, or that it answers.
fn pass(pairs: &mut [QueuePair], number_of: impl Fn(&[u8]) -> Option<u32>, is_over: &AtomicBool) -> Passed {
    let mut passed = Passed::default();
    let (mut next, mut last) = (0, Instant::now());
    loop {
        let ends = is_over.load(Ordering::Relaxed);
        if ends && next == passed.sent {
            return passed;
        }
        while !ends && passed.sent < next + WINDOW {
            let sent = pairs[0].send(&[Outgoing::from(&arp::request(0, passed.sent)[..])]).unwrap();
            passed.sent += sent as u32;
            if sent == 0 {
                break;
            }
        }
        let receiver = pairs.last_mut().unwrap();
        receiver.wait(Interest::Receive, Some(LOST_AFTER / 5)).unwrap();
        receiver
            .receive(usize::MAX, |frame| {
                let Some(number) = number_of(&frame.to_vec()) else { return };
                (passed.came, last) = (passed.came + 1, Instant::now());
                if number < next {
                    // On a busy machine, a frame can come after it was given up.
                    assert!(passed.lost.remove(&number), "frame {number} comes twice, or behind {next}");
                    return;
                }
                assert!(number < passed.sent, "frame {number} was not sent");
                passed.lost.extend(next..number);
                next = number + 1;
            })
            .unwrap();
        if last.elapsed() > LOST_AFTER {
            passed.lost.extend(next..passed.sent);
            (next, last) = (passed.sent, Instant::now());
        }
    }
}

/// Returns the number of a frame that comes back as it was sent.
fn of_same(frame: &[u8]) -> Option<u32> {
    let number = u32::from_be_bytes(frame[8..12].try_into().unwrap());
    assert!(frame == arp::request(0, number), "frame {number} has changed");
    Some(number)
}

/// Sends a frame until something comes, because a port drops the frames of a ring that does not run yet.
/// Takes all that comes.
fn warm_up(pairs: &mut [QueuePair]) {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LIMIT, "no frame passes");
        pairs[0].send(&[Outgoing::from(&arp::request(0, 0)[..])]).unwrap();
        let receiver = pairs.last_mut().unwrap();
        let mut has_come = false;
        while receiver.wait(Interest::Receive, Some(Duration::from_millis(50))).unwrap() {
            has_come |= receiver.receive(usize::MAX, |_| {}).unwrap() > 0;
        }
        if has_come {
            return;
        }
    }
}

/// Upgrades a daemon with these cards again and again, while frames pass from the first to the last one.
fn upgrade_cards(
    cards: &[(&str, &str)],
    number_of: impl Fn(&[u8]) -> Option<u32> + Copy + Send + Sync,
    kind: (Choice, Choice),
) -> Passed {
    let mut daemon = Daemon::serve_with(&["--control"], "", cards).unwrap();
    if cards[0].1.contains("tap:") {
        arp::join("vm", 0);
    }
    let (packed, in_order) = kind;
    let connected: Vec<Card> = cards
        .iter()
        .map(|(name, _)| {
            let reconnect_limit = Duration::ZERO;
            let socket = daemon.socket_of(name);
            Card::connect(CardOptions { packed, in_order, reconnect_limit, ..CardOptions::new(socket) })
                .unwrap()
        })
        .collect();
    let mut pairs: Vec<_> = connected.iter().map(|card| card.pair(0).unwrap()).collect();
    warm_up(&mut pairs);
    let passed = daemon.upgrade_under(upgrades(), |is_over| pass(&mut pairs, number_of, is_over)).unwrap();
    drop((pairs, connected));
    let (status, log) = daemon.stop().unwrap();
    assert!(status.success(), "{status}");
    check_log(&log).unwrap();
    let Passed { sent, came, lost } = &passed;
    println!(
        "{}, packed {packed:?}, in order {in_order:?}: {came} of {sent}, {} lost",
        cards[0].1,
        lost.len()
    );
    assert!(passed.came > 100, "{passed:?}");
    passed
}

/// The interface keeps the frames that come in the pause.
#[test]
fn a_tap_loses_no_frame() {
    in_time(|| {
        in_network_namespace(|| {
            for kind in KINDS {
                let passed = upgrade_cards(&[("card", "port = 'tap:vm'")], arp::answered, kind);
                assert!(passed.lost.is_empty(), "{passed:?}");
            }
        });
    });
}

/// Frames that wait in a port of the process itself end with it: at most a window at each upgrade.
#[test]
fn a_loop_and_a_switch_go_on() {
    const LOOP: &[(&str, &str)] = &[("card", "port = 'loop'")];
    const SWITCH: &[(&str, &str)] = &[("a", "port = 'switch:lan'"), ("b", "port = 'switch:lan'")];
    in_time(|| {
        for kind in KINDS {
            for cards in [LOOP, SWITCH] {
                let passed = upgrade_cards(cards, of_same, kind);
                assert!(passed.lost.len() as u32 <= upgrades() * WINDOW, "{passed:?}");
            }
        }
    });
}

/// A peer that returns the frames of a stream, which have their length before them.
fn return_frames(mut stream: UnixStream) {
    let mut len = [0; 4];
    while stream.read_exact(&mut len).is_ok() {
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        if stream.read_exact(&mut frame).is_err() || stream.write_all(&[&len[..], &frame].concat()).is_err() {
            return;
        }
    }
}

/// The peer sees one connection, whose stream stays in step.
#[test]
fn a_stream_loses_no_frame() {
    in_time(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("peer.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = thread::spawn(move || {
            for _ in KINDS {
                return_frames(listener.accept().unwrap().0);
            }
        });
        for kind in KINDS {
            let port = format!("port = 'stream:{}'", path.display());
            let passed = upgrade_cards(&[("card", &port)], of_same, kind);
            assert!(passed.lost.is_empty(), "{passed:?}");
        }
        peer.join().unwrap();
    });
}

/// A capture goes on in the same file. It has each frame once, or has counted it as dropped.
#[test]
fn a_capture_stays_complete() {
    in_time(|| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("frames.pcapng");
        let lines = format!("port = 'loop'\ncapture = '{}'", file.display());
        let passed = upgrade_cards(&[("card", &lines)], of_same, KINDS[0]);
        let capture = parse_pcapng(&fs::read(&file).unwrap());
        println!("{} frames, {} dropped, of {}", capture.frames.len(), capture.dropped, capture.received);
        assert_eq!(capture.frames.len() as u64 + capture.dropped, capture.received);
        // The frames of the first step are in it too.
        assert!(capture.received >= u64::from(passed.came + passed.sent), "{passed:?}");
        let mut next = [0; 3];
        for frame in &capture.frames {
            let number = of_same(&frame.bytes).unwrap();
            let next = &mut next[frame.direction as usize];
            assert!(number >= *next || number == 0, "frame {number} is in the capture twice");
            *next = number + u32::from(number > 0);
        }
    });
}
