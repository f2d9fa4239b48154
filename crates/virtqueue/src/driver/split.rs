//! The driver's end of a split virtqueue (virtio 1.3, section 2.7).

use super::areas::Areas;
use super::chain::{Buffer, Completed, NoRoom, Table, chain_len, writable};
use super::chain_tables::{ChainTables, Record};
use super::free::FreeDescriptors;
use super::hint::Position;
use super::suppress;
use super::used_error::{UsedError, check};
use crate::device::Options;
use crate::device::suppress::{NotificationWords, Word};
use kickless_spec::ring::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, RING_ENTRIES, RING_FLAGS, RING_IDX, UsedElem,
    avail_len, used_len,
};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// The number of used elements after which an event index that asks for no calls must be moved on: half of
/// the index's range.
const EVENT_LAG_MAX: u16 = 1 << 15;

/// A queue's memory and its size.
#[derive(Debug)]
struct Ring {
    areas: Arc<Areas>,
    size: u16,
}

impl Ring {
    #[inline]
    fn entry(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }
}

impl NotificationWords for Ring {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u16 {
        match word {
            Word::AvailFlags => self.areas.driver.load_u16(RING_FLAGS, order),
            Word::AvailIdx => self.areas.driver.load_u16(RING_IDX, order),
            Word::UsedEvent => self.areas.driver.load_u16(avail_len(self.size, false), order),
            Word::UsedFlags => self.areas.device.load_u16(RING_FLAGS, order),
            Word::UsedIdx => self.areas.device.load_u16(RING_IDX, order),
            Word::AvailEvent => self.areas.device.load_u16(used_len(self.size, false), order),
        }
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u16, order: Ordering) {
        match word {
            Word::AvailFlags => self.areas.driver.store_u16(RING_FLAGS, value, order),
            Word::AvailIdx => self.areas.driver.store_u16(RING_IDX, value, order),
            Word::UsedEvent => self.areas.driver.store_u16(avail_len(self.size, false), value, order),
            Word::UsedFlags | Word::UsedIdx | Word::AvailEvent => debug_assert!(false, "the device's own"),
        }
    }

    #[inline(always)]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A split ring's [`super::Submitter`].
#[derive(Debug)]
pub struct Submitter {
    ring: Ring,
    tables: Arc<ChainTables>,
    event_idx: bool,
    /// The free descriptors. A chain's id is the index of its first descriptor.
    free: FreeDescriptors,
    /// Number of chains ever added. The low bits are the avail index.
    added: u32,
    /// The avail index as the device sees it.
    published: u16,
    /// Number of ids ever taken back.
    taken: u32,
}

impl Submitter {
    pub(super) fn new(options: Options, areas: Arc<Areas>, tables: Arc<ChainTables>) -> Self {
        Self {
            ring: Ring { areas, size: options.size() },
            tables,
            event_idx: options.event_idx(),
            free: FreeDescriptors::new(options.size(), options.in_order()),
            added: 0,
            published: 0,
            taken: 0,
        }
    }

    /// Takes descriptors back.
    #[inline]
    fn reclaim(&mut self, give: impl Fn(&mut FreeDescriptors, u16)) {
        for id in self.tables.returned(self.taken) {
            self.taken = self.taken.wrapping_add(1);
            give(&mut self.free, id);
        }
    }

    /// Returns whether there are `count` free descriptors. Takes some back if necessary. The next id does
    /// not change, if there was one.
    #[inline]
    fn has_room(&mut self, count: u16) -> bool {
        if self.free.count() < count {
            self.reclaim(FreeDescriptors::give_behind);
        }
        self.free.count() >= count
    }

    #[inline]
    pub(super) fn room(&mut self) -> usize {
        self.reclaim(FreeDescriptors::give);
        self.free.count().into()
    }

    #[inline]
    pub(super) fn next_id(&mut self) -> Option<u16> {
        if self.free.count() == 0 {
            self.reclaim(FreeDescriptors::give);
        }
        self.free.first()
    }

    #[inline(always)]
    pub(super) fn add(&mut self, buffers: &[Buffer], table: Option<Table<'_>>) -> Result<u16, NoRoom> {
        let len = chain_len(buffers)?;
        match table {
            // A single buffer needs no table.
            Some(table) if len > 1 => self.add_table(buffers, len, table),
            _ => self.add_direct(buffers, len),
        }
    }

    /// Adds a chain of `len` descriptors.
    #[inline(always)]
    fn add_direct(&mut self, buffers: &[Buffer], len: u16) -> Result<u16, NoRoom> {
        if !self.has_room(len) {
            return Err(NoRoom);
        }
        let (desc_area, mut rest) = (&self.ring.areas.desc, buffers.iter());
        let head = self.free.take(len, |here, after| {
            if let Some(buffer) = rest.next() {
                let after = (!rest.as_slice().is_empty()).then_some(after);
                desc_area.write(usize::from(here) * size_of::<Desc>(), &desc(buffer, after));
            }
        });
        self.add_entry(head, Record { descriptors: len, writable: writable(buffers) });
        Ok(head)
    }

    /// Adds a chain of one descriptor, with its buffers in an indirect table.
    // Always inlined, as `super::Submitter::add`.
    #[inline(always)]
    fn add_table(&mut self, buffers: &[Buffer], len: u16, table: Table<'_>) -> Result<u16, NoRoom> {
        if !self.has_room(1) {
            return Err(NoRoom);
        }
        let entries =
            (0..len).zip(buffers).map(|(at, buffer)| desc(buffer, (at + 1 < len).then_some(at + 1)));
        table.area.write_each(table.offset, len.into(), entries);
        let in_ring = Desc {
            addr: table.addr.into(),
            len: (u32::from(len) * size_of::<Desc>() as u32).into(),
            flags: DESC_F_INDIRECT.into(),
            next: 0.into(),
        };
        let desc_area = &self.ring.areas.desc;
        let head =
            self.free.take(1, |here, _| desc_area.write(usize::from(here) * size_of::<Desc>(), &in_ring));
        self.add_entry(head, Record { descriptors: 1, writable: writable(buffers) });
        Ok(head)
    }

    /// Puts a chain into the next entry of the avail ring, which the device does not see yet.
    #[inline(always)]
    fn add_entry(&mut self, head: u16, record: Record) {
        self.tables.add(head, self.added, record);
        let entry = self.ring.entry(self.added as u16);
        self.ring.areas.driver.store_u16(RING_ENTRIES + 2 * entry, head, Ordering::Relaxed);
        self.added = self.added.wrapping_add(1);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let new = self.added as u16;
        let old = std::mem::replace(&mut self.published, new);
        // At most `size` chains are in flight at once, so equal indices mean that there is nothing to show.
        new != old && suppress::publish(&self.ring, self.event_idx, old, new)
    }
}

#[inline]
fn desc(buffer: &Buffer, next: Option<u16>) -> Desc {
    let write = if buffer.writable { DESC_F_WRITE } else { 0 };
    let flags = write | if next.is_some() { DESC_F_NEXT } else { 0 };
    Desc {
        addr: buffer.addr.into(),
        len: buffer.len.into(),
        flags: flags.into(),
        next: next.unwrap_or(0).into(),
    }
}

/// A split ring's [`super::Completer`].
#[derive(Debug)]
pub struct Completer {
    ring: Ring,
    tables: Arc<ChainTables>,
    event_idx: bool,
    in_order: bool,
    /// Number of chains ever popped. The low bits are the used index.
    popped: u32,
    /// The used index when it was last read and checked.
    seen: u16,
    /// With IN_ORDER: the last chain of the current batch, as the device described it.
    batch: Option<Completed>,
    /// `used_event` while it asks for no calls.
    quiet_event: Option<u16>,
    error: Option<UsedError>,
}

impl Completer {
    pub(super) fn new(options: Options, areas: Arc<Areas>, tables: Arc<ChainTables>) -> Self {
        Self {
            ring: Ring { areas, size: options.size() },
            tables,
            event_idx: options.event_idx(),
            in_order: options.in_order(),
            popped: 0,
            seen: 0,
            batch: None,
            quiet_event: None,
            error: None,
        }
    }

    #[inline]
    fn next_used(&self) -> u16 {
        self.popped as u16
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<Completed>, UsedError> {
        if self.next_used() == self.seen && !self.refresh()? {
            return Ok(None);
        }
        let popped = if self.in_order { self.pop_in_order() } else { self.element() };
        match popped {
            Ok(done) => {
                self.tables.take(done.id);
                self.popped = self.popped.wrapping_add(1);
                Ok(Some(done))
            }
            Err(error) => Err(self.latch(error)),
        }
    }

    /// Reads the device's used index. Returns whether there is something to pop.
    fn refresh(&mut self) -> Result<bool, UsedError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (from, size) = (self.next_used(), self.ring.size);
        // Acquire: earlier elements, and the device's writes to buffers, are read after it.
        let to = self.ring.load(Word::UsedIdx, Ordering::Acquire);
        if to.wrapping_sub(from) > size {
            return Err(self.latch(UsedError::Index { from, to, size }));
        }
        self.seen = to;
        if let Some(event) = self.quiet_event
            && to.wrapping_sub(event) >= EVENT_LAG_MAX
        {
            self.disable_calls();
        }
        Ok(to != from)
    }

    #[cold]
    fn latch(&mut self, error: UsedError) -> UsedError {
        self.seen = self.next_used();
        self.error = Some(error);
        error
    }

    /// Reads and checks the element at the used index.
    #[inline]
    fn element(&self) -> Result<Completed, UsedError> {
        let at = RING_ENTRIES + size_of::<UsedElem>() * self.ring.entry(self.next_used());
        let element: UsedElem = self.ring.areas.device.read(at);
        check(&self.tables, element.id.get(), element.len.get())
    }

    /// Does the same as [`super::Completer::later_id`]. With IN_ORDER, the elements of most chains are not
    /// written.
    #[inline]
    pub(super) fn later_id(&self, pops: u16) -> Option<u16> {
        if self.seen.wrapping_sub(self.next_used()) < pops || self.in_order {
            return None;
        }
        let entry = self.ring.entry(self.next_used().wrapping_add(pops.wrapping_sub(1)));
        // The low half of the id. A valid id has no other.
        let at = RING_ENTRIES + size_of::<UsedElem>() * entry;
        Some(self.ring.areas.device.load_u16(at, Ordering::Relaxed))
    }

    /// Pops the next chain of a batch. One element stands for all chains up to its own, and the elements of
    /// the others are skipped.
    fn pop_in_order(&mut self) -> Result<Completed, UsedError> {
        let last = match self.batch {
            Some(last) => last,
            None => *self.batch.insert(self.element()?),
        };
        let next = self.tables.ordered(self.popped);
        if next == last.id {
            self.batch = None;
            return Ok(last);
        }
        let (id, record) = self.tables.in_flight(next.into()).ok_or(UsedError::Id { id: next.into() })?;
        // The batch must end before the used index.
        if self.next_used().wrapping_add(1) == self.seen {
            return Err(UsedError::Id { id: last.id.into() });
        }
        Ok(Completed { id, len: record.writable })
    }

    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.error.is_some() || self.ring.load(Word::UsedIdx, Ordering::Relaxed) != self.next_used()
    }

    pub(super) fn areas(&self) -> &Arc<Areas> {
        &self.ring.areas
    }

    #[inline]
    pub(super) fn position(&self) -> Position {
        if self.error.is_some() { Position::DUE } else { Position::at(self.next_used()) }
    }

    #[inline]
    pub(super) fn give_back(&mut self, id: u16) {
        self.tables.give_back(id);
        // The next chain that is added begins with this descriptor, unless another one comes back before.
        self.ring.areas.desc.prefetch_for_write(usize::from(id) * size_of::<Desc>());
    }

    #[inline]
    pub(super) fn enable_calls(&mut self) -> bool {
        self.quiet_event = None;
        suppress::arm(&self.ring, self.event_idx, self.next_used()) || self.error.is_some()
    }

    #[inline]
    pub(super) fn disable_calls(&mut self) {
        // A device has passed this index even if it is a whole queue behind its last publication and has not
        // looked yet.
        let passed = self.seen.wrapping_sub(self.ring.size.min(EVENT_LAG_MAX / 2)).wrapping_sub(1);
        self.quiet_event = self.event_idx.then_some(passed);
        suppress::disable_calls(&self.ring, self.event_idx, passed);
    }
}
