//! The threads of one turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::common_options::CommonLoad;
use super::cpu::{CpuMeter, pin, shorten_timer_slack};
use super::progress::Progress;
use super::turn::Turn;
use super::watch::{Period, Sample, watch};

/// The time between two checks whether the threads have ended.
const LAST_LOOK: Duration = Duration::from_millis(1);
/// The longest time for requests in flight to end after a signal. A disk answers within some milliseconds,
/// and a person does not wait longer.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

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
    /// `counters` returns the number of requests that have completed and of kicks. After a signal, the loads
    /// return the figures so far. `abort` is then called if one waits for a back-end that does not answer any
    /// more.
    ///
    /// # Errors
    /// A load fails, or the back-end has exited.
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
            let is_over = || running.iter().all(ScopedJoinHandle::is_finished);
            while !is_over() && !is_stopped() {
                thread::sleep(LAST_LOOK);
            }
            if is_stopped() {
                self.halted.store(true, Ordering::Relaxed);
                let deadline = Instant::now() + LAST_ANSWERS;
                while !is_over() && Instant::now() < deadline {
                    thread::sleep(LAST_LOOK);
                }
                if !is_over() {
                    abort();
                }
            }
            let join = |running: ScopedJoinHandle<'_, Result<T>>| {
                running.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
            };
            (running.into_iter().map(join).collect::<Vec<_>>(), moments)
        });
        let results = ended.into_iter().collect::<Result<_>>()?;
        let (is_interrupted, time) = (is_stopped(), self.period.time_so_far());
        Ok((results, Turn { is_interrupted, ..Turn::new(time, meter.used()?, moments, plots)? }))
    }
}
