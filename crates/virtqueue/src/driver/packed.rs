//! The driver's end of a packed virtqueue. `crate::packed` has the rules for both ends.

use super::areas::Areas;
use super::chain::{Buffer, Completed, NoRoom, Table, chain_len, writable};
use super::chain_tables::{ChainTables, Record};
use super::hint::Position;
use super::used_error::{UsedError, check};
use crate::device::Options;
use crate::packed::{self, RingPosition};
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, PACKED_ID, PACKED_LEN, PackedDesc};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A packed ring's [`super::Submitter`].
#[derive(Debug)]
pub struct Submitter {
    areas: Arc<Areas>,
    tables: Arc<ChainTables>,
    size: u16,
    event_idx: bool,
    /// Free ids. The last one is the next chain's.
    free: Vec<u16>,
    /// For each id, the number of its chain's descriptors.
    lengths: Box<[u16]>,
    /// Number of free descriptors.
    descriptors_left: u16,
    next: RingPosition,
    /// The first unpublished descriptor, and its flags.
    first: Option<(RingPosition, u16)>,
    /// Descriptors made available since the last decision about a kick.
    undecided: u16,
    /// Number of chains ever added.
    added: u32,
    /// Number of ids ever taken back.
    taken: u32,
}

impl Submitter {
    pub(super) fn new(options: Options, areas: Arc<Areas>, tables: Arc<ChainTables>) -> Self {
        let size = options.size();
        Self {
            areas,
            tables,
            size,
            event_idx: options.event_idx(),
            free: (0..size).rev().collect(),
            lengths: vec![0; size.into()].into(),
            descriptors_left: size,
            next: RingPosition::FIRST,
            first: None,
            undecided: 0,
            added: 0,
            taken: 0,
        }
    }

    /// Takes ids and their descriptors back. The next id does not change.
    fn reclaim(&mut self) {
        let head = self.free.len().checked_sub(1);
        for id in self.tables.returned(self.taken) {
            self.taken = self.taken.wrapping_add(1);
            self.descriptors_left += self.lengths[usize::from(id)];
            self.free.push(id);
        }
        if let (Some(head), Some(last)) = (head, self.free.len().checked_sub(1)) {
            self.free.swap(head, last);
        }
    }

    #[inline]
    pub(super) fn room(&mut self) -> usize {
        self.reclaim();
        usize::from(self.descriptors_left).min(self.free.len())
    }

    #[inline]
    pub(super) fn next_id(&mut self) -> Option<u16> {
        if self.free.is_empty() || self.descriptors_left == 0 {
            self.reclaim();
        }
        self.free.last().copied().filter(|_| self.descriptors_left > 0)
    }

    #[inline(always)]
    pub(super) fn add(&mut self, buffers: &[Buffer], table: Option<Table<'_>>) -> Result<u16, NoRoom> {
        let len = chain_len(buffers)?;
        // A single buffer needs no table.
        let table = table.filter(|_| len > 1);
        let count = if table.is_some() { 1 } else { len };
        if self.descriptors_left < count || self.free.is_empty() {
            self.reclaim();
            if self.descriptors_left < count {
                return Err(NoRoom);
            }
        }
        let Some(id) = self.free.pop() else { return Err(NoRoom) };
        match table {
            Some(Table { area, offset, addr }) => {
                // In a table only WRITE counts. The table's length says where it ends.
                let entries = buffers.iter().map(|buffer| desc(buffer.addr, buffer.len, 0, write(buffer)));
                area.write_each(offset, len.into(), entries);
                self.append(addr, u32::from(len) * size_of::<PackedDesc>() as u32, id, DESC_F_INDIRECT);
            }
            None => {
                let mut rest = buffers.iter();
                while let Some(buffer) = rest.next() {
                    let next = if rest.as_slice().is_empty() { 0 } else { DESC_F_NEXT };
                    self.append(buffer.addr, buffer.len, id, write(buffer) | next);
                }
            }
        }
        self.descriptors_left -= count;
        self.undecided = self.undecided.saturating_add(count);
        self.lengths[usize::from(id)] = count;
        self.tables.add(id, self.added, Record { descriptors: count, writable: writable(buffers) });
        self.added = self.added.wrapping_add(1);
        Ok(id)
    }

    /// Fills the next descriptor.
    #[inline(always)]
    fn append(&mut self, addr: u64, len: u32, id: u16, flags: u16) {
        let (at, flags) = (self.next, flags | self.next.available());
        let entry = desc(addr, len, id, flags);
        if self.first.is_some() {
            // The device does not see it yet, because it does not see the first descriptor of the batch.
            self.areas.desc.write(at.at(), &entry);
        } else {
            // The flags are written last, when the batch is published.
            self.areas.desc.write(at.at(), &(addr.to_le()));
            self.areas.desc.write(at.at() + PACKED_LEN, &len.to_le());
            self.areas.desc.write(at.at() + PACKED_ID, &id.to_le());
            self.first = Some((at, flags));
        }
        self.next = at.after(1, self.size);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let Some(first) = self.first.take() else { return false };
        let Areas { desc, device, .. } = &*self.areas;
        let count = std::mem::take(&mut self.undecided);
        packed::publish(desc, device, self.event_idx, Some(first), self.next, Some(count), self.size)
    }
}

#[inline]
fn write(buffer: &Buffer) -> u16 {
    if buffer.writable { DESC_F_WRITE } else { 0 }
}

#[inline]
fn desc(addr: u64, len: u32, id: u16, flags: u16) -> PackedDesc {
    PackedDesc { addr: addr.into(), len: len.into(), id: id.into(), flags: flags.into() }
}

/// A packed ring's [`super::Completer`].
#[derive(Debug)]
pub struct Completer {
    areas: Arc<Areas>,
    tables: Arc<ChainTables>,
    size: u16,
    event_idx: bool,
    in_order: bool,
    next: RingPosition,
    /// Number of chains ever popped.
    popped: u32,
    /// With IN_ORDER: the last chain of the current batch, as the device described it.
    batch: Option<Completed>,
    error: Option<UsedError>,
}

impl Completer {
    pub(super) fn new(options: Options, areas: Arc<Areas>, tables: Arc<ChainTables>) -> Self {
        Self {
            areas,
            tables,
            size: options.size(),
            event_idx: options.event_idx(),
            in_order: options.in_order(),
            next: RingPosition::FIRST,
            popped: 0,
            batch: None,
            error: None,
        }
    }

    #[inline]
    fn is_used(&self, order: Ordering) -> bool {
        self.next.is_used(self.areas.desc.load_u16(self.next.flags_at(), order))
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<Completed>, UsedError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let popped = match self.batch {
            Some(last) => self.next_of_batch(last),
            // Acquire: the rest of the descriptor, and the device's writes to buffers, are read after it.
            None if !self.is_used(Ordering::Acquire) => return Ok(None),
            None => self
                .element()
                .and_then(|last| if self.in_order { self.next_of_batch(last) } else { Ok(last) }),
        };
        match popped.and_then(|done| self.pass(done.id).map(|()| done)) {
            Ok(done) => Ok(Some(done)),
            Err(error) => {
                self.error = Some(error);
                Err(error)
            }
        }
    }

    /// Reads and checks the used descriptor at the next position.
    #[inline]
    fn element(&self) -> Result<Completed, UsedError> {
        let used: PackedDesc = self.areas.desc.read(self.next.at());
        let (id, len) = (used.id.get().into(), used.len.get());
        match check(&self.tables, id, len) {
            // Without WRITE the length has no meaning (virtio 1.3, section 2.8.4), although some devices set
            // it.
            Err(UsedError::Length { id, .. }) if used.flags.get() & DESC_F_WRITE == 0 => {
                Ok(Completed { id, len: 0 })
            }
            checked => checked,
        }
    }

    /// Returns the next chain of a batch. One used descriptor stands for all chains up to its own.
    fn next_of_batch(&mut self, last: Completed) -> Result<Completed, UsedError> {
        let next = self.tables.ordered(self.popped);
        if next == last.id {
            self.batch = None;
            return Ok(last);
        }
        self.batch = Some(last);
        let (id, record) = self.tables.in_flight(next.into()).ok_or(UsedError::Id { id: last.id.into() })?;
        Ok(Completed { id, len: record.writable })
    }

    /// Advances past the descriptors of a chain.
    #[inline]
    fn pass(&mut self, id: u16) -> Result<(), UsedError> {
        let (id, record) = self.tables.in_flight(id.into()).ok_or(UsedError::Id { id: id.into() })?;
        self.tables.take(id);
        self.popped = self.popped.wrapping_add(1);
        self.next = self.next.after(record.descriptors, self.size);
        Ok(())
    }

    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.batch.is_some() || self.error.is_some() || self.is_used(Ordering::Relaxed)
    }

    pub(super) fn areas(&self) -> &Arc<Areas> {
        &self.areas
    }

    /// A packed ring has no word for a hint.
    #[inline]
    pub(super) fn position(&self) -> Position {
        Position::DUE
    }

    #[inline]
    pub(super) fn give_back(&mut self, id: u16) {
        self.tables.give_back(id);
    }

    #[inline]
    pub(super) fn enable_calls(&mut self) -> bool {
        packed::enable_notifications(&self.areas.driver, self.event_idx, self.next);
        // L2. Its partner is the device's fence between its store of flags and its load of this structure.
        fence(Ordering::SeqCst);
        self.is_due()
    }

    #[inline]
    pub(super) fn disable_calls(&mut self) {
        packed::disable_notifications(&self.areas.driver);
    }
}
