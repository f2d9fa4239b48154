//! Finds out by trials whether a load *reacts*: whether it makes fewer requests if they are answered later.
//!
//! A load that was found to react has a *lease* of the eager manner: it may be spun for. A lease ends after a
//! quarter of a second of activity. It is renewed then if the trials have shown enough. `docs/adr/0013` has
//! the argument.
//!
//! A trial compares the rates of requests in pairs of blocks, in random order. In a *treated* block, the
//! queue naps at first, and is served eagerly after that. A *control* block is served eagerly. A request
//! that is merely late is counted in the eager part of its block. A lost one is missing.

use super::Nanos;

/// The way in which a queue is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// A delay costs throughput.
    Eager,
    /// A delay within the accepted one costs nothing.
    Patient,
    /// For a trial: naps, whether they are cheap or not. The longer the delay, the less trials lose until its
    /// effect is known.
    Napping,
}

/// The activity after which a lease ends: twice the time in which six pairs that lose nine tenths of a nap
/// of 130 us each lose half a percent. With naps of a millisecond, simulated loads kept no more throughput
/// with a longer one.
const LEASE: Nanos = 250_000_000;
/// The eager part of a treated block, in naps. With 2, drivers that naps delay by up to 4 were held eager for
/// seconds in 7 of 12 simulated runs; with 4 for at most 250 ms. More hides small losses in noise.
const RECOVERY: Nanos = 4;
/// The naps of a treated block whose test is in doubt: the stake is not the largest, because the last pairs
/// scatter or show no loss. Noise grows less than the number of naps, and what they lose grows as much, or
/// more: a driver that has work left for one nap has none for the next. With 1, a load that lost two fifths
/// to naps (768 frames that go round between two polling ends) was without a lease for half of the time.
/// With 4 in all blocks, a load whose pairs all lose would be known later, because a lease pays for fewer
/// pairs.
const NAPS_IN_DOUBT: Nanos = 4;
/// The quick pairs that are over before a test can be in doubt: four, or two without a loss.
const PAIRS_BEFORE_DOUBT: u8 = 4;
/// The share of requests that a load may lose and still count as one that does not react.
pub(super) const TOLERATED_LOSS: f64 = 0.025;
/// The least capital at the end of a lease that renews it. By chance, a lease is renewed with probability
/// 1/16.
const RENEWAL_CAPITAL: f64 = 16.0;
/// The divisor of the capital when a lease is given or renewed. By chance, a lease is renewed 1 + k times
/// with probability 1/(16 * 4^k).
const LEASE_PRICE: f64 = 4.0;
/// The capital for which a load without a lease gets one. A test keeps no more than this. By chance, a lease
/// is given once in so many pairs.
const CAPITAL_MAX: f64 = 256.0;
/// The largest stake, so that a lost bet leaves something for the next.
const STAKE_MAX: f64 = 7.0 / 8.0;
/// The weight of the newest pair in the means from which stakes follow: one part in this many. With 16, a new
/// load is known later; with 4, stakes follow noise.
const MEAN_PAIRS: f64 = 8.0;
/// The rest after a pair of a lease is this many times what the pair loses: trials lose half a percent.
const REST_PER_LOSS: f64 = 200.0;
/// The rest after a pair without a lease is this many times what the pair spins: trials cost one percent.
const REST_PER_SPIN: f64 = 100.0;
/// The number of pairs that follow quickly on a change of the load or the end of a lease: ten drastic ones
/// give a lease, and some may differ by chance.
const QUICK_PAIRS: u8 = 16;
/// The number of quick pairs for which one without a loss counts, because most such pairs are of loads that
/// do not react.
const LOSSLESS_PAIR_WEIGHT: u8 = 3;
/// The shortest rest, in the naps of a pair.
const REST_MIN: f64 = 2.0;
/// The capital after the quick pairs below which a lease ends at once: twice that of the beginning. A load
/// that loses a tenth or more has it by then, and one that loses nothing in at most half of the cases.
const QUICK_CAPITAL_MIN: f64 = 2.0;
/// The least time between two changes of load that count, in naps. The quick pairs of one then take a
/// quarter.
const CHANGE_INTERVAL: Nanos = 1000;

/// The last request: its number, and the time at which it was found. Rates are taken from request to request.
/// A block begins just after a request, so a regular load has as many within a block as within a slightly
/// longer one, and from end to end the longer kind would seem to lose some.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Last {
    pub(super) number: u64,
    pub(super) at: Nanos,
}

/// The test of whether a load reacts.
#[derive(Debug)]
pub(super) struct Test {
    /// It begins at 1.
    pub(super) capital: f64,
    /// Decaying means over pairs: the shares that they lost, and their squares.
    lost: f64,
    squares: f64,
}

impl Default for Test {
    fn default() -> Self {
        // As after one pair that has shown half, with much noise.
        Self { capital: 1.0, lost: 0.5 / MEAN_PAIRS, squares: 1.0 / MEAN_PAIRS }
    }
}

impl Test {
    /// Returns the part of the capital to bet on the next pair: the one that would have gained most in the
    /// last pairs (Kelly 1956).
    fn stake(&self) -> f64 {
        (self.lost / self.squares.max(f64::MIN_POSITIVE)).clamp(0.0, STAKE_MAX)
    }
}

/// The trial of one queue. By default, it has no lease.
#[derive(Debug, Default)]
pub(super) struct Trial {
    /// The activity after which the lease ends. 0: there is no lease.
    pub(super) lease: Nanos,
    pub(super) test: Test,
    /// The manner of the part of a block that runs. `None`: the trial rests.
    part: Option<Manner>,
    /// The time at which [`Trial::advance`] has something to do.
    pub(super) until: Nanos,
    /// The length of a nap with its wake, and the time of naps in the last treated block: a nap that begins
    /// in time is not cut short.
    nap: Nanos,
    napped: Nanos,
    /// The number of naps in the treated block of this pair.
    naps: Nanos,
    /// The last request before the block that runs.
    last: Last,
    /// The rate of requests in the first block of the pair, if it is over.
    first: Option<f64>,
    treated_first: bool,
    quick_pairs_left: u8,
    next_change: Nanos,
    random: u32,
}

impl Trial {
    /// Makes the trial of a new queue. The queue is unknown, and its plan spins as long as a sleep costs.
    pub(super) fn new() -> Self {
        Self { lease: LEASE, quick_pairs_left: QUICK_PAIRS, ..Self::default() }
    }

    /// Returns whether a trial naps now.
    pub(super) fn is_napping(&self) -> bool {
        self.part == Some(Manner::Napping)
    }

    /// Returns the manner in which to serve the queue now.
    #[inline]
    pub(super) fn manner(&self) -> Manner {
        self.part.unwrap_or(if self.lease > 0 { Manner::Eager } else { Manner::Patient })
    }

    /// Goes on to the next part if this one is over. The caller has just found the queue empty, so `last` is
    /// the last request that was sent. `nap` is the length of a nap with its wake. `None`: there is nothing
    /// to compare.
    pub(super) fn advance(&mut self, now: Nanos, last: Last, nap: Option<Nanos>) {
        let Some(nap) = nap else {
            (self.part, self.first) = (None, None);
            return;
        };
        if now < self.until {
            return;
        }
        match self.part {
            None => {
                (self.nap, self.treated_first) = (nap, self.draw() < 0.5);
                self.naps = if self.is_in_doubt() { NAPS_IN_DOUBT } else { 1 };
            }
            Some(Manner::Napping) => {
                self.napped = self.naps * self.nap + (now - self.until).min(self.nap);
                (self.part, self.until) = (Some(Manner::Eager), now.saturating_add(RECOVERY * self.nap));
                return;
            }
            Some(_) => {
                let time = last.at.saturating_sub(self.last.at).max(1);
                let rate = last.number.wrapping_sub(self.last.number) as f64 / time as f64;
                match self.first {
                    // A pause, or other work. Both kinds of blocks end eagerly, so this says nothing of
                    // either.
                    _ if now.saturating_sub(self.last.at) > 2 * self.block() => return self.rest(now),
                    Some(first) => {
                        self.compare(now, if self.treated_first { [first, rate] } else { [rate, first] });
                        return self.rest(now);
                    }
                    None => self.first = Some(rate),
                }
            }
        }
        self.last = last;
        let is_treated = self.treated_first == self.first.is_none();
        let (part, time) =
            if is_treated { (Manner::Napping, self.naps * self.nap) } else { (Manner::Eager, self.block()) };
        (self.part, self.until) = (Some(part), now.saturating_add(time));
    }

    /// Returns the length of a block of this pair.
    fn block(&self) -> Nanos {
        (self.naps + RECOVERY) * self.nap
    }

    /// Returns whether earlier pairs scatter or show no loss.
    fn is_in_doubt(&self) -> bool {
        self.quick_pairs_left <= QUICK_PAIRS - PAIRS_BEFORE_DOUBT && self.test.stake() < STAKE_MAX
    }

    /// Compares the rates of a treated block and of its control.
    fn compare(&mut self, now: Nanos, [treated, control]: [f64; 2]) {
        let more = treated.max(control);
        if more > 0.0 {
            // The share of the naps, which are only one part of the block.
            let share =
                (control - treated) / more * (1.0 + (RECOVERY * self.nap) as f64 / self.napped as f64);
            self.bet(share);
            tracing::trace!(now, share, self.test.capital, self.lease, treated, control, "polling trial");
        }
    }

    /// Bets on the share of naps that a pair has lost. The stake is chosen before the pair is known. If
    /// nothing is lost, the order of blocks decides which of them has more, so capital grows only by chance.
    pub(super) fn bet(&mut self, share: f64) {
        let lost = (share - TOLERATED_LOSS).clamp(-1.0, 1.0);
        let stake = self.test.stake();
        let least = if self.lease > 0 { 0.0 } else { 1.0 };
        self.test.capital = (self.test.capital * (1.0 + stake * lost)).clamp(least, CAPITAL_MAX);
        self.test.lost += (lost - self.test.lost) / MEAN_PAIRS;
        self.test.squares += (lost * lost - self.test.squares) / MEAN_PAIRS;
        if self.quick_pairs_left > 0 {
            let pairs = if lost > 0.0 { 1 } else { LOSSLESS_PAIR_WEIGHT };
            self.quick_pairs_left = self.quick_pairs_left.saturating_sub(pairs);
            if self.quick_pairs_left == 0 && self.test.capital < QUICK_CAPITAL_MIN {
                (self.lease, self.test.capital) = (0, 1.0);
            }
        }
        if self.lease == 0 && self.test.capital >= CAPITAL_MAX {
            self.renew();
        }
    }

    fn renew(&mut self) {
        (self.test.capital, self.lease) = (self.test.capital / LEASE_PRICE, LEASE);
        tracing::trace!(lease = self.lease, "polling lease given or renewed");
    }

    /// Takes `time` of activity off the lease.
    pub(super) fn spend(&mut self, time: Nanos) {
        if self.lease == 0 || self.lease > time {
            self.lease = self.lease.saturating_sub(time);
        } else if self.test.capital >= RENEWAL_CAPITAL {
            self.renew();
        } else {
            (self.lease, self.test.capital, self.quick_pairs_left) = (0, 1.0, QUICK_PAIRS);
            tracing::trace!("polling lease lapsed");
        }
    }

    /// Notes that the load seems to have changed. Without a lease, drops what is known of the old one, and
    /// tries the new one soon and often. With one, the end of the lease is soon enough, and a pause of the
    /// driver does not cost the lease. Ignores changes in short succession, because the trial of an unsteady
    /// load would never end otherwise.
    pub(super) fn load_changed(&mut self, now: Nanos) {
        if self.lease == 0 && now >= self.next_change {
            tracing::trace!(now, capital = self.test.capital, "polling load changed");
            self.next_change = now.saturating_add(CHANGE_INTERVAL * self.nap);
            (self.test, self.quick_pairs_left) = (Test::default(), QUICK_PAIRS);
            self.rest(now);
        }
    }

    fn rest(&mut self, now: Nanos) {
        (self.part, self.first) = (None, None);
        let rest = if self.quick_pairs_left > 0 {
            0.0
        } else if self.lease > 0 {
            REST_PER_LOSS * self.test.lost * self.napped as f64
        } else {
            // Capital is doubt. The more there is, the sooner it is settled.
            REST_PER_SPIN * (self.block() + RECOVERY * self.nap) as f64 / self.test.capital.floor().powi(2)
        };
        // A random part keeps the trial out of step with the load.
        let rest = rest.max(REST_MIN * (self.naps * self.nap) as f64) * (0.875 + self.draw() / 4.0);
        self.until = now.saturating_add(rest as Nanos);
    }

    /// Returns the next number of a linear congruential generator (Knuth), from 0 to 1. It is not secret, but
    /// no load follows the pattern by chance.
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(self.random) / f64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAP: Nanos = 130_000;

    /// Lets `trial` run for `time` on a load with these rates, in requests a millisecond. A load that is late
    /// sends most of what it did not send in a nap during the next. Returns the time with a lease.
    fn run(trial: &mut Trial, from: Nanos, time: Nanos, eager: u64, patient: u64, late: bool) -> Nanos {
        let (mut milli, mut owed, mut leased, mut last) = (0, 0, 0, Last { number: 0, at: from });
        for now in (from..from + time).step_by(10_000) {
            let rate = if trial.manner() == Manner::Eager { eager } else { patient };
            let paid = if late && rate == eager { owed / 10 } else { 0 };
            owed = owed + (eager - rate) * 10 - paid;
            milli += rate * 10 + paid;
            if milli / 1000 > last.number {
                last = Last { number: milli / 1000, at: now };
            }
            trial.advance(now, last, Some(NAP));
            if trial.lease > 0 {
                leased += 10_000;
            }
            trial.spend(10_000);
        }
        leased
    }

    #[test]
    fn a_load_that_loses_keeps_its_lease_and_another_does_not() {
        let second = 1_000_000_000;
        assert_eq!(run(&mut Trial::new(), 0, second, 150, 15, false), second);
        assert_eq!(run(&mut Trial::new(), 0, second, 300, 250, false), second);
        // A load that loses nothing keeps its first lease for the quick pairs only.
        for (patient, late) in [(300, false), (297, false), (100, true)] {
            let leased = run(&mut Trial::new(), 0, second, 300, patient, late);
            assert!(leased <= LEASE / 4, "{patient}: {leased}");
        }
    }

    #[test]
    fn a_load_gets_a_lease_when_it_begins_to_lose() {
        let mut trial = Trial::new();
        run(&mut trial, 0, 1_000_000_000, 300, 300, false);
        assert_eq!(trial.manner(), Manner::Patient);
        trial.load_changed(1_000_000_000);
        let leased = run(&mut trial, 1_000_000_000, 200_000_000, 150, 15, false);
        assert!(leased >= 170_000_000, "{leased}");
    }

    /// Naps take longer than planned, by a wake that is late, and a request comes each half of a nap. Counted
    /// from end to end, the longer blocks would have as many requests as the others, and a lower rate.
    #[test]
    fn a_regular_load_does_not_seem_to_lose() {
        let gap = 100_000;
        for late in [10_000, 20_000, 30_000, 65_000] {
            let (mut trial, mut leased, mut now, mut last) = (Trial::new(), 0, 0, Last::default());
            while now < 6_000_000_000 {
                let next = (now / gap + 1) * gap;
                let then = match trial.manner() {
                    Manner::Eager => next.min(trial.until.max(now + 1_000)),
                    Manner::Napping => trial.until + late,
                    Manner::Patient => next + late,
                };
                leased += if trial.lease > 0 { then - now } else { 0 };
                trial.spend(then - now);
                now = then;
                if now / gap > last.number {
                    last = Last { number: now / gap, at: now };
                }
                trial.advance(now, last, Some(2 * gap));
            }
            assert!(leased <= LEASE, "wakes {late} ns late: {leased}");
        }
    }

    #[test]
    fn chance_renews_a_lease_as_rarely_as_promised() {
        let mut trial = Trial { nap: NAP, napped: NAP, naps: 1, ..Trial::new() };
        let mut renewed = 0;
        // The two blocks of a pair differ by up to a lot, and which has more is chance.
        for test in 0..2_000 {
            (trial.lease, trial.test.capital) = (LEASE, 1.0);
            for _ in 0..40 {
                let counts = [(trial.draw() * 4.0).floor() * 10.0, 20.0];
                let at = usize::from(trial.draw() < 0.5);
                trial.compare(0, [counts[at], counts[1 - at]]);
            }
            renewed += u32::from(trial.test.capital >= RENEWAL_CAPITAL);
            assert!(renewed <= 30 + test / 16, "{renewed} of {test}");
        }
    }

    /// In one of four periods of 300 us, something else takes half of the load's time.
    #[test]
    fn a_load_whose_rate_scatters_is_judged_by_more_naps() {
        let second: Nanos = 1_000_000_000;
        for (patient, least, most) in [(90, 0.95, 1.0), (150, 0.8, 1.0), (300, 0.0, 0.1)] {
            let (mut trial, mut random, mut leased, mut milli) = (Trial::new(), Trial::new(), 0u64, 0u64);
            let (mut last, mut disturbed, mut doubts) = (Last::default(), false, 0);
            for now in (0u64..4 * second).step_by(10_000) {
                if now % 300_000 == 0 {
                    disturbed = random.draw() < 0.25;
                }
                let rate = if trial.manner() == Manner::Eager { 300 } else { patient };
                milli += if disturbed { rate * 5 } else { rate * 10 };
                if milli / 1000 > last.number {
                    last = Last { number: milli / 1000, at: now };
                }
                trial.advance(now, last, Some(NAP / 2));
                leased += if trial.lease > 0 { 10_000 } else { 0 };
                doubts += u32::from(trial.naps == NAPS_IN_DOUBT);
                trial.spend(10_000);
            }
            let share = leased as f64 / (4 * second) as f64;
            assert!((least..=most).contains(&share), "{patient}: {share}");
            assert!(doubts > 0, "{patient}");
        }
    }

    #[test]
    fn trials_lose_half_a_percent() {
        let mut trial = Trial { nap: NAP, napped: NAP, naps: 1, ..Trial::new() };
        for _ in 0..20 {
            trial.compare(0, [10.0, 50.0]);
        }
        trial.rest(0);
        // A pair loses all of a nap.
        assert!((150..=230).contains(&(trial.until / NAP)), "{}", trial.until / NAP);
        trial.napped = 2 * NAP;
        trial.rest(0);
        assert!((300..=460).contains(&(trial.until / NAP)), "of two naps: {}", trial.until / NAP);
    }

    #[test]
    fn a_pause_of_the_process_in_a_nap_is_no_long_rest() {
        let hour = 3_600_000_000_000;
        let mut trial = Trial::new();
        while trial.part != Some(Manner::Napping) {
            trial.advance(trial.until, Last { number: 0, at: trial.until }, Some(NAP));
        }
        for step in 0..4 {
            trial.advance(hour + step * 20 * NAP, Last { number: 1_000, at: hour }, Some(NAP));
        }
        trial.quick_pairs_left = 0;
        trial.rest(hour);
        assert!(trial.until < hour + 1000 * NAP, "{}", trial.until - hour);
    }

    #[test]
    fn both_orders_and_many_rests_are_used() {
        let mut trial = Trial { nap: NAP, ..Trial::new() };
        let mut rests = std::collections::BTreeSet::new();
        let mut treated_first = 0;
        for _ in 0..200 {
            trial.rest(0);
            rests.insert(trial.until);
            trial.advance(trial.until, Last { number: 0, at: trial.until }, Some(NAP));
            treated_first += u32::from(trial.treated_first);
        }
        assert!(rests.len() > 20 && (70..130).contains(&treated_first));
        trial.advance(0, Last::default(), None);
        assert_eq!(trial.part, None);
    }
}
