//! Measures network cards beside the calls that they consist of, and disks beside a card. Needs root for the
//! TAPs, which are in a network namespace.
//!
//!     cargo bench -p kickless-tests --bench cards [-- --quick] [tap] [gso] [metadata] [disks]
//!
//! The driver polls on the first CPU, and the back-ends have the second.
//! - `tap`: frames through a TAP, with our driver, against a bare loop of `write` on the first CPU, because
//!   the back-end polls on the second one. With a bridge that returns each frame (hairpin mode), the bare
//!   loop is one of `read` and `write`.
//! - `gso`: packets of 64 KiB that the kernel would segment, against the bare loop of writes.
//! - `metadata`: a transmit ring inside one memory region, and one that crosses two, where each access is
//!   translated.
//! - `disks`: reads from `null:1G` with one worker: alone, beside a card that is idle, and beside one whose
//!   driver sends as fast as it can. Two drivers share the first CPU in the last case, so the reads alone are
//!   measured a second time beside a thread that burns that CPU.

mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use common::{Contestant, Cpus, Plan, Spread, Turn};
use kickless_driver::{
    Card, CardOptions, Checksum, Offload, Outgoing, Protocol, QueuePair, Segmentation, Waiting,
};
use kickless_memory::Gpa;
use kickless_net_port::{Offloads, Tap, TapQueue};
use kickless_spec::net::Header;
use kickless_testing::{in_network_namespace, ip, tcp_segmentation};
use kickless_tests::daemon::{CardConfig, Daemon};
use kickless_tests::driver::load::random_sectors;
use kickless_tests::frontend::card::{Card as FrontendCard, CardShape};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_vhost_user::FrontendMessage as Message;
use rustix::io::{Errno, read, write};
use zerocopy::IntoBytes;

/// Frames that a call of the driver carries.
const BATCH: usize = 32;
/// Frames that go round.
const ROUND: usize = 64;
const DISK_SIZE: u64 = 1 << 30;
const TRANSMIT: usize = 1;

/// Returns the bytes that a bare loop writes for a frame.
fn with_header(header: &Header, frame: &[u8]) -> Vec<u8> {
    [header.as_bytes(), frame].concat()
}

/// Returns a frame of this length to an address that nobody has, with the packet of an EtherType for
/// experiments.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![7; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame
}

/// Returns the longest TCP packet, its header for a TAP, and its offload for our driver.
fn packet() -> (Vec<u8>, Header, Offload) {
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

/// Writes a frame, header included, until the time is over. Returns the rate.
fn bare_writes(queue: &TapQueue, frame: &[u8], time: Duration) -> Result<f64> {
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        for _ in 0..BATCH {
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

/// Sends a frame as often as possible. Returns the rate of those that the card has used.
fn sends(pair: &mut QueuePair, bytes: &[u8], offload: Offload, time: Duration) -> Result<f64> {
    let batch = [Outgoing { bytes, offload }; BATCH];
    let (begun, mut count) = (Instant::now(), 0);
    while begun.elapsed() < time {
        count += pair.send(&batch)?;
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

/// Prints the medians of two contestants, and the ratio of the turns.
fn compare(what: &str, names: [&str; 2], turns: &[[f64; 2]], target: f64, plan: &Plan) {
    let rates = [0, 1].map(|at| Spread::of(turns.iter().map(|turn| turn[at])));
    let ratio = Spread::of(turns.iter().map(|turn| turn[0] / turn[1]));
    println!(
        "{what}: {} {:.0}/s, {} {:.0}/s, ratio {:.2} ({:.2} .. {:.2}) (target: at least {target}){}",
        names[0],
        rates[0].median,
        names[1],
        rates[1].median,
        ratio.median,
        ratio.min,
        ratio.max,
        plan.remark()
    );
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
    /// Makes the TAPs. Each is at a bridge that returns its frames, if `returns`.
    fn new(cpus: &Cpus, returns: bool) -> Result<Taps> {
        let [bare, card] = if returns { ["bare1", "card1"] } else { ["bare0", "card0"] };
        for name in [bare, card] {
            ip(&format!("tuntap add dev {name} mode tap multi_queue"));
            ip(&format!("link set {name} up txqueuelen 1000"));
            if returns {
                ip(&format!("link add br-{name} up type bridge forward_delay 0 mcast_snooping 0"));
                ip(&format!("link set {name} master br-{name}"));
                ip(&format!("link set {name} type bridge_slave hairpin on learning off"));
            }
        }
        let tap = Tap::open(bare, 1)?;
        tap.set(Offloads::empty(), |_| true);
        cpus.for_back_ends()?;
        let daemon = Daemon::start_card(&CardConfig::new(&format!("tap:{card}")).with(&["--poll=always"]))?;
        cpus.for_driver()?;
        let card = Card::connect(CardOptions::new(daemon.socket()))?;
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

const TAP_NAMES: [&str; 2] = ["card", "bare loop"];

fn tap(plan: &Plan, cpus: &Cpus) -> Result<()> {
    let mut taps = Taps::new(cpus, false)?;
    for len in [64, 1514] {
        let frame = frame(len);
        let turns = taps.turns(
            plan,
            cpus,
            |pair| sends(pair, &frame, Offload::default(), plan.time),
            |queue| bare_writes(queue, &with_header(&Header::default(), &frame), plan.time),
        )?;
        compare(&format!("{len} bytes, transmit"), TAP_NAMES, &turns, 0.9, plan);
    }
    // Its worker would share the CPU with the next one.
    drop(taps);
    let mut taps = Taps::new(cpus, true)?;
    for len in [64, 1514] {
        let frame = frame(len);
        let turns = taps.turns(
            plan,
            cpus,
            |pair| rounds(pair, &frame, plan.time),
            |queue| bare_rounds(queue, &with_header(&Header::default(), &frame), plan.time),
        )?;
        compare(&format!("{len} bytes, transmit and receive"), TAP_NAMES, &turns, 0.9, plan);
    }
    Ok(())
}

fn gso(plan: &Plan, cpus: &Cpus) -> Result<()> {
    let (packet, header, offload) = packet();
    let mut taps = Taps::new(cpus, false)?;
    let turns = taps.turns(
        plan,
        cpus,
        |pair| sends(pair, &packet, offload, plan.time),
        |queue| bare_writes(queue, &with_header(&header, &packet), plan.time),
    )?;
    compare("packets of 64 KiB, transmit", TAP_NAMES, &turns, 0.9, plan);
    Ok(())
}

/// Starts a card whose memory is in two regions, and whose transmit ring is in one of them or in both.
fn in_regions(is_split: bool) -> Result<(Daemon, FrontendCard)> {
    let daemon = Daemon::start_card(&CardConfig::new("null").with(&["--poll=always"]))?;
    let mut card = FrontendCard::prepare(daemon.socket(), CardShape { pairs: 1, packed: false })?;
    card.resize(TRANSMIT, 256)?;
    // The second region begins in the middle of the descriptor table, or in the first page, which no ring of
    // this card needs any more.
    let table = card.rings[TRANSMIT].queue.user_addresses()[0] - card.ram.user(Gpa(RAM_BASE));
    let seam = if is_split { table + 96 * 16 } else { 4096 };
    let regions = card.ram.regions_and_files(Gpa(RAM_BASE + seam))?;
    card.frontend.order(&Message::SetMemTable(regions))?;
    card.resume(TRANSMIT)?;
    Ok((daemon, card))
}

fn metadata(plan: &Plan, cpus: &Cpus) -> Result<()> {
    cpus.for_back_ends()?;
    let mut both = [in_regions(false)?, in_regions(true)?];
    cpus.for_driver()?;
    let mut turns = Vec::new();
    for _ in 0..plan.rounds {
        let mut rates = [0.0; 2];
        for ((_, card), rate) in both.iter_mut().zip(&mut rates) {
            let (begun, mut count) = (Instant::now(), 0);
            while begun.elapsed() < plan.time {
                for _ in 0..BATCH {
                    count += card.send_more(TRANSMIT)?;
                }
            }
            *rate = count as f64 / begun.elapsed().as_secs_f64();
        }
        turns.push(rates);
    }
    compare("60 bytes, transmit", ["mapped", "translated"], &turns, 1.22, plan);
    Ok(())
}

/// The load beside a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    IdleCard,
    Burner,
    BusyCard,
}

/// Reads from a disk while something runs beside it. Returns the turn, and the frames a second.
fn read_beside(
    disk: &mut Contestant,
    pair: &mut QueuePair,
    beside: Beside,
    plan: &Plan,
    cpus: &Cpus,
) -> Result<(Turn, f64)> {
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let frame = frame(64);
    let is_over = || over.load(Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            if cpus.for_driver().is_err() {
                return;
            }
            let batch = [Outgoing::from(&frame[..]); BATCH];
            match beside {
                Beside::Nothing | Beside::IdleCard => {}
                Beside::Burner => {
                    while !is_over() {
                        std::hint::spin_loop();
                    }
                }
                Beside::BusyCard => {
                    while let (false, Ok(count)) = (is_over(), pair.send(&batch)) {
                        sent.fetch_add(count as u64, Ordering::Relaxed);
                    }
                }
            }
        });
        let turn = disk.turn(32, plan.time, random_sectors(DISK_SIZE, common::BLOCK));
        over.store(true, Ordering::Relaxed);
        Ok((turn?, sent.load(Ordering::Relaxed) as f64 / plan.time.as_secs_f64()))
    })
}

fn disks(plan: &Plan, cpus: &Cpus) -> Result<()> {
    cpus.for_back_ends()?;
    let blk = format!("blk-file = \"null:{DISK_SIZE}\"\nnum-queues = 1");
    let pool = "workers = 1\n";
    let alone = Daemon::serve(pool, &[("disk", &blk)])?;
    let both = Daemon::serve(pool, &[("disk", &blk), ("card", "port = \"null\"")])?;
    cpus.for_driver()?;
    let card =
        Card::connect(CardOptions { waiting: Waiting::Sleep, ..CardOptions::new(both.socket_of("card")) })?;
    let mut pair = card.pair(0).ok_or_else(|| anyhow::anyhow!("the card has no pair"))?;
    let over = |name: &str, daemon: Daemon| -> Result<Contestant> {
        let machine = Machine::start(&daemon.socket_of("disk"), &Shape::LINUX)?;
        Ok(Contestant::over(name, daemon, machine))
    };
    let (mut alone, mut both) = (over("alone", alone)?, over("beside a card", both)?);
    let (mut idle, mut busy, mut frames) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let mut rate = |disk: &mut Contestant, beside| -> Result<_> {
            let (turn, frames) = read_beside(disk, &mut pair, beside, plan, cpus)?;
            Ok((turn.run.rate(), frames))
        };
        let reference = rate(&mut alone, Beside::Nothing)?.0;
        idle.push([rate(&mut both, Beside::IdleCard)?.0, reference]);
        let reference = rate(&mut alone, Beside::Burner)?.0;
        let (beside, sent) = rate(&mut both, Beside::BusyCard)?;
        busy.push([beside, reference]);
        frames.push(sent);
    }
    compare("reads, 32 in flight", ["beside an idle card", "alone"], &idle, 0.98, plan);
    compare("reads, 32 in flight", ["beside a busy card", "beside a busy CPU"], &busy, 0.5, plan);
    println!("the busy card: {:.0} frames/s", Spread::of(frames).median);
    Ok(())
}

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    let known = ["tap", "gso", "metadata", "disks"];
    let asked: Vec<_> = std::env::args().filter(|word| known.contains(&word.as_str())).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|word| word == name);
    println!("{} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    let mut results = Vec::new();
    for (name, run) in [("tap", tap as fn(&Plan, &Cpus) -> Result<()>), ("gso", gso)] {
        if wants(name) {
            println!("\n{name}");
            in_network_namespace(|| results.push(run(&plan, &cpus)));
        }
    }
    for (name, run) in [("metadata", metadata as fn(&Plan, &Cpus) -> Result<()>), ("disks", disks)] {
        if wants(name) {
            println!("\n{name}");
            results.push(run(&plan, &cpus));
        }
    }
    results.into_iter().collect()
}
