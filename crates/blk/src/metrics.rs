//! The metrics of the queues of a disk.

use crate::operation::Operation;
use kickless_device::{Context, DeviceMetrics, OperationTotals, QueueMetrics};
use kickless_handover::Amounts;
use std::sync::{Arc, OnceLock};

/// The metrics of all queues, by index. A queue that never started has none.
#[derive(Debug)]
pub(crate) struct Metrics {
    queues: Box<[OnceLock<Arc<QueueMetrics>>]>,
    queue_size_max: u16,
    /// The counts of the process from which this one took the device over.
    earlier: OnceLock<Amounts>,
}

/// The names of the three counts of an operation, as another process reads them.
fn count_names(operation: &str) -> [String; 3] {
    ["requests", "bytes", "errors"].map(|count| format!("{operation}-{count}"))
}

impl Metrics {
    pub(crate) fn new(queues_max: u16, queue_size_max: u16) -> Self {
        let queues = (0..queues_max).map(|_| OnceLock::new()).collect();
        Self { queues, queue_size_max, earlier: OnceLock::new() }
    }

    /// Returns the metrics of a queue, which go on when the queue starts again.
    pub(crate) fn queue(&self, index: u16) -> Arc<QueueMetrics> {
        let make = || Arc::new(QueueMetrics::new(self.queue_size_max));
        self.queues.get(usize::from(index)).map_or_else(make, |queue| queue.get_or_init(make).clone())
    }

    /// Returns the sums over all queues.
    pub(crate) fn read(&self, now_ns: u64) -> DeviceMetrics {
        let (mut sum, names) = (DeviceMetrics::default(), Operation::names());
        let queues = self.queues.iter().filter_map(OnceLock::get);
        queues.for_each(|queue| queue.add_to(&mut sum, &names, now_ns));
        if let Some(earlier) = self.earlier.get() {
            if sum.operations.is_empty() {
                let none = |name| OperationTotals { name, requests: 0, bytes: 0, errors: 0 };
                sum.operations = names.map(none).into();
            }
            for total in &mut sum.operations {
                let counts = [&mut total.requests, &mut total.bytes, &mut total.errors];
                for (count, name) in counts.into_iter().zip(count_names(total.name)) {
                    *count = count.saturating_add(earlier.get(&name).copied().unwrap_or(0));
                }
            }
        }
        sum
    }

    /// Returns the counts of operations by name, without those that are 0.
    pub(crate) fn operations(&self) -> Amounts {
        let counts = |total: OperationTotals| {
            count_names(total.name).into_iter().zip([total.requests, total.bytes, total.errors])
        };
        self.read(0).operations.into_iter().flat_map(counts).filter(|(_, count)| *count > 0).collect()
    }

    /// Goes on with the counts of another process. Those that this one does not know are dropped.
    pub(crate) fn go_on_from(&self, earlier: Amounts) {
        if !earlier.is_empty() {
            let _ = self.earlier.set(earlier);
        }
    }
}

/// Measures the requests of a running queue.
///
/// Counts are kept here until the end of a poll, and written for other threads once. A request that is
/// answered in the poll that popped it costs three additions. All of a poll have the same latency, and the
/// clock is read once for them. A request that waits has its own time of its pop.
#[derive(Debug)]
pub(crate) struct Meter {
    metrics: Arc<QueueMetrics>,
    /// The time at the beginning of the present poll, in which its requests are popped.
    popped_ns: u64,
    /// The last operation that began, and the requests of this kind and their bytes that the metrics do not
    /// have yet.
    operation: Operation,
    requests: u64,
    bytes: u64,
    /// The number of requests that are answered in the poll that popped them, and not published yet.
    answered: u64,
    /// The time at which the request in each slot was submitted. 0: it was not.
    submitted_ns: Box<[u64]>,
    /// The requests that waited, and are answered and not published yet: when they were popped and submitted.
    waited: Vec<(u64, u64)>,
}

impl Meter {
    /// Measures a queue with this number of slots.
    pub(crate) fn new(metrics: Arc<QueueMetrics>, slots: u16) -> Self {
        let slots = usize::from(slots);
        let submitted_ns = vec![0; slots].into_boxed_slice();
        Self {
            metrics,
            popped_ns: 0,
            operation: Operation::Read,
            requests: 0,
            bytes: 0,
            answered: 0,
            submitted_ns,
            waited: Vec::with_capacity(slots),
        }
    }

    /// Begins a poll, or the completions of a batch.
    #[inline]
    pub(crate) fn begin(&mut self, now_ns: u64) {
        self.popped_ns = now_ns;
    }

    /// Counts a request that begins.
    #[inline(always)]
    pub(crate) fn count(&mut self, operation: Operation, bytes: u64) {
        if operation != self.operation {
            self.write_counts();
            self.operation = operation;
        }
        self.requests += 1;
        self.bytes += bytes;
    }

    /// Adds the requests counted since the last call to the metrics.
    #[inline(never)]
    fn write_counts(&mut self) {
        let counts = self.metrics.operation(self.operation as usize);
        counts.requests.add(std::mem::take(&mut self.requests));
        counts.bytes.add(std::mem::take(&mut self.bytes));
    }

    /// Counts an answer with an error.
    pub(crate) fn count_error(&self, operation: Operation) {
        self.metrics.operation(operation as usize).errors.add(1);
    }

    /// Notes that a request is answered in the poll that popped it.
    #[inline(always)]
    pub(crate) fn answered_at_once(&mut self) {
        self.answered += 1;
    }

    /// Notes that a request of this poll waits in its slot.
    #[inline]
    pub(crate) fn waits(&mut self, slot: u32) {
        self.metrics.set_waiting(slot, self.popped_ns);
    }

    /// Notes that the request in a slot has an operation in an engine or a library. Counts from the first
    /// one.
    #[inline]
    pub(crate) fn submitted(&mut self, slot: u32) {
        if let Some(submitted_ns @ 0) = self.submitted_ns.get_mut(slot as usize) {
            *submitted_ns = self.popped_ns.max(1);
        }
    }

    /// Notes that a request that waited is answered.
    #[inline]
    pub(crate) fn answered(&mut self, slot: u32) {
        let submitted_ns = self.submitted_ns.get_mut(slot as usize).map_or(0, std::mem::take);
        self.waited.push((self.metrics.take_waiting(slot), submitted_ns));
    }

    /// Forgets a request that waited, and that another queue will answer.
    pub(crate) fn left(&mut self, slot: u32) {
        self.metrics.take_waiting(slot);
        self.submitted_ns.get_mut(slot as usize).map(std::mem::take);
    }

    /// Writes the counts of requests that began, and the latencies of those that were published.
    #[inline]
    pub(crate) fn published(&mut self, context: &mut Context<'_>) {
        if self.requests > 0 {
            self.write_counts();
        }
        if self.answered > 0 {
            let ns = context.read_clock().saturating_sub(self.popped_ns);
            self.metrics.request.record(ns, std::mem::take(&mut self.answered));
        }
        if !self.waited.is_empty() {
            self.published_waited(context.read_clock());
        }
    }

    #[inline(never)]
    fn published_waited(&mut self, now_ns: u64) {
        for (popped_ns, submitted_ns) in self.waited.drain(..) {
            self.metrics.request.record(now_ns.saturating_sub(popped_ns), 1);
            if submitted_ns > 0 {
                self.metrics.io.record(now_ns.saturating_sub(submitted_ns), 1);
            }
        }
    }
}
