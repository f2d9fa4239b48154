//! The metrics of one queue.

use std::sync::atomic::{AtomicU64, Ordering};

use super::histogram::Histogram;
use super::totals::{DeviceMetrics, OperationTotals};
use crate::Count;

/// The most kinds of operations of a device. A power of two, so that a queue finds the counts of one without
/// a check.
const OPERATIONS_MAX: usize = 8;

/// The counts of one kind of operation.
#[derive(Debug, Default)]
pub struct OperationCounts {
    /// Requests that were begun.
    pub requests: Count,
    /// The bytes of their data.
    pub bytes: Count,
    /// Requests that were answered with an error.
    pub errors: Count,
}

/// The metrics of one queue. Its worker writes them, and any thread reads them.
#[derive(Debug)]
pub struct QueueMetrics {
    operations: [OperationCounts; OPERATIONS_MAX],
    /// The latencies from the pop of a request to its publication.
    pub request: Histogram,
    /// The latencies from the submission of a request to its completion.
    pub io: Histogram,
    /// The time at which the request in each slot was popped, for requests that wait. 0: it does not wait.
    popped_ns: Box<[AtomicU64]>,
}

impl QueueMetrics {
    /// Makes the metrics of a queue that has at most `slots` requests in flight.
    pub fn new(slots: u16) -> Self {
        Self {
            operations: Default::default(),
            request: Histogram::default(),
            io: Histogram::default(),
            popped_ns: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the counts of the operation at this place in the list of the device, which has at most eight.
    pub fn operation(&self, place: usize) -> &OperationCounts {
        &self.operations[place % OPERATIONS_MAX]
    }

    /// Notes that the request in a slot waits, and when it was popped.
    pub fn set_waiting(&self, slot: u32, popped_ns: u64) {
        if let Some(stamp) = self.popped_ns.get(slot as usize) {
            stamp.store(popped_ns.max(1), Ordering::Relaxed);
        }
    }

    /// Notes that the request in a slot is answered. Returns when it was popped.
    pub fn take_waiting(&self, slot: u32) -> u64 {
        let Some(stamp) = self.popped_ns.get(slot as usize) else { return 0 };
        let popped_ns = stamp.load(Ordering::Relaxed);
        stamp.store(0, Ordering::Relaxed);
        popped_ns
    }

    /// Adds these metrics to those of the device, whose operations have these names. `now_ns` is on the clock
    /// of the queue's worker.
    pub fn add_to(&self, sum: &mut DeviceMetrics, names: &[&'static str], now_ns: u64) {
        for (place, (name, counts)) in names.iter().zip(&self.operations).enumerate() {
            if sum.operations.len() <= place {
                sum.operations.push(OperationTotals { name, requests: 0, bytes: 0, errors: 0 });
            }
            let total = &mut sum.operations[place];
            total.requests += counts.requests.get();
            total.bytes += counts.bytes.get();
            total.errors += counts.errors.get();
        }
        sum.request.add(&self.request.read());
        sum.io.add(&self.io.read());
        let stamps = self.popped_ns.iter().map(|stamp| stamp.load(Ordering::Relaxed)).filter(|ns| *ns > 0);
        for popped_ns in stamps {
            sum.in_flight += 1;
            sum.oldest_ns = sum.oldest_ns.max(now_ns.saturating_sub(popped_ns));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_add_up() {
        let (one, other) = (QueueMetrics::new(4), QueueMetrics::new(4));
        one.operation(0).requests.add(2);
        one.operation(1).bytes.add(512);
        other.operation(1).bytes.add(1024);
        other.operation(1).errors.add(1);
        one.set_waiting(3, 100);
        other.set_waiting(0, 40);
        other.set_waiting(1, 90);
        // A slot that the queue does not have.
        other.set_waiting(4, 1);
        other.request.record(1000, 5);
        let mut sum = DeviceMetrics::default();
        one.add_to(&mut sum, &["read", "write"], 150);
        other.add_to(&mut sum, &["read", "write"], 150);
        assert_eq!(
            sum.operations,
            [
                OperationTotals { name: "read", requests: 2, bytes: 0, errors: 0 },
                OperationTotals { name: "write", requests: 0, bytes: 1536, errors: 1 },
            ]
        );
        assert_eq!((sum.in_flight, sum.oldest_ns, sum.request.count()), (3, 110, 5));
        assert_eq!((one.take_waiting(3), one.take_waiting(3), other.take_waiting(4)), (100, 0, 0));
    }
}
