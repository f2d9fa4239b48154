//! The search for free clusters.
//!
//! The counts are the list of free clusters. It is read unit by unit: first those in which clusters became
//! free lately, then one pass over all.

use std::collections::BTreeSet;

/// The units to remember. With more, the pass begins again.
const FREED_MAX: usize = 4096;
/// The units to read for one chunk, so that the file's end is taken soon if the image is full.
const LOOKS_MAX: u32 = 16;
/// The free clusters that make a unit worth it: at most so many, and at most one in 128. The rest stays
/// unused.
const WORTH_MAX: u64 = 16;
const WORTH_SHARE: u64 = 128;

/// The units that may have free clusters.
#[derive(Debug)]
pub(super) struct FreeSpace {
    /// Units in which clusters became free.
    freed: BTreeSet<u64>,
    /// The rest of the pass.
    next: u64,
    end: u64,
    /// The units that were looked at for the current chunk.
    looks: u32,
    /// There is nothing behind the end, so each free cluster is worth it.
    is_tight: bool,
}

impl FreeSpace {
    /// Searches all units before `end`, first those from `first` on: what a session did not use is there.
    pub(super) fn new(first: u64, end: u64) -> Self {
        Self { freed: (first..end).collect(), next: 0, end, looks: 0, is_tight: false }
    }

    /// Notes that clusters of a unit became free.
    pub(super) fn freed(&mut self, unit: u64) {
        self.freed.insert(unit);
        if self.freed.len() > FREED_MAX {
            self.end = self.end.max(self.freed.last().map_or(0, |last| last + 1));
            self.freed.clear();
            self.next = 0;
        }
    }

    /// Returns the unit to look at for the current chunk.
    pub(super) fn unit(&self) -> Option<u64> {
        if self.looks >= LOOKS_MAX && !self.is_tight {
            return None;
        }
        self.freed.first().copied().or((self.next < self.end).then_some(self.next))
    }

    /// Goes on to the next unit: this one has nothing.
    pub(super) fn skip(&mut self, unit: u64) {
        self.looks += 1;
        if !self.freed.remove(&unit) && self.next == unit {
            self.next += 1;
        }
    }

    /// Begins the search for another chunk.
    pub(super) fn begin(&mut self) {
        self.looks = 0;
    }

    /// Notes that only units before `end` have free clusters. Returns whether the pass begins again for that.
    pub(super) fn tighten(&mut self, end: u64) -> bool {
        if std::mem::replace(&mut self.is_tight, true) {
            return false;
        }
        (self.next, self.end) = (0, end);
        true
    }

    /// Notes that there is room behind the end again.
    pub(super) fn loosen(&mut self) {
        self.is_tight = false;
    }

    pub(super) fn is_tight(&self) -> bool {
        self.is_tight
    }

    /// Returns the number of free clusters in a unit of `per_unit` that makes it worth it.
    pub(super) fn worth(&self, per_unit: u64) -> u64 {
        if self.is_tight { 1 } else { (per_unit / WORTH_SHARE).clamp(1, WORTH_MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_units_are_first_and_a_pass_has_pauses() {
        let mut space = FreeSpace::new(98, 100);
        let mut seen = Vec::new();
        for _ in 0..7 {
            space.begin();
            while let Some(unit) = space.unit() {
                seen.push(unit);
                space.skip(unit);
            }
            space.freed(200);
        }
        let mut expected = vec![98, 99];
        for unit in 0..100 {
            // A pause after 14 units, and after each 15 from then on.
            expected.extend((unit >= 14 && unit % 15 == 14).then_some(200));
            expected.push(unit);
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn without_an_end_each_free_cluster_is_found() {
        let mut space = FreeSpace::new(0, 0);
        assert_eq!((space.unit(), space.worth(2048), space.worth(64)), (None, 16, 1));
        assert!(space.tighten(50));
        assert!(!space.tighten(50));
        assert_eq!((space.unit(), space.worth(2048)), (Some(0), 1));
        (0..20).for_each(|unit| space.skip(unit));
        assert_eq!(space.unit(), Some(20));
    }

    #[test]
    fn too_many_units_begin_the_pass_again() {
        let mut space = FreeSpace::new(0, 0);
        (0..=FREED_MAX as u64).for_each(|unit| space.freed(2 * unit));
        assert_eq!((space.freed.len(), space.next, space.end), (0, 0, 2 * FREED_MAX as u64 + 1));
    }
}
