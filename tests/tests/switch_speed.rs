//! Measures cards on one switch: a receiver that does not refill, and many cards all to all.
//!
//! `cargo test --release -p kickless-tests --test switch_speed -- --ignored --nocapture --test-threads=1`, on
//! an idle machine. The first CPU is for the threads that drive cards, and the second one for a worker. Two
//! workers and the threads run where the scheduler puts them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, QueuePair};
use kickless_tests::daemon::Daemon;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::{Barrier, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

/// The time that each figure is measured, and the time before.
const TIME: Duration = Duration::from_secs(2);
const WARM_UP: Duration = Duration::from_millis(300);
/// A longer time for the frames of one card means that the thread had no processor. They take some 10 us.
const GAP_MAX: Duration = Duration::from_micros(200);
/// Frames of one call.
const BATCH: usize = 32;
const FRAME_LEN: usize = 64;

fn mac(card: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, card as u8]
}

fn ethernet(to: [u8; 6], from: usize) -> [u8; 14] {
    let mut header = [0; 14];
    header[..6].copy_from_slice(&to);
    header[6..12].copy_from_slice(&mac(from));
    header[12..].copy_from_slice(&[0x88, 0xb5]);
    header
}

/// A card with its driver.
struct Station {
    _card: Card,
    pair: QueuePair,
    sent: u64,
    received: u64,
    /// The longest time between two moments at which the card took frames, while its thread ran.
    longest: Duration,
    last: Instant,
}

/// The processors of both sides. With only one, both share it.
struct Cpus {
    all: CpuSet,
    driver: CpuSet,
    worker: CpuSet,
}

impl Cpus {
    fn get() -> Self {
        let all = sched_getaffinity(None).unwrap();
        let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).map(|cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            one
        });
        let (driver, worker) = each.next().zip(each.next()).unwrap_or((all, all));
        Self { all, driver, worker }
    }
}

/// The processors at the start of the program.
static CPUS: LazyLock<Cpus> = LazyLock::new(Cpus::get);

/// Moves this thread, and what it starts from now on.
fn run_on(cpus: &CpuSet) {
    sched_setaffinity(None, cpus).unwrap();
}

/// Serves this number of cards on one switch. All of them know where the others are.
fn stations(count: usize, workers: usize) -> (Daemon, Vec<Station>) {
    let names: Vec<_> = (0..count).map(|card| format!("card{card}")).collect();
    let devices: Vec<_> = names.iter().map(|name| (name.as_str(), "port = \"switch:bench\"")).collect();
    let cpus = &*CPUS;
    run_on(if workers == 1 { &cpus.worker } else { &cpus.all });
    // Several workers that never sleep would wait for one another's processor.
    let poll = if workers == 1 { "always" } else { "auto" };
    let daemon = Daemon::serve(&format!("workers = {workers}\npoll = \"{poll}\""), &devices).unwrap();
    run_on(if workers == 1 { &cpus.driver } else { &cpus.all });
    let mut stations: Vec<_> = names
        .iter()
        .map(|name| {
            let card = Card::connect(CardOptions::new(daemon.socket_of(name))).unwrap();
            let pair = card.pair(0).unwrap();
            let (longest, last) = (Duration::ZERO, Instant::now());
            Station { _card: card, pair, sent: 0, received: 0, longest, last }
        })
        .collect();
    for (card, station) in stations.iter_mut().enumerate() {
        let frame = [&ethernet([0xff; 6], card)[..], &[0; FRAME_LEN - 14]].concat();
        station.pair.send(&[(&frame[..]).into()]).unwrap();
        assert!(station.pair.flush(Some(Duration::from_secs(10))).unwrap());
    }
    (daemon, stations)
}

impl Station {
    /// Sends as many frames as there is room for in two batches, each to the next of these cards.
    fn send(&mut self, from: usize, next: &mut usize, to: &[usize], now: Instant) {
        self.send_long(FRAME_LEN, from, next, to, now);
    }

    /// Sends frames of this length.
    fn send_long(&mut self, len: usize, from: usize, next: &mut usize, to: &[usize], now: Instant) {
        let start = *next;
        for _ in 0..2 {
            let sent = self
                .pair
                .send_with(
                    BATCH,
                    |_| len,
                    |at, frame| {
                        frame.write(0, &ethernet(mac(to[(*next + at) % to.len()]), from));
                    },
                )
                .unwrap();
            *next += sent;
            self.sent += sent as u64;
        }
        if *next > start {
            self.longest = self.longest.max(now - self.last);
            self.last = now;
        }
    }

    fn receive(&mut self) {
        self.received += self.pair.receive(2 * BATCH, |_| {}).unwrap() as u64;
    }

    fn reset(&mut self) {
        (self.sent, self.received, self.longest, self.last) = (0, 0, Duration::ZERO, Instant::now());
    }
}

/// Runs `turn` until the measured time is over, and forgets the first part.
fn measure(stations: &mut [Station], mut turn: impl FnMut(&mut [Station])) {
    for time in [WARM_UP, TIME] {
        stations.iter_mut().for_each(Station::reset);
        let start = Instant::now();
        while start.elapsed() < time {
            turn(stations);
        }
    }
}

/// Prints the frames a second that a third card receives from a sender, whose other frames are for a receiver
/// that refills, and for one that does not.
#[test]
#[ignore = "a measurement"]
fn a_receiver_that_does_not_refill() {
    for workers in [1, 2] {
        let (_daemon, mut stations) = stations(3, workers);
        let mut next = 0;
        for round in 0..3 {
            let mut rates = [0.0; 2];
            for (rate, refills) in rates.iter_mut().zip([true, false]) {
                measure(&mut stations, |stations| {
                    stations[0].send(0, &mut next, &[1, 2], Instant::now());
                    stations[1].receive();
                    if refills {
                        stations[2].receive();
                    }
                });
                *rate = stations[1].received as f64 / TIME.as_secs_f64();
            }
            let [with, without] = rates;
            println!(
                "workers {workers}, round {round}: {with:.0} frames/s with refills, {without:.0} without, ratio {:.3}",
                without / with
            );
        }
    }
}

/// Prints the rates of a card that sends long frames and of one that sends short frames back. Both have as
/// many in flight as their rings hold. The long frames can go directly, so the work for them is the sender's.
#[test]
#[ignore = "a measurement"]
fn a_card_that_answers_beside_one_that_sends() {
    const LONG: usize = 1514;
    let (_daemon, mut stations) = stations(2, 1);
    let mut next = [0; 2];
    for round in 0..3 {
        measure(&mut stations, |stations| {
            stations[0].send_long(LONG, 0, &mut next[0], &[1], Instant::now());
            stations[1].receive();
            stations[1].send(1, &mut next[1], &[0], Instant::now());
            stations[0].receive();
        });
        let [long, short] = [0, 1].map(|card| stations[card].sent as f64 / TIME.as_secs_f64());
        let pauses = [0, 1].map(|card| stations[card].longest);
        println!(
            "round {round}: {long:.0} long frames/s, {short:.0} short ones, ratio {:.2}, pauses {pauses:?}",
            short / long
        );
    }
}

/// Prints how the rates of many cards differ that send to all others. Several threads drive a part of the
/// cards each.
#[test]
#[ignore = "a measurement"]
fn many_cards_are_served_fairly() {
    const CARDS: usize = 64;
    for (workers, threads) in [(1, 1), (1, 4), (2, 4)] {
        let (_daemon, mut stations) = stations(CARDS, workers);
        let start = Barrier::new(threads);
        thread::scope(|scope| {
            for (part, stations) in stations.chunks_mut(CARDS / threads).enumerate() {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    drive(stations, part * (CARDS / threads), CARDS);
                });
            }
        });
        let summary = |of: fn(&Station) -> u64| {
            let values: Vec<_> = stations.iter().map(of).collect();
            let mean = values.iter().sum::<u64>() as f64 / CARDS as f64;
            let (min, max) = (values.iter().min().unwrap(), values.iter().max().unwrap());
            format!(
                "{:.0} in all, {:.3} to {:.3} of the mean",
                mean * CARDS as f64 / TIME.as_secs_f64(),
                *min as f64 / mean,
                *max as f64 / mean
            )
        };
        let longest = stations.iter().map(|station| station.longest).max().unwrap();
        println!(
            "workers {workers}, threads {threads}: sent/s {}; received/s {}; the longest pause of a sender \
             {longest:?}",
            summary(|station| station.sent),
            summary(|station| station.received)
        );
    }
}

/// Has these cards, the first of which has the number `first`, send to all others of `cards` cards.
fn drive(stations: &mut [Station], first: usize, cards: usize) {
    let others: Vec<Vec<usize>> = (first..first + stations.len())
        .map(|card| (0..cards).filter(|other| *other != card).collect())
        .collect();
    let mut next = vec![0; stations.len()];
    let mut last = Instant::now();
    measure(stations, |stations| {
        for at in 0..stations.len() {
            let now = Instant::now();
            if now - std::mem::replace(&mut last, now) > GAP_MAX {
                stations.iter_mut().for_each(|station| station.last = now);
            }
            stations[at].send(first + at, &mut next[at], &others[at], now);
            stations[at].receive();
        }
    });
}
