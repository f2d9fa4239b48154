//! Counts the instructions of the polls of cards for each frame, with the drivers in the same thread. They
//! are the same each time, so that a change of a few shows. They need valgrind. Then times the polls of two
//! cards of a switch. No line comes from another core, and no poll is idle.
//!
//!     cargo bench -p kickless-net --bench frames [-- --instructions]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a benchmark may")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use kickless_device::Device;
use kickless_memory::{Gpa, Marks};
use kickless_net::Net;
use kickless_net_port::Tap;
use kickless_spec::net::{ETHERNET_HEADER_LEN, GSO_NONE, Header};
use kickless_testing::{CountedLoad, print_instructions, tcp_segmentation};
use kickless_virtqueue::driver::Buffer;
use rig::{Beside, Kind, Rig, SIZE_LONG, card_on, card_with};
use rustix::io::{read, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The frames of a poll, and those of several buffers.
const BATCH: u16 = 32;
const LONG_BATCH: u16 = 8;
/// The bytes of a buffer.
const BUFFER_LEN: usize = 2048;
/// The batches of a counted run, and of a timed one. The first ones allocate.
const BATCHES: u32 = 200;
const TIMED: u32 = 20_000;
const HEADER: usize = size_of::<Header>();
/// The number of the receive ring's task.
const TASK: u32 = 1;
/// The bytes from one buffer to the next, as drivers have them: neighbours are in other lines of a cache.
const STRIDE: u64 = 2304;
/// Each ring has so many buffers, which are used in turn. They are a multiple of those of a long frame.
const BUFFERS: u64 = 34 * 32;
/// The bytes of memory for an indirect table.
const TABLE_BYTES: u64 = 1024;

/// Frames from one card of a switch to another.
#[derive(Clone, Copy)]
struct Cell {
    packed: bool,
    /// The bytes of a frame.
    len: usize,
    /// The frames pass from one guest's memory to the other's.
    direct: bool,
    /// The checksums are left to the receiver, as Linux leaves those of TCP.
    partial: bool,
}

impl Cell {
    /// Returns the number of buffers that hold a frame.
    fn buffers(self) -> usize {
        (HEADER + self.len).div_ceil(BUFFER_LEN)
    }

    /// Returns the number of frames of a poll.
    fn frames(self) -> u16 {
        if self.buffers() == 1 { BATCH } else { LONG_BATCH }
    }

    fn name(self) -> String {
        let Self { packed, len, direct, partial } = self;
        let path = if direct { "direct" } else { "copied" };
        let checksum = if partial { "/partial-checksum" } else { "" };
        format!("switch/{path}/{}/{len}{checksum}", ring_name(packed))
    }
}

fn ring_name(packed: bool) -> &'static str {
    if packed { "packed" } else { "split" }
}

/// A ring whose buffers are near to one another.
struct Ring {
    rig: Rig,
    next: u64,
    /// The bytes of a chain, in buffers of [`BUFFER_LEN`].
    len: usize,
    writable: bool,
}

impl Ring {
    /// Starts a ring of a card, for chains of this length.
    fn start(card: &Arc<Net>, index: u16, packed: bool, len: usize) -> Self {
        let kind = Kind { packed, event_idx: false, in_order: false };
        let rig = Rig::start(card, index, kind, SIZE_LONG, card.features());
        Self { rig, next: 0, len, writable: index == 0 }
    }

    /// Writes the same bytes to the start of each chain.
    fn write(&mut self, bytes: &[u8]) {
        for buffer in (0..BUFFERS).step_by(self.len.div_ceil(BUFFER_LEN)) {
            self.rig.view.write(buffer_at(buffer), bytes, &mut Marks::off()).unwrap();
        }
    }

    /// Makes chains available.
    fn offer(&mut self, chains: usize) {
        let Self { rig, next, len, writable } = self;
        while rig.with_device() < chains {
            let mut buffers = Vec::new();
            for start in (0..*len).step_by(BUFFER_LEN) {
                let len = BUFFER_LEN.min(*len - start) as u32;
                buffers.push(Buffer { addr: buffer_at(*next).0, len, writable: *writable });
                *next += 1;
            }
            let id = rig.next_id().expect("a free chain");
            let is_added = match buffers.len() {
                1 => rig.add(id, buffers),
                _ => rig.add_indirect(
                    id,
                    buffer_at(BUFFERS - 1).0 + STRIDE + u64::from(id) * TABLE_BYTES,
                    buffers,
                ),
            };
            is_added.expect("room for a chain");
        }
    }

    /// Takes all buffers back.
    fn take(&mut self) {
        while self.rig.take().is_some() {}
    }
}

/// Returns the address of a buffer.
fn buffer_at(number: u64) -> Gpa {
    Gpa(rig::Guest::chain_at(0).0 + number % BUFFERS * STRIDE)
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
fn run(cell: Cell, batches: u32) -> [Duration; 2] {
    let Cell { packed, len, direct, partial } = cell;
    let cards = [1, 2].map(|number| card_with(Some([2, 0, 0, 0, 0, number]), 1, "switch:bench"));
    let ring = |card: usize, index: u16, len: usize| Ring::start(&cards[card], index, packed, len);
    let (mut transmit, mut answers) = (ring(0, 1, HEADER + len), ring(1, 1, HEADER + ETHERNET_HEADER_LEN));
    let (mut receive, mut first) = (ring(1, 0, BUFFER_LEN), ring(0, 0, BUFFER_LEN));
    receive.rig.set_location(Some((0, TASK)));
    transmit.rig.set_location(Some((0, TASK + 1)));
    // The frames of each card are for the other one.
    for (rings, to, from) in [(&mut answers, 1, 2), (&mut transmit, 2, 1)] {
        let is_long = rings.len > BUFFER_LEN;
        let header = match (is_long, partial && to == 2) {
            (true, _) => tcp_segmentation(),
            (_, true) => Header { gso_type: GSO_NONE, gso_size: 0.into(), ..tcp_segmentation() },
            _ => Header::default(),
        };
        rings.write(&[header.as_bytes(), &[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]].concat());
    }
    // The switch learns where the second card is.
    first.offer(1);
    first.rig.poll();
    answers.offer(1);
    answers.rig.poll();
    let mut times = [Duration::ZERO; 2];
    for _ in 0..batches {
        transmit.offer(cell.frames().into());
        receive.offer(usize::from(cell.frames()) * cell.buffers());
        let start = Instant::now();
        counted_submit(&mut transmit, direct.then_some(&mut receive));
        let middle = Instant::now();
        counted_complete(&mut receive);
        times[0] += middle - start;
        times[1] += middle.elapsed();
        transmit.take();
        receive.take();
    }
    let sent = u64::from(batches) * u64::from(cell.frames());
    assert_eq!(rig::counter(&cards[1], "received_frames"), sent);
    // The first batch shows where the receiver is.
    let sent_directly = if direct { sent - u64::from(cell.frames()) } else { 0 };
    assert_eq!(rig::counter(&cards[0], "sent_directly"), sent_directly);
    times
}

/// Sends frames through a loop port, and receives them again.
fn run_loop(packed: bool, len: usize, batches: u32) {
    let card = card_on(1, "loop");
    let mut transmit = Ring::start(&card, 1, packed, HEADER + len);
    let mut receive = Ring::start(&card, 0, packed, BUFFER_LEN);
    transmit.write(Header::default().as_bytes());
    for _ in 0..batches {
        transmit.offer(BATCH.into());
        receive.offer(BATCH.into());
        counted_submit(&mut transmit, None);
        counted_complete(&mut receive);
        transmit.take();
        receive.take();
    }
    assert_eq!(rig::counter(&card, "received_frames"), u64::from(batches) * u64::from(BATCH));
}

/// Returns a card on a TAP, for which a socket stands, and the other end of the socket.
fn tap_card() -> (Arc<Net>, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
    (card_on(1, Tap::over_sockets(vec![ours], true)), peer)
}

/// Sends frames to a TAP. The time and the instructions of the kernel do not count.
fn run_tap_transmit(packed: bool, len: usize, batches: u32) {
    let (card, peer) = tap_card();
    let mut transmit = Ring::start(&card, 1, packed, HEADER + len);
    transmit.write(Header::default().as_bytes());
    let mut frame = vec![0; HEADER + len];
    for _ in 0..batches {
        transmit.offer(BATCH.into());
        counted_submit(&mut transmit, None);
        for _ in 0..BATCH {
            assert_eq!(read(&peer, &mut frame), Ok(HEADER + len));
        }
        transmit.take();
    }
}

/// Receives frames from a TAP.
fn run_tap_receive(packed: bool, len: usize, batches: u32) {
    let (card, peer) = tap_card();
    let mut receive = Ring::start(&card, 0, packed, BUFFER_LEN);
    let frame = vec![0; HEADER + len];
    for _ in 0..batches {
        for _ in 0..BATCH {
            write(&peer, &frame).unwrap();
        }
        receive.offer(BATCH.into());
        counted_complete(&mut receive);
        receive.take();
    }
    assert_eq!(rig::counter(&card, "received_frames"), u64::from(batches) * u64::from(BATCH));
}

/// Returns the cells of a switch.
fn cells() -> Vec<Cell> {
    let loads = [
        (64, false, false),
        (1514, false, false),
        (1514, true, false),
        (64, false, true),
        (1514, false, true),
        (1514, true, true),
        (65_000, false, false),
        (65_000, true, false),
    ];
    let cell = |(len, direct, partial)| [false, true].map(|packed| Cell { packed, len, direct, partial });
    loads.map(cell).concat()
}

/// Returns the loads whose instructions are counted.
fn loads() -> Vec<CountedLoad> {
    let frames = BATCHES * u32::from(BATCH);
    let mut loads = Vec::new();
    for (name, run) in [
        ("loop", run_loop as fn(bool, usize, u32)),
        ("tap/transmit", run_tap_transmit),
        ("tap/receive", run_tap_receive),
    ] {
        for packed in [false, true] {
            for len in [64, 1514] {
                let name = format!("{name}/{}/{len}", ring_name(packed));
                loads.push(CountedLoad::new(name, frames, move || run(packed, len, BATCHES)));
            }
        }
    }
    loads.extend(cells().into_iter().map(|cell| {
        CountedLoad::new(cell.name(), BATCHES * u32::from(cell.frames()), move || {
            run(cell, BATCHES);
        })
    }));
    loads
}

fn main() {
    if !print_instructions(&loads()) {
        return;
    }
    for cell in cells() {
        let [transmit, receive] =
            run(cell, TIMED).map(|time| time.as_nanos() as f64 / f64::from(TIMED * u32::from(cell.frames())));
        println!("{}: {transmit:.1} ns to send and {receive:.1} ns to receive a frame", cell.name());
    }
}
