//! Counters of a device.

use kickless_device::{Count, Counters, Device};
use kickless_handover::Amounts;
use kickless_handover::v1::Final;
use std::fmt;
use std::sync::Arc;
use tracing::info;

/// The name in a final record of the counter of kicks that were ignored.
const KICKS_IGNORED: &str = "kicks_ignored";

/// The counters of a device, over all its front-ends.
pub struct Statistics {
    queues: Vec<Arc<Counters>>,
    /// Kicks by message for rings that did not run.
    pub(crate) kicks_ignored: Count,
}

impl Statistics {
    /// Makes the counters of a device.
    pub(crate) fn new(device: &dyn Device) -> Self {
        let queues = (0..device.queues_max()).map(|_| Arc::default()).collect();
        Self { queues, kicks_ignored: Count::default() }
    }

    pub(crate) fn queue(&self, index: u16) -> Arc<Counters> {
        self.queues[usize::from(index)].clone()
    }

    /// Returns the kicks and requests of all queues.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let add =
            |(kicks, requests), of: &Arc<Counters>| (kicks + of.kicks.get(), requests + of.requests.get());
        self.queues.iter().fold((0, 0), add)
    }

    /// Returns the counters of each queue, by index.
    pub fn queues(&self) -> &[Arc<Counters>] {
        &self.queues
    }

    /// Returns the number of kicks by message for rings that did not run.
    pub fn kicks_ignored(&self) -> u64 {
        self.kicks_ignored.get()
    }

    /// Adds the counters to a final record. A counter of 0 is not there, and no queue behind the last one
    /// that has counted: most devices use few of the queues that they offer, and each costs time in the
    /// pause.
    pub(crate) fn give(&self, to: &mut Final) {
        let amounts = |counters: &Arc<Counters>| {
            let counted = counters.each().filter(|(_, value)| *value > 0);
            counted.map(|(name, value)| (name.to_owned(), value)).collect()
        };
        to.queue_counters = self.queues.iter().map(amounts).collect();
        let used = to.queue_counters.iter().rposition(|counted: &Amounts| !counted.is_empty());
        to.queue_counters.truncate(used.map_or(0, |last| last + 1));
        if self.kicks_ignored() > 0 {
            to.counters.insert(KICKS_IGNORED.to_owned(), self.kicks_ignored());
        }
    }

    /// Takes the counters of another process. No queue runs.
    pub(crate) fn receive(&self, from: &Final) {
        for (counters, amounts) in std::iter::zip(&self.queues, &from.queue_counters) {
            amounts.iter().for_each(|(name, value)| counters.set(name, *value));
        }
        let kicks_ignored = from.counters.get(KICKS_IGNORED).copied().unwrap_or_default();
        self.kicks_ignored.set(kicks_ignored);
    }

    /// Logs a line for each queue that was ever used, or one line if there is none, and a line with the
    /// device's `own` counters. Each begins with `occasion`.
    pub fn log(&self, occasion: &str, own: &[(&str, u64)]) {
        let used = |counters: &Counters| counters.requests.get() + counters.kicks.get() > 0;
        if !self.queues.iter().any(|counters| used(counters)) {
            info!("{occasion} queues_used=0");
        }
        for (queue, counters) in self.queues.iter().enumerate().filter(|(_, counters)| used(counters)) {
            info!("{occasion} queue={queue} {counters}");
        }
        let own: Vec<_> = own.iter().map(|(name, value)| format!(" {name}={value}")).collect();
        if !own.is_empty() {
            info!("{occasion} device{}", own.concat());
        }
        if self.kicks_ignored() > 0 {
            info!("{occasion} kicks_ignored={}", self.kicks_ignored());
        }
    }
}

impl fmt::Debug for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Statistics").field("queues", &self.queues).finish_non_exhaustive()
    }
}
