//! Measures cards on TAPs beside bare loops of calls on a TAP with the same settings.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kickless_driver::{Card, CardOptions, Checksum, Offload, Outgoing, Protocol, QueuePair, Segmentation};
use kickless_net_port::{Offloads, Tap, TapQueue};
use kickless_spec::net::Header;
use kickless_testing::{ip, tcp_segmentation};
use kickless_tests::daemon::{CardConfig, Daemon};
use rustix::io::{Errno, read, write};
use zerocopy::IntoBytes;

use crate::common::{Cpus, Plan};
use crate::{BATCH, compare, frame};

/// Frames that go round.
const ROUND: usize = 64;
/// Length of the headers of a packet, Ethernet, IP and TCP.
const HEADERS: usize = 54;
/// The longest packets that are in the driver's buffers at a time.
const PACKETS: u16 = 32;

/// Returns the bytes that a bare loop writes for a frame.
fn with_header(header: &Header, frame: &[u8]) -> Vec<u8> {
    [header.as_bytes(), frame].concat()
}

/// Returns the longest TCP packet, its header for a TAP, and its offload for our driver.
pub(crate) fn packet() -> (Vec<u8>, Header, Offload) {
    let mut packet = vec![7; 65_549];
    packet[..12].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1]);
    let ip = [8, 0, 0x45, 0, 0xff, 0xff, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    packet[12..34].copy_from_slice(&ip);
    packet[34..54].copy_from_slice(&[0, 1, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    let segmentation =
        Some(Segmentation { protocol: Protocol::TcpV4, size: 1448, header_len: 54, ecn: false });
    (
        packet,
        tcp_segmentation(),
        Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, segmentation },
    )
}

/// Writes frames in turn, headers included, until the time is over. Returns the rate.
fn bare_writes(queue: &TapQueue, frames: &[Vec<u8>], time: Duration) -> Result<f64> {
    let (begun, mut count) = (Instant::now(), 0);
    let mut next = frames.iter().cycle();
    while begun.elapsed() < time {
        for frame in next.by_ref().take(BATCH) {
            write(queue, frame)?;
        }
        count += BATCH;
    }
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// Reads frames and writes them again until the time is over. Returns the rate.
fn bare_rounds(queue: &TapQueue, frame: &[u8], time: Duration) -> Result<f64> {
    let mut bytes = vec![0; 70_000];
    for _ in 0..ROUND {
        write(queue, frame)?;
    }
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        for _ in 0..BATCH {
            match read(queue, &mut bytes) {
                Ok(len) => write(queue, black_box(&bytes[..len]))?,
                Err(Errno::AGAIN) => continue,
                Err(error) => return Err(error.into()),
            };
            count += 1;
        }
    }
    let rate = f64::from(count) / begun.elapsed().as_secs_f64();
    while read(queue, &mut bytes).is_ok() {}
    Ok(rate)
}

/// Sends a frame as often as possible. The driver copies its first `copied` bytes into its buffers; the
/// others are there from earlier frames. Returns the rate of those that the card has used.
fn sends(pair: &mut QueuePair, bytes: &[u8], copied: usize, offload: Offload, time: Duration) -> Result<f64> {
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        count += pair.send_with(
            BATCH,
            |_| bytes.len(),
            |_, frame| {
                frame.write(0, &bytes[..copied]);
                frame.set_offload(offload);
            },
        )?;
    }
    let left = pair.in_flight()?;
    let rate = (count as u64 - left) as f64 / begun.elapsed().as_secs_f64();
    ensure!(pair.flush(Some(Duration::from_secs(10)))?, "frames stay in flight");
    Ok(rate)
}

/// Sends frames, and again all that come back. Returns their rate.
fn rounds(pair: &mut QueuePair, bytes: &[u8], time: Duration) -> Result<f64> {
    let batch = [Outgoing::from(bytes); ROUND];
    let mut sent = 0;
    while sent < ROUND {
        sent += pair.send(&batch[sent..])?;
    }
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        count += pair.forward(BATCH, |_| true)?;
    }
    let rate = count as f64 / begun.elapsed().as_secs_f64();
    // The others are dropped when they come back.
    let last = Instant::now();
    while last.elapsed() < Duration::from_millis(20) {
        pair.receive(BATCH, |_| {})?;
    }
    Ok(rate)
}

/// A card on a TAP with our driver, and another TAP for bare loops.
struct Taps {
    bare: TapQueue,
    pair: QueuePair,
    _card: Card,
    _daemon: Daemon,
    _tap: Tap,
}

impl Taps {
    /// Makes the TAPs, whose names begin with `name`. Each is at a bridge that returns its frames, if
    /// `returns`.
    fn new(cpus: &Cpus, name: &str, returns: bool, options: impl FnOnce(&mut CardOptions)) -> Result<Taps> {
        let [bare, card] = ["bare", "card"].map(|end| format!("{name}-{end}"));
        for name in [&bare, &card] {
            ip(&format!("tuntap add dev {name} mode tap multi_queue"));
            ip(&format!("link set {name} up txqueuelen 1000"));
            if returns {
                ip(&format!("link add br-{name} up type bridge forward_delay 0 mcast_snooping 0"));
                ip(&format!("link set {name} master br-{name}"));
                ip(&format!("link set {name} type bridge_slave hairpin on learning off"));
            }
        }
        let tap = Tap::open(&bare, 1)?;
        tap.set(Offloads::empty(), |_| true);
        cpus.for_back_ends()?;
        let daemon = Daemon::start_card(&CardConfig::new(&format!("tap:{card}")).with(&["--poll=always"]))?;
        cpus.for_driver()?;
        let mut card = CardOptions::new(daemon.socket());
        options(&mut card);
        let card = Card::connect(card)?;
        let pair = card.pair(0).ok_or_else(|| anyhow::anyhow!("the card has no pair"))?;
        // A thread of the card attaches its queue.
        thread::sleep(Duration::from_millis(100));
        Ok(Taps { bare: tap.queue(0)?, pair, _card: card, _daemon: daemon, _tap: tap })
    }

    /// Runs turns of both in alternation.
    fn turns(
        &mut self,
        plan: &Plan,
        cpus: &Cpus,
        ours: impl Fn(&mut QueuePair) -> Result<f64>,
        bare: impl Fn(&TapQueue) -> Result<f64>,
    ) -> Result<Vec<[f64; 2]>> {
        (0..plan.rounds)
            .map(|_| {
                cpus.for_driver()?;
                Ok([ours(&mut self.pair)?, bare(&self.bare)?])
            })
            .collect()
    }
}

const NAMES: [&str; 2] = ["card", "bare loop"];

pub(crate) fn tap(plan: &Plan, cpus: &Cpus) -> Result<()> {
    let mut taps = Taps::new(cpus, "sent", false, |_| {})?;
    for len in [64, 1514] {
        let frame = frame(len);
        let bare = [with_header(&Header::default(), &frame)];
        let turns = taps.turns(
            plan,
            cpus,
            |pair| sends(pair, &frame, len, Offload::default(), plan.time),
            |queue| bare_writes(queue, &bare, plan.time),
        )?;
        compare(&format!("{len} bytes, transmit"), NAMES, &turns, 0.9, plan);
    }
    // Its worker would share the CPU with the next one.
    drop(taps);
    let mut taps = Taps::new(cpus, "round", true, |_| {})?;
    for len in [64, 1514] {
        let frame = frame(len);
        let turns = taps.turns(
            plan,
            cpus,
            |pair| rounds(pair, &frame, plan.time),
            |queue| bare_rounds(queue, &with_header(&Header::default(), &frame), plan.time),
        )?;
        compare(&format!("{len} bytes, transmit and receive"), NAMES, &turns, 0.9, plan);
    }
    Ok(())
}

pub(crate) fn gso(plan: &Plan, cpus: &Cpus) -> Result<()> {
    let (packet, header, offload) = packet();
    let bare = with_header(&header, &packet);
    let mut taps = Taps::new(cpus, "copied", false, |_| {})?;
    let turns = taps.turns(
        plan,
        cpus,
        |pair| sends(pair, &packet, packet.len(), offload, plan.time),
        |queue| bare_writes(queue, std::slice::from_ref(&bare), plan.time),
    )?;
    compare("packets of 64 KiB that the driver copies, transmit", NAMES, &turns, 0.9, plan);
    drop(taps);
    // Each packet is one piece of memory, as it is for the bare loop.
    let mut taps = Taps::new(cpus, "whole", false, |options| {
        (options.buffer_len, options.queue_size) = (bare.len() as u32, PACKETS);
    })?;
    // Fills all buffers.
    sends(&mut taps.pair, &packet, packet.len(), offload, Duration::from_millis(20))?;
    let one = [bare];
    let many = vec![one[0].clone(); PACKETS.into()];
    for (what, bare) in [("one buffer", &one[..]), ("as many buffers", &many[..])] {
        let turns = taps.turns(
            plan,
            cpus,
            |pair| sends(pair, &packet, HEADERS, offload, plan.time),
            |queue| bare_writes(queue, bare, plan.time),
        )?;
        let what = format!("packets of 64 KiB in the driver's buffers, transmit, bare loop with {what}");
        compare(&what, NAMES, &turns, 0.9, plan);
    }
    Ok(())
}
