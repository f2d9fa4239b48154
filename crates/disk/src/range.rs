//! The ranges of a disk that are being written.
//!
//! They are only needed for targets whose blocks are larger than a sector. A write of a part of a block reads
//! it, changes it and writes it back, which would undo another write in between. Such a write holds its block
//! *exclusively*. Writes of whole blocks *share* their ranges with one another. A later request waits for all
//! conflicting ones before it, so no request starves.

use crate::Step;
use kickless_io::Waker;
use kickless_sync::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The ranges of one disk. Its lock is held only briefly, and no other lock is taken under it.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    table: Mutex<Table>,
}

/// The requests for ranges.
///
/// A conflict is between two exclusive ranges, or one of each kind. With two lists, the writes of whole
/// blocks, which may be many, are not compared with one another. There are few exclusive ones, because each
/// has a bounce buffer.
#[derive(Debug, Default)]
struct Table {
    shared: Vec<Option<Entry>>,
    shared_free: Vec<usize>,
    exclusive: Vec<Option<Entry>>,
    exclusive_free: Vec<usize>,
    /// The number of the next entry. An earlier entry has a smaller number.
    next: u64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    range: Range<u64>,
    /// The number of earlier entries in conflict with it. It holds its range when there are none.
    blockers: usize,
    waker: Waker,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Table {
    fn list(&mut self, exclusive: bool) -> (&mut Vec<Option<Entry>>, &mut Vec<usize>) {
        if exclusive {
            (&mut self.exclusive, &mut self.exclusive_free)
        } else {
            (&mut self.shared, &mut self.shared_free)
        }
    }

    /// Returns the entries that can be in conflict with one of this kind.
    fn rivals(&mut self, exclusive: bool) -> impl Iterator<Item = &mut Entry> {
        let shared = if exclusive { self.shared.as_mut_slice() } else { &mut [] };
        self.exclusive.iter_mut().chain(shared).flatten()
    }
}

impl Ranges {
    /// Requests a range. [`RangeClaim::is_held`] returns whether it is held; `waker` is signalled when that
    /// changes.
    pub(crate) fn claim(self: &Arc<Self>, range: Range<u64>, exclusive: bool, waker: &Waker) -> RangeClaim {
        let mut table = lock(&self.table);
        let blockers = table.rivals(exclusive).filter(|rival| overlap(&rival.range, &range)).count();
        let number = table.next;
        table.next += 1;
        let entry = Some(Entry { number, range, blockers, waker: waker.clone() });
        let (entries, free) = table.list(exclusive);
        let index = match free.pop() {
            Some(index) => {
                entries[index] = entry;
                index
            }
            None => {
                entries.push(entry);
                entries.len() - 1
            }
        };
        RangeClaim { ranges: self.clone(), index, exclusive }
    }

    /// Takes a range for the request that keeps `claim`.
    ///
    /// # Errors
    /// [`Step::Busy`]: the request waits for the range.
    pub(crate) fn hold(
        self: &Arc<Self>,
        claim: &mut Option<RangeClaim>,
        range: Range<u64>,
        exclusive: bool,
        waker: &Waker,
    ) -> Result<(), Step> {
        let claim = claim.get_or_insert_with(|| self.claim(range, exclusive, waker));
        if claim.is_held() { Ok(()) } else { Err(Step::Busy) }
    }
}

/// A range that is held or waited for. Dropping it releases the range.
#[derive(Debug)]
pub(crate) struct RangeClaim {
    ranges: Arc<Ranges>,
    index: usize,
    exclusive: bool,
}

impl RangeClaim {
    /// Returns whether the range is held.
    pub(crate) fn is_held(&self) -> bool {
        let mut table = lock(&self.ranges.table);
        let (entries, _) = table.list(self.exclusive);
        entries[self.index].as_ref().is_some_and(|entry| entry.blockers == 0)
    }
}

impl Drop for RangeClaim {
    fn drop(&mut self) {
        let mut table = lock(&self.ranges.table);
        let (entries, free) = table.list(self.exclusive);
        free.push(self.index);
        let Some(Entry { number, range, .. }) = entries[self.index].take() else { return };
        for rival in table.rivals(self.exclusive) {
            if rival.number > number && overlap(&rival.range, &range) {
                rival.blockers -= 1;
                if rival.blockers == 0 {
                    rival.waker.wake();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_share_and_parts_exclude() {
        let (ranges, waker) = (Arc::new(Ranges::default()), Waker::new().unwrap());
        let a = ranges.claim(0..8, false, &waker);
        let b = ranges.claim(4..12, false, &waker);
        assert!(a.is_held() && b.is_held());
        let part = ranges.claim(4..8, true, &waker);
        let other_block = ranges.claim(12..16, true, &waker);
        assert!(!part.is_held() && other_block.is_held());
        drop(a);
        assert!(!part.is_held() && !waker.clear());
        drop(b);
        assert!(part.is_held() && waker.clear());
    }

    #[test]
    fn later_requests_wait_for_earlier_waiting_ones() {
        let (ranges, waker) = (Arc::new(Ranges::default()), Waker::new().unwrap());
        let a = ranges.claim(0..8, false, &waker);
        let b = ranges.claim(0..8, true, &waker);
        let c = ranges.claim(0..8, false, &waker);
        let d = ranges.claim(0..8, false, &waker);
        assert!(!b.is_held() && !c.is_held());
        drop(a);
        assert!(b.is_held() && !c.is_held());
        drop(b);
        assert!(c.is_held() && d.is_held());
    }

    #[test]
    fn dropping_a_claim_lets_the_next_one_in() {
        let (ranges, waker) = (Arc::new(Ranges::default()), Waker::new().unwrap());
        let a = ranges.claim(0..8, true, &waker);
        let b = ranges.claim(4..8, true, &waker);
        let c = ranges.claim(4..12, false, &waker);
        drop(b);
        assert!(!c.is_held());
        drop(a);
        assert!(c.is_held() && waker.clear());
    }

    /// Compares with a simple definition that checks everything.
    #[test]
    fn held_means_no_earlier_conflict() {
        let (ranges, waker) = (Arc::new(Ranges::default()), Waker::new().unwrap());
        let mut live: Vec<(RangeClaim, Range<u64>, bool)> = Vec::new();
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..3000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = random >> 33;
            if !live.is_empty() && (bits & 1 == 0 || live.len() > 20) {
                live.remove((bits >> 1) as usize % live.len());
            } else {
                let (start, exclusive) = (bits >> 4 & 31, bits & 2 == 0);
                let range = start..start + 1 + (bits >> 10 & 7);
                live.push((ranges.claim(range.clone(), exclusive, &waker), range, exclusive));
            }
            for (i, (claim, range, exclusive)) in live.iter().enumerate() {
                let free = live[..i].iter().all(|(_, r, e)| !overlap(r, range) || !(*e || *exclusive));
                assert_eq!(claim.is_held(), free);
            }
        }
    }
}
