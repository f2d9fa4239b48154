//! Measures network cards beside the calls that they consist of, and disks beside a card. Needs root for the
//! TAPs, which are in a network namespace.
//!
//!     cargo bench -p kickless-tests --bench cards [-- --quick] [SECTION...]
//!
//! SECTION is tap, gso, iperf, bridge, xdp, metadata or disks.
//!
//! The driver polls on the first CPU, and the back-ends have the second.
//! - `tap`: frames through a TAP, with our driver, against a bare loop of `write` on the first CPU, because
//!   the back-end polls on the second one. With a bridge that returns each frame (hairpin mode), the bare
//!   loop is one of `read` and `write`.
//! - `gso`: packets of 64 KiB that the kernel would segment, against the bare loop of writes. First the
//!   driver copies each packet into its buffers of 2 KiB, which the bare loop need not do. Then the packets
//!   are in the driver's buffers already, each in one piece.
//! - `iperf`: iperf3 between two network namespaces, over a TAP, a card, our driver and a second TAP; over
//!   two TAPs and a bare loop; and over a pair of `veth` devices. It runs where the scheduler puts it.
//! - `bridge`: the same between two cards of a switch, whose drivers each have a TAP, beside the kernel's
//!   bridge with two TAPs.
//! - `metadata`: a transmit ring inside one memory region, and one that crosses two, where each access is
//!   translated; without and with a vIOMMU. The driver only sends the same frames again, so that the card is
//!   the slower end. A driver that also writes them would set the rate.
//! - `disks`: reads from `null:1G` with one worker: alone, beside a card that is idle, and beside one whose
//!   driver sends as fast as it can. Two drivers share the first CPU in the last case, so the reads alone are
//!   measured a second time beside a thread that burns that CPU.

#[path = "../common/mod.rs"]
mod common;
mod iperf;
mod taps;
mod xdp;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use common::{Contestant, Cpus, Plan, Spread, Turn};
use kickless_driver::{Card, CardOptions, Outgoing, QueuePair, Waiting};
use kickless_memory::Gpa;
use kickless_testing::in_network_namespace;
use kickless_tests::daemon::{CardConfig, Daemon};
use kickless_tests::driver::load::random_sectors;
use kickless_tests::frontend::card::{Card as FrontendCard, CardShape};
use kickless_tests::frontend::iommu::{self, DISTANCE, Iommu, PAGE};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_vhost_user::FrontendMessage as Message;

/// Frames that a call of the driver carries.
const BATCH: usize = 32;
const DISK_SIZE: u64 = 1 << 30;
const TRANSMIT: usize = 1;
/// Looks at the used ring between two looks at the clock.
const LOOKS: u32 = 32;
/// The time after which a card has asked for all translations.
const QUIET: Duration = Duration::from_millis(50);

/// Returns a frame of this length to an address that nobody has, with the packet of an EtherType for
/// experiments.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![7; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    frame
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

/// A card with a driver that sends its frames again and again, and waits for the card: it writes no
/// descriptor and no frame.
struct Resender {
    card: FrontendCard,
    viommu: Option<Iommu>,
    _daemon: Daemon,
}

impl Resender {
    /// Starts a card whose memory is in two regions, and whose transmit ring is in one of them or in both.
    /// Behind a vIOMMU, the card asks for the translations that it needs.
    fn start(is_split: bool, has_viommu: bool) -> Result<Resender> {
        let daemon = Daemon::start_card(&CardConfig::new("null").with(&["--poll=always"]))?;
        let mut card = FrontendCard::prepare(daemon.socket(), CardShape { pairs: 1, packed: false })?;
        card.resize(TRANSMIT, 256)?;
        let viommu = match has_viommu {
            true => Some(Iommu::connect(&mut card.frontend)?),
            false => None,
        };
        // The second region begins at a page of the descriptor table, or at the second page of memory, where
        // no ring is that this card needs.
        let table = card.rings[TRANSMIT].queue.user_addresses()[0] - card.ram.user(Gpa(RAM_BASE));
        ensure!(!table.is_multiple_of(PAGE), "the descriptor table is in one page");
        let seam = if is_split { table.next_multiple_of(PAGE) } else { PAGE };
        let regions = card.ram.regions_and_files(Gpa(RAM_BASE + seam))?;
        card.frontend.order(&Message::SetMemTable(regions))?;
        let mut resender = Resender { card, viommu, _daemon: daemon };
        let Resender { card, viommu, .. } = &mut resender;
        match viommu {
            None => {
                card.resume(TRANSMIT)?;
                card.send_all(TRANSMIT, 0)?;
            }
            Some(viommu) => {
                viommu.map_all(&card.ram);
                iommu::start(&mut card.frontend, &card.ram, &card.rings[TRANSMIT].queue)?;
                card.send_all(TRANSMIT, DISTANCE)?;
                while let Some(miss) = viommu.miss(QUIET)? {
                    viommu.answer(&mut card.frontend, &miss)?;
                }
            }
        }
        Ok(resender)
    }

    /// Sends for a turn. Returns the rate.
    fn turn(&mut self, time: Duration) -> Result<f64> {
        let (begun, mut count) = (Instant::now(), 0u64);
        while begun.elapsed() < time {
            for _ in 0..LOOKS {
                count += u64::from(self.card.send_again(TRANSMIT)?);
            }
        }
        let rate = count as f64 / begun.elapsed().as_secs_f64();
        if let Some(viommu) = &mut self.viommu {
            let miss = viommu.miss(Duration::ZERO)?;
            ensure!(miss.is_none(), "a translation is missing in the turn: {miss:?}");
        }
        Ok(rate)
    }
}

fn metadata(plan: &Plan, cpus: &Cpus) -> Result<()> {
    for has_viommu in [false, true] {
        let mut turns = Vec::new();
        for _ in 0..plan.rounds {
            let mut rates = [0.0; 2];
            for (is_split, rate) in [false, true].into_iter().zip(&mut rates) {
                // Only one at a time: a worker that always polls would take half of the processor from the
                // other.
                cpus.for_back_ends()?;
                let mut resender = Resender::start(is_split, has_viommu)?;
                cpus.for_driver()?;
                *rate = resender.turn(plan.time)?;
            }
            turns.push(rates);
        }
        let what = if has_viommu { "60 bytes, transmit, behind a vIOMMU" } else { "60 bytes, transmit" };
        compare(what, ["mapped", "translated"], &turns, 1.22, plan);
    }
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
    let known = ["tap", "gso", "iperf", "bridge", "xdp", "metadata", "disks"];
    let asked: Vec<_> = std::env::args().filter(|word| known.contains(&word.as_str())).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|word| word == name);
    println!("{} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    let mut results = Vec::new();
    for (name, run) in [
        ("tap", taps::tap as fn(&Plan, &Cpus) -> Result<()>),
        ("gso", taps::gso),
        ("iperf", iperf::iperf),
        ("bridge", iperf::through_switch),
        ("xdp", xdp::xdp),
    ] {
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
