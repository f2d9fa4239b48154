//! The reverse map of one slot: a list of entries for each piece that a leaf can map, at each leaf size.
//!
//! The lists of 1 GiB exist from the beginning. Lists of smaller pieces are made with the first leaf of that
//! size, and stay until the slot is removed. A leaf that is split stays in its list, and a walker follows it
//! down. So a guest that is mapped by large leaves has lists for these only, however many of its pages are
//! written.
#![expect(unsafe_code, reason = "island: lists are allocated on demand, behind pointers")]

use crate::level::{FANOUT, LEAF_MAX, index, shift};
use crate::rmap::List;
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicPtr, Ordering};

/// A list, and the lists of the smaller pieces.
struct Piece<T> {
    list: List,
    below: AtomicPtr<T>,
}

impl<T> Piece<T> {
    fn new() -> Self {
        Self { list: List::new(), below: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn below(&self) -> Option<&T> {
        // SAFETY: null, or from `Box::into_raw` and freed with `self` only. It is shared from then on.
        unsafe { self.below.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the lists below, which `make` makes if needed. Only one thread may call this at a time.
    fn below_or_make(&self, make: impl FnOnce() -> T) -> &T {
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
            // SAFETY: from `Box::into_raw`, and there is no reference to `self` any more.
            drop(unsafe { Box::from_raw(below) });
        }
    }
}

type Small = [List; FANOUT];
type Middle = [Piece<Small>; FANOUT];

/// All lists of a slot.
pub(crate) struct SlotRmap {
    /// The number of the piece of the largest size in which the slot begins.
    first: u64,
    large: Box<[Piece<Middle>]>,
}

impl SlotRmap {
    /// Makes empty lists for `len` bytes at `gpa`; at least one byte.
    pub(crate) fn new(gpa: Gpa, len: u64) -> Self {
        let first = gpa.0 >> shift(LEAF_MAX);
        let last = (gpa.0 + (len - 1)) >> shift(LEAF_MAX);
        Self { first, large: (first..=last).map(|_| Piece::new()).collect() }
    }

    fn large(&self, gpa: Gpa) -> Option<&Piece<Middle>> {
        self.large.get((gpa.0 >> shift(LEAF_MAX)).checked_sub(self.first)? as usize)
    }

    /// Returns the list of the leaves of `level` that map `gpa`, or `None` if no such list was made.
    #[inline]
    pub(crate) fn find(&self, gpa: Gpa, level: u32) -> Option<&List> {
        let large = self.large(gpa)?;
        if level == LEAF_MAX {
            return Some(&large.list);
        }
        let middle = &large.below()?[index(gpa.0, 2)];
        if level == 2 { Some(&middle.list) } else { Some(&middle.below()?[index(gpa.0, 1)]) }
    }

    /// Returns the same list, which is made if needed, or `None` outside the slot. Only one thread may call
    /// this at a time.
    pub(crate) fn make(&self, gpa: Gpa, level: u32) -> Option<&List> {
        let large = self.large(gpa)?;
        if level == LEAF_MAX {
            return Some(&large.list);
        }
        let middle = &large.below_or_make(|| std::array::from_fn(|_| Piece::new()))[index(gpa.0, 2)];
        if level == 2 {
            return Some(&middle.list);
        }
        Some(&middle.below_or_make(|| std::array::from_fn(|_| List::new()))[index(gpa.0, 1)])
    }

    /// Calls `visit` with each list and the level of its leaves.
    pub(crate) fn each(&self, mut visit: impl FnMut(u32, &List)) {
        for large in &self.large {
            visit(LEAF_MAX, &large.list);
            for middle in large.below().into_iter().flatten() {
                visit(2, &middle.list);
                for small in middle.below().into_iter().flatten() {
                    visit(1, small);
                }
            }
        }
    }

    /// Returns the number of bytes of all lists.
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
        let rmap = SlotRmap::new(Gpa(3 << 29), 1 << 30);
        assert_eq!(rmap.large.len(), 2);
        let before = rmap.bytes();
        assert!(rmap.find(Gpa(3 << 29), 2).is_none());
        assert!(rmap.find(Gpa(1 << 40), 3).is_none());
        let mut blocks = Blocks::default();
        for (level, what) in [(3, 4), (2, 8), (1, 12)] {
            let list = rmap.make(Gpa(1 << 31), level).unwrap();
            // SAFETY: one set of blocks, and the lists stay where they are.
            unsafe { list.add(&mut blocks, what) };
            assert!(std::ptr::eq(rmap.find(Gpa(1 << 31), level).unwrap(), list));
        }
        assert_eq!(rmap.bytes() - before, size_of::<Middle>() + size_of::<Small>());
        let mut found = Vec::new();
        // SAFETY: the blocks are alive.
        rmap.each(|level, list| unsafe { list.walk(|what| found.push((level, what))) });
        assert_eq!(found, [(3, 4), (2, 8), (1, 12)]);
    }
}
