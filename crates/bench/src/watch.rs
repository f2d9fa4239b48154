//! Watches a turn: takes samples of its counters, and shows the progress.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::progress::Progress;
use super::turn::Moment;

/// The number of parts of a turn, unless they would be shorter than `PART_MIN`. Each part gets its own rate.
const PARTS: u32 = 100;
const PART_MIN: Duration = Duration::from_millis(20);
/// The length of a part for the plot over time.
const MOMENT: Duration = Duration::from_millis(10);

/// The measured time of a turn, in nanoseconds since `epoch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Period {
    pub(crate) epoch: Instant,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Period {
    /// Makes the period of a turn that begins now.
    pub(crate) fn new(warm_up: Duration, time: Duration) -> Self {
        let from = warm_up.as_nanos() as u64;
        Self { epoch: Instant::now(), from, to: from + time.as_nanos() as u64 }
    }

    /// Returns the measured time.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.to - self.from)
    }

    /// Returns the part of the measured time that has passed.
    pub(crate) fn time_so_far(&self) -> Duration {
        self.epoch.elapsed().saturating_sub(Duration::from_nanos(self.from)).min(self.time())
    }
}

/// The counters at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) done: u64,
    pub(crate) kicks: u64,
    pub(crate) back_end_cpu: Option<Duration>,
}

impl Sample {
    /// Returns the rates between an earlier sample and this one.
    fn since(&self, earlier: &Sample, (from, to): (Duration, Duration)) -> Moment {
        let seconds = (to - from).as_secs_f64();
        let cpu = self.back_end_cpu.zip(earlier.back_end_cpu);
        Moment {
            at: f64::midpoint(from.as_secs_f64(), to.as_secs_f64()),
            requests: (self.done - earlier.done) as f64 / seconds,
            kicks: (self.kicks - earlier.kicks) as f64 / seconds,
            back_end_cpu: cpu.map(|(now, then)| now.saturating_sub(then).as_secs_f64() / seconds),
        }
    }
}

/// Records a moment for each part of the turn until it is over, or until a thread ends. `plots`: the turn is
/// for the plot over time.
pub(crate) fn watch(
    period: &Period,
    plots: bool,
    look: impl Fn() -> Sample,
    stop: &AtomicBool,
    progress: &Progress,
    finished: impl Fn() -> bool,
) -> Vec<Moment> {
    let (from, to) = (Duration::from_nanos(period.from), Duration::from_nanos(period.to));
    let part = if plots { MOMENT } else { (period.time() / PARTS).max(PART_MIN) };
    let mut moments: Vec<Moment> = Vec::new();
    let mut last: Option<(Duration, Sample)> = None;
    loop {
        let now = period.epoch.elapsed();
        if now >= to || stop.load(Ordering::Relaxed) || finished() {
            progress.clear();
            return moments;
        }
        if now >= from {
            let seen = look();
            moments.extend(last.map(|(then, earlier)| seen.since(&earlier, (then - from, now - from))));
            last = Some((now, seen));
        }
        progress.show(now, to, moments.last().map(|moment| moment.requests));
        let next = if now < from { from - now } else { part };
        thread::sleep(next.min(part).min(to.saturating_sub(now)));
    }
}
