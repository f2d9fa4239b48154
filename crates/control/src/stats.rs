//! The result of `stats.get`: counters and latencies, for daemons and for clients.
//!
//! Counters never decrease, and go on when a front-end leaves and another one connects. They begin at 0 when
//! a device is added.

use std::collections::BTreeMap;

use kickless_daemon::{DeviceRef, DeviceStatus};
use kickless_device::{BUCKETS, Latencies, OperationTotals, bucket_end_ns};
use kickless_worker::WorkerTimes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The counters of a daemon at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The time on the clock of the workers. Rates are differences of counters, divided by those of this
    /// time.
    pub time_ns: u64,
    /// The workers.
    pub workers: Vec<WorkerStats>,
    /// The devices.
    pub devices: Vec<DeviceStats>,
}

/// The times of a worker. They add up to its age.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStats {
    /// The number of the worker.
    pub worker: usize,
    /// Nanoseconds in which it served requests or completions.
    pub work_ns: u64,
    /// Nanoseconds in which it polled and found nothing.
    pub looking_ns: u64,
    /// Nanoseconds in which it slept.
    pub asleep_ns: u64,
}

/// The counters of a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// The name.
    pub name: String,
    /// The kind, by its name in a configuration file.
    pub kind: String,
    /// The state, as `device.list` shows it.
    pub state: String,
    /// The limits, by the keys of a configuration file.
    #[serde(default)]
    pub limits: Map<String, Value>,
    /// The requests of each kind of operation.
    pub operations: Vec<OperationStats>,
    /// The latencies from the pop of a request to its publication.
    pub request_latency: LatencyStats,
    /// The latencies from the submission of a request to its completion.
    pub io_latency: LatencyStats,
    /// The requests that wait for the disk or for room.
    pub in_flight: u64,
    /// The failed requests among these that wait until the device is resumed.
    #[serde(default)]
    pub stopped_requests: u64,
    /// The age of the oldest of these.
    pub oldest_ns: u64,
    /// The queues that were ever used.
    pub queues: Vec<QueueStats>,
    /// The device's own counters.
    pub device: BTreeMap<String, u64>,
    /// Kicks by message for rings that did not run.
    pub kicks_ignored: u64,
}

/// The requests of one kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// The name of the operation.
    pub name: String,
    /// Requests that were begun.
    pub requests: u64,
    /// The bytes of their data.
    pub bytes: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
}

/// The counters of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// The number of the queue.
    pub queue: usize,
    /// The counters, as in the log.
    #[serde(flatten)]
    pub counters: BTreeMap<String, u64>,
}

/// A histogram of latencies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyStats {
    /// The sum of all latencies.
    pub sum_ns: u64,
    /// The buckets with requests: the end in nanoseconds, and the number of requests. The last bucket has no
    /// end. A bucket is an eighth of an octave.
    pub buckets: Vec<(Option<u64>, u64)>,
}

impl WorkerStats {
    pub(crate) fn new(worker: usize, times: &WorkerTimes) -> Self {
        let WorkerTimes { work_ns, looking_ns, asleep_ns } = *times;
        Self { worker, work_ns, looking_ns, asleep_ns }
    }
}

impl From<Latencies> for LatencyStats {
    fn from(latencies: Latencies) -> Self {
        let buckets = latencies.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        let buckets = buckets.map(|(bucket, count)| (bucket_end_ns(bucket), *count)).collect();
        Self { sum_ns: latencies.sum_ns, buckets }
    }
}

impl LatencyStats {
    /// Returns the histogram. Requests of a bucket that this version does not know count in the next one.
    pub fn latencies(&self) -> Latencies {
        let mut latencies = Latencies { sum_ns: self.sum_ns, ..Latencies::default() };
        let ends: Vec<u64> = (0..BUCKETS).map_while(bucket_end_ns).collect();
        for (end, count) in &self.buckets {
            let bucket = end.map_or(BUCKETS - 1, |end| ends.partition_point(|known| *known < end));
            latencies.counts[bucket] = latencies.counts[bucket].saturating_add(*count);
        }
        latencies
    }
}

impl DeviceStats {
    /// Makes the counters of a device that is not read yet, or has none.
    pub(crate) fn new(status: &DeviceStatus) -> Self {
        Self {
            name: status.config.name().unwrap_or_default().to_owned(),
            kind: status.config.kind.words().name.to_owned(),
            state: status.state.word().to_owned(),
            limits: status.config.kind.limit_entries(),
            ..Self::default()
        }
    }

    /// Reads the counters of the device.
    pub(crate) fn read(&mut self, device: &DeviceRef, time_ns: u64) {
        let statistics = device.statistics();
        let queues = statistics.queues().iter().enumerate();
        let used = queues.filter(|(_, counters)| counters.each().any(|(_, value)| value > 0));
        let named = |(name, value): (&str, u64)| (name.to_owned(), value);
        self.queues = used
            .map(|(queue, counters)| QueueStats { queue, counters: counters.each().map(named).collect() })
            .collect();
        self.device = device.device().counters().into_iter().map(named).collect();
        self.kicks_ignored = statistics.kicks_ignored();
        self.stopped_requests = device.device().stopped().map_or(0, |stopped| stopped.requests);
        let metrics = device.device().metrics(time_ns);
        let operation = |OperationTotals { name, requests, bytes, errors }| OperationStats {
            name: str::to_owned(name),
            requests,
            bytes,
            errors,
        };
        self.operations = metrics.operations.into_iter().map(operation).collect();
        self.request_latency = metrics.request.into();
        self.io_latency = metrics.io.into();
        (self.in_flight, self.oldest_ns) = (metrics.in_flight, metrics.oldest_ns);
    }

    /// Returns the sum of a counter over all queues.
    pub fn sum(&self, counter: &str) -> u64 {
        self.queues.iter().filter_map(|queue| queue.counters.get(counter)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_survive_the_way_to_a_client() {
        let mut latencies = Latencies { sum_ns: 77, ..Latencies::default() };
        for bucket in [0, 1, 100, BUCKETS - 2, BUCKETS - 1] {
            latencies.counts[bucket] = bucket as u64 + 1;
        }
        let stats = LatencyStats::from(latencies.clone());
        assert_eq!(stats.buckets.len(), 5);
        assert_eq!(stats.latencies(), latencies);
    }
}
