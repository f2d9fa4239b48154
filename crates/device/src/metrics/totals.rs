//! Sums over the queues of a device.

use super::histogram::Latencies;

/// The sums of one kind of operation over all queues of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationTotals {
    /// The name of the operation.
    pub name: &'static str,
    /// Requests that were begun.
    pub requests: u64,
    /// The bytes of their data.
    pub bytes: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
}

/// The metrics of a device at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceMetrics {
    /// The counts of each kind of operation.
    pub operations: Vec<OperationTotals>,
    /// The latencies from the pop of a request to its publication.
    pub request: Latencies,
    /// The latencies from the submission of a request to an engine or a library to its completion there.
    pub io: Latencies,
    /// The number of requests that wait for an engine, a library, or room.
    pub in_flight: u64,
    /// The age of the oldest of these in nanoseconds. 0 if there is none.
    pub oldest_ns: u64,
}
