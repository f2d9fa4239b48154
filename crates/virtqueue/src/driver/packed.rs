//! The driver's end of a packed virtqueue; what both ends know is in `crate::packed`.

use super::areas::Areas;
use super::chain::{Buffer, Completed, NoRoom, Table, chain_len, writable};
use super::glimpse::Position;
use super::lie::{Lie, check};
use super::shared::{Record, Shared};
use crate::device::Options;
use crate::packed::{self, Place};
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, EVENT_LEN, PackedDesc, desc_len};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

fn checked(options: Options, areas: Arc<Areas>) -> Arc<Areas> {
    let lengths = [desc_len(options.size()), EVENT_LEN, EVENT_LEN];
    for (area, len) in [&areas.desc, &areas.driver, &areas.device].into_iter().zip(lengths) {
        assert!(area.len() >= len, "an area of {} bytes, but {len} are needed", area.len());
    }
    areas
}

/// See [`super::Submitter`].
#[derive(Debug)]
pub struct Submitter {
    areas: Arc<Areas>,
    shared: Arc<Shared>,
    size: u16,
    event_idx: bool,
    /// Ids that no chain has; the last is the next one's.
    free: Vec<u16>,
    /// Of each id, how many descriptors its chain takes.
    lengths: Box<[u16]>,
    /// Places that no chain has.
    places: u16,
    next: Place,
    /// The first descriptor of what is not published yet, and its flags.
    first: Option<(Place, u16)>,
    /// Places made available since the last decision about a kick.
    undecided: u16,
    /// Chains ever added.
    added: u32,
    /// Ids ever taken back.
    taken: u32,
}

impl Submitter {
    pub(super) fn new(options: Options, areas: Arc<Areas>, shared: Arc<Shared>) -> Self {
        let size = options.size();
        Self {
            areas: checked(options, areas),
            shared,
            size,
            event_idx: options.event_idx(),
            free: (0..size).rev().collect(),
            lengths: vec![0; size.into()].into(),
            places: size,
            next: Place::FIRST,
            first: None,
            undecided: 0,
            added: 0,
            taken: 0,
        }
    }

    /// Takes ids and their places back. The next id stays what it was.
    fn reclaim(&mut self) {
        let head = self.free.len().checked_sub(1);
        while let Some(id) = self.shared.returned(self.taken) {
            self.taken = self.taken.wrapping_add(1);
            self.places += self.lengths[usize::from(id)];
            self.free.push(id);
        }
        if let (Some(head), Some(last)) = (head, self.free.len().checked_sub(1)) {
            self.free.swap(head, last);
        }
    }

    #[inline]
    pub(super) fn room(&mut self) -> usize {
        self.reclaim();
        usize::from(self.places).min(self.free.len())
    }

    #[inline]
    pub(super) fn next_id(&mut self) -> Option<u16> {
        if self.free.is_empty() || self.places == 0 {
            self.reclaim();
        }
        self.free.last().copied().filter(|_| self.places > 0)
    }

    #[inline(always)]
    pub(super) fn add(&mut self, buffers: &[Buffer], table: Option<Table<'_>>) -> Result<u16, NoRoom> {
        let len = chain_len(buffers)?;
        // One buffer needs no table.
        let table = table.filter(|_| len > 1);
        let count = if table.is_some() { 1 } else { len };
        if self.places < count || self.free.is_empty() {
            self.reclaim();
            if self.places < count {
                return Err(NoRoom);
            }
        }
        let Some(id) = self.free.pop() else { return Err(NoRoom) };
        match table {
            Some(Table { area, offset, addr }) => {
                // In a table only WRITE counts: its length says where it ends.
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
        self.places -= count;
        self.undecided = self.undecided.saturating_add(count);
        self.lengths[usize::from(id)] = count;
        self.shared.add(id, self.added, Record { descriptors: count, writable: writable(buffers) });
        self.added = self.added.wrapping_add(1);
        Ok(id)
    }

    /// Fills the next place.
    #[inline(always)]
    fn append(&mut self, addr: u64, len: u32, id: u16, flags: u16) {
        let (at, flags) = (self.next, flags | self.next.available());
        let entry = desc(addr, len, id, flags);
        if self.first.is_some() {
            // Invisible yet, for what comes before it is.
            self.areas.desc.write(at.at(), &entry);
        } else {
            // The flags come last, when the batch is published.
            self.areas.desc.write(at.at(), &(addr.to_le()));
            self.areas.desc.write(at.at() + 8, &len.to_le());
            self.areas.desc.write(at.at() + 12, &id.to_le());
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

/// See [`super::Completer`].
#[derive(Debug)]
pub struct Completer {
    areas: Arc<Areas>,
    shared: Arc<Shared>,
    size: u16,
    event_idx: bool,
    in_order: bool,
    next: Place,
    /// Chains ever taken back.
    popped: u32,
    /// With IN_ORDER: the last chain of the batch that is being taken, and what was said of it.
    batch: Option<Completed>,
    lie: Option<Lie>,
}

impl Completer {
    pub(super) fn new(options: Options, areas: Arc<Areas>, shared: Arc<Shared>) -> Self {
        Self {
            areas: checked(options, areas),
            shared,
            size: options.size(),
            event_idx: options.event_idx(),
            in_order: options.in_order(),
            next: Place::FIRST,
            popped: 0,
            batch: None,
            lie: None,
        }
    }

    #[inline]
    fn is_used(&self, order: Ordering) -> bool {
        self.next.is_used(self.areas.desc.load_u16(self.next.flags_at(), order))
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<Completed>, Lie> {
        if let Some(lie) = self.lie {
            return Err(lie);
        }
        let popped = match self.batch {
            Some(last) => self.next_of_batch(last),
            // Acquire: the rest of the descriptor, and what the device wrote into buffers, are read after it.
            None if !self.is_used(Ordering::Acquire) => return Ok(None),
            None => self
                .element()
                .and_then(|last| if self.in_order { self.next_of_batch(last) } else { Ok(last) }),
        };
        match popped.and_then(|done| self.pass(done.id).map(|()| done)) {
            Ok(done) => Ok(Some(done)),
            Err(lie) => {
                self.lie = Some(lie);
                Err(lie)
            }
        }
    }

    /// The used descriptor at the next place, checked.
    #[inline]
    fn element(&self) -> Result<Completed, Lie> {
        let used: PackedDesc = self.areas.desc.read(self.next.at());
        let (id, len) = (used.id.get().into(), used.len.get());
        match check(&self.shared, id, len) {
            // Without WRITE the length means nothing (virtio 1.3, section 2.8.4), although some devices tell it there.
            Err(Lie::Length { id, .. }) if used.flags.get() & DESC_F_WRITE == 0 => {
                Ok(Completed { id, len: 0 })
            }
            checked => checked,
        }
    }

    /// One used descriptor stands for all chains up to its own.
    fn next_of_batch(&mut self, last: Completed) -> Result<Completed, Lie> {
        let next = self.shared.ordered(self.popped);
        if next == last.id {
            self.batch = None;
            return Ok(last);
        }
        self.batch = Some(last);
        let (id, record) = self.shared.in_flight(next.into()).ok_or(Lie::Id { id: last.id.into() })?;
        Ok(Completed { id, len: record.writable })
    }

    /// Goes past the places of a chain.
    #[inline]
    fn pass(&mut self, id: u16) -> Result<(), Lie> {
        let (id, record) = self.shared.in_flight(id.into()).ok_or(Lie::Id { id: id.into() })?;
        self.shared.take(id);
        self.popped = self.popped.wrapping_add(1);
        self.next = self.next.after(record.descriptors, self.size);
        Ok(())
    }

    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.batch.is_some() || self.lie.is_some() || self.is_used(Ordering::Relaxed)
    }

    pub(super) fn areas(&self) -> &Arc<Areas> {
        &self.areas
    }

    /// There is no word that could be looked at from outside.
    #[inline]
    pub(super) fn position(&self) -> Position {
        Position::DUE
    }

    #[inline]
    pub(super) fn give_back(&mut self, id: u16) {
        self.shared.give_back(id);
    }

    #[inline]
    pub(super) fn enable_calls(&mut self) -> bool {
        packed::ask(&self.areas.driver, self.event_idx, self.next);
        // L2, whose partner is the device's fence between the flags of what it used and its look at this structure.
        fence(Ordering::SeqCst);
        self.is_due()
    }

    #[inline]
    pub(super) fn disable_calls(&mut self) {
        packed::quiet(&self.areas.driver);
    }
}
