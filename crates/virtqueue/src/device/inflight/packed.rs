//! A packed ring's region.

use super::{Region, at, begun, entries, in_order, wrong};
use crate::RingError;
use crate::packed::Place;
use kickless_spec::ring::DESC_F_NEXT;
use kickless_spec::vhost_user::{
    INFLIGHT_COUNTER, INFLIGHT_DESC, INFLIGHT_HEAD, INFLIGHT_PACKED_USED, INFLIGHT_VERSION, InflightEntry,
    PackedHead, PackedUsed,
};
use std::collections::VecDeque;

/// An id is whatever the driver likes. Zeroes that are not used take no memory.
const IDS: usize = 1 << 16;

/// A chain that is to be popped again.
#[derive(Debug)]
pub(in crate::device) struct Again {
    /// Its descriptors as they were popped: two words each, as in the ring.
    pub(in crate::device) descs: Vec<[u64; 2]>,
    pub(in crate::device) id: u16,
}

/// Where the ring stands after another device.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct Resumed {
    /// How far it is used.
    pub(in crate::device) used: Place,
    /// How many descriptors chains in flight have.
    pub(in crate::device) descriptors: u16,
}

/// What a packed queue writes down. The letters are those of the module's argument.
#[derive(Debug)]
pub(in crate::device) struct Packed<R> {
    region: R,
    entries: u16,
    counter: u64,
    /// `next` of each entry, and, of those that are the first of a chain, `last` and `num`.
    chains: Vec<InflightEntry>,
    /// The first entry of the chain in flight under each id.
    heads: Box<[u16]>,
    /// As they stand in the region, where what was before is the same but for the time in which a batch is shown.
    free_head: u16,
    used: Place,
    /// First entries of chains that were pushed and not shown.
    batch: Vec<u16>,
    /// To be popped again, the next one last.
    again: Vec<Again>,
    /// Of those, what was popped as credit, oldest first.
    credit: VecDeque<Again>,
}

impl<R: Region> Packed<R> {
    pub(in crate::device) fn new(region: R) -> Self {
        let entries = entries(true, region.len());
        Self {
            region,
            entries,
            counter: 0,
            chains: Vec::new(),
            heads: vec![0; IDS].into(),
            free_head: 0,
            used: Place::FIRST,
            batch: Vec::new(),
            again: Vec::new(),
            credit: VecDeque::new(),
        }
    }

    pub(in crate::device) fn region(&self) -> &R {
        &self.region
    }

    /// R but for R3: goes on after another device. `flags` reads those of a place in the ring. `None`: nobody has begun.
    pub(in crate::device) fn resume(
        &mut self,
        size: u16,
        flags: impl Fn(Place) -> u16,
    ) -> Result<Option<Resumed>, RingError> {
        let Some(word) = begun(&self.region, self.entries, size)? else { return Ok(None) };
        let head = PackedHead::from_word(word);
        self.entries = head.desc_num;
        let word = PackedUsed::from_word(self.region.load(INFLIGHT_PACKED_USED));
        let [new, old] = [
            Place { index: word.used_idx, wrap: word.used_wrap_counter },
            Place { index: word.old_used_idx, wrap: word.old_used_wrap_counter },
        ];
        if let Some(place) = [new, old].iter().find(|place| place.index >= size) {
            return Err(wrong("used index", place.index));
        }
        let offsets = (0..self.entries).map(|entry| at(true, entry));
        self.chains = offsets.map(|at| InflightEntry::from_word(true, self.region.load(at))).collect();
        // R1.
        let committed = new != old && !old.is_available(flags(old));
        (self.free_head, self.used) =
            if committed { (head.free_head, new) } else { (head.old_free_head, old) };
        self.tell_free(self.free_head);
        self.tell_used(self.used);
        let free = self.forget_free()?;
        self.find_chains(free, size).map(Some)
    }

    /// R2. Which entries are free.
    fn forget_free(&mut self) -> Result<Vec<bool>, RingError> {
        let mut free = vec![false; usize::from(self.entries)];
        let mut entry = self.free_head;
        // The last one leads anywhere: out of the region, or to where the list has been.
        while let Some(seen) = free.get_mut(usize::from(entry)).filter(|seen| !**seen) {
            *seen = true;
            let chain = &mut self.chains[usize::from(entry)];
            if std::mem::take(&mut chain.inflight) {
                self.region.store(at(true, entry), chain.word(true));
            }
            entry = chain.next;
        }
        Ok(free)
    }

    /// R4. Each entry is free, or in one chain; what was written down by somebody who did not keep to that cannot be followed.
    fn find_chains(&mut self, mut taken: Vec<bool>, size: u16) -> Result<Resumed, RingError> {
        let mut found = Vec::new();
        let mut descriptors = 0u16;
        let mut ids = vec![false; IDS];
        for head in 0..self.entries {
            let chain = self.chains[usize::from(head)];
            if !chain.inflight {
                continue;
            }
            // In all they are no more than the entries, for none is taken twice.
            let descs = self.copies_of(head, &mut taken)?;
            descriptors = descriptors.saturating_add(chain.num);
            let id = descs.last().map_or(0, |[_, rest]| (rest >> 32) as u16);
            if std::mem::replace(&mut ids[usize::from(id)], true) {
                return Err(wrong("id in flight twice", id));
            }
            self.heads[usize::from(id)] = head;
            let counter = self.region.load(at(true, head) + INFLIGHT_COUNTER);
            found.push((counter, Again { descs, id }));
        }
        if let Some(lost) = taken.iter().position(|taken| !taken) {
            return Err(wrong("lost entry", lost as u16));
        }
        if descriptors > size {
            return Err(wrong("number of descriptors in flight", descriptors));
        }
        (self.counter, self.again) = in_order(found);
        Ok(Resumed { used: self.used, descriptors })
    }

    /// The descriptors of the chain that begins at an entry. Each is read once.
    fn copies_of(&self, head: u16, taken: &mut [bool]) -> Result<Vec<[u64; 2]>, RingError> {
        let chain = self.chains[usize::from(head)];
        let (mut descs, mut entry, mut last) = (Vec::new(), head, head);
        for nth in 1..=chain.num {
            match taken.get_mut(usize::from(entry)) {
                Some(taken) if !*taken => *taken = true,
                _ => return Err(wrong("entry of a chain", entry)),
            }
            let copy = at(true, entry) + INFLIGHT_DESC;
            let [rest, addr] = [self.region.load(copy), self.region.load(copy + 8)];
            let (id, flags) = (rest as u16, (rest >> 16) as u16);
            if (flags & DESC_F_NEXT != 0) != (nth < chain.num) {
                return Err(wrong("flags of a descriptor", flags));
            }
            descs.push([addr, rest >> 32 | u64::from(id) << 32 | u64::from(flags) << 48]);
            (last, entry) = (entry, self.chains[usize::from(entry)].next);
        }
        if chain.num == 0 || last != chain.last {
            return Err(wrong("last entry of a chain", chain.last));
        }
        Ok(descs)
    }

    /// Begins a region that nobody has begun, in a ring that is used up to `used`, and of which nothing is in flight.
    pub(in crate::device) fn begin(&mut self, used: Place) {
        for offset in (0..at(true, self.entries)).step_by(size_of::<u64>()) {
            self.region.store(offset, 0);
        }
        let next = |entry| InflightEntry { next: entry + 1, ..InflightEntry::default() };
        self.chains = (0..self.entries).map(next).collect();
        for (entry, chain) in (0..).zip(&self.chains) {
            self.region.store(at(true, entry), chain.word(true));
        }
        self.used = used;
        self.tell_used(used);
        self.tell_free(0);
    }

    #[inline]
    fn tell_free(&self, old: u16) {
        let (desc_num, free_head) = (self.entries, self.free_head);
        let head = PackedHead { version: INFLIGHT_VERSION, desc_num, free_head, old_free_head: old };
        self.region.store(INFLIGHT_HEAD, head.word());
    }

    #[inline]
    fn tell_used(&self, old: Place) {
        let used = PackedUsed {
            used_idx: self.used.index,
            old_used_idx: old.index,
            used_wrap_counter: self.used.wrap,
            old_used_wrap_counter: old.wrap,
        };
        self.region.store(INFLIGHT_PACKED_USED, used.word());
    }

    /// P: a chain with these descriptors, as they are in the ring, that was not in flight.
    #[inline]
    pub(in crate::device) fn popped(&mut self, id: u16, descs: impl Iterator<Item = [u64; 2]>) {
        let head = self.free_head;
        let (mut num, mut last, mut free) = (0, head, head);
        // P1.
        for [addr, rest] in descs {
            // There are as many entries as descriptors, and each is free or in a chain in flight.
            let Some(entry) = self.chains.get(usize::from(free)) else { return };
            let copy = at(true, free) + INFLIGHT_DESC;
            let (id, flags) = ((rest >> 32) as u16, (rest >> 48) as u16);
            self.region.store(copy, u64::from(id) | u64::from(flags) << 16 | rest << 32);
            self.region.store(copy + 8, addr);
            num += 1;
            (last, free) = (free, entry.next);
        }
        self.region.store(at(true, head) + INFLIGHT_COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        let Some(chain) = self.chains.get_mut(usize::from(head)) else { return };
        *chain = InflightEntry { inflight: true, last, num, ..*chain };
        self.region.store(at(true, head), chain.word(true));
        self.heads[usize::from(id)] = head;
        // P2.
        self.free_head = free;
        self.tell_free(free);
    }

    /// `id` is of a chain in flight.
    #[inline]
    pub(in crate::device) fn pushed(&mut self, id: u16) {
        self.batch.push(self.heads[usize::from(id)]);
    }

    /// S2 to S4, before what was pushed is shown, and the ring is used up to `used`.
    #[inline]
    pub(in crate::device) fn showing(&mut self, used: Place) {
        let old = (self.free_head, self.used);
        // S2.
        for &head in &self.batch {
            let last = self.chains.get(usize::from(head)).map_or(0, |chain| chain.last);
            let Some(entry) = self.chains.get_mut(usize::from(last)) else { continue };
            entry.next = self.free_head;
            self.region.store(at(true, last), entry.word(true));
            self.free_head = head;
        }
        // S3.
        self.tell_free(old.0);
        // S4.
        self.used = used;
        self.tell_used(old.1);
    }

    /// S6 to S8, after what was pushed has been shown.
    #[inline]
    pub(in crate::device) fn shown(&mut self) {
        // S6.
        for &head in &self.batch {
            let Some(entry) = self.chains.get_mut(usize::from(head)) else { continue };
            entry.inflight = false;
            self.region.store(at(true, head), entry.word(true));
        }
        self.batch.clear();
        // S7 and S8.
        self.tell_free(self.free_head);
        self.tell_used(self.used);
    }

    /// How many chains are to be popped again.
    #[inline]
    pub(in crate::device) fn again(&self) -> u16 {
        self.again.len() as u16
    }

    /// The chains that are to be popped again, the next one last.
    pub(in crate::device) fn chains_again(&self) -> &[Again] {
        &self.again
    }

    /// The next one was popped.
    pub(in crate::device) fn took_again(&mut self) {
        self.again.pop();
    }

    /// The next one was popped as credit.
    pub(in crate::device) fn took_credit_again(&mut self) {
        self.credit.extend(self.again.pop());
    }

    /// How many of these are credit.
    #[inline]
    pub(in crate::device) fn credit(&self) -> u16 {
        self.credit.len() as u16
    }

    /// Takes the oldest off the credit; `false`: there is none. The region names it all the time.
    pub(in crate::device) fn use_credit(&mut self) -> bool {
        self.credit.pop_front().is_some()
    }

    /// Has the newest of the credit popped again, and returns its id.
    pub(in crate::device) fn unpop(&mut self) -> Option<u16> {
        let chain = self.credit.pop_back()?;
        let id = chain.id;
        self.again.push(chain);
        Some(id)
    }
}
