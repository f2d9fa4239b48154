//! Measures the gain of translating the ring areas once. Compares `kickless blk --blk-file=null:1G` with a
//! ring inside one memory region, and the same program with a ring that crosses two regions, where each
//! access is translated.
//!
//! Each front-end shares its memory, one file, as two regions. The second region begins in the middle of the
//! descriptor table, or behind the ring. One queue of 256 with EVENT_IDX, reads of 4 KiB without a copy, the
//! same polling driver, turn by turn. The driver has the first CPU and the back-ends the second.
//!
//!     cargo bench -p kickless-tests --bench metadata [-- --quick]

mod common;

use anyhow::Result;
use common::{Contestant, Cpus, Plan, Turn, head, ratios, row};
use kickless_memory::Gpa;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::random_sectors;
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_vhost_user::FrontendMessage as Message;

const DISK_SIZE: u64 = 1 << 30;
const TARGET: f64 = 1.22;
const DEPTHS: [u16; 3] = [1, 32, 85];

/// Offset of the second region in the memory. The ring is at the start of the memory, first the descriptor
/// table of 4 KiB. The area after the ring is aligned to a page.
const IN_THE_TABLE: u64 = 96 * 16;
const BEHIND_THE_RING: u64 = 16 << 10;

fn start(name: &str, seam: u64) -> Result<Contestant> {
    let disk = format!("null:{DISK_SIZE}");
    let daemon =
        Daemon::start(&DaemonConfig { program: Program::Kickless, queues: 1, ..DaemonConfig::new(disk) })?;
    let mut machine = Machine::prepare(daemon.socket(), &Shape::LINUX)?;
    let regions = machine.ram.regions_and_files(Gpa(RAM_BASE + seam))?;
    machine.frontend.order(&Message::SetMemTable(regions))?;
    machine.frontend.start(&machine.queues[0])?;
    Ok(Contestant::over(name, daemon, machine))
}

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let mut both = [start("ring in one piece", BEHIND_THE_RING)?, start("ring in two pieces", IN_THE_TABLE)?];
    cpus.for_driver()?;
    println!("reads of 4 KiB from nothing, {} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    let mut results = Vec::new();
    for depth in DEPTHS {
        let mut turns: [Vec<Turn>; 2] = Default::default();
        for round in 0..plan.rounds {
            for at in [round % 2, 1 - round % 2] {
                turns[at].push(both[at].turn(depth, plan.time, random_sectors(DISK_SIZE, common::BLOCK))?);
            }
        }
        println!("\n{depth} in flight");
        head();
        for (contestant, turns) in both.iter().zip(&turns) {
            row(&contestant.name, turns);
        }
        results.push((depth, ratios(&turns[0], &turns[1])));
    }
    println!();
    for (depth, ratio) in results {
        println!(
            "{depth} in flight: mapped/translated = {:.2} ({:.2} .. {:.2}) (target: at least {TARGET}){}",
            ratio.median,
            ratio.min,
            ratio.max,
            plan.remark()
        );
    }
    Ok(())
}
