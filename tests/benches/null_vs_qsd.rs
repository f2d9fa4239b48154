//! Compares `kickless blk --blk-file=null:1G` with `qemu-storage-daemon` on null-co. Only the rings matter.
//!
//! One queue of 256 with EVENT_IDX, reads of 4 KiB, the same polling driver, turn by turn. The storage
//! daemon runs with and without an iothread; its better result counts. The driver has the first CPU and all
//! back-ends the second. With one in flight, two threads that only exchange the cache lines of a request
//! show the limit of the machine.
//!
//!     cargo bench -p kickless-tests --bench null_vs_qsd [-- --quick]

mod common;
#[path = "null_vs_qsd/lines.rs"]
mod lines;

use anyhow::Result;
use common::{Contestant, Cpus, Plan, Spread, Turn, head, ratios, row};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::random_sectors;

const DISK_SIZE: u64 = 1 << 30;

fn start(program: Program, iothread: bool) -> Result<Daemon> {
    let disk = format!("null:{DISK_SIZE}");
    Daemon::start(&DaemonConfig { program, iothread, queues: 1, ..DaemonConfig::new(disk) })
}

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let mut all = [
        Contestant::new("kickless null:1G", start(Program::Kickless, false)?)?,
        Contestant::new("qemu-storage-daemon null-co", start(Program::StorageDaemon, false)?)?,
        Contestant::new("the same with an iothread", start(Program::StorageDaemon, true)?)?,
    ];
    cpus.for_driver()?;
    println!("reads of 4 KiB from nothing, {} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    let one = compare(&mut all, 1, &plan, Some(&cpus))?;
    let deep = compare(&mut all, 32, &plan, None)?;
    println!("\n1 in flight, for information: kickless/qemu-storage-daemon = {one}");
    println!("32 in flight: kickless/qemu-storage-daemon = {deep} (target: at least 1){}", plan.remark());
    Ok(())
}

/// Returns the ratio to the better of the other contestants, and with one in flight also to the bare cache
/// lines.
fn compare(all: &mut [Contestant; 3], depth: u16, plan: &Plan, bare: Option<&Cpus>) -> Result<String> {
    let mut turns: [Vec<Turn>; 3] = Default::default();
    let mut bare_rates = Vec::new();
    for round in 0..plan.rounds {
        // The order changes in each round, so that no contestant always comes second.
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            turns[at].push(all[at].turn(depth, plan.time, random_sectors(DISK_SIZE, common::BLOCK))?);
        }
        if let Some(cpus) = bare {
            bare_rates.push(lines::turn(cpus, plan.time)?);
        }
    }
    println!("\n{depth} in flight");
    head();
    for (contestant, turns) in all.iter().zip(&turns) {
        row(&contestant.name, turns);
    }
    if bare.is_some() {
        let of_bare = turns[0].iter().zip(&bare_rates).map(|(turn, bare)| turn.run.rate() / bare);
        let (of_bare, bare) = (Spread::of(of_bare), Spread::of(bare_rates.iter().copied()));
        println!("  {:<34} {:>9.0}  {:>9.0} .. {:<9.0}", "the lines alone", bare.median, bare.min, bare.max);
        println!(
            "  => kickless/the lines alone = {:.2} ({:.2} .. {:.2})",
            of_bare.median, of_bare.min, of_bare.max
        );
    }
    let others = [ratios(&turns[0], &turns[1]), ratios(&turns[0], &turns[2])];
    let ratio = if others[0].median < others[1].median { others[0] } else { others[1] };
    Ok(format!("{:.2} ({:.2} .. {:.2})", ratio.median, ratio.min, ratio.max))
}
