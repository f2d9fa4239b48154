//! Random reads of 4 KiB from /dev/zram0, O_DIRECT, 32 in flight: through `kickless blk`, with a polling driver, against fio
//! with io_uring on the same device, turn by turn. The driver has the first CPU and the back-end the second; fio, and the
//! kernel's threads that it keeps busy, have all.
//!
//! The device is sized and filled with data that compresses to half, and left as it was found: unused. It takes root, and is
//! not touched if somebody uses it.
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
        // Where there is none, nothing can be measured; where it is in use, the short form has nothing to try.
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
