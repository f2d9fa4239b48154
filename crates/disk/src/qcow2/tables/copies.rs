//! Clusters that are filled before they are mapped (R3).

use super::Tables;
use super::blocks::Block;
use super::copying::Copy;
use super::ops::Run;
use super::plan::{Copying, GivenUp, Ticket};
use crate::qcow2::format::entry::{Mapping, RawEntry, UNWRITTEN, counted, encode};
use crate::qcow2::format::geometry::{GuestCluster, HostCluster, SliceIndex};
use crate::qcow2::slices::with_bits;
use std::sync::{Arc, PoisonError};

impl Tables {
    /// Begins a copy. `mapping` is the entry that follows, `old` the entry before.
    pub(super) fn begin_copy(
        &mut self,
        cluster: GuestCluster,
        (slice, index): (SliceIndex, usize),
        new: Option<HostCluster>,
        (old, mapping): (Mapping, Mapping),
    ) -> Copying {
        let id = self.copies.next;
        self.copies.next = id.wrapping_add(1);
        self.copies.running.insert(id, Copy { cluster, slice, index, new, old, mapping });
        self.copies.by_cluster.insert(cluster, id);
        Copying {
            id,
            given_up: Arc::clone(&self.copies.given_up),
            wakers: self.wakers.clone(),
            is_over: false,
        }
    }

    /// Maps a cluster that was filled durably.
    pub(crate) fn copied(&mut self, mut copy: Copying) -> Ticket {
        let id = copy.id;
        copy.is_over = true;
        let Some(Copy { slice, index, new, old, mapping, .. }) = self.end_copy(id) else {
            return Ticket::default();
        };
        let Some(way) = self.slices.find(slice) else { return Ticket::default() };
        self.set_entry(way, index, mapping);
        self.blocks.change(Block::Slice(slice));
        let ticket = self.ticket(slice);
        if new.is_some() {
            self.retire_mapping(old, ticket, false);
        }
        self.progress();
        ticket
    }

    fn end_copy(&mut self, id: u32) -> Option<Copy> {
        let copy = self.copies.running.remove(&id)?;
        self.copies.by_cluster.remove(&copy.cluster);
        Some(copy)
    }

    /// Ends the copies whose owners gave up.
    pub(super) fn end_given_up(&mut self) {
        let list: Vec<GivenUp> = {
            let mut list = self.copies.given_up.lock().unwrap_or_else(PoisonError::into_inner);
            list.drain(..).collect()
        };
        for GivenUp { id, leaks } in list {
            let new = self.end_copy(id).and_then(|copy| copy.new);
            if let Some(new) = new.filter(|_| !leaks) {
                self.retire(Run { start: new.0, len: 1 }, Ticket::default(), false);
            }
        }
    }

    /// Changes an entry in memory. The caller notes the change of the block.
    pub(super) fn set_entry(&mut self, way: crate::qcow2::slices::WayIndex, index: usize, mapping: Mapping) {
        let raw: RawEntry = with_bits(encode(self.geometry, mapping), UNWRITTEN);
        self.slices.edit(way, index..index + 1, |_, _| raw);
    }

    /// Retires the clusters of a mapping that is gone.
    pub(super) fn retire_mapping(&mut self, old: Mapping, changes: Ticket, is_urgent: bool) {
        let mut clusters = counted(self.geometry, old).map(|cluster| cluster.0);
        if let Some(start) = clusters.next() {
            let len = 1 + clusters.count() as u64;
            self.retire(Run { start, len }, changes, is_urgent);
        }
    }
}
