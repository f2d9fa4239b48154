//! The region of a packed ring.

use super::resubmissions::Resubmissions;
use super::{Region, at, begun, entries, in_order, wrong};
use crate::RingError;
use crate::packed::RingPosition;
use kickless_spec::ring::DESC_F_NEXT;
use kickless_spec::vhost_user::{
    INFLIGHT_COUNTER, INFLIGHT_DESC, INFLIGHT_HEAD, INFLIGHT_PACKED_USED, INFLIGHT_VERSION, InflightEntry,
    PackedHead, PackedUsed,
};

/// Number of ids. The driver may choose any. Pages of the table that are never written take no memory.
const IDS: usize = 1 << 16;

/// A chain to resubmit.
#[derive(Debug)]
pub(in crate::device) struct Resubmission {
    /// The descriptors as they were popped: two words each, as in the ring.
    pub(in crate::device) descs: Vec<[u64; 2]>,
    pub(in crate::device) id: u16,
}

/// The state of the ring after another device.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct Resumed {
    /// The position up to which the ring is used.
    pub(in crate::device) used: RingPosition,
    /// Number of descriptors of the chains in flight.
    pub(in crate::device) descriptors: u16,
}

/// The record of a packed queue. The letters are those of the module's argument.
#[derive(Debug)]
pub(in crate::device) struct Packed<R> {
    region: R,
    entries: u16,
    counter: u64,
    /// For each entry `next`, and for the first entry of a chain also `last` and `num`.
    chains: Vec<InflightEntry>,
    /// For each id, the first entry of the chain in flight.
    heads: Box<[u16]>,
    /// The present values in the region. The old values differ only while a batch is shown.
    free_head: u16,
    used: RingPosition,
    /// First entries of chains that are pushed and not shown.
    batch: Vec<u16>,
    /// The chains to resubmit.
    pub(in crate::device) resubmissions: Resubmissions<Resubmission>,
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
            used: RingPosition::FIRST,
            batch: Vec::new(),
            resubmissions: Resubmissions::new(Vec::new()),
        }
    }

    pub(in crate::device) fn region(&self) -> &R {
        &self.region
    }

    /// Steps R without R3: resumes after another device. `flags` reads the flags of a descriptor in the ring.
    /// Returns `None` if the region was never used.
    pub(in crate::device) fn resume(
        &mut self,
        size: u16,
        flags: impl Fn(RingPosition) -> u16,
    ) -> Result<Option<Resumed>, RingError> {
        let Some(word) = begun(&self.region, self.entries, size)? else { return Ok(None) };
        let head = PackedHead::from_word(word);
        self.entries = head.desc_num;
        let word = PackedUsed::from_word(self.region.load(INFLIGHT_PACKED_USED));
        let [new, old] = [
            RingPosition { index: word.used_idx, wrap: word.used_wrap_counter },
            RingPosition { index: word.old_used_idx, wrap: word.old_used_wrap_counter },
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

    /// R2. Returns for each entry whether it is free.
    fn forget_free(&mut self) -> Result<Vec<bool>, RingError> {
        let mut free = vec![false; usize::from(self.entries)];
        let mut entry = self.free_head;
        // The last link leads out of the region, or to an entry that was seen.
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

    /// R4. Each entry must be free, or in one chain. Otherwise the record is inconsistent.
    fn find_chains(&mut self, mut taken: Vec<bool>, size: u16) -> Result<Resumed, RingError> {
        let mut found = Vec::new();
        let mut descriptors = 0u16;
        let mut ids = vec![false; IDS];
        for head in 0..self.entries {
            let chain = self.chains[usize::from(head)];
            if !chain.inflight {
                continue;
            }
            // The sum is at most the number of entries, because no entry is taken twice.
            let descs = self.copies_of(head, &mut taken)?;
            descriptors = descriptors.saturating_add(chain.num);
            let id = descs.last().map_or(0, |[_, rest]| (rest >> 32) as u16);
            if std::mem::replace(&mut ids[usize::from(id)], true) {
                return Err(wrong("id in flight twice", id));
            }
            self.heads[usize::from(id)] = head;
            let counter = self.region.load(at(true, head) + INFLIGHT_COUNTER);
            found.push((counter, Resubmission { descs, id }));
        }
        if let Some(lost) = taken.iter().position(|taken| !taken) {
            return Err(wrong("lost entry", lost as u16));
        }
        if descriptors > size {
            return Err(wrong("number of descriptors in flight", descriptors));
        }
        (self.counter, self.resubmissions) = in_order(found);
        Ok(Resumed { used: self.used, descriptors })
    }

    /// Reads the descriptors of the chain that begins at an entry, each once.
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

    /// Begins a region that was never used. The ring is used up to `used`, and nothing is in flight.
    pub(in crate::device) fn begin(&mut self, used: RingPosition) {
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

    fn tell_free(&self, old: u16) {
        let (desc_num, free_head) = (self.entries, self.free_head);
        let head = PackedHead { version: INFLIGHT_VERSION, desc_num, free_head, old_free_head: old };
        self.region.store(INFLIGHT_HEAD, head.word());
    }

    fn tell_used(&self, old: RingPosition) {
        let used = PackedUsed {
            used_idx: self.used.index,
            old_used_idx: old.index,
            used_wrap_counter: self.used.wrap,
            old_used_wrap_counter: old.wrap,
        };
        self.region.store(INFLIGHT_PACKED_USED, used.word());
    }

    /// P: records a chain with these descriptors, as they are in the ring. It was not in flight.
    pub(in crate::device) fn popped(&mut self, id: u16, descs: impl Iterator<Item = [u64; 2]>) {
        let head = self.free_head;
        let (mut num, mut last, mut free) = (0, head, head);
        // P1.
        for [addr, rest] in descs {
            // There are as many entries as descriptors, and each entry is free or in a chain in flight.
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

    /// Adds the chain in flight with this id to the batch.
    pub(in crate::device) fn pushed(&mut self, id: u16) {
        self.batch.push(self.heads[usize::from(id)]);
    }

    /// S2 to S4, before the pushed chains are shown. The ring is used up to `used` afterwards.
    pub(in crate::device) fn showing(&mut self, used: RingPosition) {
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

    /// S6 to S8, after the pushed chains were shown.
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
}
