//! The region of a split ring.

use super::resubmissions::Resubmissions;
use super::{Region, at, begun, entries, in_order, wrong};
use crate::RingError;
use kickless_spec::vhost_user::{
    INFLIGHT_COUNTER, INFLIGHT_HEAD, INFLIGHT_VERSION, InflightEntry, SplitHead,
};

/// The record of a split queue. The letters are those of the module's argument.
#[derive(Debug)]
pub(in crate::device) struct Split<R> {
    region: R,
    entries: u16,
    counter: u64,
    /// The present values of `last_batch_head` and `used_idx` in the region.
    last_batch_head: u16,
    used_idx: u16,
    /// Chains that are pushed and not shown.
    batch: Vec<u16>,
    /// The heads of chains to resubmit.
    pub(in crate::device) resubmissions: Resubmissions<u16>,
}

impl<R: Region> Split<R> {
    pub(in crate::device) fn new(region: R) -> Self {
        let entries = entries(false, region.len());
        let (batch, resubmissions) = (Vec::new(), Resubmissions::new(Vec::new()));
        Self { region, entries, counter: 0, last_batch_head: 0, used_idx: 0, batch, resubmissions }
    }

    pub(in crate::device) fn region(&self) -> &R {
        &self.region
    }

    /// R: resumes after another device, in a ring whose used index is `used`. Returns the number of chains in
    /// flight, or `None` if the region was never used.
    pub(in crate::device) fn resume(&mut self, used: u16, size: u16) -> Result<Option<u16>, RingError> {
        let Some(word) = begun(&self.region, self.entries, size)? else { return Ok(None) };
        let head = SplitHead::from_word(word);
        self.entries = head.desc_num;
        let offsets = (0..self.entries).map(|entry| at(false, entry));
        let mut found: Vec<_> = offsets
            .map(|at| (InflightEntry::from_word(false, self.region.load(at)), at))
            .map(|(entry, at)| (entry, self.region.load(at + INFLIGHT_COUNTER)))
            .collect();
        // R1.
        let behind = used.wrapping_sub(head.used_idx);
        if behind <= size {
            self.forget_batch(&mut found, head.last_batch_head, behind)?;
        } else if found.iter().any(|(entry, _)| entry.inflight) {
            return Err(wrong("used index", head.used_idx));
        }
        // R3. The last batch is ignored from here on.
        self.tell(used);
        // R4.
        let heads = (0..).zip(&found).filter(|(_, (entry, _))| entry.inflight);
        let heads: Vec<(u64, u16)> = heads.map(|(head, (_, counter))| (*counter, head)).collect();
        if let Some((_, head)) = heads.iter().find(|(_, head)| *head >= size) {
            return Err(wrong("head in flight", *head));
        }
        (self.counter, self.resubmissions) = in_order(heads);
        Ok(Some(self.resubmissions.len()))
    }

    /// Does step R2.
    fn forget_batch(
        &self,
        found: &mut [(InflightEntry, u64)],
        last: u16,
        behind: u16,
    ) -> Result<(), RingError> {
        let mut head = last;
        for _ in 0..behind {
            let Some((entry, _)) = found.get_mut(usize::from(head)) else {
                return Err(wrong("head in the last batch", head));
            };
            if std::mem::take(&mut entry.inflight) {
                self.region.store(at(false, head), entry.word(false));
            }
            head = entry.next;
        }
        Ok(())
    }

    /// Begins a region that was never used, in a ring whose used index is `used`. Nothing is in flight.
    pub(in crate::device) fn begin(&mut self, used: u16) {
        for offset in (0..at(false, self.entries)).step_by(size_of::<u64>()) {
            self.region.store(offset, 0);
        }
        self.tell(used);
    }

    /// Stores the head of the region, with this used index.
    fn tell(&mut self, used: u16) {
        self.used_idx = used;
        let (desc_num, last_batch_head) = (self.entries, self.last_batch_head);
        let head = SplitHead { version: INFLIGHT_VERSION, desc_num, last_batch_head, used_idx: used };
        self.region.store(INFLIGHT_HEAD, head.word());
    }

    /// P: records a chain that was not in flight.
    pub(in crate::device) fn popped(&mut self, head: u16) {
        if head < self.entries {
            let at = at(false, head);
            // P1.
            self.region.store(at + INFLIGHT_COUNTER, self.counter);
            self.counter = self.counter.wrapping_add(1);
            // P2.
            self.store(head, true, 0);
        }
    }

    fn store(&self, head: u16, inflight: bool, next: u16) {
        let entry = InflightEntry { inflight, next, ..InflightEntry::default() };
        self.region.store(at(false, head), entry.word(false));
    }

    pub(in crate::device) fn pushed(&mut self, head: u16) {
        if head < self.entries {
            self.batch.push(head);
        }
    }

    /// S1 and S2, before the pushed chains are shown.
    pub(in crate::device) fn showing(&mut self) {
        let [first, rest @ ..] = self.batch.as_slice() else { return };
        let mut last = *first;
        // The link of the first one leads out of the batch, and is not followed.
        for &head in rest {
            self.store(head, true, last);
            last = head;
        }
        self.last_batch_head = last;
        self.tell(self.used_idx);
    }

    /// S4 and S5, after the pushed chains were shown. `used` is the ring's index now.
    pub(in crate::device) fn shown(&mut self, used: u16) {
        let mut last = 0;
        for &head in &self.batch {
            self.store(head, false, last);
            last = head;
        }
        self.batch.clear();
        self.tell(used);
    }
}
