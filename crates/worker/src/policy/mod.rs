//! When a queue that was found empty is looked at again, when it is left alone for a while, and when it asks for kicks. Pure:
//! times go in, decisions come out; no clock is read, nothing is allocated after [`Policy::new`], and all sums are of integers.
//!
//! # Words
//! * A *wait* begins when a queue is found empty and ends when something comes for it: a request, or the completion of
//!   its I/O.
//! * *Spin*: look at the ring again and again. *Nap*: sleep on a timer. Kicks are off in both: the queue is *polled*.
//! * *Arm*: enable kicks and sleep until one comes: the queue is *notified*, until it is found empty after it was served
//!   and spins or naps.
//!
//! # Parts
//! * `waits`: how long waits have been, and how long it pays to spin for such: the ski-rental problem.
//! * `arrivals`: how many requests come for each unit of time.
//! * `reaction`: whether requests come later if they are answered later, by a trial.
//! * `auto`: what follows from these for each wait.
//! * `rate`: the rule of 2014, which takes none of it into account.
//! * [`Pressure`]: whether other threads want the core.
//! * [`Host`]: what sleeping and waking costs on this machine.
//!
//! # How it is called
//! Each visit of a queue ends in [`found`](Policy::found) or [`empty`](Policy::empty), and each completion in `found`. What
//! `empty` says is done: on [`Verdict::Arm`], kicks are enabled and the ring looked at once more, which ends in
//! [`armed`](Policy::armed), or in [`still_busy`](Policy::still_busy) and a visit. A sleep ends in
//! [`woken`](Policy::woken) and a visit.

#[allow(dead_code, reason = "what decides about naps comes next")]
mod arrivals;
mod auto;
mod host;
mod pressure;
mod rate;
mod reaction;
mod verdict;
mod waits;

pub use crate::clock::Nanos;
pub use host::Host;
pub use pressure::{Pressure, Usage};
pub use verdict::Verdict;

use crate::Poll;
use crate::clock::nanos;
use auto::Auto;
use rate::Rate;

/// Decides for one queue.
#[derive(Debug)]
pub struct Policy {
    poll: Poll,
    polled: bool,
    rate: Rate,
    auto: Auto,
}

impl Policy {
    /// For a queue of `ring_size` entries that is being served (it has not been armed), as `poll` says.
    pub fn new(poll: Poll, ring_size: u16) -> Self {
        let mut policy = Self { poll, polled: false, rate: Rate::default(), auto: Auto::new(ring_size) };
        policy.set(poll);
        policy
    }

    /// From the next decision on, as `poll` says. What was learnt stays.
    pub fn set(&mut self, poll: Poll) {
        match poll {
            Poll::Rate { start_per_sec, stop_idle } => self.rate.set(start_per_sec, nanos(stop_idle)),
            Poll::Auto { latency } => self.auto.set(nanos(latency)),
            Poll::Always | Poll::Never => {}
        }
        self.poll = poll;
    }

    /// A visit, or a completion, yielded work; `requests` were popped (0: there were completions only). This ends a wait.
    pub fn found(&mut self, now: Nanos, requests: u32) {
        match self.poll {
            Poll::Auto { .. } => self.auto.found(now, requests),
            Poll::Rate { .. } if requests > 0 && self.rate.found(now, self.polled) => self.polled = true,
            _ => {}
        }
    }

    /// A visit found nothing, while I/O of this queue is in flight (`on_disk`) or not. This begins a wait, or goes on with one.
    pub fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        let verdict = match self.poll {
            Poll::Auto { .. } => self.auto.empty(now, host, on_disk),
            Poll::Always => Verdict::Spin { until: Nanos::MAX },
            Poll::Never => Verdict::Arm,
            Poll::Rate { .. } => self.rate.empty(now, self.polled),
        };
        self.polled |= verdict != Verdict::Arm;
        verdict
    }

    /// Kicks were not enabled after all, because work came in between: the queue stays as it was.
    pub fn still_busy(&mut self) {
        // The work is found by the visit that follows, and ends the wait.
    }

    /// Kicks are enabled, and the worker may sleep.
    pub fn armed(&mut self, now: Nanos) {
        self.polled = false;
        self.auto.armed(now);
    }

    /// A nap or the sleep of an armed queue is over, whatever ended it; after a nap, `pending` entries are in the ring.
    pub fn woken(&mut self, now: Nanos, host: &Host, pending: u16) {
        self.auto.woken(now, host, pending);
    }

    /// Kicks are off, because the queue is spun for or naps.
    pub fn is_polled(&self) -> bool {
        self.polled
    }
}
