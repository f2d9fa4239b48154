//! What to do with each wait, from what is known of the queue and of the machine.

use super::arrivals::Arrivals;
use super::waits::Waits;
use super::{Host, Nanos, Verdict};

/// What a nanosecond of delay is worth, in nanoseconds of processor time, where it costs throughput.
const DELAY_WORTH: Nanos = 8;
/// Decisions are worked out anew after so many waits.
const REPLAN: u32 = 32;

/// The wait that goes on, if there is one.
#[derive(Debug, Default)]
struct Wait {
    open: bool,
    on_disk: bool,
    since: Nanos,
    asleep_since: Option<Nanos>,
    /// When what ended the sleep probably came.
    came: Option<Nanos>,
}

/// The state of `auto` for one queue.
#[derive(Debug)]
pub(super) struct Auto {
    waits: [Waits; 2],
    arrivals: Arrivals,
    /// How long to spin: with nothing in flight, and with something.
    limits: [Nanos; 2],
    waits_until_replan: u32,
    wait: Wait,
}

impl Auto {
    pub(super) fn new(_ring_size: u16) -> Self {
        Self {
            waits: Default::default(),
            arrivals: Arrivals::default(),
            limits: [0; 2],
            waits_until_replan: 0,
            wait: Wait::default(),
        }
    }

    pub(super) fn set(&mut self, _latency: Nanos) {
        self.waits_until_replan = 0;
    }

    pub(super) fn found(&mut self, now: Nanos, requests: u32) {
        self.arrivals.record(requests);
        if !self.wait.open {
            return;
        }
        let wait = self.wait.came.unwrap_or(now).saturating_sub(self.wait.since);
        self.waits[usize::from(self.wait.on_disk)].record(wait);
        self.arrivals.waited(wait);
        self.wait.open = false;
    }

    pub(super) fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        if !self.wait.open {
            self.wait = Wait { open: true, on_disk, since: now, asleep_since: None, came: None };
            if self.waits_until_replan == 0 {
                self.replan(host);
            }
            self.waits_until_replan -= 1;
            self.arrivals.look(now);
        }
        self.wait.came = None;
        let until = self.wait.since.saturating_add(self.limits[usize::from(on_disk)]);
        if now < until { Verdict::Spin { until } } else { Verdict::Arm }
    }

    pub(super) fn armed(&mut self, now: Nanos) {
        self.wait.asleep_since = Some(now);
    }

    pub(super) fn woken(&mut self, now: Nanos, host: &Host, _pending: u16) {
        if let Some(since) = self.wait.asleep_since.take() {
            self.wait.came = Some(now.saturating_sub(host.wake_delay).max(since));
        }
    }

    fn replan(&mut self, host: &Host) {
        let cost = host.sleep_cpu.saturating_add(host.wake_delay.saturating_mul(DELAY_WORTH));
        self.limits = [self.waits[0].limit(cost), self.waits[1].limit(cost)];
        self.waits_until_replan = REPLAN;
    }
}
