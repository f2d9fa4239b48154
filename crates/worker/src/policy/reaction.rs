//! Whether a load reacts: do its requests come later if they are answered later?
//!
//! Those of a closed loop (so many in flight, each sent when another has been answered) do, and every delay costs throughput.
//! Those that come from outside, at times of their own, do not: there a delay costs nothing but itself. The two cannot be told
//! apart by looking on, but by a randomised controlled trial: two windows of equal length, each begun when the queue was just
//! found empty, one served in the manner that is right for a load that reacts and one in the other manner, in random order. The
//! rates at which requests came in the two are compared, pair after pair, until chance does not explain the difference.

use super::Nanos;
use super::arrivals::rate;

/// How a queue is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// As is right for a load that reacts: a delay costs throughput.
    Eager,
    /// As is right for one that does not: a delay within what the owner accepts costs nothing.
    Patient,
}

/// The whole, in the units of shares and differences.
const ONE: i64 = 1024;
/// A load that loses less than a tenth by being served patiently does not react.
const TOLERATED: i64 = ONE / 10;
/// No pair of windows counts for more than this: requests that come in bunches differ much from window to window, and mean nothing.
const CLIP: i64 = ONE * 35 / 100;
/// What chance explains: a mean within the root of so many times its variance.
const CHANCE: i64 = 9;
/// How much few pairs scatter says little: so many are added that scatter by so much.
const ADDED: i64 = 2;
const SCATTER: i64 = ONE / 5;
/// At so many all are halved.
const PAIRS_MAX: i64 = 256;
/// A difference that is seen in short windows already, if it is also more than so many times what chance makes of the counts.
const DRASTIC: i64 = ONE / 2;
const DRASTIC_CHANCE: u64 = 9;
/// What the last decision found of the loss counts for so many pairs.
const PRIOR: i64 = 2;
/// Where the load reacts, a pair is followed by so many windows' lengths without: as many as keep the loss below half a percent
/// at the loss that pairs have shown, within these bounds.
const LOSSES_KEPT_BELOW: i64 = 200;
const REST: std::ops::RangeInclusive<i64> = 2..=200;
/// The more pairs in a row have left no doubt that it reacts, the longer the rest: twice as long after so many, ...
const SURE: u8 = 8;
/// ... and as many times as that, of which there are so many at most.
const SURE_MAX: u8 = 7 * SURE;
/// Where it does not, the trial costs processor time: 4 % of it, and half as much each time that the trial has shown it once more,
/// down to half a percent.
const REST_PATIENT: Nanos = 24;
const CONFIRMED_MAX: u8 = 3;
/// But if something seems to have changed, that should be known soon: for so many pairs less. Not at once, or all of them would
/// fall into one disturbance: a driver that was kept from running and makes up for it does react until it has.
const REST_ALERT: Nanos = 2;
const ALERT: u8 = 8;
/// So many windows' lengths pass before the load can seem to have changed once more.
const DEAF: Nanos = 256;
/// A window that ended later than it should by more than so many of the short ones was disturbed, by a pause of the load or by
/// whatever else kept the worker, and says nothing. It ends with a nap, which is hardly longer than one.
const LATE: Nanos = 3;
/// Some loads lose nothing in a window and much in the long run: many in flight, which a nap now and then leaves spread, and naps
/// without end make one bunch. A load that turned out to react although trials had not shown it is served eagerly for so long,
/// and twice as long each time, unless a trial shows the difference.
const HOLD: Nanos = 500_000_000;
const HOLD_MAX: Nanos = 16_000_000_000;
/// Patience that was right for so long was no mistake.
const LASTED: Nanos = 4_000_000_000;

/// What came in a window.
#[derive(Clone, Copy, Debug)]
struct Counted {
    rate: u64,
    count: u64,
}

impl Counted {
    /// By more than chance makes of two counts of independent events.
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
    /// The queue was left alone in it.
    slept: bool,
}

/// How long windows are to be so that enough comes in them to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    /// For a difference that is drastic.
    pub(super) short: Nanos,
    /// For any other: a request that is delayed shows only when the one that follows it is due.
    pub(super) long: Nanos,
}

/// What pairs have shown: differences between the manners, less what is tolerated.
#[derive(Debug, Default)]
struct Evidence {
    pairs: i64,
    sum: i64,
    squares: i64,
    /// The share of requests that patience costs: all that was compared, and what was known before.
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
    /// The first of a pair, and its manner.
    first: Option<(Manner, Counted)>,
    /// Windows are to be long.
    long: bool,
    /// The length of the windows of this pair.
    length: Nanos,
    /// What lengths there are.
    lengths: Lengths,
    /// When the next window may begin.
    next: Nanos,
    /// Drastic pairs in a row for the manner that is not in force.
    surprises: u8,
    /// Pairs in a row that have left no doubt that it reacts.
    sure: u8,
    /// Pairs that are to follow one another quickly.
    alert: u8,
    deaf_until: Nanos,
    /// How often in a row the trial has shown, while patience was in force, that it costs nothing.
    confirmed_patience: u8,
    /// Since when patience is in force.
    since: Nanos,
    /// A trial has shown, since the load was found to react, that it does.
    confirmed: bool,
    /// If none has, no patience until then.
    held_until: Nanos,
    hold: Nanos,
    evidence: Evidence,
    random: u32,
}

impl Default for Reaction {
    fn default() -> Self {
        Self {
            // Latency first.
            manner: Manner::Eager,
            window: None,
            first: None,
            long: false,
            length: 0,
            lengths: Lengths { short: 0, long: 0 },
            next: 0,
            surprises: 0,
            sure: 0,
            alert: 0,
            deaf_until: 0,
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
    /// How the queue is to be served now.
    pub(super) fn manner(&self) -> Manner {
        self.window.as_ref().map_or(self.manner, |window| window.manner)
    }

    /// When the window ends, if there is one.
    pub(super) fn end(&self) -> Option<Nanos> {
        self.window.as_ref().map(|window| window.end)
    }

    /// So many requests were popped.
    pub(super) fn record(&mut self, requests: u32) {
        if let Some(window) = &mut self.window {
            window.count += u64::from(requests);
        }
    }

    /// The queue naps or is armed.
    pub(super) fn slept(&mut self) {
        if let Some(window) = &mut self.window {
            window.slept = true;
        }
    }

    /// A wait begins, and with it a window if one is due. No `lengths`: there is nothing to be compared.
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
                if self.toss() { Manner::Eager } else { Manner::Patient }
            }
        };
        self.window =
            Some(Window { manner, since: now, end: now.saturating_add(self.length), count: 0, slept: false });
    }

    /// Another load seems to have come: what was seen of the old one is no evidence, and the new one is tried soon and often.
    /// Not again and again, or a load that is unsteady by nature would never be known.
    pub(super) fn load_changed(&mut self, now: Nanos) {
        if now < self.deaf_until {
            return;
        }
        self.deaf_until = now.saturating_add(DEAF * self.length);
        self.evidence = Evidence { prior: self.evidence.loss(), ..Evidence::default() };
        self.sure = 0;
        let rest = match self.manner {
            Manner::Patient => {
                (self.alert, self.confirmed_patience) = (ALERT, 0);
                REST_ALERT * self.lengths.long
            }
            Manner::Eager => *REST.end() as Nanos * self.length,
        };
        self.next = self.next.min(now.saturating_add(rest));
    }

    /// The load has paused for so long: that time does not count as time without a trial, or a load of short bursts would be tried
    /// at the start of each.
    pub(super) fn paused(&mut self, time: Nanos) {
        self.first = None;
        self.next = self.next.saturating_add(time);
    }

    /// Gives up a window that is open, and the pair with it.
    pub(super) fn abandon(&mut self, now: Nanos) {
        if self.window.take().is_some() {
            self.first = None;
            self.rest(now);
        }
    }

    /// The queue was found empty: all that has come has been counted. Closes the window if it is over.
    pub(super) fn look(&mut self, now: Nanos) {
        let Some(window) = self.window.take_if(|window| now >= window.end) else { return };
        let time = now.saturating_sub(window.since);
        let disturbed = now.saturating_sub(window.end) > self.lengths.short.saturating_mul(LATE);
        // Patience that never came to anything has not been tried.
        let untried = window.manner == Manner::Patient && !window.slept;
        if disturbed || untried {
            self.first = None;
            self.rest(now);
            return;
        }
        let counted = Counted { rate: rate(window.count, time), count: window.count };
        match self.first.take() {
            None => {
                self.first = Some((window.manner, counted));
                // What the first window did to the load is not to be seen in the second.
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
            self.sure = if drastic && difference > 0 { (self.sure + 1).min(SURE_MAX) } else { 0 };
            // In a short window a load can look as if it did not react, because it has not had the time.
            self.evidence.lost(difference);
            if drastic || self.long {
                self.weigh(difference, drastic);
            }
            self.long = !drastic;
        }
        if let Some(manner) = self.evidence.verdict() {
            // The next trial begins anew: what has been decided is no evidence.
            self.evidence = Evidence { prior: self.evidence.loss(), ..Evidence::default() };
            self.decide(now, manner);
        }
        self.rest(now);
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

    /// Adds to the evidence. Two drastic pairs in a row for the other manner, and what was seen before them is of another load.
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

    fn rest(&mut self, now: Nanos) {
        let rest = match self.manner {
            Manner::Eager => {
                (self.evidence.loss() * LOSSES_KEPT_BELOW / ONE).clamp(*REST.start(), *REST.end()) as Nanos
                    * self.length
                    * Nanos::from(1 + self.sure / SURE)
            }
            Manner::Patient if self.alert > 0 => REST_ALERT * self.lengths.long,
            Manner::Patient => (REST_PATIENT << self.confirmed_patience) * self.lengths.long,
        };
        // Not in step with anything that the load does.
        let more = rest / 4 * Nanos::from(self.draw() % 256) / 256;
        self.next = now.saturating_add(rest - rest / 8 + more);
    }

    fn toss(&mut self) -> bool {
        self.draw().is_multiple_of(2)
    }

    /// Marsaglia's xorshift: no secret, but no pattern that a load would have by itself.
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

    /// Runs pairs with these counts of an eager and of a patient window until something is decided; how many pairs that took.
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
                reaction.look(now);
                assert!(reaction.window.is_none());
            }
            if reaction.evidence.pairs + reaction.evidence.compared == 0 {
                return pair;
            }
        }
        u64::MAX
    }

    #[test]
    fn what_is_drastic_is_decided_at_once() {
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
        reaction.look(now);
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
            reaction.look(now);
        }
        assert_eq!((reaction.evidence.compared, reaction.manner), (0, Manner::Eager));
    }

    #[test]
    fn the_dearer_the_trial_the_rarer() {
        let rest = |loss, manner| {
            let evidence = Evidence { prior: loss, ..Evidence::default() };
            let mut reaction =
                Reaction { length: LENGTH, lengths: BOTH, evidence, manner, ..Reaction::default() };
            reaction.rest(0);
            reaction.next / LENGTH
        };
        assert!((1..=2).contains(&rest(0, Manner::Eager)));
        assert!((150..=226).contains(&rest(ONE * 9 / 10, Manner::Eager)));
        assert!((20..=28).contains(&rest(ONE * 9 / 10, Manner::Patient)));
    }

    #[test]
    fn nothing_begins_where_there_is_nothing_to_compare() {
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
    fn what_was_seen_of_another_load_is_outweighed_at_once() {
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
        reaction.rest(0);
        assert!(reaction.next > 10 * LENGTH);
        reaction.evidence.pairs = 3;
        reaction.load_changed(LENGTH);
        assert_eq!(reaction.next, (1 + REST_ALERT) * LENGTH);
        assert_eq!(reaction.evidence.pairs, 0);
        reaction.evidence.pairs = 3;
        reaction.load_changed(DEAF * LENGTH);
        assert_eq!(reaction.evidence.pairs, 3);
        reaction.load_changed((1 + DEAF) * LENGTH);
        assert_eq!(reaction.evidence.pairs, 0);
    }

    #[test]
    fn a_pause_brings_no_trial_closer() {
        let mut reaction = Reaction { length: LENGTH, lengths: BOTH, ..Reaction::default() };
        reaction.rest(0);
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
    fn trials_keep_no_step() {
        let mut reaction = Reaction { length: LENGTH, ..Reaction::default() };
        let mut rests = std::collections::BTreeSet::new();
        for _ in 0..20 {
            reaction.rest(0);
            rests.insert(reaction.next);
        }
        assert!(rests.len() > 10, "{rests:?}");
    }

    #[test]
    fn drastic_is_what_chance_does_not_make_of_the_counts() {
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
