//! The decision for each wait, from the history of the queue and the costs of the machine.

use super::load::Load;
use super::trial::{Last, Manner, TOLERATED_LOSS, Trial};
use super::waits::Waits;
use super::{Host, Nanos, Verdict};

/// The worth of a nanosecond of delay, in nanoseconds of processor time, where it costs throughput.
const DELAY_WORTH: Nanos = 8;
/// The longest wake for which a shorter accepted delay is met by spinning: half of the default one. A host
/// that takes longer adds this time to the accepted delay. Otherwise a load that needs no core would hold one
/// for as long as the host is slow.
const WAKE_MAX: Nanos = 50_000;
/// The shortest nap is the accepted delay by this number, however slow wakes are: only the ends of naps show
/// that wakes are quick again. To a wake longer than that delay, an eighth adds less than an eighth.
const NAP_PARTS: Nanos = 8;
/// The longest accepted delay.
const LATENCY_MAX: Nanos = 1_000_000_000;
/// The number of waits after which new plans are made, at most once in a span of the load. Plans follow from
/// the last few hundred waits, so they need not be made for each. At 1000 requests a second, there is one
/// wait in a span.
const PLAN_WAITS: u32 = 16;
/// The number of empty naps in a row after which the queue is armed. By then they have cost more than the
/// kick that they were to save, at a price of half of a sleep or so.
const NAPS_MAX: u8 = 2;
/// The number of requests that a nap of the trial should contain, and the longest such nap, in shorter ones.
/// A wait for a request is then up to twice as long as a shortest nap, some 260 us. Longer ones are not spun
/// for in any case: eight wakes are shorter.
const TRIAL_COUNT: f64 = 2.0;
const TRIAL_MAX: Nanos = 4;

/// A wait that goes on.
#[derive(Debug, Default)]
struct Wait {
    on_disk: bool,
    since: Nanos,
    /// The last time at which the queue was found empty.
    empty_at: Nanos,
    naps: u8,
    nap_until: Nanos,
    /// The estimated time of the event that ended the sleep of an armed queue, and the end of time without a
    /// sleep. `None`: a nap began, so that nothing says when the event came.
    event_at: Option<Nanos>,
}

/// A way to wait: the time to spin before the queue is armed, or 0 and the length of the naps instead.
type Way = (Nanos, Nanos);

/// The state of `auto` for one queue.
#[derive(Debug, Default)]
pub(super) struct Auto {
    ring_size: u16,
    latency: Nanos,
    kick_price: Nanos,
    /// For waits with nothing in flight and with requests in flight: the history, the ways to wait in each
    /// `Manner`, and the way until the next review.
    waits: [Waits; 2],
    plans: [[Way; 3]; 2],
    ways: [Way; 2],
    load: Load,
    pub(super) trial: Trial,
    last: Last,
    /// The number of waits since the last plans.
    new_waits: u32,
    /// The time at which the plans and the trial are looked at again.
    due: Nanos,
    contended: bool,
    wait: Option<Wait>,
}

impl Auto {
    pub(super) fn new(ring_size: u16) -> Self {
        Self { ring_size, trial: Trial::new(), ..Self::default() }
    }

    pub(super) fn set(&mut self, latency: Nanos, kick_price: Nanos) {
        (self.latency, self.kick_price) = (latency.min(LATENCY_MAX), kick_price.min(LATENCY_MAX));
        (self.wait, self.due) = (None, 0);
    }

    pub(super) fn found(&mut self, now: Nanos, requests: u32) {
        if requests > 0 {
            self.last = Last { number: self.last.number.wrapping_add(requests.into()), at: now };
        }
        if let Some(wait) = self.wait.take() {
            self.new_waits += 1;
            // The eager blocks of trials show the lengths of waits that a nap would hide.
            if let Some(event_at) = wait.event_at {
                self.waits[usize::from(wait.on_disk)].record(now.min(event_at).saturating_sub(wait.since));
            }
        }
    }

    pub(super) fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        if now >= self.due || host.contended != self.contended {
            self.review(now, host);
        }
        let wait = self.wait.get_or_insert(Wait { on_disk, since: now, ..Wait::default() });
        (wait.event_at, wait.empty_at) = (Some(Nanos::MAX), now);
        let (limit, nap) = self.ways[usize::from(on_disk)];
        let until = wait.since.saturating_add(limit);
        if now < until {
            return Verdict::Spin { until: until.min(self.due) };
        }
        // A nap that another queue's work has cut short goes on.
        let is_over = now >= wait.nap_until;
        if nap == 0 || is_over && wait.naps >= NAPS_MAX {
            return Verdict::Arm;
        }
        if is_over {
            wait.naps += 1;
            wait.nap_until = now.saturating_add(nap);
        }
        wait.event_at = None;
        Verdict::Nap { until: wait.nap_until, ignore_completions: on_disk }
    }

    pub(super) fn woken(&mut self, now: Nanos, host: &Host) {
        if let Some(wait) = &mut self.wait {
            wait.event_at = Some(now.saturating_sub(host.wake_delay).max(wait.empty_at));
        }
    }

    /// Returns whether the core is kept for the queue now: it has a lease, or is in the eager part of a
    /// trial, and this changes how it waits.
    pub(super) fn is_eager(&self) -> bool {
        let keeps = |[eager, patient, _]: &[Way; 3]| eager.0 > 0 && eager != patient;
        !self.contended && self.trial.manner() == Manner::Eager && self.plans.iter().any(keeps)
    }

    /// Lets the trial go on, and makes new plans now and then. The queue was just found empty.
    #[cold]
    fn review(&mut self, now: Nanos, host: &Host) {
        let span = self.load.close_span(now, self.last.number);
        let enough = span.is_some() && self.new_waits >= PLAN_WAITS;
        if enough || self.due == 0 || host.contended != self.contended {
            self.plan(host);
        }
        let differ = !self.contended && self.plans.iter().any(|[eager, patient, _]| eager != patient);
        if let Some((time, changed)) = span {
            self.trial.spend(if differ { time } else { 0 });
            if changed {
                self.trial.load_changed(now);
            }
        }
        // A nap of the trial is longer than others if few requests come.
        let shortest = (self.latency + host.wake_delay).max(1);
        let enough = self.load.time_of(TRIAL_COUNT);
        let nap = (differ && enough <= shortest * TRIAL_MAX).then_some(enough.max(shortest));
        self.trial.advance(now, self.last, nap);
        self.ways = self.plans.map(|ways| ways[self.trial.manner() as usize]);
        let trial = nap.map_or(Nanos::MAX, |_| self.trial.until);
        self.due = self.load.until().min(trial).max(now.saturating_add(1));
    }

    /// Makes new plans from all measurements.
    fn plan(&mut self, host: &Host) {
        (self.contended, self.new_waits) = (host.contended, 0);
        let wake = host.wake_delay;
        // A load is slow if it loses no more to the wake of each request than is tolerated. An unknown queue
        // counts as slow: nothing is spent on it before it is busy.
        let slow = self.load.expected(wake) < TOLERATED_LOSS;
        // If wakes are so slow that they exceed the accepted delay, naps are shorter: a request waits for
        // half of the nap on average, and for the wake. A nap is also at most the time in which a quarter of
        // the ring fills, or three quarters including the wake.
        let is_met = wake.min(WAKE_MAX) <= self.latency;
        let least = if is_met { self.latency / NAP_PARTS } else { 0 };
        let accepted = self.latency.min((2 * self.latency).saturating_sub(2 * wake)).max(least);
        let quarter = self.load.time_of(f64::from(self.ring_size / 4));
        let longest = accepted.min(quarter).min(quarter.saturating_mul(3).saturating_sub(wake));
        // The end of a wait with nothing in flight is a request, and needs a kick.
        for (at, cost) in [host.kicked_cpu + self.kick_price, host.kicked_cpu].into_iter().enumerate() {
            let (thrifty, sleep_price) = self.waits[at].best(cost, wake);
            let worth = if host.contended || slow { 0 } else { wake * DELAY_WORTH };
            let eager = self.waits[at].best(cost + worth, wake).0;
            let patient = if is_met { thrifty } else { eager };
            // With requests in flight, a request waits for a nap before it starts and for another when it is
            // done. So each of them is half as long.
            let nap = longest >> at;
            // If three quarters of the ring fill in the time of a wake, no nap is short enough, and the
            // trial's are as long as accepted. Without a nap, both blocks of a pair would be alike.
            let trial_nap = if nap > 0 { nap } else { accepted >> at };
            let nap_price = host.timed_cpu as f64 / (nap + wake).max(1) as f64;
            // The price of a nap counts only if a request comes in each.
            let cheap = nap > 0 && nap_price < sleep_price && self.load.expected(longest) >= 1.0;
            tracing::trace!(at, cost, sleep_price, nap, nap_price, ?host, "polling prices");
            let patient = if cheap { (0, nap) } else { (patient, 0) };
            self.plans[at] = [(eager, 0), patient, if trial_nap > 0 { (0, trial_nap) } else { patient }];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Host = Host { kicked_cpu: 8_000, timed_cpu: 8_000, wake_delay: 30_000, contended: false };

    fn auto(latency: Nanos) -> Auto {
        let mut auto = Auto::new(256);
        auto.set(latency, 3_000);
        auto
    }

    #[test]
    fn a_wait_ends_when_its_event_comes_not_when_the_worker_wakes() {
        let mut auto = auto(100_000);
        for _ in 0..8 {
            auto.empty(0, &HOST, true);
            auto.woken(50_000, &HOST);
            auto.found(50_000, 1);
        }
        assert_eq!(auto.waits[1].best(1_000_000, 0).0, 20_480 + 1_000_000, "20 us");
        auto.empty(100_000, &HOST, false);
        auto.woken(150_000, &HOST);
        auto.empty(150_000, &HOST, false);
        let event_at = auto.wait.as_ref().and_then(|wait| wait.event_at);
        assert_eq!(event_at, Some(Nanos::MAX), "it woke for another queue");
        // No event came before the queue was armed.
        auto.empty(180_000, &HOST, false);
        auto.woken(190_000, &HOST);
        assert_eq!(auto.wait.and_then(|wait| wait.event_at), Some(180_000));
    }

    #[test]
    fn an_interrupted_nap_goes_on_and_two_empty_ones_are_enough() {
        let mut auto = auto(100_000);
        auto.trial.spend(Nanos::MAX);
        auto.empty(0, &HOST, false);
        auto.ways = [(0, 50_000), (0, 25_000)];
        let nap = |until, ignore_completions| Verdict::Nap { until, ignore_completions };
        assert_eq!(auto.empty(0, &HOST, false), nap(50_000, false));
        assert_eq!(auto.empty(20_000, &HOST, false), nap(50_000, false));
        assert_eq!(auto.empty(50_000, &HOST, true), nap(75_000, true), "half as long with I/O in flight");
        assert_eq!(auto.empty(75_000, &HOST, true), Verdict::Arm);
        auto.set(10_000, 0);
        assert!(auto.wait.is_none(), "a nap of the old length is forgotten");
    }

    /// Returns the patient plan for waits of this length at a rate of as many requests.
    fn patient(wait: Nanos, kick_price: Nanos, host: &Host) -> (Nanos, Nanos) {
        let mut auto = auto(100_000);
        auto.kick_price = kick_price;
        (0..200).for_each(|_| auto.waits.iter_mut().for_each(|waits| waits.record(wait)));
        auto.load.close_span(4_000_000, 4_000_000 / wait);
        auto.plan(host);
        auto.plans[0][Manner::Patient as usize]
    }

    #[test]
    fn the_cheapest_way_wins() {
        // One sleep in 130 us costs less than one in 5 + 30 us, and more than one in 300 + 30 us.
        assert_eq!(patient(5_000, 3_000, &HOST), (0, 100_000));
        assert_eq!(patient(300_000, 3_000, &HOST), (0, 0));
        // At this rate, the kick decides, or a timer that costs more.
        let host = Host { wake_delay: 10_000, kicked_cpu: 4_000, ..HOST };
        assert_eq!(patient(90_000, 0, &host).1, 0);
        assert_eq!(patient(90_000, 6_000, &host).1, 100_000);
        assert_eq!(patient(90_000, 6_000, &Host { timed_cpu: 12_000, ..host }).1, 0);
        assert_eq!(patient(1_000, 3_000, &HOST).1 / 1000, 64, "a quarter of the ring");
        for (wake_delay, nap) in [(75_000, 50_000), (99_000, 12_500), (200_000, 12_500)] {
            assert_eq!(patient(5_000, 3_000, &Host { wake_delay, ..HOST }).1, nap, "{wake_delay}");
        }
    }

    #[test]
    fn a_delay_that_is_shorter_than_a_wake_is_met_by_spinning_unless_the_host_is_slow() {
        let slow = Host { wake_delay: 150_000, ..HOST };
        let cases = [(0, HOST, true), (29_999, HOST, true), (30_000, HOST, false), (49_999, slow, true)];
        for (latency, host, same) in cases.into_iter().chain([(50_000, slow, false)]) {
            let mut auto = auto(latency);
            (0..8).for_each(|_| auto.waits[0].record(20_000));
            auto.load.close_span(7_000_000, 700);
            auto.plan(&host);
            assert_eq!(auto.plans[0][0] == auto.plans[0][1], same, "{latency}");
        }
    }
}
