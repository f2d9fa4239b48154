//! A trial that shows whether a load *reacts*: do its requests come later if they are answered later?
//!
//! A closed loop reacts: it has a fixed number of requests in flight, and sends each after another is
//! answered. There every delay costs throughput. Requests that come from outside, at times of their own, do
//! not react. There a delay costs nothing but itself.
//!
//! Observation alone cannot tell the two apart, but a randomised controlled trial can. It uses two windows of
//! equal length, each begun when the queue was just found empty. One is served in the manner that is right
//! for a load that reacts and one in the other manner, in random order. The rates of requests in the two are
//! compared, pair after pair, until chance does not explain the difference.

use super::Nanos;
use super::arrivals::rate;

/// A manner of serving a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// Right for a load that reacts: a delay costs throughput.
    Eager,
    /// Right for a load that does not react: a delay within the accepted one costs nothing.
    Patient,
}

/// One, in the unit of shares and differences.
const ONE: i64 = 1024;
/// A load that loses less than a tenth by being served patiently does not react.
const TOLERATED: i64 = ONE / 10;
/// The largest difference for which a pair counts. Requests that come in bunches differ much from window to
/// window without meaning.
const CLIP: i64 = ONE * 35 / 100;
/// Chance explains a mean within the root of this many times its variance.
const CHANCE: i64 = 9;
/// Few pairs say little about their variance. So this many pairs with this deviation are added.
const ADDED: i64 = 2;
const SCATTER: i64 = ONE / 5;
/// The number of pairs at which all sums are halved.
const PAIRS_MAX: i64 = 256;
/// A difference that counts even in short windows, if it is also more than this many times the variance of
/// the counts by chance.
const DRASTIC: i64 = ONE / 2;
const DRASTIC_CHANCE: u64 = 9;
/// The number of pairs for which the loss found by the last decision counts.
const PRIOR: i64 = 2;
/// If the load reacts, a pair is followed by a rest of this many windows' lengths: as many as keep the loss
/// below half a percent, at the loss that pairs have shown, within these bounds.
const LOSSES_KEPT_BELOW: i64 = 200;
const REST_EAGER: std::ops::RangeInclusive<i64> = 2..=200;
/// The size of a group of pairs in a row that have shown a clear reaction. The rest is twice as long after
/// one group, and longer after each further one.
const CERTAIN: u8 = 8;
/// The number of such pairs after which the rest grows no more.
const CERTAIN_MAX: u8 = 7 * CERTAIN;
/// If the load does not react, the trial costs processor time: 4 % of it at first. Each time that the trial
/// confirms the result, this is halved, down to half a percent.
const REST_PATIENT: Nanos = 24;
const CONFIRMED_MAX: u8 = 3;
/// After a possible change, this many pairs follow with a shorter rest, so that the change is known soon. The
/// rest is not zero, or all pairs would fall into one disturbance. For example, a driver that was kept from
/// running reacts until it has caught up.
const REST_ALERT: Nanos = 2;
const ALERT: u8 = 8;
/// The number of windows' lengths that must pass before another change of load counts.
const CHANGE_INTERVAL: Nanos = 256;
/// A window that ended later than planned by more than this many short windows was disturbed, by a pause of
/// the load or by other work. It says nothing. A window ends with a nap, which is hardly longer than a short
/// window.
const LATE: Nanos = 3;
/// Some loads lose nothing in a window and much in the long run. An example is many requests in flight: one
/// nap leaves them spread, but endless naps make them one bunch. If a load reacts although trials had not
/// shown it, it is served eagerly for this long. The time doubles each time, unless a trial shows the
/// difference.
const HOLD: Nanos = 500_000_000;
const HOLD_MAX: Nanos = 16_000_000_000;
/// The time after which patience counts as right, even if the load reacts later.
const LASTED: Nanos = 4_000_000_000;

/// The requests in a window.
#[derive(Clone, Copy, Debug)]
struct Counted {
    rate: u64,
    count: u64,
}

impl Counted {
    /// Returns whether the two counts differ by more than chance explains for independent events.
    fn differs(self, other: Self) -> bool {
        let difference = self.count.abs_diff(other.count);
        difference.saturating_mul(difference)
            > DRASTIC_CHANCE * self.count.saturating_add(other.count).min(1 << 32)
    }
}

#[derive(Debug)]
struct Window {
    manner: Manner,
    since: Nanos,
    end: Nanos,
    count: u64,
    /// The queue napped or was armed in it.
    slept: bool,
}

/// The lengths of windows in which enough requests come to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    /// For a drastic difference.
    pub(super) short: Nanos,
    /// For any other difference. The delay of a request shows only when the next one is due.
    pub(super) long: Nanos,
}

/// The sums over all pairs: differences between the manners, less the tolerated one.
#[derive(Debug, Default)]
struct Evidence {
    pairs: i64,
    sum: i64,
    squares: i64,
    /// The share of requests that patience costs: the sum and number of all pairs, and the value known
    /// before.
    losses: i64,
    compared: i64,
    prior: i64,
}

impl Evidence {
    fn lost(&mut self, difference: i64) {
        if self.loss() - difference >= DRASTIC {
            // Another load, which can be tried more often at once.
            (self.prior, self.losses, self.compared) = (difference, 0, 0);
        }
        self.losses += difference;
        self.compared += 1;
    }

    fn loss(&self) -> i64 {
        (self.prior * PRIOR + self.losses) / (PRIOR + self.compared)
    }

    fn add(&mut self, difference: i64) {
        if self.pairs >= PAIRS_MAX {
            self.pairs /= 2;
            self.sum /= 2;
            self.squares /= 2;
            self.losses /= 2;
            self.compared /= 2;
        }
        let difference = difference.clamp(-CLIP, CLIP) - TOLERATED;
        self.pairs += 1;
        self.sum += difference;
        self.squares += difference * difference;
    }

    fn verdict(&self) -> Option<Manner> {
        // mean^2 > CHANCE * variance / pairs, multiplied out.
        let square = self.sum * self.sum;
        let scattered = self.pairs * (self.squares + ADDED * SCATTER * SCATTER) - square;
        let clear = self.pairs * square > CHANCE * scattered;
        clear.then_some(if self.sum > 0 { Manner::Eager } else { Manner::Patient })
    }
}

/// The trial of one queue.
#[derive(Debug)]
pub(super) struct Reaction {
    manner: Manner,
    window: Option<Window>,
    /// The first window of a pair, and its manner.
    first: Option<(Manner, Counted)>,
    /// The next windows are long.
    long: bool,
    /// The length of the windows of this pair.
    length: Nanos,
    /// The lengths to choose from.
    lengths: Lengths,
    /// The time from which the next window may begin.
    next: Nanos,
    /// The number of drastic pairs in a row that speak against the manner in force.
    surprises: u8,
    /// The number of pairs in a row that have shown a clear reaction.
    certain_pairs: u8,
    /// The number of pairs that still follow one another quickly.
    alert: u8,
    next_change: Nanos,
    /// The number of times in a row that a trial has confirmed patience while it was in force.
    confirmed_patience: u8,
    /// The time since which patience is in force.
    since: Nanos,
    /// A trial has confirmed that the load reacts, since it was found to.
    confirmed: bool,
    /// Without such a trial, there is no patience until this time.
    held_until: Nanos,
    hold: Nanos,
    evidence: Evidence,
    random: u32,
}

impl Default for Reaction {
    fn default() -> Self {
        Self {
            // A new queue is served eagerly.
            manner: Manner::Eager,
            window: None,
            first: None,
            long: false,
            length: 0,
            lengths: Lengths { short: 0, long: 0 },
            next: 0,
            surprises: 0,
            certain_pairs: 0,
            alert: 0,
            next_change: 0,
            confirmed_patience: 0,
            since: 0,
            confirmed: false,
            held_until: 0,
            hold: 0,
            evidence: Evidence::default(),
            random: 0x9e37_79b9,
        }
    }
}

impl Reaction {
    /// Returns the manner in which to serve the queue now.
    pub(super) fn manner(&self) -> Manner {
        self.window.as_ref().map_or(self.manner, |window| window.manner)
    }

    /// Returns the end of the window, if there is one.
    pub(super) fn end(&self) -> Option<Nanos> {
        self.window.as_ref().map(|window| window.end)
    }

    /// Counts requests that were popped.
    pub(super) fn record(&mut self, requests: u32) {
        if let Some(window) = &mut self.window {
            window.count += u64::from(requests);
        }
    }

    /// Notes that the queue naps or is armed.
    pub(super) fn slept(&mut self) {
        if let Some(window) = &mut self.window {
            window.slept = true;
        }
    }

    /// Begins a window with a wait, if a window is due. Without `lengths`, there is nothing to compare.
    pub(super) fn wait_begins(&mut self, now: Nanos, lengths: Option<Lengths>) {
        if now < self.next || self.window.is_some() {
            return;
        }
        let manner = match (self.first, lengths) {
            (_, None) => {
                self.first = None;
                return;
            }
            (Some((Manner::Eager, _)), _) => Manner::Patient,
            (Some((Manner::Patient, _)), _) => Manner::Eager,
            (None, Some(lengths)) => {
                self.length = if self.long { lengths.long } else { lengths.short };
                self.lengths = lengths;
                if self.random_bool() { Manner::Eager } else { Manner::Patient }
            }
        };
        self.window =
            Some(Window { manner, since: now, end: now.saturating_add(self.length), count: 0, slept: false });
    }

    /// Notes that another load seems to have come. The evidence of the old load is dropped, and the new one
    /// is tried soon and often. Changes in short succession are ignored, or the trial would never end for an
    /// unsteady load.
    pub(super) fn load_changed(&mut self, now: Nanos) {
        if now < self.next_change {
            return;
        }
        self.next_change = now.saturating_add(CHANGE_INTERVAL * self.length);
        self.evidence = Evidence { prior: self.evidence.loss(), ..Evidence::default() };
        self.certain_pairs = 0;
        let rest = match self.manner {
            Manner::Patient => {
                (self.alert, self.confirmed_patience) = (ALERT, 0);
                REST_ALERT * self.lengths.long
            }
            Manner::Eager => *REST_EAGER.end() as Nanos * self.length,
        };
        self.next = self.next.min(now.saturating_add(rest));
    }

    /// Notes that the load has paused. The pause does not count as time without a trial, or a load of short
    /// bursts would be tried at the start of each.
    pub(super) fn paused(&mut self, time: Nanos) {
        self.first = None;
        self.next = self.next.saturating_add(time);
    }

    /// Abandons an open window, and its pair.
    pub(super) fn abandon(&mut self, now: Nanos) {
        if self.window.take().is_some() {
            self.first = None;
            self.schedule_next(now);
        }
    }

    /// Closes the window if it is over. Called when the queue was found empty, so that all its requests are
    /// counted.
    pub(super) fn close_window(&mut self, now: Nanos) {
        let Some(window) = self.window.take_if(|window| now >= window.end) else { return };
        let time = now.saturating_sub(window.since);
        let disturbed = now.saturating_sub(window.end) > self.lengths.short.saturating_mul(LATE);
        // A patient window without a sleep was served like an eager one.
        let untried = window.manner == Manner::Patient && !window.slept;
        if disturbed || untried {
            self.first = None;
            self.schedule_next(now);
            return;
        }
        let counted = Counted { rate: rate(window.count, time), count: window.count };
        match self.first.take() {
            None => {
                self.first = Some((window.manner, counted));
                // A gap, so that effects of the first window do not show in the second.
                self.next = now.saturating_add(self.length / 4);
            }
            Some((Manner::Eager, eager)) => self.compare(now, eager, counted),
            Some((Manner::Patient, patient)) => self.compare(now, counted, patient),
        }
    }

    fn compare(&mut self, now: Nanos, eager: Counted, patient: Counted) {
        let larger = eager.rate.max(patient.rate) as i64;
        if larger > 0 {
            let difference = (eager.rate as i64 - patient.rate as i64) * ONE / larger;
            let drastic = difference.abs() >= DRASTIC && eager.differs(patient);
            self.certain_pairs =
                if drastic && difference > 0 { (self.certain_pairs + 1).min(CERTAIN_MAX) } else { 0 };
            // In a short window, a load can seem not to react, because it has not had the time.
            self.evidence.lost(difference);
            if drastic || self.long {
                self.weigh(difference, drastic);
            }
            self.long = !drastic;
        }
        if let Some(manner) = self.evidence.verdict() {
            // The next trial starts without evidence, because the old one is in the decision.
            self.evidence = Evidence { prior: self.evidence.loss(), ..Evidence::default() };
            self.decide(now, manner);
        }
        self.schedule_next(now);
    }

    fn decide(&mut self, now: Nanos, manner: Manner) {
        match (self.manner, manner) {
            (Manner::Eager, Manner::Eager) => self.confirmed = true,
            (Manner::Eager, Manner::Patient) if self.confirmed || now >= self.held_until => {
                (self.manner, self.since, self.confirmed_patience) = (manner, now, 0);
            }
            (Manner::Patient, Manner::Eager) => {
                let lasted = now.saturating_sub(self.since) >= LASTED;
                self.hold = if lasted { HOLD } else { (self.hold * 2).clamp(HOLD, HOLD_MAX) };
                self.held_until = now.saturating_add(self.hold);
                self.confirmed = false;
                self.manner = manner;
            }
            (Manner::Patient, Manner::Patient) => {
                self.confirmed_patience = (self.confirmed_patience + 1).min(CONFIRMED_MAX);
            }
            (Manner::Eager, Manner::Patient) => {}
        }
        (self.surprises, self.alert) = (0, 0);
    }

    /// Adds to the evidence. After two drastic pairs in a row for the other manner, earlier evidence belongs
    /// to another load.
    fn weigh(&mut self, difference: i64, drastic: bool) {
        let favours = if difference > 0 { Manner::Eager } else { Manner::Patient };
        self.surprises = if drastic && favours != self.manner { self.surprises.saturating_add(1) } else { 0 };
        self.alert = if self.surprises > 0 { ALERT } else { self.alert.saturating_sub(1) };
        if self.surprises == 2 {
            self.evidence = Evidence { prior: difference, ..Evidence::default() };
            self.evidence.add(difference);
        }
        self.evidence.add(difference);
    }

    fn schedule_next(&mut self, now: Nanos) {
        let rest = match self.manner {
            Manner::Eager => {
                (self.evidence.loss() * LOSSES_KEPT_BELOW / ONE).clamp(*REST_EAGER.start(), *REST_EAGER.end())
                    as Nanos
                    * self.length
                    * Nanos::from(1 + self.certain_pairs / CERTAIN)
            }
            Manner::Patient if self.alert > 0 => REST_ALERT * self.lengths.long,
            Manner::Patient => (REST_PATIENT << self.confirmed_patience) * self.lengths.long,
        };
        // A random part keeps the trial out of step with the load.
        let more = rest / 4 * Nanos::from(self.draw() % 256) / 256;
        self.next = now.saturating_add(rest - rest / 8 + more);
    }

    fn random_bool(&mut self) -> bool {
        self.draw().is_multiple_of(2)
    }

    /// Marsaglia's xorshift. The numbers are no secret, but no load follows their pattern by itself.
    fn draw(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random >> 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Nanos = 100_000;
    const SEC: Nanos = 1_000_000_000;
    const BOTH: Lengths = Lengths { short: LENGTH, long: LENGTH };
    const LENGTHS: Option<Lengths> = Some(BOTH);

    /// Runs pairs with these counts of an eager and of a patient window until there is a decision. Returns
    /// the number of pairs.
    fn until_decided(reaction: &mut Reaction, counts: impl Fn(u64) -> (u64, u64)) -> u64 {
        let mut now = reaction.next;
        for pair in 1..=PAIRS_MAX as u64 * 4 {
            let (eager, patient) = counts(pair);
            for _ in 0..2 {
                now = now.max(reaction.next);
                reaction.wait_begins(now, LENGTHS);
                let manner = reaction.window.as_ref().unwrap().manner;
                if manner == Manner::Patient {
                    reaction.slept();
                }
                reaction.record(if manner == Manner::Eager { eager as u32 } else { patient as u32 });
                now += LENGTH;
                reaction.close_window(now);
                assert!(reaction.window.is_none());
            }
            if reaction.evidence.pairs + reaction.evidence.compared == 0 {
                return pair;
            }
        }
        u64::MAX
    }

    #[test]
    fn a_drastic_difference_is_decided_at_once() {
        let mut reaction = Reaction::default();
        assert_eq!(until_decided(&mut reaction, |_| (20, 20)), 10, "the first was short and says nothing");
        assert_eq!(reaction.manner, Manner::Patient);
        assert_eq!(until_decided(&mut reaction, |_| (20, 2)), 4);
        assert_eq!(reaction.manner, Manner::Eager);
    }

    #[test]
    fn noise_takes_longer_and_half_of_the_tolerated_loss_is_no_reaction() {
        let mut reaction = Reaction::default();
        let noisy = |pair: u64| (1000 + 500 * (pair % 2), 950 + 500 * (pair / 2 % 2));
        let pairs = until_decided(&mut reaction, noisy);
        assert!((5..=100).contains(&pairs), "{pairs}");
        assert_eq!(reaction.manner, Manner::Patient);
        assert!(until_decided(&mut reaction, |pair| (1000 + 10 * (pair % 3), 800)) < 20);
        assert_eq!(reaction.manner, Manner::Eager);
    }

    #[test]
    fn a_pause_or_nothing_at_all_is_no_evidence() {
        let mut reaction = Reaction::default();
        assert_eq!(until_decided(&mut reaction, |_| (0, 0)), 1, "no pair was counted");
        assert_eq!(reaction.evidence.pairs, 0);
        let mut now = reaction.next;
        reaction.wait_begins(now, LENGTHS);
        now += LENGTH * (1 + LATE) + 1;
        reaction.slept();
        reaction.close_window(now);
        assert!(reaction.window.is_none() && reaction.first.is_none());
        assert!(reaction.next > now);
    }

    #[test]
    fn patience_that_did_nothing_is_no_evidence() {
        let mut reaction = Reaction::default();
        let mut now = 0;
        for _ in 0..100 {
            now = now.max(reaction.next);
            reaction.wait_begins(now, LENGTHS);
            reaction.record(20);
            now += LENGTH;
            reaction.close_window(now);
        }
        assert_eq!((reaction.evidence.compared, reaction.manner), (0, Manner::Eager));
    }

    #[test]
    fn a_costly_trial_is_rare() {
        let rest = |loss, manner| {
            let evidence = Evidence { prior: loss, ..Evidence::default() };
            let mut reaction =
                Reaction { length: LENGTH, lengths: BOTH, evidence, manner, ..Reaction::default() };
            reaction.schedule_next(0);
            reaction.next / LENGTH
        };
        assert!((1..=2).contains(&rest(0, Manner::Eager)));
        assert!((150..=226).contains(&rest(ONE * 9 / 10, Manner::Eager)));
        assert!((20..=28).contains(&rest(ONE * 9 / 10, Manner::Patient)));
    }

    #[test]
    fn no_window_begins_without_lengths() {
        let mut reaction = Reaction::default();
        reaction.wait_begins(5, None);
        assert_eq!(reaction.end(), None);
        reaction.wait_begins(5, LENGTHS);
        assert_eq!(reaction.end(), Some(5 + LENGTH));
        reaction.abandon(6);
        assert_eq!(reaction.end(), None);
        assert!(reaction.next > 6);
    }

    #[test]
    fn bunches_are_noise() {
        let mut reaction = Reaction::default();
        let bunches = |pair: u64| [(64, 4), (30, 30), (4, 64), (30, 30)][pair as usize % 4];
        assert!(until_decided(&mut reaction, bunches) <= 400);
        assert_eq!(reaction.manner, Manner::Patient);
    }

    #[test]
    fn pairs_that_are_alike_are_not_taken_for_certainty() {
        let mut reaction = Reaction::default();
        assert!(until_decided(&mut reaction, |_| (1000, 890)) > 50, "just above what is tolerated");
    }

    #[test]
    fn evidence_of_another_load_is_outweighed_at_once() {
        let mut reaction = Reaction::default();
        until_decided(&mut reaction, |_| (20, 20));
        assert_eq!(reaction.manner, Manner::Patient);
        // Much noise, and no decision yet.
        let noise = Evidence { pairs: 20, sum: -20 * 100, squares: 20 * 200_000, ..Evidence::default() };
        assert!(noise.verdict().is_none());
        reaction.evidence = noise;
        assert_eq!(until_decided(&mut reaction, |_| (20, 2)), 4);
        assert_eq!(reaction.manner, Manner::Eager);
    }

    #[test]
    fn another_load_is_tried_soon_but_not_again_and_again() {
        let mut reaction =
            Reaction { manner: Manner::Patient, length: LENGTH, lengths: BOTH, ..Reaction::default() };
        reaction.schedule_next(0);
        assert!(reaction.next > 10 * LENGTH);
        reaction.evidence.pairs = 3;
        reaction.load_changed(LENGTH);
        assert_eq!(reaction.next, (1 + REST_ALERT) * LENGTH);
        assert_eq!(reaction.evidence.pairs, 0);
        reaction.evidence.pairs = 3;
        reaction.load_changed(CHANGE_INTERVAL * LENGTH);
        assert_eq!(reaction.evidence.pairs, 3);
        reaction.load_changed((1 + CHANGE_INTERVAL) * LENGTH);
        assert_eq!(reaction.evidence.pairs, 0);
    }

    #[test]
    fn a_pause_brings_no_trial_closer() {
        let mut reaction = Reaction { length: LENGTH, lengths: BOTH, ..Reaction::default() };
        reaction.schedule_next(0);
        let next = reaction.next;
        reaction.paused(SEC);
        assert_eq!(reaction.next, next + SEC);
        reaction.wait_begins(next + SEC - 1, LENGTHS);
        assert_eq!(reaction.end(), None);
        reaction.wait_begins(next + SEC, LENGTHS);
        assert!(reaction.end().is_some());
    }

    #[test]
    fn patience_that_was_wrong_is_not_tried_again_at_once() {
        let mut reaction = Reaction::default();
        let mut now = SEC;
        let mut holds = Vec::new();
        for _ in 0..8 {
            reaction.decide(now, Manner::Patient);
            assert_eq!(reaction.manner, Manner::Patient);
            reaction.decide(now + SEC, Manner::Eager);
            holds.push((reaction.held_until - now - SEC) / HOLD);
            reaction.decide(reaction.held_until - 1, Manner::Patient);
            assert_eq!(reaction.manner, Manner::Eager);
            now = reaction.held_until;
        }
        assert_eq!(holds, [1, 2, 4, 8, 16, 32, 32, 32]);
        reaction.decide(now, Manner::Patient);
        reaction.decide(now + LASTED, Manner::Eager);
        assert_eq!(reaction.held_until, now + LASTED + HOLD, "it had been right for long");
        reaction.decide(now + LASTED, Manner::Eager);
        reaction.decide(now + LASTED, Manner::Patient);
        assert_eq!(reaction.manner, Manner::Patient, "trials had shown the difference, and show none now");
    }

    #[test]
    fn trials_come_at_random_times() {
        let mut reaction = Reaction { length: LENGTH, ..Reaction::default() };
        let mut rests = std::collections::BTreeSet::new();
        for _ in 0..20 {
            reaction.schedule_next(0);
            rests.insert(reaction.next);
        }
        assert!(rests.len() > 10, "{rests:?}");
    }

    #[test]
    fn a_difference_within_chance_is_not_drastic() {
        let mut reaction = Reaction::default();
        let of = |count| Counted { rate: count * 100, count };
        reaction.compare(0, of(16), of(7));
        assert_eq!((reaction.evidence.pairs, reaction.long), (0, true), "longer windows will tell");
        reaction.compare(0, of(16), of(2));
        assert_eq!((reaction.evidence.pairs, reaction.long), (1, false));
    }

    #[test]
    fn both_orders_are_used() {
        let mut reaction = Reaction::default();
        let (mut now, mut eager) = (0, 0);
        for _ in 0..1000 {
            reaction.wait_begins(now, LENGTHS);
            eager += u32::from(reaction.manner() == Manner::Eager);
            reaction.abandon(now);
            now = reaction.next;
        }
        assert!((400..600).contains(&eager), "{eager}");
    }
}
