//! The translations of a virtqueue behind a vIOMMU: those that it waits for, and those that its requests in
//! flight use.

use crate::{IotlbMisses, IovaAddresses};
use kickless_memory::{Access, IovaRange, Map, Table, Tlb, TranslateError, UserAddr};
use kickless_virtqueue::device::{LoggedAt, Options};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// The parts that a queue needs behind a vIOMMU.
#[derive(Clone, Debug)]
pub struct Iommu {
    /// The translations that the front-end has sent.
    pub table: Arc<Table>,
    /// The list of translations to ask for.
    pub misses: Arc<IotlbMisses>,
}

/// The sender of an invalidation. Each user of the range holds a clone, and the invalidation is complete when
/// all are dropped.
pub(crate) type Done = Sender<Infallible>;

/// The state of a vring behind a vIOMMU.
#[derive(Debug)]
pub(crate) struct Translation {
    pub(crate) tlb: Tlb,
    misses: Arc<IotlbMisses>,
    queue: u16,
    /// A translation was asked for since the last chain was popped.
    asked: bool,
    /// Lookups of translations that [`Translation::take_cost`] has not returned yet.
    lookups: u32,
    /// The queue waits for answers, and pops no chain before the next update.
    pub(crate) is_waiting: bool,
    /// The ranges that the ring's areas use, while they are mapped.
    ring: Vec<IovaRange>,
    in_use: InFlightRanges,
    /// Invalidations that wait for requests in flight.
    invalidations: Vec<Invalidation>,
}

/// The places of a ring's areas: pieces of the front-end's memory.
pub(crate) struct Located {
    pub(crate) areas: [Vec<(UserAddr, usize)>; 3],
    pub(crate) log: Option<LoggedAt>,
}

/// The largest number of ranges that are kept for the chains with one head. A disk's largest request has as
/// many: 126 segments, a header and a status. More ranges are replaced by a single one that contains all of
/// them. An invalidation may then wait for a request that does not use its range. With 2^16 requests in
/// flight, the ranges take 128 MiB.
const RANGES_MAX: usize = 128;
/// The number of lookups that cost as much as a request does: see
/// [`QueueTask::poll`](crate::QueueTask::poll). One takes about 25 nanoseconds.
const LOOKUPS_PER_COST: u32 = 16;

/// The ranges that requests in flight use, by head.
#[derive(Debug)]
struct InFlightRanges {
    /// The index in `requests`, plus one, by head. Zeroes that are never written take no memory.
    indices: Box<[u16]>,
    requests: Vec<RequestRanges>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct RequestRanges {
    ranges: Vec<IovaRange>,
    /// The number of chains with this head in flight. A driver can make a head available twice.
    chains: u32,
}

#[derive(Debug)]
struct Invalidation {
    /// Indices of the requests that were in flight when the invalidation came. Later requests use newer
    /// translations.
    indices: Vec<u16>,
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
            is_waiting: false,
            ring: Vec::new(),
            in_use: InFlightRanges {
                indices: vec![0; 1 << 16].into(),
                requests: Vec::new(),
                free: Vec::new(),
            },
            invalidations: Vec::new(),
        }
    }

    /// Finds the areas of a ring of this shape in the front-end's memory.
    pub(crate) fn locate(
        &mut self,
        addresses: &IovaAddresses,
        options: &Options,
        map: &Map,
    ) -> Result<Located, TranslateError> {
        self.tlb.begin();
        let lens = options.area_lens();
        // Before the lookups, so that a translation that comes right after them wakes the queue.
        let log = addresses.log.map(|log| (log, lens[2]));
        let areas = [(addresses.desc, lens[0]), (addresses.avail, lens[1]), (addresses.used, lens[2])];
        let watched = areas.into_iter().chain(log).map(|(iova, len)| IovaRange::new(iova, len as u64));
        self.misses.watch(self.queue, watched.collect());
        self.asked = true;
        let desc_access = if options.is_packed() { Access::BOTH } else { Access::READ };
        // All areas are looked up, so that all missing translations are asked for at once.
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
            // Front-ends give the address of the used ring itself, so these are its pieces.
            _ => LoggedAt::InPlace,
        };
        let log = log?.map(logged_at);
        self.ring.clear();
        self.ring.extend_from_slice(self.tlb.ranges());
        Ok(Located { areas, log })
    }

    /// Returns the cost of the lookups since the last call. The remainder counts the next time.
    #[inline]
    pub(crate) fn take_cost(&mut self) -> u32 {
        self.lookups = self.lookups.saturating_add(self.tlb.take_lookups());
        let cost = self.lookups / LOOKUPS_PER_COST;
        self.lookups %= LOOKUPS_PER_COST;
        cost
    }

    /// Asks for the missing translations, and waits.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
        self.is_waiting = true;
        self.misses.ask(self.queue, self.tlb.missing(), self.tlb.ranges());
    }

    /// Waits after a refusal. A translation that comes later ends the wait.
    pub(crate) fn wait_for_update(&mut self) {
        self.asked = true;
        self.is_waiting = true;
        // The queue has watched the range since before the lookup.
        self.tlb.clear_refusals();
    }

    /// Ends the waits of the queue, because it has all its translations.
    pub(crate) fn resolved(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.misses.resolved(self.queue);
        }
        self.tlb.clear_refusals();
    }

    /// Returns whether an invalidation waits for a chain with this head.
    ///
    /// Two chains with one head cannot be told apart when they are returned. So the invalidation would also
    /// have to wait for the second chain. A driver that repeats this could delay the invalidation for ever.
    #[inline]
    pub(crate) fn blocks_invalidation(&self, head: u16) -> bool {
        !self.invalidations.is_empty()
            && self.in_use.index_of(head).is_some_and(|index| {
                self.invalidations.iter().any(|invalidation| invalidation.indices.contains(&index))
            })
    }

    /// Notes that a chain was popped. Its ranges are in use until it is returned.
    #[inline]
    pub(crate) fn chain_popped(&mut self, head: u16) {
        self.resolved();
        self.in_use.take(head, self.tlb.ranges());
    }

    /// Notes that a chain was returned.
    #[inline]
    pub(crate) fn chain_returned(&mut self, head: u16) {
        let Some(index) = self.in_use.release(head) else { return };
        if !self.invalidations.is_empty() {
            self.invalidations.retain_mut(|invalidation| {
                invalidation.indices.retain(|held| *held != index);
                !invalidation.indices.is_empty()
            });
        }
    }

    /// Returns whether the ring's areas use the range.
    pub(crate) fn ring_overlaps(&self, range: IovaRange) -> bool {
        self.ring.iter().any(|ring| ring.overlaps(range))
    }

    /// Drops the translations of a range. Keeps `done` until no request in flight uses the range.
    pub(crate) fn invalidate(&mut self, range: IovaRange, done: Done) {
        self.tlb.drop_range(range);
        let indices = self.in_use.users_of(range);
        if !indices.is_empty() {
            self.invalidations.push(Invalidation { indices, _done: done });
        }
    }
}

impl InFlightRanges {
    #[inline]
    fn take(&mut self, head: u16, ranges: &[IovaRange]) {
        let index = &mut self.indices[usize::from(head)];
        if *index == 0 {
            let free = self.free.pop().unwrap_or_else(|| {
                self.requests.push(RequestRanges::default());
                // At most as many as the ring has entries.
                (self.requests.len() - 1) as u16
            });
            *index = free + 1;
        }
        let Some(used) = self.requests.get_mut(usize::from(*index - 1)) else { return };
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

    /// Returns the index of the chains with this head, if any is in flight.
    #[inline]
    fn index_of(&self, head: u16) -> Option<u16> {
        self.indices[usize::from(head)].checked_sub(1)
    }

    /// Releases a chain. Returns its head's index if no other chain with this head is in flight.
    #[inline]
    fn release(&mut self, head: u16) -> Option<u16> {
        let index = &mut self.indices[usize::from(head)];
        let at = index.checked_sub(1)?;
        let used = self.requests.get_mut(usize::from(at))?;
        used.chains -= 1;
        if used.chains > 0 {
            return None;
        }
        *index = 0;
        self.free.push(at);
        Some(at)
    }

    /// Returns the indices of requests that use a part of the range.
    fn users_of(&self, range: IovaRange) -> Vec<u16> {
        let uses =
            |used: &RequestRanges| used.chains > 0 && used.ranges.iter().any(|used| used.overlaps(range));
        (0..).zip(&self.requests).filter(|(_, used)| uses(used)).map(|(index, _)| index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_memory::Iova;

    #[test]
    fn a_head_that_is_available_again_and_again_takes_no_more_memory() {
        let mut in_use =
            InFlightRanges { indices: vec![0; 1 << 16].into(), requests: Vec::new(), free: Vec::new() };
        let range = |page: u64| IovaRange::new(Iova(page << 12), 1);
        for page in 0..20_000 {
            in_use.take(7, &[range(2 * page)]);
        }
        assert!(in_use.requests[0].ranges.len() <= RANGES_MAX);
        assert_eq!(in_use.users_of(range(0)), [0]);
        assert_eq!(in_use.users_of(range(39_998)), [0]);
        for _ in 1..20_000 {
            assert_eq!(in_use.release(7), None);
        }
        assert_eq!(in_use.release(7), Some(0));
    }
}
