//! Shares: the division of places among owners. Places are slots of an engine, or threads of a pool. Pure.
//!
//! An *owner* is a device. Some places are *common*: an owner takes as many of them as are free. In addition,
//! each owner has a *reserve* that no other owner can take. An owner uses its reserve first.
//!
//! # Why a reserve and not a rule for the common places
//! A device that hangs keeps the places that it has taken. A rule such as "no more than half of the free
//! places" leaves some for the next device, and half of these for the one after it. After ten devices have
//! hung one after the other, nothing is left. A reserve does not depend on earlier devices: the places of all
//! reserves exist from the start, and count for nothing else. A device that is alone can still take all
//! common places.
//!
//! # More owners than reserves
//! The number of reserves is fixed when the engine opens, because the kernel's queues get their sizes then.
//! An owner beyond that number has the common places only, so devices that hang can stop it. It gets a
//! reserve when its number ([`crate::files`]) is assigned anew.

/// The places, and the number that each owner uses.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    common: usize,
    common_used: usize,
    /// The number of places that each of the first `owners` owners has for itself.
    reserve: usize,
    owners: usize,
    /// The number of places that each owner uses, including common ones.
    used: Vec<usize>,
    total_used: usize,
}

impl Shares {
    /// Makes `common` places for any owner, and `reserve` more for each owner with a number below `owners`.
    pub(crate) fn new(common: usize, reserve: usize, owners: usize) -> Self {
        Self { common, common_used: 0, reserve, owners, used: vec![0; owners], total_used: 0 }
    }

    /// Divides a smaller `total` of places. At least half of them are common.
    pub(crate) fn within(&self, total: usize) -> Self {
        if total >= self.total() {
            return self.clone();
        }
        let owners = (total / 2).checked_div(self.reserve).unwrap_or(0).min(self.owners);
        Self::new(total - owners * self.reserve, self.reserve, owners)
    }

    /// Returns the number of places, free or not.
    pub(crate) fn total(&self) -> usize {
        self.common + self.reserve * self.owners
    }

    /// Returns the number of places in use.
    #[inline]
    pub(crate) fn used(&self) -> usize {
        self.total_used
    }

    #[inline]
    fn reserve_of(&self, owner: u32) -> usize {
        if (owner as usize) < self.owners { self.reserve } else { 0 }
    }

    /// Returns the number of places that the owner uses.
    #[inline]
    pub(crate) fn used_by(&self, owner: u32) -> usize {
        self.used.get(owner as usize).copied().unwrap_or(0)
    }

    /// Returns the number of places that the owner can still take.
    #[inline]
    pub(crate) fn room(&self, owner: u32) -> usize {
        self.common_room() + self.reserve_room(owner)
    }

    /// Returns the number of places that any owner can take.
    #[inline]
    pub(crate) fn common_room(&self) -> usize {
        self.common.saturating_sub(self.common_used)
    }

    /// Returns the number of places that only this owner can take.
    #[inline]
    pub(crate) fn reserve_room(&self, owner: u32) -> usize {
        self.reserve_of(owner).saturating_sub(self.used_by(owner))
    }

    /// Takes a place for the owner. The caller has checked that there is room.
    #[inline]
    pub(crate) fn take(&mut self, owner: u32) {
        debug_assert!(self.room(owner) > 0, "a place that is not there");
        if self.used.len() <= owner as usize {
            self.used.resize(owner as usize + 1, 0);
        }
        let reserve = self.reserve_of(owner);
        let used = &mut self.used[owner as usize];
        if *used >= reserve {
            self.common_used += 1;
        }
        *used += 1;
        self.total_used += 1;
    }

    /// Puts back a place of the owner. Returns whether any owner can take it.
    #[inline]
    pub(crate) fn put_back(&mut self, owner: u32) -> bool {
        let reserve = self.reserve_of(owner);
        let Some(used) = self.used.get_mut(owner as usize).filter(|used| **used > 0) else {
            debug_assert!(false, "a place that was not taken");
            return false;
        };
        *used -= 1;
        let is_common = *used >= reserve;
        self.common_used -= usize::from(is_common);
        self.total_used -= 1;
        is_common
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(shares: &mut Shares, owner: u32) -> usize {
        let mut taken = 0;
        while shares.room(owner) > 0 {
            shares.take(owner);
            taken += 1;
        }
        taken
    }

    #[test]
    fn a_lone_owner_has_all_common_places_and_its_reserve() {
        let mut shares = Shares::new(100, 4, 8);
        assert_eq!((shares.total(), shares.room(3)), (132, 104));
        assert_eq!(take_all(&mut shares, 3), 104);
        assert_eq!(shares.used(), 104);
    }

    /// This holds for any number of owners that hang in succession.
    #[test]
    fn each_owner_keeps_its_reserve_beside_hanging_ones() {
        let mut shares = Shares::new(100, 4, 8);
        for owner in 0..8 {
            let taken = take_all(&mut shares, owner);
            assert_eq!(taken, if owner == 0 { 104 } else { 4 });
        }
        // Beyond the number of reserves there is no place until a common one is free.
        assert_eq!(shares.room(8), 0);
        shares.put_back(0);
        assert_eq!((shares.room(8), shares.room(3)), (1, 1));
        shares.take(8);
        assert_eq!((shares.room(8), shares.room(0), shares.used()), (0, 0, shares.total()));
    }

    #[test]
    fn the_reserve_is_used_first_and_given_back_last() {
        let mut shares = Shares::new(2, 2, 2);
        (0..3).for_each(|_| shares.take(0));
        assert_eq!(shares.room(1), 3, "one of the common places is taken");
        shares.put_back(0);
        assert_eq!((shares.room(1), shares.room(0)), (4, 2));
        shares.put_back(0);
        shares.put_back(0);
        assert_eq!((shares.room(0), shares.used()), (4, 0));
    }

    #[test]
    fn fewer_places_than_were_wanted() {
        let wanted = Shares::new(1024, 16, 64);
        for (total, common, owners) in [(4096, 1024, 64), (2047, 1039, 63), (512, 256, 16), (8, 8, 0)] {
            let shares = wanted.within(total);
            assert_eq!((shares.common, shares.owners), (common, owners), "of {total}");
            assert_eq!(shares.total(), total.min(wanted.total()));
        }
        assert_eq!(Shares::new(100, 0, 0).within(8).common, 8);
    }

    /// Compares all results with a simple count.
    #[test]
    fn no_place_is_lost_or_used_twice() {
        let mut shares = Shares::new(5, 2, 3);
        let mut taken = [0usize; 5];
        let mut random = 1u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let owner = (random >> 33) as usize % taken.len();
            let number = owner as u32;
            if random >> 60 & 1 == 0 && shares.room(number) > 0 {
                shares.take(number);
                taken[owner] += 1;
            } else if taken[owner] > 0 {
                shares.put_back(number);
                taken[owner] -= 1;
            }
            let reserves = |owner: usize| if owner < 3 { 2 } else { 0 };
            let common: usize = (0..5).map(|owner| taken[owner].saturating_sub(reserves(owner))).sum();
            assert!(common <= 5);
            for (owner, taken) in taken.iter().enumerate() {
                let own = reserves(owner).saturating_sub(*taken);
                assert_eq!(shares.room(owner as u32), 5 - common + own);
            }
            assert_eq!(shares.used(), taken.iter().sum::<usize>());
        }
    }
}
