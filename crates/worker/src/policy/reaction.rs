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
/// No pair of windows counts for more than this, so that evidence of a load that was there before is soon outweighed.
const CLIP: i64 = ONE * 35 / 100;
/// What chance explains: a mean within the root of so many times its variance.
const CHANCE: i64 = 6;
/// Pairs that seem all alike are taken to scatter by so much.
const SCATTER: i64 = ONE / 20;
/// No decision on fewer pairs.
const PAIRS_MIN: i64 = 4;
/// At so many all are halved.
const PAIRS_MAX: i64 = 256;
/// Where the load reacts, a pair is followed by so many windows' lengths without: as many as keep the loss below half a percent
/// at the loss that pairs have shown, within these bounds.
const LOSSES_KEPT_BELOW: i64 = 200;
const REST: std::ops::RangeInclusive<i64> = 8..=200;
/// Where it does not, the trial costs processor time: 4 % of it.
const REST_PATIENT: Nanos = 24;
/// A window that took so many times its length was interrupted by a pause of the load and says nothing.
const PAUSED: Nanos = 4;

#[derive(Debug)]
struct Window {
    manner: Manner,
    since: Nanos,
    end: Nanos,
    count: u64,
}

/// What pairs have shown: differences between the manners, less what is tolerated.
#[derive(Debug, Default)]
struct Evidence {
    pairs: i64,
    sum: i64,
    squares: i64,
}

impl Evidence {
    fn add(&mut self, difference: i64) {
        if self.pairs >= PAIRS_MAX {
            self.pairs /= 2;
            self.sum /= 2;
            self.squares /= 2;
        }
        let difference = difference.clamp(-CLIP, CLIP) - TOLERATED;
        self.pairs += 1;
        self.sum += difference;
        self.squares += difference * difference;
    }

    fn verdict(&self) -> Option<Manner> {
        if self.pairs < PAIRS_MIN {
            return None;
        }
        // mean^2 > CHANCE * variance / pairs, multiplied out.
        let square = self.sum * self.sum;
        let scattered = (self.pairs * self.squares - square).max((self.pairs * SCATTER).pow(2));
        let clear = self.pairs * square > CHANCE * scattered;
        clear.then_some(if self.sum > 0 { Manner::Eager } else { Manner::Patient })
    }
}

/// The trial of one queue.
#[derive(Debug)]
pub(super) struct Reaction {
    manner: Manner,
    window: Option<Window>,
    /// The first of a pair: its manner and its rate.
    first: Option<(Manner, u64)>,
    /// The length of the windows of this pair.
    length: Nanos,
    /// When the next window may begin.
    next: Nanos,
    /// The share of requests that patience has cost.
    loss: i64,
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
            length: 0,
            next: 0,
            loss: ONE / 4,
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

    /// A wait begins, and with it a window if one is due. `length`: of windows in which enough comes to compare, or nothing if
    /// there is nothing to be compared.
    pub(super) fn wait_begins(&mut self, now: Nanos, length: Option<Nanos>) {
        if now < self.next || self.window.is_some() {
            return;
        }
        let manner = match (self.first, length) {
            (_, None) => {
                self.first = None;
                return;
            }
            (Some((Manner::Eager, _)), _) => Manner::Patient,
            (Some((Manner::Patient, _)), _) => Manner::Eager,
            (None, Some(length)) => {
                self.length = length;
                if self.toss() { Manner::Eager } else { Manner::Patient }
            }
        };
        self.window = Some(Window { manner, since: now, end: now.saturating_add(self.length), count: 0 });
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
        if time > self.length.saturating_mul(PAUSED) {
            self.first = None;
            self.rest(now);
            return;
        }
        let rate = rate(window.count, time);
        match self.first.take() {
            None => self.first = Some((window.manner, rate)),
            Some((Manner::Eager, eager)) => self.compare(now, eager, rate),
            Some((Manner::Patient, patient)) => self.compare(now, rate, patient),
        }
    }

    fn compare(&mut self, now: Nanos, eager: u64, patient: u64) {
        let larger = eager.max(patient) as i64;
        if larger > 0 {
            let difference = (eager as i64 - patient as i64) * ONE / larger;
            self.loss += (difference.max(0) - self.loss) / 4;
            self.evidence.add(difference);
        }
        if let Some(manner) = self.evidence.verdict() {
            // The next trial begins anew: what has been decided is no evidence.
            self.evidence = Evidence::default();
            self.manner = manner;
        }
        self.rest(now);
    }

    fn rest(&mut self, now: Nanos) {
        let rest = match self.manner {
            Manner::Eager => {
                (self.loss * LOSSES_KEPT_BELOW / ONE).clamp(*REST.start(), *REST.end()) as Nanos * self.length
            }
            Manner::Patient => REST_PATIENT * self.length,
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

    /// Runs pairs with these counts of an eager and of a patient window until something is decided; how many pairs that took.
    fn until_decided(reaction: &mut Reaction, counts: impl Fn(u64) -> (u64, u64)) -> u64 {
        let mut now = reaction.next;
        for pair in 1..=PAIRS_MAX as u64 * 4 {
            let before = reaction.evidence.pairs;
            let (eager, patient) = counts(pair);
            for _ in 0..2 {
                now = now.max(reaction.next);
                reaction.wait_begins(now, Some(LENGTH));
                let manner = reaction.window.as_ref().unwrap().manner;
                reaction.record(if manner == Manner::Eager { eager as u32 } else { patient as u32 });
                now += LENGTH;
                reaction.look(now);
                assert!(reaction.window.is_none());
            }
            if reaction.evidence.pairs < before + 1 {
                return pair;
            }
        }
        u64::MAX
    }

    #[test]
    fn what_is_drastic_is_decided_at_once() {
        let mut reaction = Reaction::default();
        assert_eq!(until_decided(&mut reaction, |_| (20, 20)), 4);
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
        reaction.wait_begins(now, Some(LENGTH));
        now += LENGTH * PAUSED + 1;
        reaction.look(now);
        assert!(reaction.window.is_none() && reaction.first.is_none());
        assert!(reaction.next > now);
    }

    #[test]
    fn the_dearer_the_trial_the_rarer() {
        let rest = |loss, manner| {
            let mut reaction = Reaction { length: LENGTH, loss, manner, ..Reaction::default() };
            reaction.rest(0);
            reaction.next / LENGTH
        };
        assert!((7..=10).contains(&rest(0, Manner::Eager)));
        assert!((150..=226).contains(&rest(ONE * 9 / 10, Manner::Eager)));
        assert!((20..=28).contains(&rest(ONE * 9 / 10, Manner::Patient)));
    }

    #[test]
    fn nothing_begins_where_there_is_nothing_to_compare() {
        let mut reaction = Reaction::default();
        reaction.wait_begins(5, None);
        assert_eq!(reaction.end(), None);
        reaction.wait_begins(5, Some(LENGTH));
        assert_eq!(reaction.end(), Some(5 + LENGTH));
        reaction.abandon(6);
        assert_eq!(reaction.end(), None);
        assert!(reaction.next > 6);
    }

    #[test]
    fn both_orders_are_used() {
        let mut reaction = Reaction::default();
        let eager = (0..1000).filter(|_| reaction.toss()).count();
        assert!((400..600).contains(&eager), "{eager}");
    }
}
