//! Measures the processor time of other programs, which makes figures unreliable.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::common::{cpu_seconds, cpu_seconds_of_ended_children};

/// Counts the processor time of other programs.
pub(crate) struct OthersClock {
    started: Instant,
    before: f64,
}

impl OthersClock {
    /// Starts to count.
    ///
    /// # Errors
    /// /proc does not exist.
    pub(crate) fn start() -> Result<OthersClock> {
        Ok(OthersClock { started: Instant::now(), before: others_seconds()? })
    }

    /// Returns the number of processors that other programs kept busy since the start. Time of child
    /// processes counts when they have ended.
    ///
    /// # Errors
    /// /proc does not exist.
    pub(crate) fn cores(&self) -> Result<f64> {
        Ok((others_seconds()? - self.before).max(0.0) / self.started.elapsed().as_secs_f64())
    }
}

fn others_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let all = stat.lines().next().context("/proc/stat is empty")?;
    // user, nice, system, idle, iowait, irq, softirq and steal of proc_stat(5). All but idle and iowait
    // count as busy.
    let ticks: Vec<f64> =
        all.split_whitespace().skip(1).take(8).filter_map(|word| word.parse().ok()).collect();
    let busy: f64 =
        ticks.iter().enumerate().filter(|(at, _)| ![3, 4].contains(at)).map(|(_, ticks)| ticks).sum();
    let ours = cpu_seconds(std::process::id())? + cpu_seconds_of_ended_children()?;
    Ok(busy / rustix::param::clock_ticks_per_second() as f64 - ours)
}
