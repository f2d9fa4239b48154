//! Runs fio on the bare target.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kickless_tests::driver::load::Kind;

use super::{Spread, cpu_ns_per_request, cpu_seconds_of_ended_children};

/// One turn. Its processor time includes fio's start and end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fio {
    pub(crate) rate: f64,
    pub(crate) cpu: f64,
}

impl Fio {
    /// Runs one turn.
    ///
    /// # Errors
    /// fio cannot be run, or fails.
    pub(crate) fn turn(
        engine: &str,
        path: &Path,
        kind: Kind,
        sequential: bool,
        time: Duration,
    ) -> Result<Fio> {
        let Kind { depth, block, write } = kind;
        let what = match (sequential, write) {
            (false, false) => "randread",
            (false, true) => "randwrite",
            (true, false) => "read",
            (true, true) => "write",
        };
        let before = cpu_seconds_of_ended_children()?;
        let output = Command::new("fio")
            .args(["--name=turn", "--direct=1", "--time_based", "--output-format=json", "--norandommap"])
            // The data compresses to half and is the same for each write.
            .args(["--buffer_compress_percentage=50", "--refill_buffers=0", "--scramble_buffers=0"])
            .arg(format!("--filename={}", path.display()))
            .args([format!("--ioengine={engine}"), format!("--rw={what}")])
            .args([format!("--bs={block}"), format!("--iodepth={depth}")])
            .arg(format!("--runtime={}ms", time.as_millis()))
            .stderr(Stdio::inherit())
            .output()
            .context("fio cannot be run")?;
        if !output.status.success() {
            bail!("fio failed, {}: {}", output.status, String::from_utf8_lossy(&output.stdout));
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0][if write { "write" } else { "read" }]["iops"].as_f64();
        let rate = rate.context("fio's report is not as expected")?;
        // fio's own figure omits the kernel's threads, which do the I/O.
        let cpu = (cpu_seconds_of_ended_children()? - before) / time.as_secs_f64();
        Ok(Fio { rate, cpu })
    }
}

/// Returns the median rate.
pub(crate) fn rate(turns: &[Fio]) -> f64 {
    Spread::of(turns.iter().map(|turn| turn.rate)).median
}

/// Prints the turns in the format of the other contestants.
pub(crate) fn row(name: &str, turns: &[Fio]) {
    let rate = Spread::of(turns.iter().map(|turn| turn.rate));
    println!(
        "  {name:<34} {:>9.0}  {:>9.0} .. {:<9.0} {:>9} {:>8.2} {:>10.0}",
        rate.median,
        rate.min,
        rate.max,
        "-",
        Spread::of(turns.iter().map(|turn| turn.cpu)).median,
        Spread::of(turns.iter().map(|turn| cpu_ns_per_request(turn.cpu, turn.rate))).median
    );
}
