//! What the two halves of a driver's queue tell each other.
//!
//! Two tables, neither locked, nothing allocated after they were made:
//!
//! * `records`: what is in flight under each id (its descriptors, and how much the device may write); 0 for nothing. The
//!   submitter sets a record when it adds a chain, the completer clears it when it takes the chain back. An id belongs to
//!   one of them at a time: to the submitter while it is free, from `add` on to the completer (by way of the device), and
//!   with `give_back` to the submitter again.
//! * `returned`: ids on their way back, a ring with one producer (the completer) and one consumer (the submitter). It cannot
//!   run over, for there are no more ids than places, and none is in it twice: the completer pops an id only with a record,
//!   which it clears, and the submitter sets the next one only after it has taken the id out of here.
//!
//! And for VIRTIO_F_IN_ORDER a third, `order`: the ids in the order of their submission, which the completer follows.
//! `tests/driver_loom.rs` runs all of them in every order that the memory model allows.
//!
//! # Orders
//! A record is stored with release before the chain is shown to the device, and loaded with acquire after the device has
//! shown that it is done with it. So the order holds also for a device that shows what it was never given: there is a record
//! of 0, or one of a chain that was just added, which then counts as completed, and what belongs to it is there.
//! `returned` is published by `tail` with release and taken with acquire: what the completer did with an id's memory is over
//! before the submitter uses it again.

use kickless_sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A chain in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Descriptors that it takes in the ring; at least 1.
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

/// On cache lines of its own, of which processors fetch two at a time: what one half writes all the time does not take away
/// what the other reads all the time.
#[derive(Debug)]
#[repr(align(128))]
struct Apart<T>(T);

/// The tables.
#[derive(Debug)]
pub struct Shared {
    records: Box<[AtomicU64]>,
    /// Empty without IN_ORDER.
    order: Box<[AtomicU16]>,
    returned: Box<[AtomicU16]>,
    /// Ids ever given back.
    tail: Apart<AtomicU32>,
}

impl Shared {
    /// For a queue of this size; nothing is in flight.
    pub fn new(size: u16, in_order: bool) -> Self {
        // Rings of a power of two, so that their indices can wrap.
        let ids = |len: u16| (0..len).map(|_| AtomicU16::new(0)).collect();
        let places = size.next_power_of_two();
        Self {
            records: (0..size).map(|_| AtomicU64::new(0)).collect(),
            order: ids(if in_order { places } else { 0 }),
            returned: ids(places),
            tail: Apart(AtomicU32::new(0)),
        }
    }

    #[inline]
    fn place(&self, count: u32) -> usize {
        count as usize & (self.returned.len() - 1)
    }

    /// The submitter's: `id` is in flight from now on, as the chain with this number of all chains ever added.
    #[inline]
    pub fn add(&self, id: u16, number: u32, record: Record) {
        if let Some(place) = self.order.get(self.place(number)) {
            place.store(id, Ordering::Relaxed);
        }
        // Release, whose partner is the acquire in `in_flight`: the place in `order`, and what belongs to the id, come before.
        self.records[usize::from(id)].store(record.pack(), Ordering::Release);
    }

    /// The submitter's: the next id that was given back, after `taken` others.
    #[inline]
    pub fn returned(&self, taken: u32) -> Option<u16> {
        // Acquire, whose partner is the release in `give_back`.
        (self.tail.0.load(Ordering::Acquire) != taken)
            .then(|| self.returned[self.place(taken)].load(Ordering::Relaxed))
    }

    /// The completer's: what is in flight under an id, which can be anything.
    #[inline]
    pub fn in_flight(&self, id: u32) -> Option<(u16, Record)> {
        let word = self.records.get(id as usize)?.load(Ordering::Acquire);
        Record::unpack(word).map(|record| (id as u16, record))
    }

    /// The completer's: the id of the chain with this number, if something that was added no earlier was seen in flight.
    ///
    /// # Panics
    /// Without IN_ORDER.
    #[inline]
    pub fn ordered(&self, number: u32) -> u16 {
        // Relaxed: it was stored before the record that was seen.
        self.order[self.place(number)].load(Ordering::Relaxed)
    }

    /// The completer's: the device is done with `id`.
    #[inline]
    pub fn take(&self, id: u16) {
        self.records[usize::from(id)].store(0, Ordering::Relaxed);
    }

    /// The completer's: `id`, which was taken, is free again.
    #[inline]
    pub fn give_back(&self, id: u16) {
        // Relaxed: only the completer stores it.
        let tail = self.tail.0.load(Ordering::Relaxed);
        self.returned[self.place(tail)].store(id, Ordering::Relaxed);
        // Release: also what was done with the id before.
        self.tail.0.store(tail.wrapping_add(1), Ordering::Release);
    }
}
