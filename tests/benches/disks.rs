//! Compares disks through `kickless blk` with fio on the bare target, and with `qemu-storage-daemon`
//! through the same driver.
//!
//! The loads are random reads and writes of 4 KiB with 1, 8, 32 and 128 in flight, and sequential ones of
//! 128 KiB with 8. `--load=neighbours` adds sequential ones of 4 KiB with 32. All use O_DIRECT and one
//! queue, turn by turn. The driver polls on the first CPU; back-ends are on the second. fio, and the
//! kernel's threads that work for it, have both. The storage daemon has `aio=io_uring`, `cache.direct=on`
//! and an iothread. fio runs with io_uring and with libaio, and the better one counts.
//!
//!     cargo bench -p kickless-tests --bench disks -- --target=zram|tmpfs|file|null|mem|queues
//!         [--load=read|write|sequential|neighbours] [--millis=200]
//!         [--ours=--engine=aio] [--quick]
//!
//! `--ours` adds a second kickless with these options. A target that does not exist is left out. zram is
//! /dev/zram0, which must be unused; tmpfs is a file below /dev/shm; file is one below `target`. Each has 1
//! GiB of data that compresses to half.

mod common;
#[path = "disks/targets.rs"]
mod targets;

use anyhow::Result;
use common::fio::{self, Fio};
use common::{BLOCK, Contestant, Cpus, Plan, Spread, Turn, argument, head, ratios, row};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::{Kind, next_sectors, random_sectors};
use kickless_tests::frontend::machine::{Machine, Shape};
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};
use targets::Target;

/// The queues have room for 128 requests of three descriptors.
const SHAPE: Shape = Shape { size: 512, memory: 512 << 20, ..Shape::LINUX };
const SEQUENTIAL: u32 = 128 << 10;
const TARGETS: [&str; 6] = ["null", "mem", "queues", "zram", "tmpfs", "file"];

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
struct Cell {
    name: &'static str,
    kind: Kind,
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (name, write) in [("read", false), ("write", true)] {
        cells.extend([1, 8, 32, 128].map(|depth| Cell { name, kind: Kind { depth, block: BLOCK, write } }));
    }
    let sequential =
        |name, depth, block| [false, true].map(|write| Cell { name, kind: Kind { depth, block, write } });
    cells.extend(sequential("sequential", 8, SEQUENTIAL));
    cells.extend(sequential("neighbours", 32, BLOCK));
    let asked = argument("--load=");
    cells.retain(|cell| asked.as_ref().map_or(cell.name != "neighbours", |asked| asked == cell.name));
    cells
}

fn main() -> Result<()> {
    let mut plan = Plan::from_arguments();
    if !plan.quick && argument("--millis=").is_none() {
        // The default turn is short, because there are ten cells, four contestants and seven turns of each.
        plan.time = Duration::from_millis(200);
    }
    let asked = argument("--target=");
    for target in TARGETS.into_iter().filter(|target| asked.as_ref().is_none_or(|asked| asked == target)) {
        match target {
            "queues" => queues(&plan)?,
            _ => match Target::take(target, plan.quick) {
                Ok(taken) => table(&taken, &plan)?,
                Err(error) => println!("{target}: left out: {error:#}"),
            },
        }
    }
    Ok(())
}

fn contestant(name: &str, config: &DaemonConfig) -> Result<Contestant> {
    let daemon = Daemon::start(config)?;
    let machine = Machine::start(daemon.socket(), &Shape { queues: config.queues, ..SHAPE })?;
    Ok(Contestant::over(name, daemon, machine))
}

/// Returns the contestants: ours, ours with other options if there are any, and the storage daemon.
fn contestants(disk: &OsStr, program_too: bool) -> Result<Vec<Contestant>> {
    let base = DaemonConfig { program: Program::Kickless, queues: 1, ..DaemonConfig::new(disk) };
    let lock = "--lock=off".to_owned();
    let mut all =
        vec![contestant("kickless", &DaemonConfig { arguments: vec![lock.clone()], ..base.clone() })?];
    if let Some(options) = argument("--ours=") {
        let mut arguments = vec![lock];
        arguments.extend(options.split_whitespace().map(str::to_owned));
        all.push(contestant(&format!("kickless {options}"), &DaemonConfig { arguments, ..base.clone() })?);
    }
    if program_too {
        let peer = DaemonConfig { program: Program::StorageDaemon, iothread: true, by_uring: true, ..base };
        all.push(contestant("qemu-storage-daemon", &peer)?);
    }
    Ok(all)
}

/// Writes a whole disk. A read of a block that was never written would not access the memory of the disk.
fn fill(contestant: &mut Contestant, size: u64, plan: &Plan) -> Result<()> {
    let kind = Kind { depth: 8, block: SEQUENTIAL, write: true };
    let mut sectors = next_sectors(size, SEQUENTIAL);
    let mut blocks = 0;
    while blocks * u64::from(SEQUENTIAL) < size && (blocks == 0 || !plan.quick) {
        blocks += contestant.turn_on(1, kind, plan.time, &mut sectors)?.run.requests;
    }
    Ok(())
}

/// Measures all cells on one target.
fn table(target: &Target, plan: &Plan) -> Result<()> {
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let mut all = contestants(target.disk(), target.has_peer())?;
    cpus.for_driver()?;
    println!("{}: {} turns of {:?} each{}", target.name(), plan.rounds, plan.time, plan.remark());
    if target.is_to_be_filled() {
        for contestant in &mut all {
            fill(contestant, target.size(), plan)?;
        }
        cpus.for_back_ends()?;
        println!(
            "copies of 4 KiB from random places of as much memory, alone: {:.0}/s",
            copies(target.size(), plan.time)
        );
        cpus.for_driver()?;
    }
    for Cell { name, kind } in cells() {
        let is_sequential = matches!(name, "sequential" | "neighbours");
        let mut turns = vec![Vec::new(); all.len()];
        let mut fio: [Vec<Fio>; 2] = Default::default();
        for round in 0..plan.rounds {
            cpus.for_driver()?;
            for at in 0..all.len() {
                // The order changes in each round, so that no contestant always comes second.
                let at = (at + round) % all.len();
                let (size, block, device) = (target.size(), kind.block, &mut all[at]);
                let turn = match is_sequential {
                    true => device.turn_on(1, kind, plan.time, next_sectors(size, block))?,
                    false => device.turn_on(1, kind, plan.time, random_sectors(size, block))?,
                };
                turns[at].push(turn);
            }
            cpus.for_others()?;
            if let Some(path) = target.path() {
                for (engine, fio) in ["io_uring", "libaio"].into_iter().zip(&mut fio) {
                    fio.push(Fio::turn(engine, path, kind, is_sequential, plan.time)?);
                }
            }
        }
        let what = if kind.write { "writes" } else { "reads" };
        let order = if is_sequential { "sequential" } else { "random" };
        println!("\n{order} {what} of {} KiB, {} in flight", kind.block >> 10, kind.depth);
        head();
        for (contestant, turns) in all.iter().zip(&turns) {
            row(&contestant.name, turns);
        }
        for (engine, fio) in
            ["fio io_uring", "fio libaio"].into_iter().zip(&fio).filter(|(_, fio)| !fio.is_empty())
        {
            fio::row(engine, fio);
        }
        verdict(&turns, &fio, kind, target.has_peer());
    }
    Ok(())
}

/// Prints the ratios of the first contestant to all others.
fn verdict(turns: &[Vec<Turn>], fio: &[Vec<Fio>; 2], kind: Kind, has_peer: bool) {
    let cpu = |turns: &[Turn]| Spread::of(turns.iter().map(Turn::cpu_ns_per_request)).median;
    let ours = &turns[0];
    let mut said = Vec::new();
    let better =
        fio.iter().filter(|fio| !fio.is_empty()).max_by(|a, b| fio::rate(a).total_cmp(&fio::rate(b)));
    if let Some(fio) = better {
        let ratio = Spread::of(ours.iter().zip(fio).map(|(ours, fio)| ours.run.rate() / fio.rate));
        said.push(format!("of bare {}", shown(ratio)));
        if kind.depth == 1 {
            let later = ours.iter().zip(fio).map(|(ours, fio)| 1e6 / ours.run.rate() - 1e6 / fio.rate);
            said.push(format!("{:+.2} us", Spread::of(later).median));
        }
    }
    for (others, name) in
        turns.iter().zip(["", "the other options"]).skip(1).take(turns.len() - 1 - usize::from(has_peer))
    {
        said.push(format!(
            "{name}: {} of it, CPU {:.2}",
            shown(ratios(others, ours)),
            cpu(others) / cpu(ours)
        ));
    }
    if let (true, Some(peer)) = (has_peer, turns.last()) {
        said.push(format!(
            "of the storage daemon {}, CPU/req {:.2}",
            shown(ratios(ours, peer)),
            cpu(ours) / cpu(peer)
        ));
    }
    if !said.is_empty() {
        println!("  => {}", said.join("; "));
    }
}

fn shown(of: Spread) -> String {
    format!("{:.2} ({:.2} .. {:.2})", of.median, of.min, of.max)
}

/// Returns the number of blocks that this thread copies per second: from random places in `size` bytes of
/// memory to 32 places of other memory.
fn copies(size: u64, time: Duration) -> f64 {
    let from = vec![1u8; size as usize];
    let mut into = vec![0u8; 32 * BLOCK as usize];
    let mut sector = random_sectors(size, BLOCK);
    let (mut count, start) = (0u64, Instant::now());
    while start.elapsed() < time {
        for to in into.chunks_mut(BLOCK as usize) {
            let at = sector() as usize * 512;
            to.copy_from_slice(&from[at..at + to.len()]);
            std::hint::black_box(&to);
            count += 1;
        }
    }
    count as f64 / start.elapsed().as_secs_f64()
}

/// Compares four queues of one device on one worker with one queue of the same device, with the same number
/// in flight. `trivial-responder` shows how far the driver, one thread for all queues, is the limit.
fn queues(plan: &Plan) -> Result<()> {
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let config = DaemonConfig { program: Program::Kickless, queues: 4, ..DaemonConfig::new("null:1G") };
    let mut device = contestant("null:1G", &config)?;
    cpus.for_driver()?;
    println!("null:1G, reads of 4 KiB, {} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    head();
    for depth in [8, 32] {
        let loads = [(4, depth), (1, 4 * depth)];
        let (mut ours, mut ceilings) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..plan.rounds {
            for (nth, (queues, depth)) in loads.into_iter().enumerate() {
                let kind = Kind { depth, block: BLOCK, write: false };
                let sectors = || random_sectors(1 << 30, BLOCK);
                ours[nth].push(device.turn_on(queues.into(), kind, plan.time, sectors())?);
                // It polls all the time, so it runs only for this turn.
                let mut ceiling = ceiling(&cpus, queues)?;
                ceilings[nth].push(ceiling.turn_on(queues.into(), kind, plan.time, sectors())?);
            }
        }
        for (name, [four, one]) in [("null:1G", &ours), ("ceiling", &ceilings)] {
            row(&format!("{name}, 4 queues of {depth}"), four);
            row(&format!("{name}, 1 queue of {}", 4 * depth), one);
            println!("  => 4 queues/1 queue = {} (target: 0.97 or more)", shown(ratios(four, one)));
        }
        let [four, one] = [0, 1].map(|nth| shown(ratios(&ours[nth], &ceilings[nth])));
        println!("  => of the ceiling: 4 queues {four} (target: 0.95 or more), 1 queue {one}");
    }
    Ok(())
}

/// Starts a back-end that does as little as possible for each request.
fn ceiling(cpus: &Cpus, queues: u16) -> Result<Contestant> {
    cpus.for_back_ends()?;
    let daemon = Daemon::start_program(Path::new(env!("CARGO_BIN_EXE_trivial-responder")))?;
    cpus.for_driver()?;
    let machine = Machine::start(daemon.socket(), &Shape { queues, ..SHAPE })?;
    Ok(Contestant::over("ceiling", daemon, machine))
}
