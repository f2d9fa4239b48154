//! Measures the cost of a front-end's log of written pages: one back-end, with the log on and off in turns.
//!
//! One queue of 256 with EVENT_IDX, random reads of 4 KiB, 32 in flight, a polling driver. While the log is
//! on, the benchmark takes all marks every 10 ms, more often than a migration does. The driver has the
//! first CPU and the back-end the second.
//!
//!     cargo bench -p kickless-tests --bench dirty_log [-- --quick] [-- --disk=PATH]
//!
//! The disks are `null:`, `mem:` and zram, or the disk of `--disk`. The benchmark only reads that one.

mod common;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use common::zram::{CONTROL, DEVICE, Zram};
use common::{Contestant, Cpus, Plan, Turn, argument, head, ratios, row};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::random_sectors;
use kickless_tests::frontend::log::Bitmap;

const DEPTH: u16 = 32;
const HARVEST_EVERY: Duration = Duration::from_millis(10);

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    println!(
        "4 KiB reads, {DEPTH} in flight, {} turns of {:?} each{}",
        plan.rounds,
        plan.time,
        plan.remark()
    );
    if let Some(disk) = argument("--disk=") {
        let size = File::open(&disk)?.seek(SeekFrom::End(0))?;
        return measure(&disk, size, 0.97, &plan, &cpus);
    }
    let size: u64 = if plan.quick { 16 << 20 } else { 1 << 30 };
    measure(&format!("null:{size}"), size, 0.90, &plan, &cpus)?;
    measure(&format!("mem:{size}"), size, 0.97, &plan, &cpus)?;
    match Zram::take(size) {
        Ok(_zram) => measure(DEVICE, size, 0.97, &plan, &cpus),
        // A machine without zram has nothing to measure. If zram is in use, only the full form fails.
        Err(error) if plan.quick || !Path::new(CONTROL).exists() => {
            println!("\n{DEVICE} left out: {error:#}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Measures one disk.
fn measure(disk: &str, size: u64, target: f64, plan: &Plan, cpus: &Cpus) -> Result<()> {
    cpus.for_back_ends()?;
    let config = DaemonConfig { program: Program::Kickless, queues: 1, ..DaemonConfig::new(disk) };
    let mut contestant = Contestant::new(disk, Daemon::start(&config)?)?;
    cpus.for_driver()?;
    let bitmap = Bitmap::covering(&contestant.machine().ram)?;
    contestant.machine().frontend.set_log(&bitmap)?;
    // The first access to a page of a RAM disk costs a fault, so this reads each page once.
    let mut next = 0;
    contestant.turn(DEPTH, plan.time, || {
        let sector = next;
        next = (next + u64::from(common::BLOCK) / 512) % (size / 512);
        sector
    })?;
    let mut turns: [Vec<Turn>; 2] = Default::default();
    for round in 0..plan.rounds {
        // The order changes in each round, so that no contestant always comes second.
        for on in [round % 2 == 0, round % 2 != 0] {
            turns[usize::from(on)].push(turn(&mut contestant, &bitmap, size, on, plan)?);
        }
    }
    println!("\n{disk}");
    head();
    row("log off", &turns[0]);
    row("log on", &turns[1]);
    let ratio = ratios(&turns[1], &turns[0]);
    println!(
        "on/off = {:.3} ({:.3} .. {:.3}) (target: at least {target}){}",
        ratio.median,
        ratio.min,
        ratio.max,
        plan.remark()
    );
    Ok(())
}

fn turn(contestant: &mut Contestant, bitmap: &Bitmap, size: u64, on: bool, plan: &Plan) -> Result<Turn> {
    let machine = contestant.machine();
    if on {
        machine.frontend.set_log(bitmap)?;
    }
    machine.frontend.set_logging(on)?;
    machine.frontend.set_ring_logging(&machine.ram, &machine.queues[0], on)?;
    let stop = AtomicBool::new(!on);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(HARVEST_EVERY);
                bitmap.harvest();
            }
        });
        let turn = contestant.turn(DEPTH, plan.time, random_sectors(size, common::BLOCK));
        stop.store(true, Ordering::Relaxed);
        turn
    })
}
