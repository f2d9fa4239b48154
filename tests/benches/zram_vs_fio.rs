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
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use common::zram::{CONTROL, DEVICE, Zram};
use common::{
    BLOCK, Contestant, Cpus, Plan, Spread, Turn, cpu_ns_per_request, cpu_seconds_of_ended_children, head, row,
};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver_load::random_sectors;

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
    let (mut turns, mut fio) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        cpus.for_driver()?;
        turns.push(ours.turn(DEPTH, plan.time, random_sectors(size, BLOCK))?);
        cpus.for_others()?;
        fio.push(Fio::turn(plan.time)?);
    }
    head();
    row(&ours.name, &turns);
    let rate = Spread::of(fio.iter().map(|turn| turn.rate));
    println!(
        "  {:<34} {:>9.0}  {:>9.0} .. {:<9.0} {:>9} {:>8.2} {:>10.0}",
        "fio --ioengine=io_uring",
        rate.median,
        rate.min,
        rate.max,
        "-",
        Spread::of(fio.iter().map(|turn| turn.cpu)).median,
        Spread::of(fio.iter().map(|turn| cpu_ns_per_request(turn.cpu, turn.rate))).median
    );
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

/// One turn of fio; its processor time is with starting and ending.
struct Fio {
    rate: f64,
    cpu: f64,
}

impl Fio {
    fn turn(time: Duration) -> Result<Fio> {
        let before = cpu_seconds_of_ended_children()?;
        let output = Command::new("fio")
            .args(["--name=turn", "--ioengine=io_uring", "--direct=1", "--bs=4k", "--rw=randread"])
            .arg(format!("--filename={DEVICE}"))
            .arg(format!("--iodepth={DEPTH}"))
            .arg(format!("--runtime={}ms", time.as_millis()))
            .args(["--time_based", "--output-format=json"])
            .stderr(Stdio::inherit())
            .output()
            .context("fio cannot be run")?;
        if !output.status.success() {
            bail!("fio failed, {}: {}", output.status, String::from_utf8_lossy(&output.stdout));
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0]["read"]["iops"].as_f64().context("fio's report is not as expected")?;
        // Not what fio reports: that leaves out the kernel's threads, which do the reads.
        let cpu = (cpu_seconds_of_ended_children()? - before) / time.as_secs_f64();
        Ok(Fio { rate, cpu })
    }
}
