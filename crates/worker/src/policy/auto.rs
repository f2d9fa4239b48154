//! The decision for each wait, from the history of the queue and the costs of the machine.

use super::arrivals::{Arrivals, LoadChange, expected_256, time_of};
use super::reaction::{Lengths, Manner, Reaction};
use super::waits::Waits;
use super::{Host, Nanos, Verdict};

/// The worth of a nanosecond of delay, in nanoseconds of processor time, where it costs throughput.
const DELAY_WORTH: Nanos = 8;
/// A load is slow if the wake delay of each request costs it less than one part in this many. Its delays are
/// worth nothing.
const SLOW_LOSS: u64 = 64;
/// A nap shorter than this many times its cost saves little.
const NAP_WORTH: Nanos = 2;
/// The longest accepted delay.
const LATENCY_MAX: Nanos = 1_000_000_000;
/// The number of empty naps in a row after which the queue is armed.
const NAPS_MAX: u8 = 2;
/// The number of requests that a window of the trial should contain, and the longest window, in accepted
/// delays.
const WINDOW_COUNT: u64 = 16;
const WINDOW_MAX: Nanos = 32;
/// The shortest of the longer windows of the trial, in accepted delays.
const WINDOW_LONG: Nanos = 8;
/// The trial needs at least one request in this many accepted delays.
const TRIAL_MAX: u64 = 4;
/// Plans are renewed after this many waits, and after each span of `arrivals`.
const REPLAN: u32 = 64;
/// Plans that are younger than this are kept after `REPLAN` waits.
const PLAN_AGE: Nanos = 100_000;

/// The present wait, if there is one.
#[derive(Debug, Default)]
struct Wait {
    open: bool,
    on_disk: bool,
    since: Nanos,
    naps: u8,
    nap_until: Nanos,
    asleep: Asleep,
    /// The estimated time of the event that ended the sleep.
    event_at: Option<Nanos>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Asleep {
    #[default]
    No,
    Armed(Nanos),
    Napping(Nanos),
}

/// A plan for the waits of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Plan {
    /// The time to spin with nothing in flight, and with requests in flight.
    limits: [Nanos; 2],
    /// The length of the naps after that. 0: no naps.
    nap: Nanos,
    /// The length of a nap with requests in flight, whose completions do not end it. 0: a completion ends the
    /// nap.
    nap_in_flight: Nanos,
}

/// The state of `auto` for one queue.
#[derive(Debug)]
pub(super) struct Auto {
    ring_size: u16,
    latency: Nanos,
    /// With nothing in flight, and with requests in flight.
    waits: [Waits; 2],
    arrivals: Arrivals,
    reaction: Reaction,
    eager: Plan,
    patient: Plan,
    /// The lengths of the trial's windows, if there is something to compare.
    windows: Option<Lengths>,
    waits_until_replan: u32,
    /// The time of the last renewal.
    planned: Option<Nanos>,
    contended: bool,
    /// A nap has left the ring half full. Until this time it is served eagerly.
    ring_full_until: Nanos,
    wait: Wait,
}

impl Auto {
    pub(super) fn new(ring_size: u16) -> Self {
        Self {
            ring_size,
            latency: 0,
            waits: Default::default(),
            arrivals: Arrivals::default(),
            reaction: Reaction::default(),
            eager: Plan::default(),
            patient: Plan::default(),
            windows: None,
            waits_until_replan: 0,
            planned: None,
            contended: false,
            ring_full_until: 0,
            wait: Wait::default(),
        }
    }

    pub(super) fn set(&mut self, latency: Nanos) {
        self.latency = latency.min(LATENCY_MAX);
        self.wait = Wait::default();
        (self.waits_until_replan, self.planned) = (0, None);
    }

    pub(super) fn found(&mut self, now: Nanos, requests: u32) {
        self.arrivals.record(requests);
        self.reaction.record(requests);
        if !self.wait.open {
            return;
        }
        let wait = self.wait.event_at.unwrap_or(now).saturating_sub(self.wait.since);
        self.waits[usize::from(self.wait.on_disk)].record(wait);
        self.wait.open = false;
    }

    pub(super) fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        self.reaction.close_window(now);
        if self.wait.open {
            self.wait.event_at = None;
        } else {
            self.begin_wait(now, host, on_disk);
        }
        if host.contended != self.contended {
            self.replan(now, host);
        }
        let plan = match self.reaction.manner() {
            Manner::Patient if now >= self.ring_full_until => self.patient,
            Manner::Eager | Manner::Patient => self.eager,
        };
        let until = self.wait.since.saturating_add(plan.limits[usize::from(on_disk)]);
        if now < until {
            // The window must end on time.
            let end = self.reaction.end().filter(|&end| end > now).unwrap_or(until);
            return Verdict::Spin { until: until.min(end) };
        }
        if plan.nap == 0 {
            return Verdict::Arm;
        }
        let ignore_completions = on_disk && plan.nap_in_flight > 0;
        // A nap that another queue's work has cut short goes on.
        if now >= self.wait.nap_until && self.wait.naps < NAPS_MAX {
            self.wait.naps += 1;
            self.wait.nap_until =
                now.saturating_add(if ignore_completions { plan.nap_in_flight } else { plan.nap });
        }
        if now >= self.wait.nap_until {
            return Verdict::Arm;
        }
        self.wait.asleep = Asleep::Napping(now);
        self.reaction.slept();
        Verdict::Nap { until: self.wait.nap_until, ignore_completions }
    }

    pub(super) fn armed(&mut self, now: Nanos) {
        self.wait.asleep = Asleep::Armed(now);
        self.reaction.slept();
    }

    pub(super) fn woken(&mut self, now: Nanos, host: &Host, pending: u16) {
        let woken_by_event = now.saturating_sub(host.wake_delay);
        self.wait.event_at = match std::mem::take(&mut self.wait.asleep) {
            Asleep::No => None,
            Asleep::Armed(since) => Some(woken_by_event.max(since)),
            Asleep::Napping(since) if pending == 0 => Some(woken_by_event.max(since)),
            // The entries came at random times during the nap: on average, the first of n after one part in n
            // + 1.
            Asleep::Napping(since) => {
                // A driver that has fallen behind sends as soon as there is room. Naps prevent that.
                if pending >= self.ring_size / 2 {
                    let as_long = self.patient.nap.saturating_add(host.nap_overshoot);
                    self.ring_full_until = now.saturating_add(as_long);
                }
                Some(since.saturating_add(now.saturating_sub(since) / (Nanos::from(pending) + 1)))
            }
        };
    }

    fn begin_wait(&mut self, now: Nanos, host: &Host, on_disk: bool) {
        self.wait = Wait { open: true, on_disk, since: now, ..Wait::default() };
        let seen = self.arrivals.close_span(now);
        if seen.is_some() || self.waits_until_replan == 0 {
            // If waits are short, a plan is kept for more of them.
            let fresh = self.planned.is_some_and(|planned| now.saturating_sub(planned) < PLAN_AGE);
            match seen.is_none() && fresh {
                true => self.waits_until_replan = REPLAN,
                false => self.replan(now, host),
            }
        }
        match seen {
            Some(LoadChange::Change) => self.reaction.load_changed(now),
            Some(LoadChange::Pause(time)) => self.reaction.paused(time),
            Some(LoadChange::Same) | None => {}
        }
        self.waits_until_replan -= 1;
        self.reaction.wait_begins(now, self.windows);
    }

    /// Makes new plans from all measurements.
    fn replan(&mut self, now: Nanos, host: &Host) {
        self.contended = host.contended;
        (self.waits_until_replan, self.planned) = (REPLAN, Some(now));
        let rate = self.arrivals.rate();
        // An unknown queue counts as slow: nothing is spent on it before it is busy.
        let slow = rate.is_none_or(|rate| expected_256(rate, host.wake_delay) < 256 / SLOW_LOSS);
        let thrifty = host.sleep_cpu;
        let latency_first = match host.contended || slow {
            true => thrifty,
            false => thrifty.saturating_add(host.wake_delay.saturating_mul(DELAY_WORTH)),
        };
        let patient = if host.wake_delay <= self.latency { thrifty } else { latency_first };
        self.eager = Plan { limits: self.limits(latency_first), nap: 0, nap_in_flight: 0 };
        let (nap, nap_in_flight) = self.naps(rate, host);
        self.patient = Plan { limits: self.limits(patient), nap, nap_in_flight };
        if nap > 0 {
            self.patient.limits[0] = 0;
        }
        if nap_in_flight > 0 {
            self.patient.limits[1] = 0;
        }
        let trial = !host.contended && self.eager != self.patient;
        self.windows = rate.filter(|_| trial).and_then(|rate| self.windows(rate));
        if host.contended {
            self.reaction.abandon(now);
        }
    }

    fn limits(&self, cost: Nanos) -> [Nanos; 2] {
        [self.waits[0].limit(cost), self.waits[1].limit(cost)]
    }

    /// Returns the length of naps, and of naps that ignore completions. 0: such naps are not worth it.
    ///
    /// A nap is at most as long as the owner accepts. It is also at most the time in which a quarter of the
    /// ring fills, or three quarters including the wake. The delay of the wake is additional, as for a kick:
    /// a request waits for half of the nap on average, and for the wake. If wakes are so slow that this
    /// exceeds the accepted delay, naps are shorter.
    ///
    /// With naps that ignore completions, a request waits for a nap before it starts and for another when it
    /// is done. So each of them is half as long.
    fn naps(&self, rate: Option<u64>, host: &Host) -> (Nanos, Nanos) {
        let Some(rate) = rate else { return (0, 0) };
        let wake = host.nap_overshoot.min(LATENCY_MAX);
        let quarter = time_of(u64::from(self.ring_size) / 4, rate);
        let accepted = (2 * self.latency).saturating_sub(2 * wake);
        let nap = self.latency.min(quarter).min((3 * quarter).saturating_sub(wake)).min(accepted);
        // The number of naps depends on their length. Of other sleeps, there is one for each wait.
        let fewer = expected_256(rate, nap) >= 256 && self.waits[0].mostly_within(nap);
        let pays = |nap| nap > 0 && nap + wake >= host.sleep_cpu.saturating_mul(NAP_WORTH);
        if !fewer || !pays(nap) {
            return (0, 0);
        }
        let ignore_completions = nap / 2;
        // Requests that come in one nap are done in another. If that is less than one, completions are fewer
        // than naps.
        (
            nap,
            if pays(ignore_completions) && expected_256(rate, ignore_completions) >= 256 {
                ignore_completions
            } else {
                0
            },
        )
    }

    fn windows(&self, rate: u64) -> Option<Lengths> {
        if expected_256(rate, self.latency) * TRIAL_MAX < 256 {
            return None;
        }
        let enough = time_of(WINDOW_COUNT, rate);
        let of = |times| enough.clamp(self.latency * times, self.latency * WINDOW_MAX);
        Some(Lengths { short: of(1), long: of(WINDOW_LONG) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Host = Host { sleep_cpu: 8_000, wake_delay: 30_000, nap_overshoot: 30_000, contended: false };

    fn auto(latency: Nanos) -> Auto {
        let mut auto = Auto::new(256);
        auto.set(latency);
        auto
    }

    #[test]
    fn a_wait_that_ended_in_a_sleep_counts_without_the_delay_of_the_wake() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, false);
        auto.armed(0);
        auto.woken(50_000, &HOST, 1);
        auto.found(50_000, 1);
        assert!(auto.waits[0].mostly_within(30_000) && !auto.waits[0].mostly_within(15_000));
    }

    #[test]
    fn a_wake_for_another_queue_does_not_end_a_wait() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, true);
        auto.armed(0);
        auto.woken(50_000, &HOST, 0);
        auto.empty(50_000, &HOST, true);
        auto.found(200_000, 0);
        assert!(auto.waits[1].mostly_within(300_000) && !auto.waits[1].mostly_within(150_000));
    }

    #[test]
    fn an_interrupted_nap_goes_on_and_two_empty_ones_are_enough() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, false);
        let nap = Plan { limits: [0, 0], nap: 50_000, nap_in_flight: 0 };
        (auto.eager, auto.patient) = (nap, nap);
        assert_eq!(auto.empty(0, &HOST, false), Verdict::Nap { until: 50_000, ignore_completions: false });
        assert_eq!(
            auto.empty(20_000, &HOST, false),
            Verdict::Nap { until: 50_000, ignore_completions: false }
        );
        assert_eq!(
            auto.empty(50_000, &HOST, false),
            Verdict::Nap { until: 100_000, ignore_completions: false }
        );
        assert_eq!(auto.empty(100_000, &HOST, false), Verdict::Arm);
        auto.set(10_000);
        assert!(!auto.wait.open, "a nap of the old length is forgotten");
    }

    #[test]
    fn a_spin_ends_with_the_window_of_a_trial() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, false);
        let spin = Plan { limits: [300_000, 300_000], ..Plan::default() };
        (auto.eager, auto.patient) = (spin, spin);
        auto.reaction.wait_begins(0, Some(Lengths { short: 100_000, long: 100_000 }));
        assert_eq!(auto.empty(10_000, &HOST, false), Verdict::Spin { until: 100_000 });
        assert_eq!(auto.empty(100_000, &HOST, false), Verdict::Spin { until: 300_000 });
    }

    #[test]
    fn a_nap_has_to_pay() {
        let auto = auto(100_000);
        let rate = Some(super::super::arrivals::rate(200_000, 1_000_000_000));
        assert_eq!(auto.naps(rate, &HOST), (100_000, 50_000));
        assert_eq!(auto.naps(rate, &Host { sleep_cpu: 66_000, ..HOST }), (0, 0));
        assert_eq!(
            auto.naps(rate, &Host { sleep_cpu: 41_000, ..HOST }),
            (100_000, 0),
            "half of it is too short"
        );
        assert_eq!(auto.naps(rate, &Host { nap_overshoot: 75_000, ..HOST }), (50_000, 25_000));
        assert_eq!(auto.naps(rate, &Host { nap_overshoot: 100_000, ..HOST }), (0, 0));
        let fast = |per_sec| Some(super::super::arrivals::rate(per_sec, 1_000_000_000));
        assert_eq!(auto.naps(fast(1_000_000), &HOST).0 / 100, 640, "a quarter of the ring");
        assert_eq!(auto.naps(fast(5_000_000), &HOST).0 / 100, 84, "three with the wake");
        assert_eq!(auto.naps(fast(7_000_000), &HOST).0, 0, "the wake is longer");
        assert_eq!(auto.naps(Some(1_000), &HOST), (0, 0), "nothing would come");
        assert_eq!(auto.naps(Some(15_000), &HOST), (100_000, 0), "completions are fewer than naps");
        assert_eq!(auto.naps(None, &HOST), (0, 0));
    }

    #[test]
    fn completions_wait_for_the_end_of_a_nap_that_is_half_as_long() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, true);
        let nap = Plan { limits: [0, 0], nap: 50_000, nap_in_flight: 25_000 };
        (auto.eager, auto.patient) = (nap, nap);
        assert_eq!(auto.empty(0, &HOST, true), Verdict::Nap { until: 25_000, ignore_completions: true });
        // A visit of another queue has reaped the completions.
        assert_eq!(
            auto.empty(10_000, &HOST, false),
            Verdict::Nap { until: 25_000, ignore_completions: false }
        );
        assert_eq!(
            auto.empty(25_000, &HOST, false),
            Verdict::Nap { until: 75_000, ignore_completions: false }
        );
    }

    #[test]
    fn a_delay_beyond_the_accepted_one_costs_in_both_manners() {
        for (latency, same) in [(10_000, true), (29_999, true), (30_000, false), (100_000, false)] {
            let mut auto = auto(latency);
            (0..8).for_each(|_| auto.waits[0].record(20_000));
            auto.arrivals.record(1_000);
            auto.arrivals.close_span(10_000_000);
            auto.replan(0, &HOST);
            assert_eq!(auto.eager == auto.patient, same, "{latency}");
        }
    }
}
