//! What one turn of load came to.

use hdrhistogram::Histogram;

/// The longest latency that is told from longer ones: an hour.
const LATENCY_MAX: u64 = 3_600_000_000_000;
/// Latencies are kept to so many digits.
const DIGITS: u8 = 3;

/// Latencies in nanoseconds.
pub(crate) type Latencies = Histogram<u64>;

/// None yet.
///
/// # Errors
/// Never: the bounds are right.
pub(crate) fn latencies() -> anyhow::Result<Latencies> {
    Ok(Histogram::new_with_bounds(1, LATENCY_MAX, DIGITS)?)
}

/// What one turn came to. Requests done within the measured time count as done; latencies are those of all that were due in
/// it.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Seconds measured.
    pub(crate) seconds: f64,
    /// Requests done in them.
    pub(crate) done: u64,
    /// Requests that failed, at any time.
    pub(crate) failed: u64,
    /// How the first of them did.
    pub(crate) failure: Option<String>,
    /// Requests that were due in them and never sent, having no slot.
    pub(crate) unsent: u64,
    /// From when a request was due to when its completion was seen, or to the end for those that were never sent.
    pub(crate) latencies: Latencies,
    /// Requests, kicks and calls from the first request on, outside of the measured time too.
    pub(crate) submitted: u64,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
    /// Processor seconds that this process and the back-end's took, over as long as `submitted` counts.
    pub(crate) driver_cpu: f64,
    pub(crate) back_end_cpu: Option<f64>,
    /// Seconds over which these are counted.
    pub(crate) seconds_counted: f64,
    /// Requests a second, in equal parts of the measured time.
    pub(crate) timeline: Vec<f64>,
    /// What happened in these parts, for a plot over time.
    pub(crate) moments: Vec<Moment>,
}

/// A part of the measured time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// Its middle, in seconds of the measured time.
    pub(crate) at: f64,
    /// Requests done, a second.
    pub(crate) requests: f64,
    /// Kicks, a second.
    pub(crate) kicks: f64,
    /// The back-end's share of a processor, if its process is known.
    pub(crate) back_end_cpu: Option<f64>,
}

impl Turn {
    /// Requests a second.
    pub(crate) fn rate(&self) -> f64 {
        self.done as f64 / self.seconds
    }

    fn per_request(&self, number: f64) -> f64 {
        number / self.submitted.max(1) as f64
    }

    /// Kicks for each request.
    pub(crate) fn kicks_per_request(&self) -> f64 {
        self.per_request(self.kicks as f64)
    }

    /// Calls for each request.
    pub(crate) fn calls_per_request(&self) -> f64 {
        self.per_request(self.calls as f64)
    }

    /// Processor nanoseconds of this process for each request.
    pub(crate) fn driver_cpu_per_request(&self) -> f64 {
        self.per_request(self.driver_cpu * 1e9)
    }

    /// Processors that the back-end kept busy.
    pub(crate) fn back_end_cores(&self) -> Option<f64> {
        self.back_end_cpu.map(|seconds| seconds / self.seconds_counted)
    }

    /// Nanoseconds that half of the requests took no longer than; or any other share of them.
    pub(crate) fn latency(&self, quantile: f64) -> f64 {
        self.latencies.value_at_quantile(quantile) as f64
    }

    /// Processor nanoseconds of the back-end for each request.
    pub(crate) fn back_end_cpu_per_request(&self) -> Option<f64> {
        self.back_end_cpu.map(|seconds| self.per_request(seconds * 1e9))
    }
}
