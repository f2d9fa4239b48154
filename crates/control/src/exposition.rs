//! Counters as text for Prometheus and its like, in one of two formats.
//!
//! The samples are the same in both formats, and only the lines about families differ. Names of metrics and
//! labels are part of the interface of the program. The number of series depends only on the number of
//! devices and workers.

use std::fmt::Write;

use kickless_daemon::Kinds;

use super::stats::{DeviceStats, LatencyStats, Stats};

/// A format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// Prometheus text 0.0.4, which every collector reads. It has no units, and no types for states.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Exposition {
    /// Returns the media type.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The ends of the exported buckets in nanoseconds, from 20 us to 10 s. Each is the end of an internal
/// bucket, so that the counts are exact. Internal ends are eighths of powers of two, so these are not round.
const ENDS_NS: [u64; 12] = [
    20_480,
    49_152,
    98_304,
    196_608,
    491_520,
    983_040,
    5_242_880,
    20_971_520,
    100_663_296,
    503_316_480,
    2_013_265_920,
    10_737_418_240,
];

/// The states of a device, as `device.list` shows them.
const STATES: [&str; 8] =
    ["opening", "free", "connected", "drained", "stopped", "removing", "ended", "unavailable"];

/// A text with metrics.
struct Text(String, Exposition);

/// Writes a value of a label.
struct Label<'a>(&'a str);

impl std::fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            char => f.write_char(char),
        })
    }
}

/// Writes nanoseconds as seconds, exactly.
struct Seconds(u64);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (seconds, ns) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        if ns == 0 {
            return write!(f, "{seconds}.0");
        }
        let text = format!("{ns:09}");
        write!(f, "{seconds}.{}", text.trim_end_matches('0'))
    }
}

impl Text {
    /// Begins a family of metrics.
    fn family(&mut self, name: &str, kind: &str, unit: Option<&str>, help: &str) {
        // Prometheus text knows the names of samples instead of families, and fewer types.
        let (suffix, kind) = match (self.1, kind) {
            (Exposition::Prometheus, "counter") => ("_total", kind),
            (Exposition::Prometheus, "info") => ("_info", "gauge"),
            (Exposition::Prometheus, "stateset") => ("", "gauge"),
            _ => ("", kind),
        };
        // Writing to a `String` does not fail.
        let _ = writeln!(self.0, "# TYPE {name}{suffix} {kind}");
        if let (Some(unit), Exposition::OpenMetrics) = (unit, self.1) {
            let _ = writeln!(self.0, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.0, "# HELP {name}{suffix} {help}");
    }

    /// Writes a sample of a device.
    fn of_device(
        &mut self,
        name: &str,
        device: &str,
        label: Option<(&str, &str)>,
        value: impl std::fmt::Display,
    ) {
        let device = Label(device);
        let _ = match label {
            Some((key, label)) => {
                writeln!(self.0, "{name}{{device=\"{device}\",{key}=\"{}\"}} {value}", Label(label))
            }
            None => writeln!(self.0, "{name}{{device=\"{device}\"}} {value}"),
        };
    }

    /// Writes the family of a counter that each operation of each device has.
    fn operations(
        &mut self,
        stats: &Stats,
        (name, unit, help): (&str, Option<&str>, &str),
        value: fn(&super::stats::OperationStats) -> u64,
    ) {
        self.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        for device in &stats.devices {
            for operation in &device.operations {
                self.of_device(&total, &device.name, Some(("op", &operation.name)), value(operation));
            }
        }
    }

    /// Writes the family of a counter of the queues of each device.
    fn queues(&mut self, stats: &Stats, name: &str, counter: &str, help: &str) {
        let unit = name.ends_with("_seconds").then_some("seconds");
        self.family(name, "counter", unit, help);
        let total = format!("{name}_total");
        for device in &stats.devices {
            let sum = device.sum(counter);
            match unit {
                Some(_) => self.of_device(&total, &device.name, None, Seconds(sum)),
                None => self.of_device(&total, &device.name, None, sum),
            }
        }
    }

    /// Writes the family of a histogram of each device that measures latencies.
    fn histograms(
        &mut self,
        (stats, kinds): (&Stats, &Kinds),
        name: &str,
        help: &str,
        of: fn(&DeviceStats) -> &LatencyStats,
    ) {
        self.family(name, "histogram", Some("seconds"), help);
        let (bucket, count, sum) = (format!("{name}_bucket"), format!("{name}_count"), format!("{name}_sum"));
        for device in stats.devices.iter().filter(|device| kinds.has_latencies(&device.kind)) {
            let latencies = of(device).latencies();
            for end in ENDS_NS {
                let le = Seconds(end).to_string();
                self.of_device(&bucket, &device.name, Some(("le", &le)), latencies.count_below(end));
            }
            self.of_device(&bucket, &device.name, Some(("le", "+Inf")), latencies.count());
            self.of_device(&count, &device.name, None, latencies.count());
            self.of_device(&sum, &device.name, None, Seconds(latencies.sum_ns));
        }
    }
}

/// Returns the counters of a daemon of this version as text. The daemon may know other kinds of devices than
/// `kinds`.
#[must_use]
pub fn exposition(format: Exposition, version: &str, stats: &Stats, kinds: &Kinds) -> String {
    let mut text = Text(String::new(), format);
    text.family("kickless_build", "info", None, "The daemon.");
    let _ = writeln!(text.0, "kickless_build_info{{version=\"{}\"}} 1", Label(version));
    text.family(
        "kickless_worker_seconds",
        "counter",
        Some("seconds"),
        "Time of a worker: on work, looking for work, asleep.",
    );
    for worker in &stats.workers {
        for (state, ns) in
            [("work", worker.work_ns), ("looking", worker.looking_ns), ("asleep", worker.asleep_ns)]
        {
            let (worker, seconds) = (worker.worker, Seconds(ns));
            let _ = writeln!(
                text.0,
                "kickless_worker_seconds_total{{worker=\"{worker}\",state=\"{state}\"}} {seconds}"
            );
        }
    }
    text.family("kickless_device_state", "stateset", None, "The state of a device.");
    for device in &stats.devices {
        for state in STATES {
            let label = Some(("kickless_device_state", state));
            text.of_device("kickless_device_state", &device.name, label, u8::from(device.state == state));
        }
    }
    let requests = ("kickless_device_requests", None, "Requests that were begun.");
    text.operations(stats, requests, |of| of.requests);
    text.operations(stats, ("kickless_device_bytes", Some("bytes"), "Bytes of these requests."), |of| {
        of.bytes
    });
    text.operations(stats, ("kickless_device_errors", None, "Requests answered with an error."), |of| {
        of.errors
    });
    let name = "kickless_device_request_duration_seconds";
    text.histograms((stats, kinds), name, "Time from the pop of a request to its publication.", |of| {
        &of.request_latency
    });
    let name = "kickless_device_io_duration_seconds";
    text.histograms((stats, kinds), name, "Time from the submission of a request to its completion.", |of| {
        &of.io_latency
    });
    text.family("kickless_device_in_flight", "gauge", None, "Requests that wait for the disk or for room.");
    for device in &stats.devices {
        text.of_device("kickless_device_in_flight", &device.name, None, device.in_flight);
    }
    let name = "kickless_device_stopped_requests";
    text.family(name, "gauge", None, "Failed requests that wait until the device is resumed.");
    for device in &stats.devices {
        text.of_device(name, &device.name, None, device.stopped_requests);
    }
    let name = "kickless_device_oldest_request_seconds";
    text.family(name, "gauge", Some("seconds"), "Age of the oldest of these requests.");
    for device in &stats.devices {
        text.of_device(name, &device.name, None, Seconds(device.oldest_ns));
    }
    for (name, counter, help) in [
        ("throttled_seconds", "throttled_ns", "Time in which requests waited for a limit, over all queues."),
        ("polled_seconds", "polled_ns", "Time in which queues were polled, over all queues."),
        (
            "notified_seconds",
            "notified_ns",
            "Time in which queues waited for a notification, over all queues.",
        ),
        ("kicks", "kicks", "Wake-ups by the driver."),
        ("kicks_in_vain", "kicks_in_vain", "Wake-ups by the driver that found nothing to do."),
        ("kicks_avoided", "kicks_avoided", "Kicks that polling made unnecessary."),
        ("calls", "calls", "Calls sent to the driver."),
        ("calls_suppressed", "calls_suppressed", "Batches for which the driver wanted no call."),
        ("moves", "moves", "Moves of queues between workers."),
        ("stalls", "stalls", "Visits of queues that blocked a worker for long."),
    ] {
        text.queues(stats, &format!("kickless_device_{name}"), counter, help);
    }
    text.family("kickless_device_events", "counter", None, "Counters that only this kind of device has.");
    for device in &stats.devices {
        for (event, count) in &device.device {
            text.of_device("kickless_device_events_total", &device.name, Some(("event", event)), count);
        }
    }
    if format == Exposition::OpenMetrics {
        text.0.push_str("# EOF\n");
    }
    text.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_device::{BUCKETS, bucket_end_ns};

    #[test]
    fn the_exported_ends_are_internal_ones() {
        let ends: Vec<u64> = (0..BUCKETS).map_while(bucket_end_ns).collect();
        assert!(ENDS_NS.iter().all(|end| ends.contains(end)) && ENDS_NS.is_sorted());
    }

    #[test]
    fn values_and_labels_are_written_exactly() {
        let shown: Vec<String> =
            [0, 1, 20_480, 1_000_000_000, 10_737_418_240].map(|ns| Seconds(ns).to_string()).into();
        assert_eq!(shown, ["0.0", "0.000000001", "0.00002048", "1.0", "10.73741824"]);
        assert_eq!(Label("a\\b\"c\nd").to_string(), "a\\\\b\\\"c\\nd");
    }
}
