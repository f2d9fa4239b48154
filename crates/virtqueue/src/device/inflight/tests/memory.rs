//! A ring and a region to which a device writes while it is alive.
#![expect(unsafe_code, reason = "the trait that is implemented has unsafe functions")]

use super::super::{Region, at};
use crate::access::Access;
use crate::device::{Areas, Options};
use crate::packed::Words;
use kickless_memory::{Gpa, Marks};
use kickless_spec::ring::RING_IDX;
use kickless_spec::vhost_user::INFLIGHT_HEAD;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes that stop changing after `left` stores.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    bytes: Rc<RefCell<Vec<u8>>>,
    left: Rc<Cell<u64>>,
    /// The ranges that the device has marked as written.
    marked: Rc<RefCell<HashSet<usize>>>,
}

impl Cut {
    fn new(len: usize, left: &Rc<Cell<u64>>) -> Self {
        Self { bytes: Rc::new(RefCell::new(vec![0; len])), left: left.clone(), marked: Rc::default() }
    }

    pub(super) fn get<T: FromBytes>(&self, offset: usize) -> T {
        let bytes = self.bytes.borrow();
        T::read_from_bytes(&bytes[offset..offset + size_of::<T>()]).unwrap()
    }

    /// Stores a value as a peer that is always alive.
    pub(super) fn set<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.bytes.borrow_mut()[offset..offset + size_of::<T>()].copy_from_slice(value.as_bytes());
    }

    /// Returns all bytes.
    pub(super) fn all(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    /// Returns the marks since the last call.
    pub(super) fn take_marked(&self) -> HashSet<usize> {
        self.marked.take()
    }

    /// Stores a value as the device.
    pub(super) fn step<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        if let Some(left) = self.left.get().checked_sub(1) {
            self.left.set(left);
            self.set(offset, value);
        }
    }
}

impl Words for Cut {
    fn load(&self, at: usize, _: Ordering) -> u16 {
        self.get(at)
    }

    fn store(&self, at: usize, value: u16, _: Ordering) {
        self.step(at, &value);
    }

    fn fence(&self) {}
}

impl Access for Cut {
    type Region = Cut;

    fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        self.get(offset)
    }

    unsafe fn load_unchecked(&self, offset: usize) -> u16 {
        self.get(offset)
    }

    unsafe fn load_words_unchecked(&self, offset: usize) -> [u64; 2] {
        self.get(offset)
    }

    unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.step(offset, value);
    }

    fn mark(&self, _: Gpa, offset: usize, len: usize, _: &mut Marks) {
        self.marked.borrow_mut().extend(offset..offset + len);
    }
}

impl Region for Cut {
    fn len(&self) -> usize {
        self.bytes.borrow().len()
    }

    fn load(&self, offset: usize) -> u64 {
        self.get(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.step(offset, &word);
    }
}

/// The memory that survives a device.
pub(super) struct World {
    pub(super) areas: [Cut; 3],
    pub(super) region: Cut,
    pub(super) options: Options,
    left: Rc<Cell<u64>>,
}

impl World {
    /// Makes an empty ring, whose indices are `start` if it is a split one, and a region that was never used.
    pub(super) fn new(packed: bool, size: u16, start: u16) -> Self {
        Self::with_entries(packed, size, size, start)
    }

    /// Does the same with this many entries in the region.
    pub(super) fn with_entries(packed: bool, size: u16, entries: u16, start: u16) -> Self {
        let options = match packed {
            true => Options::packed(size, false, true),
            false => Options::new(size, false, true),
        };
        let options = options.unwrap();
        let left = Rc::new(Cell::new(u64::MAX));
        let areas = options.area_lens().map(|len| Cut::new(len, &left));
        let region = Cut::new(at(packed, entries), &left);
        if !packed {
            areas[1].set(RING_IDX, &start);
            areas[2].set(RING_IDX, &start);
        }
        Self { areas, region, options, left }
    }

    /// Starts the next device, which is killed after this many stores.
    pub(super) fn revive(&self, stores: u64) {
        self.left.set(stores);
    }

    pub(super) fn is_alive(&self) -> bool {
        self.left.get() > 0
    }

    pub(super) fn is_begun(&self) -> bool {
        self.region.get::<u16>(INFLIGHT_HEAD) != 0
    }

    pub(super) fn metadata(&self) -> Areas<Cut> {
        Areas::of(self.areas.clone(), self.options)
    }
}
