//! Finds out by trials whether a load *reacts*: whether it makes fewer requests if they are answered later.
//!
//! A load that was found to react has a *lease* of the eager manner: it may be spun for. A lease ends after a
//! quarter of a second of activity. It is renewed then if the trials have shown enough. `docs/adr/0013` has
//! the argument.
//!
//! A trial compares pairs of blocks of equal length, in random order. In a *treated* block, the queue naps
//! at first, and is served eagerly after that. A *control* block is served eagerly. A request that is
//! merely late is counted in the eager part of its block. A lost one is missing.

use super::Nanos;
use super::load::rate;

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

/// The number that stands for 1 in shares and stakes.
const ONE: i64 = 1024;
/// The activity after which a lease ends: twice the time in which six pairs that lose nine tenths of a nap
/// of 130 us each lose half a percent. With naps of a millisecond, simulated loads kept no more throughput
/// with a longer one.
const LEASE: Nanos = 250_000_000;
/// The eager part of a treated block, in naps. With 2, drivers that naps delay by up to 4 were held eager for
/// seconds in 7 of 12 simulated runs; with 4 for at most 250 ms. More hides small losses in noise.
const RECOVERY: u64 = 4;
/// The share of requests that a load may lose and still count as one that does not react.
const TOLERATED: i64 = ONE / 40;
/// The capital of a test that begins, and the most that it keeps.
const CAPITAL: u64 = 1 << 20;
const CAPITAL_MAX: u64 = GIVEN * CAPITAL;
/// The capital at the end of a lease that renews it, and the part of it that pays for that. By chance, a
/// lease is renewed with probability 1/16, and 1 + k times with 1/(16 * 4^k).
const RENEWED: u64 = 16;
const PAID: u64 = 4;
/// The capital for which a load without a lease gets one. By chance, this happens once in so many pairs.
const GIVEN: u64 = 256;
/// The largest stake, seven eighths, so that a lost bet leaves something for the next.
const STAKE_MAX: i64 = ONE * 7 / 8;
/// The weight of the newest pair in the means from which stakes follow: one part in this many. With 16, a new
/// load is known later; with 4, stakes follow noise.
const MEMORY: i64 = 8;
/// The sums before the first pair: one pair that has shown half, with much noise.
const PRIOR: (i64, i64) = (ONE / 2, ONE);
/// The rest after a pair of a lease is this many times what the pair loses: trials lose half a percent.
const REST_PER_LOSS: i64 = 200;
/// The rest after a pair without a lease is this many times what the pair spins: trials cost one percent.
const REST_PER_SPIN: Nanos = 100;
/// The number of pairs that follow quickly on a change of the load or the end of a lease: ten drastic ones
/// give a lease, and some may differ by chance. A pair that shows no loss counts as two, because most such
/// pairs are of loads that do not react. Without a lease it counts as four, because these pairs are then all
/// that spins. The shortest rest, in naps.
const QUICK_PAIRS: u8 = 16;
const AGAINST_LEASE: u8 = 2;
const AGAINST: u8 = 4;
const REST_MIN: Nanos = 2;
/// The capital after the quick pairs below which a lease ends at once. A load that loses a tenth or more has
/// doubled it by then, and one that loses nothing has done so in at most half of the cases.
const DOUBLED: u64 = 2;
/// The least time between two changes of load that count, in naps. The quick pairs of one then take a
/// quarter.
const CHANGE_INTERVAL: Nanos = 1000;

/// The part of a trial that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Rest,
    /// The first part of a treated block, and its eager part.
    Napping,
    Recovery,
    Control,
}

/// The trial of one queue.
#[derive(Debug)]
pub(super) struct Trial {
    /// The activity after which the lease ends. 0: there is no lease.
    lease: Nanos,
    capital: u64,
    /// Decayed sums over pairs: the shares that they lost, and their squares.
    lost: i64,
    squares: i64,
    stage: Stage,
    until: Nanos,
    /// The length of a nap with its wake.
    nap: Nanos,
    /// The beginning of the block that runs, and the number of requests by then.
    since: Nanos,
    counted: u64,
    /// The rate of requests in the first block of the pair, if it is over.
    first: Option<u64>,
    treated_first: bool,
    quick_pairs_left: u8,
    next_change: Nanos,
    random: u32,
}

impl Default for Trial {
    fn default() -> Self {
        Self {
            // A new queue is unknown. Its plan spins as long as a sleep costs.
            lease: LEASE,
            capital: CAPITAL,
            lost: PRIOR.0,
            squares: PRIOR.1,
            stage: Stage::Rest,
            until: 0,
            nap: 0,
            since: 0,
            counted: 0,
            first: None,
            treated_first: false,
            quick_pairs_left: QUICK_PAIRS,
            next_change: 0,
            random: 0x9e37_79b9,
        }
    }
}

impl Trial {
    /// Returns the manner in which to serve the queue now.
    #[inline]
    pub(super) fn manner(&self) -> Manner {
        match self.stage {
            Stage::Rest if self.lease == 0 => Manner::Patient,
            Stage::Napping => Manner::Napping,
            Stage::Rest | Stage::Recovery | Stage::Control => Manner::Eager,
        }
    }

    /// Returns the time at which [`Trial::advance`] has something to do.
    pub(super) fn until(&self) -> Nanos {
        self.until
    }

    /// Goes on to the next stage if this one is over. The caller has just found the queue empty, so
    /// `requests`, the number of all so far, has all that were sent. `nap` is the length of a nap with its
    /// wake. `None`: there is nothing to compare.
    pub(super) fn advance(&mut self, now: Nanos, requests: u64, nap: Option<Nanos>) {
        let Some(nap) = nap else {
            (self.stage, self.first) = (Stage::Rest, None);
            return;
        };
        if now < self.until {
            return;
        }
        match self.stage {
            Stage::Rest => {
                (self.nap, self.treated_first) = (nap, self.draw().is_multiple_of(2));
                self.begin(now, requests);
            }
            Stage::Napping => {
                (self.stage, self.until) = (Stage::Recovery, now.saturating_add(RECOVERY * self.nap));
            }
            Stage::Recovery | Stage::Control => {
                let time = now.saturating_sub(self.since);
                let rate = rate(requests.wrapping_sub(self.counted).saturating_mul(256), time);
                match self.first {
                    // A pause, or other work. Both kinds of blocks end eagerly, so this says nothing of
                    // either.
                    _ if time > 2 * self.block_time() => self.rest(now),
                    None => {
                        self.first = Some(rate);
                        self.begin(now, requests);
                    }
                    Some(first) => {
                        let pair = if self.treated_first { [first, rate] } else { [rate, first] };
                        self.compare(now, pair);
                        self.rest(now);
                    }
                }
            }
        }
    }

    fn begin(&mut self, now: Nanos, requests: u64) {
        (self.since, self.counted) = (now, requests);
        (self.stage, self.until) = match self.treated_first == self.first.is_none() {
            true => (Stage::Napping, now.saturating_add(self.nap)),
            false => (Stage::Control, now.saturating_add(self.block_time())),
        };
    }

    fn block_time(&self) -> Nanos {
        (1 + RECOVERY) * self.nap
    }

    /// Compares the rates of a treated block and of its control.
    fn compare(&mut self, now: Nanos, [treated, control]: [u64; 2]) {
        let more = treated.max(control);
        if more == 0 {
            return;
        }
        // The share of the nap, which is only one part of the block.
        let parts = 1 + RECOVERY as i64;
        let share = (control as i64 - treated as i64) * ONE * parts / more as i64;
        let lost = share.clamp(-ONE, ONE) - TOLERATED;
        self.bet(lost);
        let (capital, lease) = (self.capital / CAPITAL, self.lease);
        tracing::trace!(now, lost, capital, lease, treated, control, "polling trial");
    }

    /// Bets on what a pair has lost. The stake is chosen before the pair is known, and grows with what
    /// earlier pairs have lost. If nothing is lost, their order decides which of them has more, so capital
    /// grows only by chance.
    fn bet(&mut self, lost: i64) {
        let stake = self.stake().clamp(0, STAKE_MAX);
        let gain = stake * lost * (self.capital / ONE as u64) as i64 / ONE;
        self.capital = self.capital.saturating_add_signed(gain).min(CAPITAL_MAX);
        self.lost += lost - self.lost / MEMORY;
        self.squares += lost * lost / ONE - self.squares / MEMORY;
        if self.quick_pairs_left > 0 {
            let against = if self.lease > 0 { AGAINST_LEASE } else { AGAINST };
            self.quick_pairs_left = self.quick_pairs_left.saturating_sub(if lost > 0 { 1 } else { against });
            if self.quick_pairs_left == 0 && self.capital < DOUBLED * CAPITAL {
                self.lease = 0;
            }
        }
        if self.lease == 0 {
            self.capital = self.capital.max(CAPITAL);
            if self.capital >= GIVEN * CAPITAL {
                self.renew();
            }
        }
    }

    /// Returns the stake that would have gained most in the last pairs (Kelly 1956): their mean by the mean
    /// of their squares.
    fn stake(&self) -> i64 {
        self.lost * ONE / self.squares.max(1)
    }

    fn renew(&mut self) {
        (self.capital, self.lease) = (self.capital / PAID, LEASE);
        tracing::trace!(lease = self.lease, "polling lease given or renewed");
    }

    /// Takes `time` of activity off the lease.
    pub(super) fn spend(&mut self, time: Nanos) {
        let had = self.lease > 0;
        self.lease = self.lease.saturating_sub(time);
        if !had || self.lease > 0 {
            return;
        }
        if self.capital >= RENEWED * CAPITAL {
            self.renew();
        } else {
            (self.capital, self.quick_pairs_left) = (CAPITAL, QUICK_PAIRS);
            tracing::trace!("polling lease lapsed");
        }
    }

    /// Notes that the load seems to have changed. Without a lease, drops what is known of the old one, and
    /// tries the new one soon and often. With one, the end of the lease is soon enough, and a pause of the
    /// driver does not cost the lease. Ignores changes in short succession, because the trial of an unsteady
    /// load would never end otherwise.
    pub(super) fn load_changed(&mut self, now: Nanos) {
        if self.lease == 0 && now >= self.next_change {
            tracing::trace!(now, capital = self.capital / CAPITAL, "polling load changed");
            self.next_change = now.saturating_add(CHANGE_INTERVAL * self.nap);
            (self.capital, self.quick_pairs_left) = (CAPITAL, QUICK_PAIRS);
            (self.lost, self.squares) = PRIOR;
            self.rest(now);
        }
    }

    /// Runs the test over recorded pairs: the time of each, and what it lost. Returns the lease and the
    /// capital after each.
    pub(super) fn replay(pairs: &[(Nanos, i64)]) -> Vec<(Nanos, u64)> {
        let mut trial = Self::default();
        let mut before = pairs.first().map_or(0, |pair| pair.0);
        let step = |&(now, lost): &(Nanos, i64)| {
            trial.spend(now.saturating_sub(std::mem::replace(&mut before, now)));
            trial.bet(lost.clamp(-2 * ONE, ONE));
            (trial.lease, trial.capital / CAPITAL)
        };
        pairs.iter().map(step).collect()
    }

    fn rest(&mut self, now: Nanos) {
        (self.stage, self.first) = (Stage::Rest, None);
        let rest = if self.quick_pairs_left > 0 {
            0
        } else if self.lease > 0 {
            (REST_PER_LOSS * (self.lost / MEMORY).max(0)) as Nanos * self.nap / ONE as Nanos
        } else {
            // Capital is doubt. The more there is, the sooner it is settled.
            let doubt = self.capital / CAPITAL;
            REST_PER_SPIN * (self.block_time() + RECOVERY * self.nap) / (doubt * doubt)
        };
        let rest = rest.max(REST_MIN * self.nap);
        // A random part keeps the trial out of step with the load.
        self.until = now.saturating_add(rest - rest / 8 + rest / 4 * Nanos::from(self.draw() % 256) / 256);
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

    const NAP: Nanos = 130_000;

    /// Lets `trial` run for `time` on a load with these rates, in requests a millisecond. A load that is late
    /// sends most of what it did not send in a nap during the next. Returns the time with a lease.
    fn run(trial: &mut Trial, from: Nanos, time: Nanos, eager: u64, patient: u64, late: bool) -> Nanos {
        let (mut milli, mut owed, mut leased) = (0, 0, 0);
        for now in (from..from + time).step_by(10_000) {
            let rate = if trial.manner() == Manner::Eager { eager } else { patient };
            let paid = if late && rate == eager { owed / 10 } else { 0 };
            owed = owed + (eager - rate) * 10 - paid;
            milli += rate * 10 + paid;
            trial.advance(now, milli / 1000, Some(NAP));
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
        assert_eq!(run(&mut Trial::default(), 0, second, 150, 15, false), second);
        assert_eq!(run(&mut Trial::default(), 0, second, 300, 250, false), second);
        // A load that loses nothing keeps its first lease for the quick pairs only.
        for (patient, late) in [(300, false), (297, false), (100, true)] {
            let leased = run(&mut Trial::default(), 0, second, 300, patient, late);
            assert!(leased <= LEASE / 4, "{patient}: {leased}");
        }
    }

    #[test]
    fn a_load_gets_a_lease_when_it_begins_to_lose() {
        let mut trial = Trial::default();
        run(&mut trial, 0, 1_000_000_000, 300, 300, false);
        assert_eq!(trial.manner(), Manner::Patient);
        trial.load_changed(1_000_000_000);
        let leased = run(&mut trial, 1_000_000_000, 200_000_000, 150, 15, false);
        assert!(leased >= 170_000_000, "{leased}");
    }

    #[test]
    fn chance_renews_a_lease_as_rarely_as_promised() {
        let mut trial = Trial::default();
        let mut renewed = 0;
        // The two blocks of a pair differ by up to a lot, and which has more is chance.
        for test in 0..2_000 {
            (trial.lease, trial.capital) = (LEASE, CAPITAL);
            for _ in 0..40 {
                let counts = [trial.draw() % 4 * 10, 20].map(u64::from);
                let at = trial.draw() as usize % 2;
                trial.compare(0, [counts[at], counts[1 - at]]);
            }
            renewed += u32::from(trial.capital >= RENEWED * CAPITAL);
            assert!(renewed <= 30 + test / 16, "{renewed} of {test}");
        }
    }

    #[test]
    fn trials_lose_half_a_percent() {
        let mut trial = Trial { nap: NAP, ..Trial::default() };
        for _ in 0..20 {
            trial.compare(0, [10, 50]);
        }
        trial.rest(0);
        // A pair loses all of a nap.
        assert!((150..=230).contains(&(trial.until / NAP)), "{}", trial.until / NAP);
    }

    #[test]
    fn both_orders_and_many_rests_are_used() {
        let mut trial = Trial { nap: NAP, ..Trial::default() };
        let mut rests = std::collections::BTreeSet::new();
        let mut treated_first = 0;
        for _ in 0..200 {
            trial.rest(0);
            rests.insert(trial.until);
            trial.advance(trial.until, 0, Some(NAP));
            treated_first += u32::from(trial.treated_first);
        }
        assert!(rests.len() > 20 && (70..130).contains(&treated_first));
        trial.advance(0, 0, None);
        assert_eq!(trial.stage, Stage::Rest);
    }
}
