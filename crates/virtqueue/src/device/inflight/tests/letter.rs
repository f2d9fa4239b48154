//! A device that follows the specification's steps literally, one field at a time.

use super::driver::Tag;
use super::memory::{Cut, World};
use crate::packed::RingPosition;
use kickless_spec::ring::{DESC_F_NEXT, RING_ENTRIES, RING_IDX};
use std::collections::HashMap;

pub(super) struct Letter {
    areas: [Cut; 3],
    region: Cut,
    packed: bool,
    size: u16,
    counter: u64,
    next: u16,
    place: RingPosition,
    /// The head or entry, and the id.
    out: HashMap<Tag, (u16, u16)>,
}

/// Offsets of fields in the structures of the specification.
mod split {
    pub(super) const LAST_BATCH_HEAD: usize = 12;
    pub(super) const USED_IDX: usize = 14;
    pub(super) const DESC: usize = 16;
}
mod packed {
    pub(super) const FREE_HEAD: usize = 12;
    pub(super) const OLD_FREE_HEAD: usize = 14;
    pub(super) const USED_IDX: usize = 16;
    pub(super) const OLD_USED_IDX: usize = 18;
    pub(super) const USED_WRAP: usize = 20;
    pub(super) const OLD_USED_WRAP: usize = 21;
    pub(super) const DESC: usize = 32;
}

impl Letter {
    pub(super) fn begin(world: &World, start: u16) -> Self {
        let letter = Self {
            areas: world.areas.clone(),
            region: world.region.clone(),
            packed: world.options.is_packed(),
            size: world.options.size(),
            counter: 0,
            next: start,
            place: RingPosition::FIRST,
            out: HashMap::new(),
        };
        letter.region.set(8, &1u16);
        letter.region.set(10, &letter.size);
        match letter.packed {
            true => {
                letter.region.set(packed::USED_WRAP, &1u8);
                letter.region.set(packed::OLD_USED_WRAP, &1u8);
                (0..letter.size).for_each(|entry| letter.region.set(letter.entry(entry) + 2, &(entry + 1)));
            }
            false => letter.region.set(split::USED_IDX, &start),
        }
        letter
    }

    fn entry(&self, index: u16) -> usize {
        if self.packed {
            packed::DESC + 32 * usize::from(index)
        } else {
            split::DESC + 16 * usize::from(index)
        }
    }

    pub(super) fn pop(&mut self) -> Option<Tag> {
        if self.packed { self.pop_packed() } else { self.pop_split() }
    }

    fn pop_split(&mut self) -> Option<Tag> {
        if self.areas[1].get::<u16>(RING_IDX) == self.next {
            return None;
        }
        let head: u16 = self.areas[1].get(RING_ENTRIES + 2 * usize::from(self.next & (self.size - 1)));
        self.next = self.next.wrapping_add(1);
        self.region.step(self.entry(head) + 8, &self.counter);
        self.counter += 1;
        self.region.step(self.entry(head), &1u8);
        let tag = self.areas[0].get(16 * usize::from(head));
        self.out.insert(tag, (head, head));
        Some(tag)
    }

    fn pop_packed(&mut self) -> Option<Tag> {
        if !self.place.is_available(self.areas[0].get(self.place.flags_at())) {
            return None;
        }
        let tag = self.areas[0].get(self.place.at());
        let head: u16 = self.region.get(packed::OLD_FREE_HEAD);
        self.region.step(self.entry(head) + 6, &0u16);
        self.region.step(self.entry(head) + 8, &self.counter);
        self.counter += 1;
        self.region.step(self.entry(head), &1u8);
        loop {
            let [addr, rest]: [u64; 2] = self.areas[0].get(self.place.at());
            let (len, id, flags) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
            let free: u16 = self.region.get(packed::FREE_HEAD);
            let is_last = flags & DESC_F_NEXT == 0;
            if is_last {
                self.region.step(self.entry(head) + 4, &free);
            }
            let num: u16 = self.region.get(self.entry(head) + 6);
            self.region.step(self.entry(head) + 6, &(num + 1));
            self.region.step(self.entry(free) + 24, &addr);
            self.region.step(self.entry(free) + 20, &len);
            self.region.step(self.entry(free) + 18, &flags);
            self.region.step(self.entry(free) + 16, &id);
            let next: u16 = self.region.get(self.entry(free) + 2);
            self.region.step(packed::FREE_HEAD, &next);
            self.place = self.place.after(1, self.size);
            if is_last {
                self.region.step(packed::OLD_FREE_HEAD, &next);
                self.out.insert(tag, (head, id));
                return Some(tag);
            }
            // A device that is cut off would go on for ever.
            if self.region.get::<u16>(packed::FREE_HEAD) != next {
                return None;
            }
        }
    }

    pub(super) fn push(&mut self, tag: Tag) {
        let (head, id) = self.out[&tag];
        if self.packed { self.push_packed(head, id) } else { self.push_split(head) }
    }

    fn push_split(&mut self, head: u16) {
        let used: u16 = self.areas[2].get(RING_IDX);
        let slot = RING_ENTRIES + 8 * usize::from(used & (self.size - 1));
        self.areas[2].step(slot, &u32::from(head));
        let last: u16 = self.region.get(split::LAST_BATCH_HEAD);
        self.region.step(self.entry(head) + 6, &last);
        self.region.step(split::LAST_BATCH_HEAD, &head);
        self.areas[2].step(RING_IDX, &used.wrapping_add(1));
        self.region.step(self.entry(head), &0u8);
        self.region.step(split::USED_IDX, &used.wrapping_add(1));
    }

    fn push_packed(&mut self, head: u16, id: u16) {
        let get = |at: usize| self.region.get::<u16>(at);
        let place = RingPosition {
            index: get(packed::USED_IDX),
            wrap: self.region.get::<u8>(packed::USED_WRAP) != 0,
        };
        let (last, num) = (get(self.entry(head) + 4), get(self.entry(head) + 6));
        self.region.step(self.entry(last) + 2, &get(packed::FREE_HEAD));
        self.region.step(packed::FREE_HEAD, &head);
        let next = place.after(num, self.size);
        self.region.step(packed::USED_IDX, &next.index);
        self.region.step(packed::USED_WRAP, &u8::from(next.wrap));
        self.areas[0].step(place.at() + 12, &id);
        self.areas[0].step(place.flags_at(), &place.used());
        self.region.step(self.entry(head), &0u8);
        self.region.step(packed::OLD_FREE_HEAD, &head);
        self.region.step(packed::OLD_USED_IDX, &next.index);
        self.region.step(packed::OLD_USED_WRAP, &u8::from(next.wrap));
    }
}
