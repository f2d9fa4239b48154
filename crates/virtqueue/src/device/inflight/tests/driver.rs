//! A driver that goes on whatever happens to its device.

use super::memory::{Cut, World};
use crate::packed::RingPosition;
use kickless_spec::ring::{DESC_F_NEXT, RING_ENTRIES, RING_IDX};
use std::collections::{HashMap, VecDeque};

/// The address of the first buffer, which identifies a chain.
pub(super) type Tag = u64;

pub(super) struct Driver {
    areas: [Cut; 3],
    packed: bool,
    size: u16,
    tags: Tag,
    /// Free descriptors of a split ring, or free ids of a packed one, which are more than its descriptors.
    free: VecDeque<u16>,
    /// Chains in flight: tag and descriptors by head, or tag and number of descriptors by id.
    out: HashMap<u16, (Tag, Vec<u16>)>,
    /// `avail.idx`, and the index of the next used element.
    next: u16,
    used: u16,
    /// The same in a packed ring, and the number of free descriptors.
    next_place: RingPosition,
    used_place: RingPosition,
    room: u16,
}

impl Driver {
    pub(super) fn new(world: &World, start: u16) -> Self {
        let (packed, size) = (world.options.is_packed(), world.options.size());
        let ids = if packed { (0..size + 3).map(|id| id * 7 + 1).collect() } else { (0..size).collect() };
        Self {
            areas: world.areas.clone(),
            packed,
            size,
            tags: 0,
            free: ids,
            out: HashMap::new(),
            next: start,
            used: start,
            next_place: RingPosition::from_bits(start),
            used_place: RingPosition::from_bits(start),
            room: size,
        }
    }

    /// Returns the number of chains that were ever made available.
    pub(super) fn offered(&self) -> usize {
        self.tags as usize
    }

    /// Makes a chain of this many descriptors available, if there is room.
    pub(super) fn offer(&mut self, count: u16) -> Option<Tag> {
        let count = count.min(self.size);
        if self.packed { self.offer_packed(count) } else { self.offer_split(count) }
    }

    fn offer_split(&mut self, count: u16) -> Option<Tag> {
        if self.free.len() < usize::from(count) {
            return None;
        }
        let descs: Vec<u16> = self.free.drain(..usize::from(count)).collect();
        self.tags += 1;
        for (nth, &index) in descs.iter().enumerate() {
            let next = descs.get(nth + 1);
            let flags = if next.is_some() { DESC_F_NEXT } else { 0 };
            let words = [self.tags, 8 | u64::from(flags) << 32 | u64::from(next.copied().unwrap_or(0)) << 48];
            self.areas[0].set(16 * usize::from(index), &words);
        }
        let slot = RING_ENTRIES + 2 * usize::from(self.next & (self.size - 1));
        self.areas[1].set(slot, &descs[0]);
        self.next = self.next.wrapping_add(1);
        self.areas[1].set(RING_IDX, &self.next);
        self.out.insert(descs[0], (self.tags, descs));
        Some(self.tags)
    }

    fn offer_packed(&mut self, count: u16) -> Option<Tag> {
        if self.room < count {
            return None;
        }
        self.room -= count;
        let id = self.free.pop_front().unwrap();
        self.tags += 1;
        for nth in 0..count {
            let place = self.next_place.after(nth, self.size);
            let more = if nth + 1 < count { DESC_F_NEXT } else { 0 };
            let flags = place.available() | more;
            // Only the last descriptor's id counts.
            let id = if more == 0 { id } else { 0xeeee };
            let words = [self.tags, 8 | u64::from(id) << 32 | u64::from(flags) << 48];
            self.areas[0].set(place.at(), &words);
        }
        self.next_place = self.next_place.after(count, self.size);
        self.out.insert(id, (self.tags, vec![0; usize::from(count)]));
        Some(self.tags)
    }

    /// Takes a used chain.
    pub(super) fn take(&mut self) -> Option<Tag> {
        let id = if self.packed { self.take_packed()? } else { self.take_split()? };
        let (tag, descs) = self.out.remove(&id).unwrap_or_else(|| panic!("{id} is used and not out"));
        if self.packed {
            self.free.push_back(id);
            self.room += descs.len() as u16;
            self.used_place = self.used_place.after(descs.len() as u16, self.size);
        } else {
            self.free.extend(descs);
        }
        Some(tag)
    }

    fn take_split(&mut self) -> Option<u16> {
        if self.areas[2].get::<u16>(RING_IDX) == self.used {
            return None;
        }
        let slot = RING_ENTRIES + 8 * usize::from(self.used & (self.size - 1));
        self.used = self.used.wrapping_add(1);
        Some(self.areas[2].get::<u32>(slot) as u16)
    }

    fn take_packed(&mut self) -> Option<u16> {
        let place = self.used_place;
        place.is_used(self.areas[0].get(place.flags_at())).then(|| self.areas[0].get(place.at() + 12))
    }
}
