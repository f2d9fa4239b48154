//! Finds out by trials whether a load *reacts*: whether its requests come later if they are answered later.
//!
//! A closed loop reacts: it has a fixed number of requests in flight, and sends each after another is
//! answered. There every delay costs throughput. Requests that come from outside, at times of their own, do
//! not react. There a delay costs no throughput.
//!
//! Observation alone cannot tell the two apart, but a randomised controlled trial can. It uses two windows of
//! equal length, each begun when the queue was just found empty. One is served in the manner that is right
//! for a load that reacts and one in the other manner, in random order. The rates of requests in the two are
//! compared, pair after pair, until chance does not explain the difference.

use super::Nanos;
use super::arrivals::rate;

/// The way in which a queue is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// Right for a load that reacts: a delay costs throughput.
    Eager,
    /// Right for a load that does not react: a delay within the accepted one costs nothing.
    Patient,
}

/// The number that stands for 1 in shares and differences.
const ONE: i64 = 1024;
/// The largest loss of requests with which a load counts as one that does not react: a tenth.
const TOLERATED: i64 = ONE / 10;
/// The limit of a pair's difference; larger ones count as this. Requests that come in bunches differ much
/// from window to window without meaning.
const DIFFERENCE_MAX: i64 = ONE * 35 / 100;
/// A mean is significant if its square is more than this many times its variance: three standard errors.
const Z_SQUARED: i64 = 9;
/// Few pairs say little about their variance. So this many pairs with this deviation are added.
const PRIOR_PAIRS: i64 = 2;
const PRIOR_DEVIATION: i64 = ONE / 5;
/// The number of pairs at which all sums are halved.
const PAIRS_MAX: i64 = 256;
/// A difference that counts even in short windows. Its square must also be more than this many times the
/// variance that the two counts have by chance.
const DRASTIC: i64 = ONE / 2;
const DRASTIC_Z_SQUARED: u64 = 9;
/// The number of pairs whose weight the loss has that the last decision found.
const PRIOR_LOSS_PAIRS: i64 = 2;
/// The rest after a pair if the load reacts, in lengths of a window, is this many times the share of requests
/// that pairs have shown to be lost. So the trials lose less than half a percent.
const REST_PER_LOSS: i64 = 200;
/// The bounds of this rest.
const REST_EAGER: std::ops::RangeInclusive<i64> = 2..=200;
/// The size of a group of pairs in a row that have shown a clear reaction. The rest is twice as long after
/// one group, and longer after each further one.
const CERTAIN_PAIRS: u8 = 8;
/// The number of such pairs after which the rest grows no more.
const CERTAIN_PAIRS_MAX: u8 = 7 * CERTAIN_PAIRS;
/// The rest after a pair if the load does not react, in lengths of a long window. The trial then costs
/// processor time: 4 % of it at first. Each trial that confirms the result halves this, down to half a
/// percent.
const REST_PATIENT: Nanos = 24;
const CONFIRMED_MAX: u8 = 3;
/// The number of pairs that follow one another quickly after a possible change, so that the change is known
/// soon.
const QUICK_PAIRS: u8 = 8;
/// The rest after each of them, in lengths of a long window. With no rest, all pairs could fall into one
/// disturbance. For example, a driver that was kept from running reacts until it has caught up.
const REST_QUICK: Nanos = 2;
/// The least time between two changes of load that count, in lengths of a window.
const CHANGE_INTERVAL: Nanos = 256;
/// The largest delay of the end of a window, in lengths of a short window. A later end shows that a pause of
/// the load or other work disturbed the window, which is not counted then. A window ends with a nap, which is
/// hardly longer than a short window.
const LATE_WINDOWS: Nanos = 3;
/// The bounds of the time for which a load is served eagerly after it was found to react although earlier
/// trials had not shown it. The time doubles each time, unless a trial shows the difference. Some loads lose
/// nothing in a window and much in the long run. An example is many requests in flight: one nap leaves them
/// spread, but endless naps make them one bunch.
const BACKOFF_MIN: Nanos = 500_000_000;
const BACKOFF_MAX: Nanos = 16_000_000_000;
/// The time in force after which patience counts as right, even if the load reacts later.
const PATIENCE_LASTED: Nanos = 4_000_000_000;

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
            > DRASTIC_Z_SQUARED * self.count.saturating_add(other.count).min(1 << 32)
    }
}

#[derive(Debug)]
struct Window {
    manner: Manner,
    since: Nanos,
    end: Nanos,
    count: u64,
    /// The queue napped or was armed during the window.
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
    /// Adds a pair's loss to the mean loss.
    fn add_loss(&mut self, difference: i64) {
        if self.loss() - difference >= DRASTIC {
            // The load has changed, and can be tried more often from now on.
            (self.prior, self.losses, self.compared) = (difference, 0, 0);
        }
        self.losses += difference;
        self.compared += 1;
    }

    /// Returns the mean share of requests that patience costs.
    fn loss(&self) -> i64 {
        (self.prior * PRIOR_LOSS_PAIRS + self.losses) / (PRIOR_LOSS_PAIRS + self.compared)
    }

    fn add(&mut self, difference: i64) {
        if self.pairs >= PAIRS_MAX {
            self.pairs /= 2;
            self.sum /= 2;
            self.squares /= 2;
            self.losses /= 2;
            self.compared /= 2;
        }
        let difference = difference.clamp(-DIFFERENCE_MAX, DIFFERENCE_MAX) - TOLERATED;
        self.pairs += 1;
        self.sum += difference;
        self.squares += difference * difference;
    }

    fn verdict(&self) -> Option<Manner> {
        // mean^2 > Z_SQUARED * variance / pairs, multiplied out.
        let square = self.sum * self.sum;
        let scattered =
            self.pairs * (self.squares + PRIOR_PAIRS * PRIOR_DEVIATION * PRIOR_DEVIATION) - square;
        let clear = self.pairs * square > Z_SQUARED * scattered;
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
    /// The number of drastic pairs in a row that contradict the manner in force.
    contradicting_pairs: u8,
    /// The number of pairs in a row that have shown a clear reaction.
    certain_pairs: u8,
    /// The number of pairs that still follow one another quickly.
    quick_pairs_left: u8,
    next_change: Nanos,
    /// The number of times in a row that a trial has confirmed patience while it was in force.
    confirmed_patience: u8,
    /// The time since which patience is in force.
    since: Nanos,
    /// A trial has confirmed that the load reacts, since it was found to.
    confirmed: bool,
    /// The time until which a queue without such a trial is served eagerly.
    eager_until: Nanos,
    /// The length of that time.
    backoff: Nanos,
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
            contradicting_pairs: 0,
            certain_pairs: 0,
            quick_pairs_left: 0,
            next_change: 0,
            confirmed_patience: 0,
            since: 0,
            confirmed: false,
            eager_until: 0,
            backoff: 0,
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

    /// Notes that the load seems to have changed. Drops the evidence of the old load, and tries the new one
    /// soon and often. Ignores changes in short succession, because the trial of an unsteady load would never
    /// end otherwise.
    pub(super) fn load_changed(&mut self, now: Nanos) {
        if now < self.next_change {
            return;
        }
        self.next_change = now.saturating_add(CHANGE_INTERVAL * self.length);
        self.evidence = Evidence { prior: self.evidence.loss(), ..Evidence::default() };
        self.certain_pairs = 0;
        let rest = match self.manner {
            Manner::Patient => {
                (self.quick_pairs_left, self.confirmed_patience) = (QUICK_PAIRS, 0);
                REST_QUICK * self.lengths.long
            }
            Manner::Eager => *REST_EAGER.end() as Nanos * self.length,
        };
        self.next = self.next.min(now.saturating_add(rest));
    }

    /// Notes that the load has paused. Does not count the pause as time without a trial, because a load of
    /// short bursts would be tried at the start of each burst otherwise.
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

    /// Closes the window if it is over. The caller has just found the queue empty, so all its requests are
    /// counted.
    pub(super) fn close_window(&mut self, now: Nanos) {
        let Some(window) = self.window.take_if(|window| now >= window.end) else { return };
        let time = now.saturating_sub(window.since);
        let disturbed = now.saturating_sub(window.end) > self.lengths.short.saturating_mul(LATE_WINDOWS);
        // A patient window in which the queue did not sleep was served like an eager one.
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
                if drastic && difference > 0 { (self.certain_pairs + 1).min(CERTAIN_PAIRS_MAX) } else { 0 };
            // In a short window, a load can seem not to react, because it has not had the time.
            self.evidence.add_loss(difference);
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
            (Manner::Eager, Manner::Patient) if self.confirmed || now >= self.eager_until => {
                (self.manner, self.since, self.confirmed_patience) = (manner, now, 0);
            }
            (Manner::Patient, Manner::Eager) => {
                let lasted = now.saturating_sub(self.since) >= PATIENCE_LASTED;
                self.backoff =
                    if lasted { BACKOFF_MIN } else { (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX) };
                self.eager_until = now.saturating_add(self.backoff);
                self.confirmed = false;
                self.manner = manner;
            }
            (Manner::Patient, Manner::Patient) => {
                self.confirmed_patience = (self.confirmed_patience + 1).min(CONFIRMED_MAX);
            }
            (Manner::Eager, Manner::Patient) => {}
        }
        (self.contradicting_pairs, self.quick_pairs_left) = (0, 0);
    }

    /// Adds to the evidence. After two drastic pairs in a row for the other manner, earlier evidence belongs
    /// to another load.
    fn weigh(&mut self, difference: i64, drastic: bool) {
        let favours = if difference > 0 { Manner::Eager } else { Manner::Patient };
        self.contradicting_pairs =
            if drastic && favours != self.manner { self.contradicting_pairs.saturating_add(1) } else { 0 };
        self.quick_pairs_left =
            if self.contradicting_pairs > 0 { QUICK_PAIRS } else { self.quick_pairs_left.saturating_sub(1) };
        if self.contradicting_pairs == 2 {
            self.evidence = Evidence { prior: difference, ..Evidence::default() };
            self.evidence.add(difference);
        }
        self.evidence.add(difference);
    }

    fn schedule_next(&mut self, now: Nanos) {
        let rest = match self.manner {
            Manner::Eager => {
                (self.evidence.loss() * REST_PER_LOSS / ONE).clamp(*REST_EAGER.start(), *REST_EAGER.end())
                    as Nanos
                    * self.length
                    * Nanos::from(1 + self.certain_pairs / CERTAIN_PAIRS)
            }
            Manner::Patient if self.quick_pairs_left > 0 => REST_QUICK * self.lengths.long,
            Manner::Patient => (REST_PATIENT << self.confirmed_patience) * self.lengths.long,
        };
        // A random part keeps the trial out of step with the load.
        let more = rest / 4 * Nanos::from(self.draw() % 256) / 256;
        self.next = now.saturating_add(rest - rest / 8 + more);
    }

    fn random_bool(&mut self) -> bool {
        self.draw().is_multiple_of(2)
    }

    /// Returns the next number of Marsaglia's xorshift. It is not secret, but no load follows the pattern by
    /// chance.
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
        now += LENGTH * (1 + LATE_WINDOWS) + 1;
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
        assert_eq!(reaction.next, (1 + REST_QUICK) * LENGTH);
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
        let mut backoffs = Vec::new();
        for _ in 0..8 {
            reaction.decide(now, Manner::Patient);
            assert_eq!(reaction.manner, Manner::Patient);
            reaction.decide(now + SEC, Manner::Eager);
            backoffs.push((reaction.eager_until - now - SEC) / BACKOFF_MIN);
            reaction.decide(reaction.eager_until - 1, Manner::Patient);
            assert_eq!(reaction.manner, Manner::Eager);
            now = reaction.eager_until;
        }
        assert_eq!(backoffs, [1, 2, 4, 8, 16, 32, 32, 32]);
        reaction.decide(now, Manner::Patient);
        reaction.decide(now + PATIENCE_LASTED, Manner::Eager);
        assert_eq!(reaction.eager_until, now + PATIENCE_LASTED + BACKOFF_MIN, "it had been right for long");
        reaction.decide(now + PATIENCE_LASTED, Manner::Eager);
        reaction.decide(now + PATIENCE_LASTED, Manner::Patient);
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
