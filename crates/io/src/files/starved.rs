//! Sources whose operations found no room, and who of them is told of new room. Pure.
//!
//! A *source* is the one who queues operations, as tokens name it: a task of a worker. It is told once for
//! each time that it found no room, and then tries again.
//!
//! # Who is told
//! As many sources are told as places are free, so that new room does not start more tries than it can serve.
//! A place of an owner's reserve is for sources of this owner. A common place is for one source of each owner
//! in turn, so that an owner with many sources does not keep the others from it.
//!
//! # Why no source waits while there is room
//! A source that is told need not take the place: its request may be gone. So after new room, each call of
//! [`Starved::take`] tells of what is free then, until no source is left or a call finds nothing free. A
//! source finds no room only if nothing is free for it. Places become free only by [`Starved::made_room`]
//! from then on, which starts such calls again.

use super::shares::Shares;
use std::collections::{HashSet, VecDeque};

/// The sources that wait for room.
#[derive(Debug, Default)]
pub(crate) struct Starved {
    /// The sources of each owner, in the order in which they are told.
    of_owner: Vec<VecDeque<u32>>,
    /// The owners with sources, the next one first.
    owners: VecDeque<u32>,
    /// All sources, each with its owner. A task's number can come back with another owner.
    sources: HashSet<(u32, u32)>,
    /// Common places became free, or were left at the last call of `take`.
    has_common: bool,
    /// The same for reserves of owners with sources.
    has_reserve: bool,
    /// Either of them, and sources wait.
    is_due: bool,
}

impl Starved {
    /// Notes that a source of this owner found no room.
    #[cold]
    pub(crate) fn add(&mut self, owner: u32, source: u32) {
        if !self.sources.insert((owner, source)) {
            return;
        }
        let at = owner as usize;
        if self.of_owner.len() <= at {
            self.of_owner.resize_with(at + 1, VecDeque::new);
        }
        if self.of_owner[at].is_empty() {
            self.owners.push_back(owner);
        }
        self.of_owner[at].push_back(source);
    }

    /// Notes that a place that this owner used has become free.
    #[inline]
    pub(crate) fn made_room(&mut self, owner: u32, is_common: bool) {
        if !self.owners.is_empty() {
            self.note_room(owner, is_common);
        }
    }

    #[cold]
    fn note_room(&mut self, owner: u32, is_common: bool) {
        self.has_common |= is_common;
        self.has_reserve |=
            !is_common && self.of_owner.get(owner as usize).is_some_and(|sources| !sources.is_empty());
        self.is_due |= self.has_common || self.has_reserve;
    }

    /// Notes that owners take operations again, because a pause has ended.
    #[cold]
    pub(crate) fn ended_pause(&mut self) {
        if !self.owners.is_empty() {
            (self.has_common, self.has_reserve, self.is_due) = (true, true, true);
        }
    }

    /// Returns whether sources wait, and there may be room for one.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Appends the sources for which there is room now. `is_paused`: an owner takes nothing at present.
    #[cold]
    pub(crate) fn take(&mut self, shares: &Shares, is_paused: impl Fn(u32) -> bool, into: &mut Vec<u32>) {
        let (mut common, before) = (shares.common_room(), into.len());
        let mut reserves = std::mem::take(&mut self.has_reserve);
        self.has_common = false;
        // Each turn tells one source of each owner, and the first also those of the reserves.
        while reserves || common > 0 {
            let told = into.len();
            for _ in 0..self.owners.len() {
                if !reserves && common == 0 {
                    break;
                }
                let Some(owner) = self.owners.pop_front() else { break };
                let own = if reserves { shares.reserve_room(owner) } else { 0 };
                let sources = &mut self.of_owner[owner as usize];
                if !is_paused(owner) {
                    let count = (own + usize::from(common > 0)).min(sources.len());
                    common -= usize::from(count > own);
                    let told = sources.drain(..count);
                    into.extend(told.inspect(|source| _ = self.sources.remove(&(owner, *source))));
                }
                if !sources.is_empty() {
                    self.owners.push_back(owner);
                }
            }
            reserves = false;
            if into.len() == told {
                break;
            }
        }
        let goes_on = into.len() > before && !self.owners.is_empty();
        (self.has_common, self.has_reserve, self.is_due) = (goes_on, goes_on, goes_on);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes all places, so that each source finds no room.
    fn full(common: usize, reserve: usize, owners: u32) -> Shares {
        let mut shares = Shares::new(common, reserve, owners as usize);
        for owner in (0..owners).cycle() {
            if shares.used() == shares.total() {
                break;
            }
            if shares.room(owner) > 0 {
                shares.take(owner);
            }
        }
        shares
    }

    fn take(starved: &mut Starved, shares: &Shares) -> Vec<u32> {
        let mut told = Vec::new();
        starved.take(shares, |_| false, &mut told);
        told
    }

    #[test]
    fn one_source_is_told_for_each_common_place_and_owners_take_turns() {
        let mut shares = Shares::new(8, 0, 0);
        (0..8).for_each(|_| shares.take(0));
        let mut starved = Starved::default();
        // Many of the first owner, and one of the second. Each finds no room again and again.
        (10..100).chain(10..100).for_each(|source| starved.add(1, source));
        starved.add(2, 7);
        assert!(!starved.is_due());
        for expected in [10, 7, 11, 12] {
            shares.put_back(0);
            starved.made_room(0, true);
            assert!(starved.is_due());
            assert_eq!(take(&mut starved, &shares), [expected]);
            shares.take(1);
            assert!(take(&mut starved, &shares).is_empty());
            assert!(!starved.is_due(), "it was taken");
        }
        for _ in 0..3 {
            shares.put_back(0);
        }
        starved.made_room(0, true);
        starved.add(2, 8);
        assert_eq!(take(&mut starved, &shares), [13, 8, 14]);
    }

    #[test]
    fn a_place_of_a_reserve_is_for_its_owner() {
        let (mut shares, mut starved) = (full(2, 2, 3), Starved::default());
        for (owner, source) in [(0, 1), (1, 2), (1, 3), (1, 4), (2, 5)] {
            assert_eq!(shares.room(owner), 0);
            starved.add(owner, source);
        }
        // Owners 0 and 1 have a common place each. The reserve of owner 2 is used last.
        assert!(!shares.put_back(2), "it is of the reserve");
        starved.made_room(2, false);
        assert_eq!(take(&mut starved, &shares), [5]);
        shares.take(2);
        assert!(take(&mut starved, &shares).is_empty());
        // The others have none of it.
        shares.put_back(2);
        starved.made_room(2, false);
        assert!(!starved.is_due());
        for is_common in [true, false, false] {
            assert_eq!(shares.put_back(1), is_common);
            starved.made_room(1, is_common);
        }
        assert_eq!(take(&mut starved, &shares), [1, 2, 3]);
    }

    #[test]
    fn a_place_that_is_not_taken_goes_to_the_next() {
        let (mut shares, mut starved) = (full(1, 0, 1), Starved::default());
        (1..5).for_each(|source| starved.add(0, source));
        shares.put_back(0);
        starved.made_room(0, true);
        let told: Vec<_> = (0..6).map(|_| take(&mut starved, &shares)).collect();
        assert_eq!(told, [vec![1], vec![2], vec![3], vec![4], vec![], vec![]]);
        assert!(!starved.is_due() && starved.sources.is_empty());
        starved.add(0, 1);
        assert!(!starved.is_due(), "it was told");
    }

    /// The first task is gone without a word, and one of another owner has its number.
    #[test]
    fn a_source_waits_with_each_of_its_owners() {
        let (mut shares, mut starved) = (full(0, 1, 2), Starved::default());
        starved.add(0, 7);
        starved.add(1, 7);
        shares.put_back(1);
        starved.made_room(1, false);
        assert_eq!(take(&mut starved, &shares), [7]);
    }

    #[test]
    fn an_owner_that_pauses_is_told_later() {
        let (mut shares, mut starved) = (full(2, 0, 1), Starved::default());
        starved.add(0, 1);
        starved.add(1, 2);
        shares.put_back(0);
        shares.put_back(0);
        starved.made_room(0, true);
        let mut told = Vec::new();
        starved.take(&shares, |owner| owner == 0, &mut told);
        assert_eq!(told, [2]);
        assert_eq!(take(&mut starved, &shares), [1]);
    }
}
