//! Compares random reads of 4 KiB from /dev/zram0 through `kickless blk` with fio on the same device, turn
//! by turn. Both use O_DIRECT with 32 in flight; our driver polls and fio uses io_uring. The driver has the
//! first CPU and the back-end the second. fio, and the kernel's threads that work for it, have all.
//!
//! The benchmark sizes the device, fills it with data that compresses to half, and leaves it unused as
//! before. It needs root. It does not touch a device that is in use.
//!
//!     cargo bench -p kickless-tests --bench zram_vs_fio [-- --quick]

mod common;

use std::path::Path;

use anyhow::Result;
use common::fio::{self, Fio};
use common::zram::{CONTROL, DEVICE, Zram};
use common::{BLOCK, Contestant, Cpus, Plan, Spread, Turn, head, row};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::{Kind, random_sectors};

const DEPTH: u16 = 32;

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let size = if plan.quick { 16 << 20 } else { 1 << 30 };
    let _zram = match Zram::take(size) {
        Ok(zram) => zram,
        // A machine without zram has nothing to measure. If zram is in use, only the full form fails.
        Err(error) if plan.quick || !Path::new(CONTROL).exists() => {
            println!("left out: {error:#}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    println!(
        "random reads of 4 KiB from {DEVICE}, {} MiB filled, O_DIRECT, {DEPTH} in flight, {} turns of {:?} each{}",
        size >> 20,
        plan.rounds,
        plan.time,
        plan.remark()
    );
    let config = DaemonConfig { program: Program::Kickless, queues: 1, ..DaemonConfig::new(DEVICE) };
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let mut ours = Contestant::new("kickless blk", Daemon::start(&config)?)?;
    let kind = Kind { depth: DEPTH, block: BLOCK, write: false };
    let (mut turns, mut fio) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        cpus.for_driver()?;
        turns.push(ours.turn(DEPTH, plan.time, random_sectors(size, BLOCK))?);
        cpus.for_others()?;
        fio.push(Fio::turn("io_uring", Path::new(DEVICE), kind, false, plan.time)?);
    }
    head();
    row(&ours.name, &turns);
    fio::row("fio --ioengine=io_uring", &fio);
    let ratio = |(ours, fio): (&Turn, &Fio)| ours.run.rate() / fio.rate;
    let ratio = Spread::of(turns.iter().zip(&fio).map(ratio));
    println!(
        "\nkickless/fio = {:.2} ({:.2} .. {:.2}) (target: at least 0.90){}",
        ratio.median,
        ratio.min,
        ratio.max,
        plan.remark()
    );
    Ok(())
}
