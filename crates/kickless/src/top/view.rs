//! The figures of `top`: differences of two readings of the counters. Pure.

use std::fmt;

use kickless_control::{DeviceStats, LatencyStats, Stats};
use serde::Serialize;

/// The figures of a daemon between two readings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct View {
    pub(super) seconds: f64,
    pub(super) workers: Vec<WorkerView>,
    pub(super) devices: Vec<DeviceView>,
}

/// The shares of a worker's time, from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct WorkerView {
    pub(super) worker: usize,
    pub(super) work: f64,
    pub(super) looking: f64,
    pub(super) asleep: f64,
}

/// The figures of a device. Rates are for one second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct DeviceView {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) state: String,
    pub(super) reads: f64,
    pub(super) writes: f64,
    pub(super) others: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) errors: f64,
    /// `None` if no request ended.
    pub(super) p50_ns: Option<u64>,
    pub(super) p99_ns: Option<u64>,
    pub(super) oldest_ns: u64,
    pub(super) in_flight: u64,
    pub(super) kicks: f64,
    pub(super) kicks_avoided: f64,
    /// The time in which requests waited for a limit. More than 1 with several queues.
    pub(super) throttled: f64,
    pub(super) limits: String,
    pub(super) queues: Vec<QueueView>,
    /// Latencies of requests: the end of a bucket, and the requests of the interval in it.
    pub(super) latencies: Vec<(Option<u64>, u64)>,
}

/// The figures of a queue, for one second.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct QueueView {
    pub(super) queue: usize,
    pub(super) requests: f64,
    pub(super) kicks: f64,
    pub(super) kicks_avoided: f64,
    pub(super) calls: f64,
    /// The share of its time in which it was polled.
    pub(super) polled: f64,
}

impl DeviceView {
    /// Returns the requests of all kinds in a second.
    pub(super) fn requests(&self) -> f64 {
        self.reads + self.writes + self.others
    }

    /// Returns the bytes of both directions in a second.
    pub(super) fn bytes(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }
}

/// Compares two readings. A device that is new in the second one counts from 0. So does one that was removed
/// and added again meanwhile, whose counters are less.
pub(super) fn compare(before: &Stats, after: &Stats) -> View {
    let seconds = (after.time_ns.saturating_sub(before.time_ns)).max(1) as f64 / 1e9;
    let share = |new: u64, old: u64| new.saturating_sub(old) as f64 / 1e9 / seconds;
    let workers = after.workers.iter().map(|new| {
        let old = before.workers.iter().find(|old| old.worker == new.worker).cloned().unwrap_or_default();
        WorkerView {
            worker: new.worker,
            work: share(new.work_ns, old.work_ns),
            looking: share(new.looking_ns, old.looking_ns),
            asleep: share(new.asleep_ns, old.asleep_ns),
        }
    });
    let empty = DeviceStats::default();
    let devices = after.devices.iter().map(|new| {
        let old = before.devices.iter().find(|old| old.name == new.name);
        let is_same = |old: &&DeviceStats| old.sum("requests") <= new.sum("requests");
        device(old.filter(is_same).unwrap_or(&empty), new, seconds)
    });
    View { seconds, workers: workers.collect(), devices: devices.collect() }
}

fn device(old: &DeviceStats, new: &DeviceStats, seconds: f64) -> DeviceView {
    let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
    let mut view = DeviceView {
        name: new.name.clone(),
        kind: new.kind.clone(),
        state: new.state.clone(),
        oldest_ns: new.oldest_ns,
        in_flight: new.in_flight,
        kicks: rate(new.sum("kicks"), old.sum("kicks")),
        kicks_avoided: rate(new.sum("kicks_avoided"), old.sum("kicks_avoided")),
        throttled: rate(new.sum("throttled_ns"), old.sum("throttled_ns")) / 1e9,
        limits: limits(new),
        ..DeviceView::default()
    };
    for of in &new.operations {
        let before = old.operations.iter().find(|old| old.name == of.name).cloned().unwrap_or_default();
        let (requests, bytes) = (rate(of.requests, before.requests), rate(of.bytes, before.bytes));
        view.errors += rate(of.errors, before.errors);
        match of.name.as_str() {
            "read" | "receive" => (view.reads, view.read_bytes) = (requests, bytes),
            "write" | "transmit" => (view.writes, view.written_bytes) = (requests, bytes),
            _ => view.others += requests,
        }
    }
    let mut latencies = new.request_latency.latencies();
    let before = old.request_latency.latencies();
    latencies.counts.iter_mut().zip(&before.counts).for_each(|(new, old)| *new = new.saturating_sub(*old));
    (view.p50_ns, view.p99_ns) = (latencies.quantile_ns(500), latencies.quantile_ns(990));
    view.latencies = LatencyStats::from(latencies).buckets;
    let none = Default::default();
    view.queues = new
        .queues
        .iter()
        .map(|queue| {
            let before = old.queues.iter().find(|old| old.queue == queue.queue).unwrap_or(&none);
            let of = |counter: &str| {
                let value = |counters: &std::collections::BTreeMap<String, u64>| {
                    counters.get(counter).copied().unwrap_or_default()
                };
                rate(value(&queue.counters), value(&before.counters))
            };
            QueueView {
                queue: queue.queue,
                requests: of("requests"),
                kicks: of("kicks"),
                kicks_avoided: of("kicks_avoided"),
                calls: of("calls"),
                polled: of("polled_ns") / 1e9,
            }
        })
        .collect();
    view
}

/// Returns the limits of a device as short text.
fn limits(device: &DeviceStats) -> String {
    let shown = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let all = device.limits.iter().map(|(key, value)| format!("{key}={}", shown(value)));
    all.collect::<Vec<_>>().join(" ")
}

/// Shows a number with three digits and a prefix.
pub(super) struct Short(pub(super) f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut prefix) = (self.0, "");
        for next in ["k", "M", "G", "T"] {
            if value < 999.5 {
                break;
            }
            (value, prefix) = (value / 1000.0, next);
        }
        let digits = if value >= 99.95 || (value.fract() == 0.0 && prefix.is_empty()) { 0 } else { 1 };
        f.pad(&format!("{value:.digits$}{prefix}"))
    }
}

/// Shows a time.
pub(super) struct Time(pub(super) u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ns, unit) = match self.0 {
            0..1_000 => (self.0 as f64, "ns"),
            1_000..1_000_000 => (self.0 as f64 / 1e3, "us"),
            1_000_000..1_000_000_000 => (self.0 as f64 / 1e6, "ms"),
            _ => (self.0 as f64 / 1e9, "s"),
        };
        let digits = if ns >= 99.95 || unit == "ns" { 0 } else { 1 };
        f.pad(&format!("{ns:.digits$}{unit}"))
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    fn reading(time_ns: u64, reads: u64, buckets: &serde_json::Value) -> Stats {
        let device = json!({
            "name": "a", "kind": "blk", "state": "connected", "limits": { "iops": 100, "bps": "1M" },
            "operations": [
                { "name": "read", "requests": reads, "bytes": reads * 4096, "errors": 0 },
                { "name": "flush", "requests": reads, "bytes": 0, "errors": reads },
            ],
            "request_latency": { "sum_ns": 0, "buckets": buckets }, "io_latency": { "sum_ns": 0, "buckets": [] },
            "in_flight": 3, "oldest_ns": 7, "device": {}, "kicks_ignored": 0,
            "queues": [{ "queue": 1, "requests": 2 * reads, "kicks": reads, "polled_ns": time_ns / 2 }],
        });
        let worker =
            json!({ "worker": 0, "work_ns": time_ns / 4, "looking_ns": 0, "asleep_ns": 3 * time_ns / 4 });
        Stats::deserialize(json!({ "time_ns": time_ns, "workers": [worker], "devices": [device] })).unwrap()
    }

    #[test]
    fn rates_are_differences() {
        let before = reading(1_000_000_000, 100, &json!([[1024, 10]]));
        let after = reading(3_000_000_000, 300, &json!([[1024, 10], [2048, 99], [1_048_576, 1], [null, 0]]));
        let view = compare(&before, &after);
        assert_eq!((view.seconds, view.workers[0].work, view.workers[0].asleep), (2.0, 0.25, 0.75));
        let device = &view.devices[0];
        assert_eq!(
            (device.reads, device.others, device.requests(), device.errors),
            (100.0, 100.0, 200.0, 100.0)
        );
        assert_eq!((device.bytes(), device.kicks, device.in_flight), (409_600.0, 100.0, 3));
        assert_eq!((device.p50_ns, device.p99_ns), (Some(2048), Some(2048)));
        assert_eq!((device.limits.as_str(), device.queues[0].polled), ("bps=1M iops=100", 0.5));
        // The device was added again.
        let again = compare(&after, &reading(4_000_000_000, 10, &json!([])));
        assert_eq!((again.devices[0].reads, again.devices[0].p50_ns), (10.0, None));
    }

    #[test]
    fn figures_are_short() {
        let shown = |value| Short(value).to_string();
        assert_eq!(
            [0.0, 7.0, 0.25, 42.7, 999.0, 1000.0].map(shown),
            ["0", "7", "0.2", "42.7", "999", "1.0k"]
        );
        assert_eq!([123_456.0, 999_600.0, 4.2e9].map(shown), ["123k", "1.0M", "4.2G"]);
        let time = |value| Time(value).to_string();
        assert_eq!(
            [7, 1500, 123_456, 2_000_000, 12_000_000_000].map(time),
            ["7ns", "1.5us", "123us", "2.0ms", "12.0s"]
        );
    }
}
