//! The decision about an empty queue: poll it again, leave it alone for a while, or ask for kicks. Pure:
//! times go in and decisions come out. No clock is read, and nothing is allocated after [`Policy::new`].
//!
//! # Words
//! * A *wait* begins when a queue is found empty. It ends when a request comes, or when the queue's I/O
//!   completes.
//! * *Spin*: poll the ring again and again. *Nap*: sleep on a timer. Kicks are off in both: the queue is
//!   *polled*.
//! * *Arm*: enable kicks and sleep until one comes. The queue is *notified*, until a visit serves it, finds
//!   it empty again, and spins or naps.
//!
//! # Modules
//! `auto` decides about each wait, from the lengths of recent waits (`waits`: the ski-rental problem), the
//! rate of requests (`load`), whether fewer come if they are answered later (`trial`, with the lease that
//! follows from it), the costs of this machine ([`Host`]), and other threads that want the core
//! ([`Pressure`]). `never` looks once more before a sleep (`last_look`), and `rate` is the rule of 2014.
//!
//! # How it is called
//! Each visit of a queue ends in [`found`](Policy::found) or [`empty`](Policy::empty), and each completion
//! in `found`. The worker carries out the verdict of `empty`. On [`Verdict::Arm`], it enables kicks and
//! checks the ring once more. This ends in [`armed`](Policy::armed), or in a visit if work has come. The
//! sleep of an armed queue ends in [`woken`](Policy::woken) and a visit, a nap in a visit.

mod auto;
mod host;
mod last_look;
mod load;
mod pressure;
mod rate;
mod trial;
mod verdict;
mod waits;

pub use crate::clock::Nanos;
pub use host::Host;
pub use pressure::{Pressure, Usage};
pub use verdict::Verdict;

use crate::Poll;
use crate::clock::nanos;
use auto::Auto;
use last_look::LastLook;
use rate::Rate;

/// The policy of one queue.
#[derive(Debug)]
pub struct Policy {
    poll: Poll,
    polled: bool,
    rate: Rate,
    last_look: LastLook,
    auto: Auto,
}

impl Policy {
    /// Makes the policy of a queue of `ring_size` entries that is being served (it is not armed), with the
    /// rule `poll`.
    pub fn new(poll: Poll, ring_size: u16) -> Self {
        let (rate, last_look) = (Rate::default(), LastLook::default());
        let mut policy = Self { poll, polled: false, rate, last_look, auto: Auto::new(ring_size) };
        policy.set(poll);
        policy
    }

    /// Changes the rule from the next decision on. Keeps the measurements.
    pub fn set(&mut self, poll: Poll) {
        match poll {
            Poll::Rate { start_per_sec, stop_idle } => self.rate.set(start_per_sec, nanos(stop_idle)),
            Poll::Auto { latency, kick_price } => self.auto.set(nanos(latency), nanos(kick_price)),
            Poll::Always | Poll::Never => {}
        }
        self.poll = poll;
    }

    /// Ends a wait: a visit, or a completion, found work. `requests` were popped; 0 means that there were
    /// completions only.
    pub fn found(&mut self, now: Nanos, requests: u32) {
        match self.poll {
            Poll::Auto { .. } => self.auto.found(now, requests),
            Poll::Never => self.last_look.found(now, requests),
            Poll::Rate { .. } if requests > 0 => self.polled |= self.rate.found(now),
            _ => {}
        }
    }

    /// Begins or continues a wait: a visit found nothing. `on_disk` says whether I/O of this queue is in
    /// flight. Returns what to do.
    pub fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        let verdict = match self.poll {
            Poll::Auto { .. } => self.auto.empty(now, host, on_disk),
            Poll::Always => Verdict::Spin { until: Nanos::MAX },
            Poll::Never if host.contended => Verdict::Arm,
            Poll::Never => self.last_look.empty(now, host.kicked_cpu),
            Poll::Rate { .. } => self.rate.empty(now, self.polled),
        };
        self.polled |= verdict != Verdict::Arm;
        verdict
    }

    /// Notes that kicks are enabled and the worker may sleep.
    pub fn armed(&mut self) {
        self.polled = false;
    }

    /// Notes the end of an armed queue's sleep, for any reason.
    pub fn woken(&mut self, now: Nanos, host: &Host) {
        self.auto.woken(now, host);
    }

    /// Repeats the decisions of `auto` about leases after a recorded pair of blocks: `time` after the pair
    /// before, with `share` of the worker's log at level `trace`. Returns the rest of the lease, and the
    /// capital of the test.
    pub fn replay(&mut self, time: Nanos, share: f64) -> (Nanos, f64) {
        let trial = &mut self.auto.trial;
        trial.spend(time);
        trial.bet(share);
        (trial.lease, trial.test.capital)
    }

    /// Returns whether a nap may be spun through, which costs nothing while another queue keeps the core. Not
    /// so for the nap of a trial, which is to delay the requests.
    pub fn may_look_in_nap(&self) -> bool {
        !self.auto.trial.is_napping()
    }

    /// Returns whether `auto` keeps the core for this queue, in its waits too.
    pub fn keeps_core(&self) -> bool {
        matches!(self.poll, Poll::Auto { .. }) && self.auto.is_eager()
    }

    /// Returns whether kicks are off, because the queue spins or naps.
    pub fn is_polled(&self) -> bool {
        self.polled
    }
}
