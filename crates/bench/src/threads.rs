//! The threads of one turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};

use super::common_options::CommonLoad;
use super::cpu::{CpuMeter, pin, shorten_timer_slack};
use super::progress::Progress;
use super::turn::Turn;
use super::watch::{Period, Sample, watch};

/// The time between two checks whether the threads have ended.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// A turn whose loads are ready, so that the measurement can begin.
pub(crate) struct ReadyTurn<'a> {
    pub(crate) period: Period,
    pub(crate) options: &'a CommonLoad,
    /// The process of the back-end, if it is known.
    pub(crate) pid: Option<u32>,
    /// Set by a signal: the turn ends early.
    pub(crate) stop: &'a AtomicBool,
    /// Ends the loads early.
    pub(crate) halted: &'a AtomicBool,
    pub(crate) progress: &'a Progress,
}

impl ReadyTurn<'_> {
    /// Runs all loads to their end, each in a thread on its CPU of the list. Returns their results, and the
    /// turn without them.
    ///
    /// `counters` returns the number of requests that have completed and of kicks. `abort` is called after a
    /// signal, and ends loads that wait for a back-end that does not answer any more.
    ///
    /// # Errors
    /// A load fails, a signal ends the turn, or the back-end has exited.
    pub(crate) fn run<T: Send, F: FnOnce() -> Result<T> + Send>(
        &self,
        loads: impl IntoIterator<Item = F>,
        counters: impl Fn() -> (u64, u64),
        abort: impl FnOnce(),
    ) -> Result<(Vec<T>, Turn)> {
        let meter = CpuMeter::start(self.pid)?;
        let (cpus, plots) = (self.options.rings.cpu.as_ref(), self.options.output.plot_time.is_some());
        let look = || {
            let (done, kicks) = counters();
            // A back-end that has exited gives no figure here. The check after the turn reports it.
            Sample { done, kicks, back_end_cpu: meter.back_end() }
        };
        let is_stopped = || self.stop.load(Ordering::Relaxed);
        let (ended, moments) = thread::scope(|scope| {
            let start = |(at, load): (usize, F)| {
                scope.spawn(move || {
                    pin(cpus, at)?;
                    shorten_timer_slack();
                    load()
                })
            };
            let running: Vec<_> = loads.into_iter().enumerate().map(start).collect();
            let is_one_finished = || running.iter().any(ScopedJoinHandle::is_finished);
            let moments = watch(&self.period, plots, look, self.stop, self.progress, is_one_finished);
            while !running.iter().all(ScopedJoinHandle::is_finished) && !is_stopped() {
                thread::sleep(LAST_LOOK);
            }
            if is_stopped() {
                self.halted.store(true, Ordering::Relaxed);
                abort();
            }
            let join = |running: ScopedJoinHandle<'_, Result<T>>| {
                running.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
            };
            (running.into_iter().map(join).collect::<Vec<_>>(), moments)
        });
        if is_stopped() {
            bail!("interrupted");
        }
        let results = ended.into_iter().collect::<Result<_>>()?;
        Ok((results, Turn::new(self.period.time(), meter.used()?, moments, plots)?))
    }
}
