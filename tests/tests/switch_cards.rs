//! Kills and removes cards of a switch that exchange frames with others in both directions.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Interest, Outgoing, QueuePair};
use kickless_testing::{LIMIT, eventually};
use kickless_tests::daemon::{Daemon, child_command, kickless_binary};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const EVERYBODY: [u8; 6] = [0xff; 6];
/// Rounds in which a card leaves.
const ROUNDS: u64 = 8;

fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 2, number]
}

fn table(number: u8) -> String {
    format!("port = \"switch:busy\"\nmac = \"02:00:00:00:02:{number:02x}\"")
}

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
        match Card::connect(CardOptions::new(daemon.socket_of(name))) {
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
        number += pair.send(&[Outgoing::from(&frame(to, own, number)[..])]).unwrap() as u64;
        if number % 32 == 0 {
            pair.wait(Interest::Receive, Some(Duration::from_millis(1))).unwrap();
        }
        pair.receive(64, |frame| {
            let bytes = frame.to_vec();
            // The load of the card that leaves has another source.
            if bytes[6..11] != mac(0)[..5] {
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

/// Runs the cards a and b, which exchange frames and send to card c as well, and lets card c leave in
/// each round.
fn others_go_on(mut leave: impl FnMut(&Daemon, &dyn Fn())) {
    let tables = [1, 2, 3].map(table);
    let devices = [("a", tables[0].as_str()), ("b", &tables[1]), ("c", &tables[2])];
    let daemon = Daemon::serve("workers = 2", &devices).unwrap();
    let is_over = AtomicBool::new(false);
    let (at_1, at_2): ([AtomicU64; 4], [AtomicU64; 4]) = Default::default();
    thread::scope(|scope| {
        scope.spawn(|| exchange(&daemon, "a", 1, [2, 3], &is_over, &at_1));
        scope.spawn(|| exchange(&daemon, "b", 2, [1, 3], &is_over, &at_2));
        let goes_on = || {
            let before = [&at_1[2], &at_2[1]].map(|count| count.load(Ordering::Relaxed));
            eventually("frames pass between the others", || {
                let now = [&at_1[2], &at_2[1]].map(|count| count.load(Ordering::Relaxed));
                now.iter().zip(before).all(|(now, before)| *now > before + 100)
            });
        };
        goes_on();
        for _ in 0..ROUNDS {
            leave(&daemon, &goes_on);
            goes_on();
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
    command.arg(format!("--socket-path={}", daemon.socket_of(name).display()));
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn a_guest_is_killed_with_frames_on_their_way_in_both_directions() {
    let mut held = None;
    others_go_on(|daemon, goes_on| {
        let mut driver = load(daemon, "c");
        goes_on();
        driver.kill().unwrap();
        driver.wait().unwrap();
        goes_on();
        // The daemon keeps nothing of a guest that was killed.
        let holdings = *held.get_or_insert_with(|| daemon.holdings().unwrap());
        daemon.returns_to(holdings).unwrap();
    });
}

#[test]
fn a_card_is_removed_from_a_running_switch_and_comes_back() {
    let tables = [1, 2, 3].map(table);
    let two = [("a", tables[0].as_str()), ("b", &tables[1])];
    let three = [two[0], two[1], ("c", &tables[2])];
    // The others count on increasing numbers.
    let mut number = 1;
    others_go_on(|daemon, goes_on| {
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
        daemon.reload("workers = 2", &two).unwrap();
        let socket = daemon.socket_of("c");
        eventually("the card is removed", || {
            exchange(10);
            !socket.exists()
        });
        drop((pair, card));
        goes_on();
        daemon.reload("workers = 2", &three).unwrap();
        eventually("the card is back", || socket.exists());
    });
}
