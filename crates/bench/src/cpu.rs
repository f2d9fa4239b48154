//! Processor time, and where threads run.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kickless_values::CpuList;
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Moves this thread to its CPU of the list.
pub(crate) fn pin(cpus: Option<&CpuList>, thread: usize) -> Result<()> {
    let Some(cpus) = cpus else { return Ok(()) };
    let Some(cpu) = cpus.0.get(thread % cpus.0.len().max(1)) else { return Ok(()) };
    pin_to(*cpu).context("--cpu")
}

/// Moves this thread to a CPU.
pub(crate) fn pin_to(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("CPU {cpu} cannot be used"))
}

/// Returns the CPUs that this thread may use.
///
/// # Errors
/// There are more than [`CpuSet`] has room for.
pub(crate) fn allowed() -> Result<Vec<usize>> {
    let all = sched_getaffinity(None).context("the CPUs of this process cannot be read")?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect())
}

/// Asks the kernel to end sleeps on time. By default, it may end them 50 us late.
pub(crate) fn shorten_timer_slack() {
    // If this fails, requests are made late, and their latencies show it.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// Returns the processor time of this process.
fn driver_cpu() -> Duration {
    clock(ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
}

/// Returns the processor time of a process.
///
/// # Errors
/// There is no such process.
fn back_end_cpu(pid: u32) -> Result<Duration> {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX));
    let clock_of = clock_getcpuclockid(pid).with_context(|| format!("there is no process {pid}"))?;
    clock(clock_of)
}

/// Measures the processor time of this process and of a back-end.
pub(crate) struct CpuMeter {
    pid: Option<u32>,
    began: Instant,
    driver: Duration,
    back_end: Option<Duration>,
}

/// The processor time since a [`CpuMeter`] was started, in seconds.
pub(crate) struct CpuUsed {
    pub(crate) driver: f64,
    /// `None` if the process of the back-end is not known.
    pub(crate) back_end: Option<f64>,
    /// The seconds that have passed.
    pub(crate) seconds: f64,
}

impl CpuMeter {
    /// Starts a measurement. `pid` is the process of the back-end, if it is known.
    ///
    /// # Errors
    /// There is no such process.
    pub(crate) fn start(pid: Option<u32>) -> Result<Self> {
        let back_end = pid.map(back_end_cpu).transpose()?;
        Ok(Self { pid, began: Instant::now(), driver: driver_cpu(), back_end })
    }

    /// Returns the processor time of the back-end, if its process is known and runs.
    pub(crate) fn back_end(&self) -> Option<Duration> {
        self.pid.and_then(|pid| back_end_cpu(pid).ok())
    }

    /// Returns the processor time since the start.
    ///
    /// # Errors
    /// The back-end has exited.
    pub(crate) fn used(&self) -> Result<CpuUsed> {
        let back_end = self.pid.map(back_end_cpu).transpose()?.zip(self.back_end);
        Ok(CpuUsed {
            driver: (driver_cpu() - self.driver).as_secs_f64(),
            back_end: back_end.map(|(now, before)| now.saturating_sub(before).as_secs_f64()),
            seconds: self.began.elapsed().as_secs_f64(),
        })
    }
}

fn clock(id: ClockId) -> Result<Duration> {
    Ok(id.now()?.into())
}
