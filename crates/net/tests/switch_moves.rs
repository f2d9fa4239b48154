//! Cards of a switch whose tasks move between workers, and are parked, while frames pass, directly and
//! through inboxes.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::Executor;
use kickless_io::{EngineKind, EngineOptions};
use kickless_net::Net;
use kickless_spec::net::Header;
use kickless_testing::{LIMIT, Random, eventually};
use kickless_worker::{Options, Poll, WorkerPool};
use rig::running::Running;
use rig::switch::{RECEIVE, TRANSMIT, addressed, mac, name, open};
use rig::{Kind, counter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use zerocopy::IntoBytes;

const CARDS: usize = 3;
const WORKERS: usize = 3;
/// The bursts of each card. `MOVE_ROUNDS` sets another number.
const ROUNDS: u32 = 20;
/// The bursts after which something that has not happened will not.
const ROUNDS_MAX: u32 = 1_000_000;
const HEADER: usize = size_of::<Header>();

/// Returns the frame with this number from one card to another, behind its header.
fn frame(to: usize, from: usize, len: usize, number: u32) -> Vec<u8> {
    let mut frame = [Header::default().as_bytes(), &addressed(mac(to), from), &number.to_le_bytes()].concat();
    frame.extend((18..len).map(|at| (at as u32).wrapping_mul(7).wrapping_add(number) as u8));
    frame
}

/// The cards, with the numbers of the last frames from one to another.
struct Lan {
    cards: [Arc<Net>; CARDS],
    rings: [[Running; 2]; CARDS],
    sent: [[u32; CARDS]; CARDS],
    received: [[u32; CARDS]; CARDS],
}

impl Lan {
    fn new(executors: &[Arc<dyn Executor>], kind: Kind) -> Self {
        let name = name();
        let cards = std::array::from_fn(|number| rig::card_with(Some(mac(number)), 1, open(&name)));
        let rings = std::array::from_fn(|number| {
            [RECEIVE, TRANSMIT].map(|index| Running::start(&executors[number], &cards[number], index, kind))
        });
        Self { cards, rings, sent: Default::default(), received: Default::default() }
    }

    /// Sends a burst of frames from one card to others.
    fn send(&mut self, from: usize, random: &mut Random) {
        for _ in 0..1 + random.below(24) {
            let to = (from + 1 + random.below(CARDS as u64 - 1) as usize) % CARDS;
            let len = [60, 600, 1514, 1514, 6000, 20_000][random.below(6) as usize];
            let number = self.sent[from][to] + 1;
            let frame = frame(to, from, len, number);
            let transmit = &mut self.rings[from][1];
            let is_sent = match len {
                0..=2048 => transmit.guest.send(&frame, 4096),
                _ => transmit.guest.send_indirect(&frame, 2048),
            };
            if is_sent.is_some() {
                self.sent[from][to] = number;
            }
        }
        self.rings[from][1].kick();
    }

    /// Adds up a counter of the cards.
    fn sum(&self, name: &str) -> u64 {
        self.cards.iter().map(|card| counter(card, name)).sum()
    }

    /// Parks the rings of a card, and lets them go on after the answers.
    fn park(&self, card: usize) {
        let parked = self.rings[card].each_ref().map(|ring| ring.handle.park());
        for (ring, parked) in self.rings[card].iter().zip(parked) {
            let position = parked.recv_timeout(LIMIT).expect("a ring is not parked");
            assert_eq!((position.in_flight, position.is_broken), (0, false));
            ring.handle.unpark();
        }
    }

    /// Checks the frames that have come. Returns whether these are all that were sent.
    fn receive(&mut self) -> bool {
        for (to, [receive, transmit]) in self.rings.iter_mut().enumerate() {
            while transmit.guest.take().is_some() {}
            while let Some((_, bytes)) = receive.guest.receive(HEADER) {
                let from = usize::from(bytes[11]);
                let number = u32::from_le_bytes(bytes[14..18].try_into().unwrap());
                let last = std::mem::replace(&mut self.received[to][from], number);
                assert_eq!(number, last + 1, "lost, twice or out of order, from {from} to {to}");
                assert!(bytes == frame(to, from, bytes.len(), number)[HEADER..], "changed");
            }
            while receive.guest.offer(&[1530], true).is_some() {}
            receive.kick();
        }
        (0..CARDS).all(|from| (0..CARDS).all(|to| self.sent[from][to] == self.received[to][from]))
    }
}

/// Each frame arrives once, in order and unchanged, and no receiver sleeps on while frames wait for it.
#[test]
fn frames_pass_while_tasks_move_and_are_parked() {
    let rounds = std::env::var("MOVE_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    for (seed, poll) in (0..).zip([Poll::Always, Poll::Never, Poll::default()]) {
        for packed in [false, true] {
            let engine = EngineOptions::new(EngineKind::Threads, 8);
            let options = Options { workers: WORKERS, engine, cpus: Vec::new(), poll };
            let pool = Arc::new(WorkerPool::start(&options).unwrap());
            let executors: Vec<_> = (1..=CARDS as u32).map(|weight| pool.clone().executor(weight)).collect();
            let mut lan = Lan::new(&executors, Kind { packed, event_idx: true, in_order: packed });
            let mut random = Random(seed);
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                let mover = scope.spawn(|| {
                    let mut random = Random(seed + 100);
                    while !is_over.load(Ordering::Relaxed) {
                        pool.move_all(random.below(3) as usize, random.below(3) as usize);
                        thread::sleep(Duration::from_micros(random.below(2000)));
                    }
                });
                // A receiver that sleeps takes nothing directly. On a busy machine, one that polls may also
                // be late each time.
                let is_due = |lan: &Lan| poll == Poll::Always && lan.sum("sent_directly") == 0;
                let mut round = 0;
                while round < rounds || (round < ROUNDS_MAX && is_due(&lan)) {
                    round += 1;
                    for from in 0..CARDS {
                        lan.send(from, &mut random);
                    }
                    lan.park(random.below(CARDS as u64) as usize);
                    eventually("all frames arrive", || lan.receive());
                    // Nothing is on its way. A ring goes to a worker of its own.
                    if round % 4 == 0 {
                        let (card, index) = (random.below(3) as usize, random.below(2) as u16);
                        lan.rings[card][usize::from(index)].restart(
                            &executors[card],
                            &lan.cards[card],
                            index,
                        );
                    }
                }
                is_over.store(true, Ordering::Relaxed);
                mover.join().unwrap();
            });
            let moves: u64 = lan.rings.iter().flatten().map(|ring| ring.guest.counters.moves.get()).sum();
            let sums = ["sent_directly", "sent_frames", "dropped_late", "sent_unforwarded"]
                .map(|name| lan.sum(name));
            let sent: u32 = lan.sent.iter().flatten().sum();
            println!("{poll:?}: {moves} moves, {sums:?}");
            assert!(moves > 0 && sums[0] < sums[1], "{moves} {sums:?}");
            assert!(poll != Poll::Always || sums[0] > 0, "{sums:?}");
            assert_eq!(sums[1..], [u64::from(sent), 0, 0]);
        }
    }
}
