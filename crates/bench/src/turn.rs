//! The results of one turn.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::cpu::CpuUsed;

/// The longest latency that the histogram resolves: an hour.
const LATENCY_MAX: u64 = 3_600_000_000_000;
/// The number of significant digits of latencies.
const DIGITS: u8 = 3;

/// Latencies in nanoseconds.
pub(crate) type Latencies = Histogram<u64>;

/// Makes an empty histogram.
///
/// # Errors
/// Never: the bounds are valid.
pub(crate) fn latencies() -> anyhow::Result<Latencies> {
    Ok(Histogram::new_with_bounds(1, LATENCY_MAX, DIGITS)?)
}

/// The results of one turn.
///
/// `done` counts the requests that completed within the measured time. `latencies` has each request that was
/// due within that time and did not fail.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// The measured seconds.
    pub(crate) seconds: f64,
    /// Requests that completed in them.
    pub(crate) done: u64,
    /// Requests that failed, at any time.
    pub(crate) failed: u64,
    /// The first failure.
    pub(crate) failure: Option<String>,
    /// Requests that were due in the measured time and never sent, because no slot was free.
    pub(crate) unsent: u64,
    /// Frames that were sent and did not come back.
    pub(crate) lost: u64,
    /// The times from when a request was due to its completion, or to the end of the turn if it was never
    /// sent.
    pub(crate) latencies: Latencies,
    /// Requests, kicks and calls of the whole turn, also outside the measured time.
    pub(crate) submitted: u64,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
    /// The processor seconds of this process and of the back-end, over the whole turn.
    pub(crate) driver_cpu: f64,
    pub(crate) back_end_cpu: Option<f64>,
    /// The seconds of the whole turn.
    pub(crate) seconds_counted: f64,
    /// Requests a second in each part of the measured time.
    pub(crate) timeline: Vec<f64>,
    /// The figures of each part, for a plot over time.
    pub(crate) moments: Vec<Moment>,
    /// The reads and the writes of a load that has both. Otherwise empty.
    pub(crate) operations: Vec<Operation>,
    /// The checks of a load that verifies data.
    pub(crate) verified: Option<Verified>,
    /// A signal ended the turn early.
    pub(crate) is_interrupted: bool,
}

/// The reads or the writes of a turn.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    /// Requests that completed in the measured time.
    pub(crate) done: u64,
    /// The times from when each was due to its completion.
    pub(crate) latencies: Latencies,
}

impl Operation {
    /// Makes an operation without requests.
    ///
    /// # Errors
    /// Never: see [`latencies`].
    pub(crate) fn new(name: &'static str) -> anyhow::Result<Self> {
        Ok(Self { name, done: 0, latencies: latencies()? })
    }

    /// Adds the requests of another thread.
    ///
    /// # Errors
    /// Never: all histograms have the same bounds.
    pub(crate) fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        self.done += other.done;
        Ok(self.latencies.add(&other.latencies)?)
    }
}

/// The checks of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Verified {
    /// Reads during the load of blocks that the load had written before.
    pub(crate) reads: u64,
    /// Reads during the load of blocks that it had not written yet. Their content is not known.
    pub(crate) unknown_reads: u64,
    /// Blocks that were written, and read at the end.
    pub(crate) read_back: u64,
}

impl std::ops::AddAssign for Verified {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.unknown_reads += other.unknown_reads;
        self.read_back += other.read_back;
    }
}

/// A part of the measured time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// The middle of the part, in seconds of the measured time.
    pub(crate) at: f64,
    /// Completed requests a second.
    pub(crate) requests: f64,
    /// Kicks a second.
    pub(crate) kicks: f64,
    /// The share of a processor that the back-end used, if its process is known.
    pub(crate) back_end_cpu: Option<f64>,
}

impl Turn {
    /// Makes a turn of `time` without the results of its threads. A plot over time needs the moments.
    ///
    /// # Errors
    /// Never: see [`latencies`].
    pub(crate) fn new(
        time: Duration,
        used: CpuUsed,
        moments: Vec<Moment>,
        is_plotted: bool,
    ) -> anyhow::Result<Turn> {
        Ok(Turn {
            seconds: time.as_secs_f64(),
            done: 0,
            failed: 0,
            failure: None,
            unsent: 0,
            lost: 0,
            latencies: latencies()?,
            submitted: 0,
            kicks: 0,
            calls: 0,
            driver_cpu: used.driver,
            back_end_cpu: used.back_end,
            seconds_counted: used.seconds,
            timeline: moments.iter().map(|moment| moment.requests).collect(),
            moments: if is_plotted { moments } else { Vec::new() },
            operations: Vec::new(),
            verified: None,
            is_interrupted: false,
        })
    }

    /// Makes the turn of a second with these requests.
    #[cfg(test)]
    pub(crate) fn fake(done: u64) -> Turn {
        let used = CpuUsed { driver: 1.0, back_end: None, seconds: 1.0 };
        let turn = Turn::new(Duration::from_secs(1), used, Vec::new(), false).unwrap();
        Turn { done, submitted: done, ..turn }
    }

    /// Returns the requests a second.
    pub(crate) fn rate(&self) -> f64 {
        self.done as f64 / self.seconds
    }

    fn per_request(&self, number: f64) -> f64 {
        number / self.submitted.max(1) as f64
    }

    /// Returns the kicks for each request.
    pub(crate) fn kicks_per_request(&self) -> f64 {
        self.per_request(self.kicks as f64)
    }

    /// Returns the calls for each request.
    pub(crate) fn calls_per_request(&self) -> f64 {
        self.per_request(self.calls as f64)
    }

    /// Returns the processor nanoseconds of this process for each request.
    pub(crate) fn driver_cpu_per_request(&self) -> f64 {
        self.per_request(self.driver_cpu * 1e9)
    }

    /// Returns the number of processors that the back-end kept busy.
    pub(crate) fn back_end_cores(&self) -> Option<f64> {
        self.back_end_cpu.map(|seconds| seconds / self.seconds_counted)
    }

    /// Returns the latency, in nanoseconds, that the share `quantile` of the requests does not exceed.
    pub(crate) fn latency(&self, quantile: f64) -> f64 {
        self.latencies.value_at_quantile(quantile) as f64
    }

    /// Returns the processor nanoseconds of the back-end for each request.
    pub(crate) fn back_end_cpu_per_request(&self) -> Option<f64> {
        self.back_end_cpu.map(|seconds| self.per_request(seconds * 1e9))
    }
}
