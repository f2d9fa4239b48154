//! A virtqueue behind a vIOMMU: its translations, what it waits for, and what its requests in flight use.

use crate::{IovaAddresses, Misses};
use kickless_memory::{Access, IovaRange, Map, Table, Tlb, TranslateError, UserAddr};
use kickless_virtqueue::device::{LoggedAt, Options};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// What a queue needs behind a vIOMMU.
#[derive(Clone, Debug)]
pub struct Iommu {
    /// What the front-end has told.
    pub table: Arc<Table>,
    /// Where to ask for more.
    pub misses: Arc<Misses>,
}

/// An invalidation: whoever still uses the range keeps a sender, and it is over when there is none.
pub(crate) type Done = Sender<Infallible>;

/// What a vring has behind a vIOMMU.
#[derive(Debug)]
pub(crate) struct Translation {
    pub(crate) tlb: Tlb,
    misses: Arc<Misses>,
    queue: u16,
    /// Something was asked for since the last chain was taken.
    asked: bool,
    /// Translations that were looked for and are not accounted for yet.
    lookups: u32,
    /// It waits for answers, and does not look before it hears of them.
    pub(crate) standing: bool,
    /// What the ring's areas use, while they are mapped.
    ring: Vec<IovaRange>,
    in_use: InUse,
    /// Invalidations that requests in flight hold up.
    held_up: Vec<HeldUp>,
}

/// Where a ring's areas are: pieces of the front-end's memory.
pub(crate) struct Located {
    pub(crate) areas: [Vec<(UserAddr, usize)>; 3],
    pub(crate) log: Option<LoggedAt>,
}

/// Ranges that are told apart for the chains with one head: as many as a disk's largest request has, with 126 segments, a header and a
/// status. Of more, only what they span is known, so that an invalidation may wait for a request that does not use
/// its range. With 2^16 requests in flight, they take 128 MiB.
const RANGES_MAX: usize = 128;
/// So many translations cost as much as a request does: see [`QueueTask::poll`](crate::QueueTask::poll). One takes some 25 nanoseconds.
const LOOKUPS_PER_COST: u32 = 16;

/// What requests in flight use, by head.
#[derive(Debug)]
struct InUse {
    /// The place in `requests`, plus one. Zeroes that are not used take no memory.
    places: Box<[u16]>,
    requests: Vec<Use>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct Use {
    ranges: Vec<IovaRange>,
    /// Chains with this head that are in flight. A driver can make one available twice.
    chains: u32,
}

#[derive(Debug)]
struct HeldUp {
    /// The places of those that were in flight when it came. Requests that come later use what is told later.
    places: Vec<u16>,
    _done: Done,
}

impl Translation {
    pub(crate) fn new(Iommu { table, misses }: Iommu, queue: u16) -> Self {
        Self {
            tlb: Tlb::new(table),
            misses,
            queue,
            asked: false,
            lookups: 0,
            standing: false,
            ring: Vec::new(),
            in_use: InUse { places: vec![0; 1 << 16].into(), requests: Vec::new(), free: Vec::new() },
            held_up: Vec::new(),
        }
    }

    /// Where the areas of a ring of this shape are in the front-end's memory.
    pub(crate) fn locate(
        &mut self,
        addresses: &IovaAddresses,
        options: &Options,
        map: &Map,
    ) -> Result<Located, TranslateError> {
        self.tlb.begin();
        let lens = options.area_lens();
        // Before it looks, so that what comes right after that wakes it.
        let log = addresses.log.map(|log| (log, lens[2]));
        let areas = [(addresses.desc, lens[0]), (addresses.avail, lens[1]), (addresses.used, lens[2])];
        let watched = areas.into_iter().chain(log).map(|(iova, len)| IovaRange::new(iova, len as u64));
        self.misses.watch(self.queue, watched.collect());
        self.asked = true;
        let desc_access = if options.is_packed() { Access::BOTH } else { Access::READ };
        // All are looked for, so that all that are missing are asked for at once.
        let desc = self.tlb.user(addresses.desc, lens[0], desc_access);
        let avail = self.tlb.user(addresses.avail, lens[1], Access::READ);
        let used = self.tlb.user(addresses.used, lens[2], Access::BOTH);
        let log = addresses.log.map(|log| self.tlb.user(log, lens[2], Access::WRITE)).transpose();
        if self.tlb.is_missing() {
            return Err(TranslateError::Missing);
        }
        let areas = [desc?, avail?, used?];
        let logged_at = |pieces: Vec<(UserAddr, usize)>| match pieces[..] {
            [(user, len)] => map.gpa_of_range(user, len as u64).map_or(LoggedAt::InPlace, LoggedAt::Gpa),
            // Front-ends name the used ring itself, whose pieces these are.
            _ => LoggedAt::InPlace,
        };
        let log = log?.map(logged_at);
        self.ring.clear();
        self.ring.extend_from_slice(self.tlb.ranges());
        Ok(Located { areas, log })
    }

    /// Returns what the translations that were looked for cost. What is left over counts the next time.
    #[inline]
    pub(crate) fn take_cost(&mut self) -> u32 {
        self.lookups = self.lookups.saturating_add(self.tlb.take_lookups());
        let cost = self.lookups / LOOKUPS_PER_COST;
        self.lookups %= LOOKUPS_PER_COST;
        cost
    }

    /// Asks for what was missing, and waits.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
        self.standing = true;
        self.misses.ask(self.queue, self.tlb.missing(), self.tlb.ranges());
    }

    /// What was missing will not come; should it come all the same, it is looked for.
    pub(crate) fn give_up(&mut self) {
        self.asked = true;
        self.standing = true;
        // It watches for it since before it looked.
        self.tlb.clear_refusals();
    }

    /// The ring was found.
    pub(crate) fn found(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.misses.resolved(self.queue);
        }
        self.tlb.clear_refusals();
    }

    /// Whether an invalidation waits for a chain with this head. Another chain with it would have to be waited for too: the two cannot be
    /// told apart when they are given back, so a driver that goes on like that has the invalidation wait for ever.
    #[inline]
    pub(crate) fn is_held_up(&self, head: u16) -> bool {
        !self.held_up.is_empty()
            && self
                .in_use
                .place(head)
                .is_some_and(|place| self.held_up.iter().any(|held_up| held_up.places.contains(&place)))
    }

    /// A chain was taken: what it uses is in use until it is given back.
    #[inline]
    pub(crate) fn took(&mut self, head: u16) {
        self.found();
        self.in_use.take(head, self.tlb.ranges());
    }

    /// A chain was given back.
    #[inline]
    pub(crate) fn gave_back(&mut self, head: u16) {
        let Some(place) = self.in_use.give_back(head) else { return };
        if !self.held_up.is_empty() {
            self.held_up.retain_mut(|held_up| {
                held_up.places.retain(|held| *held != place);
                !held_up.places.is_empty()
            });
        }
    }

    /// Whether the ring's areas are in the range.
    pub(crate) fn is_ring_in(&self, range: IovaRange) -> bool {
        self.ring.iter().any(|ring| ring.overlaps(range))
    }

    /// These translations are not true any more.
    pub(crate) fn invalidate(&mut self, range: IovaRange, done: Done) {
        self.tlb.drop_range(range);
        let places = self.in_use.places_of(range);
        if !places.is_empty() {
            self.held_up.push(HeldUp { places, _done: done });
        }
    }
}

impl InUse {
    #[inline]
    fn take(&mut self, head: u16, ranges: &[IovaRange]) {
        let place = &mut self.places[usize::from(head)];
        if *place == 0 {
            let free = self.free.pop().unwrap_or_else(|| {
                self.requests.push(Use::default());
                // No more than a ring has entries.
                (self.requests.len() - 1) as u16
            });
            *place = free + 1;
        }
        let Some(used) = self.requests.get_mut(usize::from(*place - 1)) else { return };
        if used.chains == 0 {
            used.ranges.clear();
        }
        used.chains += 1;
        if used.ranges.len() + ranges.len() <= RANGES_MAX {
            used.ranges.extend_from_slice(ranges);
        } else if let Some(hull) = used.ranges.iter().chain(ranges).copied().reduce(IovaRange::hull) {
            used.ranges.clear();
            used.ranges.push(hull);
        }
    }

    /// The place of the chains with this head, if any is in flight.
    #[inline]
    fn place(&self, head: u16) -> Option<u16> {
        self.places[usize::from(head)].checked_sub(1)
    }

    /// The place of the chain's head, if it was the last with it.
    #[inline]
    fn give_back(&mut self, head: u16) -> Option<u16> {
        let place = &mut self.places[usize::from(head)];
        let at = place.checked_sub(1)?;
        let used = self.requests.get_mut(usize::from(at))?;
        used.chains -= 1;
        if used.chains > 0 {
            return None;
        }
        *place = 0;
        self.free.push(at);
        Some(at)
    }

    /// Places of requests that use any of these.
    fn places_of(&self, range: IovaRange) -> Vec<u16> {
        let uses = |used: &Use| used.chains > 0 && used.ranges.iter().any(|used| used.overlaps(range));
        (0..).zip(&self.requests).filter(|(_, used)| uses(used)).map(|(place, _)| place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_memory::Iova;

    #[test]
    fn a_head_that_is_available_again_and_again_takes_no_more_memory() {
        let mut in_use = InUse { places: vec![0; 1 << 16].into(), requests: Vec::new(), free: Vec::new() };
        let range = |page: u64| IovaRange::new(Iova(page << 12), 1);
        for page in 0..20_000 {
            in_use.take(7, &[range(2 * page)]);
        }
        assert!(in_use.requests[0].ranges.len() <= RANGES_MAX);
        assert_eq!(in_use.places_of(range(0)), [0]);
        assert_eq!(in_use.places_of(range(39_998)), [0]);
        for _ in 1..20_000 {
            assert_eq!(in_use.give_back(7), None);
        }
        assert_eq!(in_use.give_back(7), Some(0));
    }
}
