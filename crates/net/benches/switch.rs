//! Counts and times the polls of two cards of a switch for each frame, with the drivers in the same thread.
//! So no line comes from another core, and no poll is idle. The instructions are the same each time, so that
//! a change of a few shows. They need valgrind.
//!
//!     cargo bench -p kickless-net --bench switch
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a benchmark may")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use kickless_device::Device;
use kickless_memory::{Gpa, Marks};
use kickless_net_port::Port;
use kickless_spec::net::{ETHERNET_HEADER_LEN, Header};
use kickless_testing::counted_instructions;
use kickless_virtqueue::driver::Buffer;
use rig::{Beside, Kind, Rig, SIZE_LONG, card_with};
use std::time::{Duration, Instant};

/// Frames of a poll.
const BATCH: u16 = 32;
/// The batches of a counted run, and of a timed one. The first ones allocate.
const BATCHES: u32 = 200;
const TIMED: u32 = 20_000;
const HEADER: usize = size_of::<Header>();
/// The number of the receive ring's task.
const TASK: u32 = 1;
/// The bytes from one buffer to the next, as drivers have them: neighbours are in other lines of a cache.
const STRIDE: u64 = 2304;
/// Each ring has buffers for this many frames, which are used in turn.
const BUFFERS: u64 = 1100;

/// A load that is measured.
#[derive(Clone, Copy)]
struct Cell {
    packed: bool,
    /// The bytes of a frame.
    len: usize,
    /// The frames pass from one guest's memory to the other's.
    direct: bool,
}

/// A ring whose buffers are near to one another.
struct Ring {
    rig: Rig,
    next: u64,
    len: u32,
    writable: bool,
}

impl Ring {
    /// Makes a batch of buffers available.
    fn offer(&mut self) {
        let Self { rig, next, len, writable } = self;
        while rig.with_device() < usize::from(BATCH) {
            let addr = rig::Guest::chain_at(0).0 + *next % BUFFERS * STRIDE;
            let buffer = Buffer { addr, len: *len, writable: *writable };
            let id = rig.next_id().expect("a free chain");
            rig.add(id, vec![buffer]).expect("room for a chain");
            *next += 1;
        }
    }

    /// Takes all buffers back.
    fn take(&mut self) {
        while self.rig.take().is_some() {}
    }
}

/// Polls a transmit ring. It may send directly to the receive ring.
#[inline(never)]
fn counted_submit(ring: &mut Ring, beside: Option<&mut Ring>) {
    match beside {
        None => ring.rig.poll_with(1000, true),
        Some(receive) => ring.rig.poll_beside(1000, Beside(vec![(TASK, &mut receive.rig)])),
    };
}

#[inline(never)]
fn counted_complete(ring: &mut Ring) {
    ring.rig.poll_with(1000, true);
}

/// Passes batches from one card to another, directly or through the inbox. Returns the times of the polls of
/// both rings.
fn run(Cell { packed, len, direct }: Cell, batches: u32) -> [Duration; 2] {
    let kind = Kind { packed, event_idx: false, in_order: false };
    let cards = [1, 2].map(|number| {
        let port: Port = "switch:bench".parse().unwrap();
        card_with(Some([2, 0, 0, 0, 0, number]), 1, port.open(1, |_| unreachable!("no descriptor")).unwrap())
    });
    let ring = |card: usize, index: u16, len: usize| {
        let rig = Rig::start(&cards[card], index, kind, SIZE_LONG, cards[card].features());
        Ring { rig, next: 0, len: len as u32, writable: index == 0 }
    };
    let (mut transmit, mut answers) = (ring(0, 1, HEADER + len), ring(1, 1, HEADER + ETHERNET_HEADER_LEN));
    let (mut receive, mut first) = (ring(1, 0, 2048), ring(0, 0, 2048));
    receive.rig.set_location(Some((0, TASK)));
    transmit.rig.set_location(Some((0, TASK + 1)));
    // The frames of each card are for the other one.
    for (rings, to, from) in [(&mut answers, 1, 2), (&mut transmit, 2, 1)] {
        let header = [&[0; HEADER][..], &[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]].concat();
        for buffer in 0..BUFFERS {
            let at = Gpa(rig::Guest::chain_at(0).0 + buffer * STRIDE);
            rings.rig.view.write(at, &header, &mut Marks::off()).unwrap();
        }
    }
    // The switch learns where the second card is.
    first.offer();
    first.rig.poll();
    answers.offer();
    answers.rig.poll();
    let mut times = [Duration::ZERO; 2];
    for _ in 0..batches {
        transmit.offer();
        receive.offer();
        let start = Instant::now();
        counted_submit(&mut transmit, direct.then_some(&mut receive));
        let middle = Instant::now();
        counted_complete(&mut receive);
        times[0] += middle - start;
        times[1] += middle.elapsed();
        transmit.take();
        receive.take();
    }
    let sent = u64::from(batches) * u64::from(BATCH);
    assert_eq!(rig::counter(&cards[1], "received_frames"), sent);
    // The first batch shows where the receiver is.
    let sent_directly = if direct { sent - u64::from(BATCH) } else { 0 };
    assert_eq!(rig::counter(&cards[0], "sent_directly"), sent_directly);
    times
}

fn main() {
    let cells = [(64, false), (1514, false), (1514, true)]
        .map(|(len, direct)| [false, true].map(|packed| Cell { packed, len, direct }))
        .concat();
    if let Some(cell) = std::env::args().nth(1).and_then(|argument| argument.parse::<usize>().ok()) {
        run(cells[cell], BATCHES);
        return;
    }
    for (number, cell) in cells.into_iter().enumerate() {
        let ring = if cell.packed { "packed" } else { "split" };
        let way = if cell.direct { "directly" } else { "in batches" };
        let count = counted_instructions(&number.to_string()).map_or_else(
            || "valgrind cannot count instructions here".to_owned(),
            |count| format!("{:.0} instructions", count / f64::from(BATCHES * u32::from(BATCH))),
        );
        let [transmit, receive] =
            run(cell, TIMED).map(|time| time.as_nanos() as f64 / f64::from(TIMED) / f64::from(BATCH));
        println!(
            "{ring}, {} bytes {way}: {count}, {transmit:.1} ns to send and {receive:.1} ns to receive a frame",
            cell.len
        );
    }
}
