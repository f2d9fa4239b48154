//! Kills, resets and removes cards of a switch that exchange frames with others in both directions, and
//! truncates their memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Interest, Outgoing, QueuePair};
use kickless_memory::{Gpa, fault};
use kickless_testing::{LIMIT, eventually};
use kickless_tests::daemon::{Daemon, child_command, kickless_binary};
use kickless_tests::frontend::card::{Card as FrontendCard, CardShape};
use kickless_tests::frontend::machine::RAM_BASE;
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVERYBODY: [u8; 6] = [0xff; 6];
/// Rounds in which a card leaves.
const ROUNDS: u64 = 8;
/// The time between two batches of frames of a card.
const PAUSE: Duration = Duration::from_millis(1);

fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 2, number]
}

/// The cards that stay send from their own addresses only. The one that leaves has no address, so that the
/// frames of any load reach the others.
const TABLES: [(&str, &str); 3] = [
    ("a", "port = \"switch:busy\"\nmac = \"02:00:00:00:02:01\""),
    ("b", "port = \"switch:busy\"\nmac = \"02:00:00:00:02:02\""),
    ("c", "port = \"switch:busy\""),
];

/// Returns a frame whose bytes follow from its number.
fn frame(to: [u8; 6], from: u8, number: u64) -> Vec<u8> {
    let mut frame = [&to[..], &mac(from), &[0x88, 0xb5], &number.to_le_bytes()].concat();
    frame.extend((0..number % 1400 + 40).map(|n| (n + number) as u8));
    frame
}

/// Checks a frame of [`frame`]. Returns its sender and its number.
fn check(bytes: &[u8]) -> (u8, u64) {
    let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
    let from = bytes[11];
    assert!(bytes == frame(bytes[..6].try_into().unwrap(), from, number), "a frame was changed");
    (from, number)
}

fn connect(daemon: &Daemon, name: &str) -> (Card, QueuePair) {
    let begun = Instant::now();
    loop {
        // A card that is removed does not come back for its present driver, which must not wait for it.
        let options =
            CardOptions { reconnect_limit: Duration::ZERO, ..CardOptions::new(daemon.socket_of(name)) };
        match Card::connect(options) {
            Ok(card) => {
                let pair = card.pair(0).unwrap();
                return (card, pair);
            }
            Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends frames to two addresses and to all, and checks those that come, until `is_over`. Those of each
/// sender come in order, and none twice.
fn exchange(
    daemon: &Daemon,
    name: &str,
    own: u8,
    others: [u8; 2],
    is_over: &AtomicBool,
    from: &[AtomicU64; 4],
) {
    let (_card, mut pair) = connect(daemon, name);
    let mut last = [0; 4];
    let mut number = 1;
    while !is_over.load(Ordering::Relaxed) {
        let to = match number % 8 {
            7 => EVERYBODY,
            n => mac(others[(n % 2) as usize]),
        };
        let sent = pair.send(&[Outgoing::from(&frame(to, own, number)[..])]).unwrap() as u64;
        number += sent;
        if sent == 0 || number % 32 == 0 {
            // The workers and the other drivers need the processor too.
            thread::sleep(PAUSE);
            pair.wait(Interest::Receive, Some(PAUSE)).unwrap();
        }
        pair.receive(64, |frame| {
            let bytes = frame.to_vec();
            // The load of the card that leaves has another source in some tests.
            if bytes[6..11] != mac(0)[..5] {
                assert_ne!(bytes[6..12], [0; 6], "a frame of lost memory");
                from[0].fetch_add(1, Ordering::Relaxed);
                return;
            }
            let (sender, number) = check(&bytes);
            assert!(number > last[usize::from(sender)], "{sender}: {number}");
            last[usize::from(sender)] = number;
            from[usize::from(sender)].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    }
}

/// The cards a and b.
struct Others<'a> {
    /// The frames that each has received, by sender. Those of a load of card c are the first.
    received: [&'a [AtomicU64; 4]; 2],
}

impl Others<'_> {
    /// Waits until both have received `more` more frames from any of these senders of each.
    fn wait(&self, what: &str, from: [&[usize]; 2], more: u64) {
        let counts = || {
            [0, 1].map(|at: usize| {
                from[at].iter().map(|sender| self.received[at][*sender].load(Ordering::Relaxed)).sum::<u64>()
            })
        };
        let before = counts();
        eventually(what, || counts().iter().zip(before).all(|(now, before)| *now > before + more));
    }

    /// Waits until frames have passed between the two.
    fn go_on(&self) {
        self.wait("frames pass between the others", [&[2], &[1]], 100);
    }

    /// Waits until frames of card c have reached both.
    fn hear_card_c(&self) {
        self.wait("card c is heard", [&[0, 3]; 2], 0);
    }
}

/// Runs the cards a and b, which exchange frames and send to card c as well, and lets card c leave in
/// each round.
fn others_go_on(mut leave: impl FnMut(&Daemon, &Others<'_>)) {
    let daemon = Daemon::serve("workers = 2", &TABLES).unwrap();
    let is_over = AtomicBool::new(false);
    let (at_1, at_2): ([AtomicU64; 4], [AtomicU64; 4]) = Default::default();
    thread::scope(|scope| {
        scope.spawn(|| exchange(&daemon, "a", 1, [2, 3], &is_over, &at_1));
        scope.spawn(|| exchange(&daemon, "b", 2, [1, 3], &is_over, &at_2));
        let others = Others { received: [&at_1, &at_2] };
        others.go_on();
        for _ in 0..ROUNDS {
            leave(&daemon, &others);
            others.go_on();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let (status, log) = daemon.stop().unwrap();
    assert!(status.success());
    assert!(!log.iter().any(|line| line.contains("panicked") || line.contains("broken ")), "{log:#?}");
}

/// Starts a driver that sends to all and receives from all.
fn load(daemon: &Daemon, name: &str) -> Child {
    let mut command = child_command(kickless_binary().unwrap());
    command.args(["bench", "net", "--direction=echo", "--time=60s", "--depth=64", "--frame-size=200"]);
    command.args(["--wait=sleep", "--rate=20000"]);
    command.arg(format!("--socket-path={}", daemon.socket_of(name).display()));
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn a_guest_is_killed_with_frames_on_their_way_in_both_directions() {
    let mut held = None;
    others_go_on(|daemon, others| {
        let mut driver = load(daemon, "c");
        others.hear_card_c();
        driver.kill().unwrap();
        driver.wait().unwrap();
        others.go_on();
        // The daemon keeps nothing of a guest that was killed.
        let holdings = *held.get_or_insert_with(|| daemon.holdings().unwrap());
        daemon.returns_to(holdings).unwrap();
    });
}

/// The file of the memory of card c is truncated while the card carries frames in both directions. Its rings
/// break. The lost part reads as zeroes, and no such frame reaches the others.
#[test]
fn the_memory_of_a_card_is_lost_with_frames_on_their_way_in_both_directions() {
    // All memory, half of the receive buffers and what follows, and half of the transmit buffers.
    const LEFT: [u64; 3] = [0, 0x8000, 0x19000];
    fault::guard().unwrap();
    let frame = [&EVERYBODY[..], &[2, 0, 0, 0, 9, 3], &[0x88, 0xb5]].concat();
    others_go_on(|daemon, others| {
        for (shape, left) in CardShape::BOTH.into_iter().flat_map(|shape| LEFT.map(|left| (shape, left))) {
            let mut card = FrontendCard::start(&daemon.socket_of("c"), shape).unwrap();
            card.set_frames(TRANSMIT, &frame).unwrap();
            card.fill(RECEIVE).unwrap();
            eventually("the card carries frames in both directions", || {
                let sent = card.send_more(TRANSMIT).unwrap();
                sent > 0 && card.rings[RECEIVE].queue.used_ready() > 0
            });
            card.ram.truncate(Gpa(RAM_BASE + left)).unwrap();
            eventually("the rings of the card break", || {
                // Without its memory, the driver cannot use the ring either.
                let _ = card.send_more(TRANSMIT);
                card.rings[TRANSMIT].queue.kick();
                card.rings.iter().any(|ring| ring.queue.err().take() > 0)
            });
            others.go_on();
        }
    });
}

/// The driver of card c resets it: both rings stop while they have frames, and empty ones start.
#[test]
fn a_guest_is_reset_with_frames_on_their_way_in_both_directions() {
    let frame = [&EVERYBODY[..], &[2, 0, 0, 0, 9, 3], &[0x88, 0xb5]].concat();
    others_go_on(|daemon, others| {
        for shape in CardShape::BOTH {
            let mut card = FrontendCard::start(&daemon.socket_of("c"), shape).unwrap();
            for resets in [true, false] {
                card.set_frames(TRANSMIT, &frame).unwrap();
                card.fill(RECEIVE).unwrap();
                eventually("the card carries frames in both directions", || {
                    let sent = card.send_more(TRANSMIT).unwrap();
                    sent > 0 && card.rings[RECEIVE].queue.used_ready() > 0
                });
                for ring in [RECEIVE, TRANSMIT].into_iter().filter(|_| resets) {
                    card.frontend.stop(&mut card.rings[ring].queue).unwrap();
                    card.replace(ring).unwrap();
                    card.resume(ring).unwrap();
                }
                others.go_on();
            }
        }
    });
}

#[test]
fn a_card_is_removed_from_a_running_switch_and_comes_back() {
    // The others count on increasing numbers.
    let mut number = 1;
    others_go_on(|daemon, others| {
        let (card, mut pair) = connect(daemon, "c");
        let mut exchange = |count: u64| {
            let end = number + count;
            while number < end {
                let sent = pair.send(&[Outgoing::from(&frame(EVERYBODY, 3, number)[..])]);
                let Ok(sent) = sent else { return };
                number += sent as u64;
                if pair.receive(64, |_| {}).is_err() {
                    return;
                }
            }
        };
        exchange(500);
        daemon.reload("workers = 2", &TABLES[..2]).unwrap();
        // It is in use, so it goes on until its front-end has left, with frames on their way to it.
        exchange(500);
        let socket = daemon.socket_of("c");
        assert!(socket.exists());
        drop((pair, card));
        eventually("the card is removed", || !socket.exists());
        others.go_on();
        daemon.reload("workers = 2", &TABLES).unwrap();
        eventually("the card is back", || socket.exists());
    });
}
