//! The tables by which the two halves of a driver's queue communicate.
//!
//! There are two tables, without locks, and without allocation after they are made:
//!
//! * `records`: the chain in flight under each id (its descriptors, and how much the device may write); 0 if
//!   there is none. The submitter sets a record when it adds a chain, and the completer clears it when it
//!   pops the chain. An id belongs to one half at a time: to the submitter while it is free, to the completer
//!   from `add` on (by way of the device), and to the submitter again from `give_back` on.
//! * `returned`: ids on their way back, in a ring with one producer (the completer) and one consumer (the
//!   submitter). It cannot overflow, because it has a cell for each id, and no id is in it twice. The
//!   completer pops an id only if it has a record, and clears the record. The submitter sets the next record
//!   only after it has taken the id out of this ring.
//!
//! With VIRTIO_F_IN_ORDER there is a third table, `order`: the ids in the order of their submission, which
//! the completer follows. `tests/driver_loom.rs` runs all of them in every order that the memory model
//! allows.
//!
//! # Memory orders
//! A record is stored with release before the chain is shown to the device. It is loaded with acquire after
//! the device has shown the chain as used. This is correct even for a device that shows a chain as used
//! before it was given that chain. The record is then 0, or that of a chain that was just added. In the
//! second case, the chain counts as completed, and its data is visible.
//!
//! `tail` publishes `returned` with release, and is loaded with acquire. So the completer's accesses to an
//! id's memory are over before the submitter uses the id again.

use kickless_sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A chain in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Descriptors of the chain in the ring; at least 1.
    pub descriptors: u16,
    /// Bytes that the device may write.
    pub writable: u32,
}

impl Record {
    fn pack(self) -> u64 {
        u64::from(self.descriptors) << 32 | u64::from(self.writable)
    }

    fn unpack(word: u64) -> Option<Self> {
        (word != 0).then_some(Self { descriptors: (word >> 32) as u16, writable: word as u32 })
    }
}

/// Puts a value on cache lines of its own. Processors fetch two lines at a time. So the frequent stores of
/// one half do not evict the data that the other half reads all the time.
#[derive(Debug)]
#[repr(align(128))]
struct CacheAligned<T>(T);

/// The tables that the two halves of a driver's queue share.
#[derive(Debug)]
pub struct ChainTables {
    records: Box<[AtomicU64]>,
    /// Empty without IN_ORDER.
    order: Box<[AtomicU16]>,
    returned: Box<[AtomicU16]>,
    /// Number of ids ever given back.
    tail: CacheAligned<AtomicU32>,
}

impl ChainTables {
    /// Makes the tables for a queue of this size, with nothing in flight.
    pub fn new(size: u16, in_order: bool) -> Self {
        // Sizes are powers of two, so that indices can wrap.
        let ids = |len: u16| (0..len).map(|_| AtomicU16::new(0)).collect();
        let cells = size.next_power_of_two();
        Self {
            records: (0..size).map(|_| AtomicU64::new(0)).collect(),
            order: ids(if in_order { cells } else { 0 }),
            returned: ids(cells),
            tail: CacheAligned(AtomicU32::new(0)),
        }
    }

    fn cell(&self, count: u32) -> usize {
        count as usize & (self.returned.len() - 1)
    }

    /// Puts `id` in flight, as chain number `number` of all chains ever added. For the submitter.
    pub fn add(&self, id: u16, number: u32, record: Record) {
        if let Some(cell) = self.order.get(self.cell(number)) {
            cell.store(id, Ordering::Relaxed);
        }
        // Release: the partner is the acquire in `in_flight`. The cell in `order` and the id's data are
        // stored before.
        self.records[usize::from(id)].store(record.pack(), Ordering::Release);
    }

    /// Returns the ids that were given back after `taken` others. For the submitter.
    pub fn returned(&self, taken: u32) -> impl Iterator<Item = u16> {
        // Acquire: the partner is the release in `give_back`.
        let count = self.tail.0.load(Ordering::Acquire).wrapping_sub(taken);
        (0..count).map(move |nth| self.returned[self.cell(taken.wrapping_add(nth))].load(Ordering::Relaxed))
    }

    /// Returns the record of an id, which can be any number. For the completer.
    pub fn in_flight(&self, id: u32) -> Option<(u16, Record)> {
        let word = self.records.get(id as usize)?.load(Ordering::Acquire);
        Record::unpack(word).map(|record| (id as u16, record))
    }

    /// Returns the id of the chain with this number. The completer, which calls this, must have seen that
    /// chain or a later one in flight.
    ///
    /// # Panics
    /// Panics without IN_ORDER.
    pub fn ordered(&self, number: u32) -> u16 {
        // Relaxed: it was stored before the record that was seen.
        self.order[self.cell(number)].load(Ordering::Relaxed)
    }

    /// Removes `id` from those in flight. For the completer.
    pub fn take(&self, id: u16) {
        self.records[usize::from(id)].store(0, Ordering::Relaxed);
    }

    /// Makes `id`, which is not in flight any more, free again. For the completer.
    pub fn give_back(&self, id: u16) {
        // Relaxed: only the completer stores it.
        let tail = self.tail.0.load(Ordering::Relaxed);
        self.returned[self.cell(tail)].store(id, Ordering::Relaxed);
        // Release: all earlier accesses to the id's memory come before.
        self.tail.0.store(tail.wrapping_add(1), Ordering::Release);
    }
}
