//! What else this machine does, which is what spoils figures.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::common::{cpu_seconds, cpu_seconds_of_ended_children};

/// Processor time that is not ours.
pub(crate) struct Clock {
    started: Instant,
    before: f64,
}

impl Clock {
    /// Counts from now on.
    ///
    /// # Errors
    /// There is no /proc.
    pub(crate) fn start() -> Result<Clock> {
        Ok(Clock { started: Instant::now(), before: others_seconds()? })
    }

    /// Processors that others have kept busy since then; what children use counts once they have ended.
    ///
    /// # Errors
    /// There is no /proc.
    pub(crate) fn cores(&self) -> Result<f64> {
        Ok((others_seconds()? - self.before).max(0.0) / self.started.elapsed().as_secs_f64())
    }
}

fn others_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let all = stat.lines().next().context("/proc/stat is empty")?;
    // user, nice, system, idle, iowait, irq, softirq and steal of proc_stat(5); all that is neither idle nor iowait.
    let ticks: Vec<f64> =
        all.split_whitespace().skip(1).take(8).filter_map(|word| word.parse().ok()).collect();
    let busy: f64 =
        ticks.iter().enumerate().filter(|(at, _)| ![3, 4].contains(at)).map(|(_, ticks)| ticks).sum();
    let ours = cpu_seconds(std::process::id())? + cpu_seconds_of_ended_children()?;
    Ok(busy / rustix::param::clock_ticks_per_second() as f64 - ours)
}
