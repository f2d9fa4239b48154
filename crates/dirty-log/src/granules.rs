//! The reverse map of one slot: a list for each piece of it that a leaf can map, at each size.
//!
//! The lists of 1 GiB are there from the beginning; those of smaller pieces come with the first leaf of that size that is mapped
//! there, and stay until the slot goes. An entry that was mapped as a leaf and is split later stays in the list it is in: a walker
//! goes down from it. So a guest that is mapped by large leaves has lists for these only, however many pages of it are
//! written.
#![expect(unsafe_code, reason = "island: lists are made on demand, behind pointers")]

use crate::level::{FANOUT, LEAF_MAX, index, shift};
use crate::rmap::Head;
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicPtr, Ordering};

/// A list, and those of the smaller pieces.
struct Piece<T> {
    head: Head,
    below: AtomicPtr<T>,
}

impl<T> Piece<T> {
    fn new() -> Self {
        Self { head: Head::new(), below: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn below(&self) -> Option<&T> {
        // SAFETY: null, or from `Box::into_raw` and freed with `self` only; shared from then on.
        unsafe { self.below.load(Ordering::Acquire).as_ref() }
    }

    /// Only one thread does this at a time.
    fn below_or(&self, make: impl FnOnce() -> T) -> &T {
        if self.below().is_none() {
            self.below.store(Box::into_raw(Box::new(make())), Ordering::Release);
        }
        // SAFETY: as in `below`, and not null.
        unsafe { &*self.below.load(Ordering::Relaxed) }
    }
}

impl<T> Drop for Piece<T> {
    fn drop(&mut self) {
        let below = self.below.load(Ordering::Relaxed);
        if !below.is_null() {
            // SAFETY: from `Box::into_raw`, and nobody has a reference to `self` any more.
            drop(unsafe { Box::from_raw(below) });
        }
    }
}

type Small = [Head; FANOUT];
type Middle = [Piece<Small>; FANOUT];

/// All lists of a slot.
pub(crate) struct Granules {
    /// Which piece of the largest size the slot begins in.
    first: u64,
    large: Box<[Piece<Middle>]>,
}

impl Granules {
    /// For `len` bytes at `gpa`; at least one.
    pub(crate) fn new(gpa: Gpa, len: u64) -> Self {
        let first = gpa.0 >> shift(LEAF_MAX);
        let last = (gpa.0 + (len - 1)) >> shift(LEAF_MAX);
        Self { first, large: (first..=last).map(|_| Piece::new()).collect() }
    }

    fn large(&self, gpa: Gpa) -> Option<&Piece<Middle>> {
        self.large.get((gpa.0 >> shift(LEAF_MAX)).checked_sub(self.first)? as usize)
    }

    /// The list of the leaves of `level` that map `gpa`; `None` where there never was one.
    #[inline]
    pub(crate) fn find(&self, gpa: Gpa, level: u32) -> Option<&Head> {
        let large = self.large(gpa)?;
        if level == LEAF_MAX {
            return Some(&large.head);
        }
        let middle = &large.below()?[index(gpa.0, 2)];
        if level == 2 { Some(&middle.head) } else { Some(&middle.below()?[index(gpa.0, 1)]) }
    }

    /// The same list, made if need be; `None` outside the slot. Only one thread does this at a time.
    pub(crate) fn make(&self, gpa: Gpa, level: u32) -> Option<&Head> {
        let large = self.large(gpa)?;
        if level == LEAF_MAX {
            return Some(&large.head);
        }
        let middle = &large.below_or(|| std::array::from_fn(|_| Piece::new()))[index(gpa.0, 2)];
        if level == 2 {
            return Some(&middle.head);
        }
        Some(&middle.below_or(|| std::array::from_fn(|_| Head::new()))[index(gpa.0, 1)])
    }

    /// Each list that there is, with the level of its leaves.
    pub(crate) fn each(&self, mut visit: impl FnMut(u32, &Head)) {
        for large in &self.large {
            visit(LEAF_MAX, &large.head);
            for middle in large.below().into_iter().flatten() {
                visit(2, &middle.head);
                for small in middle.below().into_iter().flatten() {
                    visit(1, small);
                }
            }
        }
    }

    /// Bytes of all lists.
    pub(crate) fn bytes(&self) -> usize {
        let of = |large: &Piece<Middle>| {
            let Some(middle) = large.below() else { return 0 };
            size_of::<Middle>() + middle.iter().filter(|m| m.below().is_some()).count() * size_of::<Small>()
        };
        size_of_val(&*self.large) + self.large.iter().map(of).sum::<usize>()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::rmap::Blocks;

    #[test]
    fn lists_are_made_where_they_are_wanted() {
        let granules = Granules::new(Gpa(3 << 29), 1 << 30);
        assert_eq!(granules.large.len(), 2);
        let before = granules.bytes();
        assert!(granules.find(Gpa(3 << 29), 2).is_none());
        assert!(granules.find(Gpa(1 << 40), 3).is_none());
        let mut blocks = Blocks::default();
        for (level, what) in [(3, 4), (2, 8), (1, 12)] {
            let head = granules.make(Gpa(1 << 31), level).unwrap();
            // SAFETY: one set of blocks, and the lists stay where they are.
            unsafe { head.add(&mut blocks, what) };
            assert!(std::ptr::eq(granules.find(Gpa(1 << 31), level).unwrap(), head));
        }
        assert_eq!(granules.bytes() - before, size_of::<Middle>() + size_of::<Small>());
        let mut found = Vec::new();
        // SAFETY: the blocks are alive.
        granules.each(|level, head| unsafe { head.walk(|what| found.push((level, what))) });
        assert_eq!(found, [(3, 4), (2, 8), (1, 12)]);
    }
}
