//! What to do with each wait, from what is known of the queue and of the machine.

use super::arrivals::{Arrivals, Seen, expected_256, time_of};
use super::reaction::{Lengths, Manner, Reaction};
use super::waits::Waits;
use super::{Host, Nanos, Verdict};

/// What a nanosecond of delay is worth, in nanoseconds of processor time, where it costs throughput.
const DELAY_WORTH: Nanos = 8;
/// A load that loses less than one part in so many by the delay of a wake for each request is slow: no delay is worth anything.
const SLOW: u64 = 64;
/// A sleep shorter than so many times what it costs saves little.
const NAP_WORTH: Nanos = 2;
/// No accepted delay is taken to be longer.
const LATENCY_MAX: Nanos = 1_000_000_000;
/// So many naps in a row in which nothing came, and the queue is armed.
const NAPS_MAX: u8 = 2;
/// Requests that come in a window of the trial, if it takes no longer than `WINDOW_MAX` times the accepted delay.
const WINDOW_COUNT: u64 = 16;
const WINDOW_MAX: Nanos = 32;
/// The longer windows of the trial are at least so many times the accepted delay.
const WINDOW_LONG: Nanos = 8;
/// There is no trial with loads of less than one request in so many times the accepted delay.
const TRIAL_MAX: u64 = 4;
/// Plans are made anew after so many waits, and when a rate has been counted.
const REPLAN: u32 = 64;
/// But not before this much time has passed.
const PLAN_AGE: Nanos = 100_000;

/// The wait that goes on, if there is one.
#[derive(Debug, Default)]
struct Wait {
    open: bool,
    on_disk: bool,
    since: Nanos,
    naps: u8,
    nap_until: Nanos,
    asleep: Asleep,
    /// When what ended the sleep probably came.
    came: Option<Nanos>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Asleep {
    #[default]
    No,
    Armed(Nanos),
    Napping(Nanos),
}

/// What to do with waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Plan {
    /// How long to spin: with nothing in flight, and with something.
    limits: [Nanos; 2],
    /// How long to nap then; 0: not at all.
    nap: Nanos,
    /// How long to nap with something in flight, whatever of it is done meanwhile; 0: until something is.
    deaf_nap: Nanos,
}

/// The state of `auto` for one queue.
#[derive(Debug)]
pub(super) struct Auto {
    ring_size: u16,
    latency: Nanos,
    /// With nothing in flight, and with something.
    waits: [Waits; 2],
    arrivals: Arrivals,
    reaction: Reaction,
    eager: Plan,
    patient: Plan,
    /// How long windows of the trial are to be, if there is something to be found out.
    windows: Option<Lengths>,
    waits_until_replan: u32,
    /// When that was done last.
    planned: Option<Nanos>,
    contended: bool,
    /// A nap has left half of the ring full: until then it is served eagerly.
    crowded_until: Nanos,
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
            crowded_until: 0,
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
        let wait = self.wait.came.unwrap_or(now).saturating_sub(self.wait.since);
        self.waits[usize::from(self.wait.on_disk)].record(wait);
        self.wait.open = false;
    }

    pub(super) fn empty(&mut self, now: Nanos, host: &Host, on_disk: bool) -> Verdict {
        self.reaction.look(now);
        if self.wait.open {
            self.wait.came = None;
        } else {
            self.begin_wait(now, host, on_disk);
        }
        if host.contended != self.contended {
            self.replan(now, host);
        }
        let plan = match self.reaction.manner() {
            Manner::Patient if now >= self.crowded_until => self.patient,
            Manner::Eager | Manner::Patient => self.eager,
        };
        let until = self.wait.since.saturating_add(plan.limits[usize::from(on_disk)]);
        if now < until {
            // The window is to end when it should.
            let end = self.reaction.end().filter(|&end| end > now).unwrap_or(until);
            return Verdict::Spin { until: until.min(end) };
        }
        if plan.nap == 0 {
            return Verdict::Arm;
        }
        let deaf = on_disk && plan.deaf_nap > 0;
        // A nap that another queue's work has cut short goes on.
        if now >= self.wait.nap_until && self.wait.naps < NAPS_MAX {
            self.wait.naps += 1;
            self.wait.nap_until = now.saturating_add(if deaf { plan.deaf_nap } else { plan.nap });
        }
        if now >= self.wait.nap_until {
            return Verdict::Arm;
        }
        self.wait.asleep = Asleep::Napping(now);
        self.reaction.slept();
        Verdict::Nap { until: self.wait.nap_until, deaf }
    }

    pub(super) fn armed(&mut self, now: Nanos) {
        self.wait.asleep = Asleep::Armed(now);
        self.reaction.slept();
    }

    pub(super) fn woken(&mut self, now: Nanos, host: &Host, pending: u16) {
        let woken_by_event = now.saturating_sub(host.wake_delay);
        self.wait.came = match std::mem::take(&mut self.wait.asleep) {
            Asleep::No => None,
            Asleep::Armed(since) => Some(woken_by_event.max(since)),
            Asleep::Napping(since) if pending == 0 => Some(woken_by_event.max(since)),
            // They came at any time during the nap: the first of n after one part in n + 1.
            Asleep::Napping(since) => {
                // A driver that has fallen behind sends as soon as there is room: what is in the way of that is the naps.
                if pending >= self.ring_size / 2 {
                    let as_long = self.patient.nap.saturating_add(host.nap_overshoot);
                    self.crowded_until = now.saturating_add(as_long);
                }
                Some(since.saturating_add(now.saturating_sub(since) / (Nanos::from(pending) + 1)))
            }
        };
    }

    fn begin_wait(&mut self, now: Nanos, host: &Host, on_disk: bool) {
        self.wait = Wait { open: true, on_disk, since: now, ..Wait::default() };
        let seen = self.arrivals.look(now);
        if seen.is_some() || self.waits_until_replan == 0 {
            // Where waits are short, a plan is old after more of them.
            let fresh = self.planned.is_some_and(|planned| now.saturating_sub(planned) < PLAN_AGE);
            match seen.is_none() && fresh {
                true => self.waits_until_replan = REPLAN,
                false => self.replan(now, host),
            }
        }
        match seen {
            Some(Seen::Change) => self.reaction.load_changed(now),
            Some(Seen::Pause(time)) => self.reaction.paused(time),
            Some(Seen::Same) | None => {}
        }
        self.waits_until_replan -= 1;
        self.reaction.wait_begins(now, self.windows);
    }

    /// Works out what follows from all that is known.
    fn replan(&mut self, now: Nanos, host: &Host) {
        self.contended = host.contended;
        (self.waits_until_replan, self.planned) = (REPLAN, Some(now));
        let rate = self.arrivals.rate();
        // A queue of which nothing is known is one more that sleeps: nothing is spent on it before it is busy.
        let slow = rate.is_none_or(|rate| expected_256(rate, host.wake_delay) < 256 / SLOW);
        let thrifty = host.sleep_cpu;
        let latency_first = match host.contended || slow {
            true => thrifty,
            false => thrifty.saturating_add(host.wake_delay.saturating_mul(DELAY_WORTH)),
        };
        let patient = if host.wake_delay <= self.latency { thrifty } else { latency_first };
        self.eager = Plan { limits: self.limits(latency_first), nap: 0, deaf_nap: 0 };
        let (nap, deaf_nap) = self.naps(rate, host);
        self.patient = Plan { limits: self.limits(patient), nap, deaf_nap };
        if nap > 0 {
            self.patient.limits[0] = 0;
        }
        if deaf_nap > 0 {
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

    /// As long as the owner accepts, and until a quarter of the ring is full, or three with what comes during the wake; 0 if
    /// that is not worth it. The delay of the wake comes on top, as it does with a kick: a request waits for half of the nap on
    /// average, and for the wake. Where wakes are so slow that this would be more than the owner accepts, naps are shorter.
    ///
    /// And how long where completions wait as well: one that has waited for a nap before it was started waits for another when it
    /// is done, so that each is half as long.
    fn naps(&self, rate: Option<u64>, host: &Host) -> (Nanos, Nanos) {
        let Some(rate) = rate else { return (0, 0) };
        let wake = host.nap_overshoot.min(LATENCY_MAX);
        let quarter = time_of(u64::from(self.ring_size) / 4, rate);
        let accepted = (2 * self.latency).saturating_sub(2 * wake);
        let nap = self.latency.min(quarter).min((3 * quarter).saturating_sub(wake)).min(accepted);
        // Of naps there are as many as fit into the time, of other sleeps one for each wait.
        let fewer = expected_256(rate, nap) >= 256 && self.waits[0].mostly_within(nap);
        let pays = |nap| nap > 0 && nap + wake >= host.sleep_cpu.saturating_mul(NAP_WORTH);
        if !fewer || !pays(nap) {
            return (0, 0);
        }
        let deaf = nap / 2;
        // What comes in a nap is done in another: where that is less than one, there are fewer completions than naps.
        (nap, if pays(deaf) && expected_256(rate, deaf) >= 256 { deaf } else { 0 })
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
    fn naps_go_on_when_cut_short_and_two_in_vain_are_enough() {
        let mut auto = auto(100_000);
        auto.empty(0, &HOST, false);
        let nap = Plan { limits: [0, 0], nap: 50_000, deaf_nap: 0 };
        (auto.eager, auto.patient) = (nap, nap);
        assert_eq!(auto.empty(0, &HOST, false), Verdict::Nap { until: 50_000, deaf: false });
        assert_eq!(auto.empty(20_000, &HOST, false), Verdict::Nap { until: 50_000, deaf: false });
        assert_eq!(auto.empty(50_000, &HOST, false), Verdict::Nap { until: 100_000, deaf: false });
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
        let nap = Plan { limits: [0, 0], nap: 50_000, deaf_nap: 25_000 };
        (auto.eager, auto.patient) = (nap, nap);
        assert_eq!(auto.empty(0, &HOST, true), Verdict::Nap { until: 25_000, deaf: true });
        // Another queue has reaped what was in flight.
        assert_eq!(auto.empty(10_000, &HOST, false), Verdict::Nap { until: 25_000, deaf: false });
        assert_eq!(auto.empty(25_000, &HOST, false), Verdict::Nap { until: 75_000, deaf: false });
    }

    #[test]
    fn a_delay_that_is_not_accepted_is_dear_to_the_patient_too() {
        for (latency, same) in [(10_000, true), (29_999, true), (30_000, false), (100_000, false)] {
            let mut auto = auto(latency);
            (0..8).for_each(|_| auto.waits[0].record(20_000));
            auto.arrivals.record(1_000);
            auto.arrivals.look(10_000_000);
            auto.replan(0, &HOST);
            assert_eq!(auto.eager == auto.patient, same, "{latency}");
        }
    }
}
