//! Metrics of a device: requests, bytes and errors by operation, and latencies.
//!
//! The thread of a queue writes plain counts without a lock. A reader adds up the counts of all queues, and
//! never stops a queue.

mod histogram;
mod queue;
mod totals;

pub use histogram::{BUCKETS, Histogram, Latencies, bucket_end_ns};
pub use queue::{OperationCounts, QueueMetrics};
pub use totals::{DeviceMetrics, OperationTotals};
