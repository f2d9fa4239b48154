//! Plans of writes, which map clusters.

use super::Tables;
use super::blocks::Block;
use super::cluster_copies::{ClusterCopy, Copying};
use super::entries::EntryPlace;
use super::plan::{CopyFrom, CopyPlan, Stop, Ticket, Under, WritePlan};
use super::rule::Rule;
use crate::format::entry::{Mapping, decode};
use crate::format::geometry::{GuestOffset, HostCluster, HostOffset};
use crate::runtime::Runtime;
use crate::slices::{memory_bits, on_disk};

impl<R: Runtime> Tables<R> {
    /// Plans a write of `len` bytes at `at`. `under` is about all clusters that the range touches, whole. The
    /// caller holds a pin, and drops it before it waits.
    pub fn plan_write(&mut self, at: GuestOffset, len: u64, under: Under, waker: &R::Waker) -> WritePlan<R> {
        self.end_given_up();
        let plan = match self.try_write(at, len, under, waker) {
            Ok(plan) => plan,
            Err(Stop::Fail(errno)) => WritePlan::Fail(errno),
            Err(Stop::Wait) => {
                self.wakers.add(waker);
                WritePlan::Wait
            }
        };
        self.progress();
        plan
    }

    fn try_write(
        &mut self,
        at: GuestOffset,
        len: u64,
        under: Under,
        waker: &R::Waker,
    ) -> Result<WritePlan<R>, Stop> {
        let place = self.place(at, true, waker)?;
        let (mapping, flags) = self.mapping(place.way, place.index)?;
        let cluster = self.geometry.cluster();
        let zero_below = under == Under::Zero || !self.rules.hold(Rule::R2);
        let left = cluster - place.within;
        match mapping {
            Mapping::Data { host, copied: true } => Ok(self.plan_in_place(place, host, len, flags)),
            Mapping::Parts { host: Some(host), copied: true, allocated, zero } => {
                self.plan_part(place, at, len.min(left), (mapping, flags), (host, allocated, zero))
            }
            Mapping::Zero { kept, .. } => {
                if kept.is_some() {
                    self.check_space()?;
                }
                self.plan_fresh(place, at, len, zero_below)
            }
            Mapping::Unallocated if zero_below => self.plan_fresh(place, at, len, zero_below),
            Mapping::Parts { host: None, .. } if zero_below => self.plan_fresh(place, at, len, zero_below),
            Mapping::Unallocated => self.plan_copy(place, at, len.min(left), mapping, CopyFrom::Below),
            Mapping::Data { host, .. } => {
                self.plan_copy(place, at, len.min(left), mapping, CopyFrom::Host(host))
            }
            Mapping::Compressed { at: from, len: bytes } => {
                let from = CopyFrom::Compressed { at: from, bytes };
                self.plan_copy(place, at, len.min(left), mapping, from)
            }
            Mapping::Parts { host, allocated, zero, .. } => {
                let host = host.unwrap_or(HostOffset(0));
                let from = CopyFrom::Parts { host, allocated, zero };
                self.plan_copy(place, at, len.min(left), mapping, from)
            }
        }
    }

    /// Writes to a cluster that is our own, and to those that follow it in the file.
    fn plan_in_place(&mut self, place: EntryPlace, host: HostOffset, len: u64, flags: u64) -> WritePlan<R> {
        let cluster = self.geometry.cluster();
        let (mut done, mut index) = (cluster - place.within, place.index + 1);
        while done < len && index < self.entries() {
            let next = HostOffset(host.0 + place.within + done);
            let raw = self.slices.entry(place.way, index);
            let expected = Ok(Mapping::Data { host: next, copied: true });
            if memory_bits(raw) != flags || decode(self.geometry, on_disk(raw)) != expected {
                break;
            }
            (done, index) = (done + cluster, index + 1);
        }
        let host = HostOffset(host.0 + place.within);
        self.in_place(place, host, len.min(done), flags)
    }

    /// Writes in place. Until the mapping is written, the answer waits for that.
    fn in_place(&mut self, place: EntryPlace, host: HostOffset, len: u64, flags: u64) -> WritePlan<R> {
        if flags == 0 && self.slices.is_settled(place.way) {
            return WritePlan::InPlace { host, len };
        }
        WritePlan::Fresh { host, len, ticket: self.ticket(place.slice) }
    }

    /// Maps clusters of the reserve where the old contents are zeroes (R2).
    fn plan_fresh(
        &mut self,
        place: EntryPlace,
        at: GuestOffset,
        len: u64,
        below: bool,
    ) -> Result<WritePlan<R>, Stop> {
        let cluster = self.geometry.cluster();
        let wanted = (place.within + len).div_ceil(cluster);
        let mut count = 1;
        while count < wanted && place.index + (count as usize) < self.entries() {
            let guest = GuestOffset(at.0 - place.within + count * cluster);
            let is_zero = match self.mapping(place.way, place.index + count as usize)?.0 {
                Mapping::Zero { .. } => true,
                Mapping::Unallocated | Mapping::Parts { host: None, .. } => below,
                _ => false,
            };
            if !is_zero || self.copies.has(self.geometry.guest_cluster(guest)) {
                break;
            }
            count += 1;
        }
        let Some(run) = self.reserve.take(count) else { return self.wait_for_reserve() };
        let mut old = Vec::new();
        for offset in 0..run.len {
            let index = place.index + offset as usize;
            old.push(self.mapping(place.way, index)?.0);
            let host = self.geometry.host_offset(HostCluster(run.start + offset));
            self.set_entry(place.way, index, Mapping::Data { host, copied: true });
        }
        self.blocks.change(Block::Slice(place.slice));
        let ticket = self.ticket(place.slice);
        old.into_iter().for_each(|mapping| self.retire_mapping(mapping, ticket, false));
        let host = HostOffset(self.geometry.host_offset(HostCluster(run.start)).0 + place.within);
        Ok(WritePlan::Fresh { host, len: len.min(run.len * cluster - place.within), ticket })
    }

    /// Fills a new cluster before it is mapped (R3).
    fn plan_copy(
        &mut self,
        place: EntryPlace,
        at: GuestOffset,
        len: u64,
        old: Mapping,
        from: CopyFrom,
    ) -> Result<WritePlan<R>, Stop> {
        self.check_space()?;
        let Some(run) = self.reserve.take(1) else { return self.wait_for_reserve() };
        let new = HostCluster(run.start);
        let host = self.geometry.host_offset(new);
        let mapping = Mapping::Data { host, copied: true };
        let copy = self.begin_copy(place, at, Some(new), (old, mapping));
        Ok(WritePlan::Copy(CopyPlan { copy, host, fill: 0..self.geometry.cluster(), from, len }))
    }

    /// Writes to allocated subclusters in place, or fills others in the same cluster (R3).
    fn plan_part(
        &mut self,
        place: EntryPlace,
        at: GuestOffset,
        len: u64,
        (old, flags): (Mapping, u64),
        (host, allocated, zero): (HostOffset, u32, u32),
    ) -> Result<WritePlan<R>, Stop> {
        let size = self.geometry.subcluster();
        let first = (place.within / size) as u32;
        let is_allocated = allocated & 1 << first != 0;
        let last = ((place.within + len - 1) / size) as u32;
        let same =
            (first..=last).take_while(|bit| (allocated & 1 << bit != 0) == is_allocated).count() as u32;
        let fill = u64::from(first) * size..u64::from(first + same) * size;
        let len = len.min(fill.end - place.within);
        if is_allocated {
            return Ok(self.in_place(place, HostOffset(host.0 + place.within), len, flags));
        }
        let bits = (u32::MAX >> (u32::BITS - same)) << first;
        let (now, zero_now) = (allocated | bits, zero & !bits);
        let mapping = if now == u32::MAX {
            Mapping::Data { host, copied: true }
        } else {
            Mapping::Parts { host: Some(host), copied: true, allocated: now, zero: zero_now }
        };
        let copy = self.begin_copy(place, at, None, (old, mapping));
        let from = CopyFrom::Parts { host, allocated, zero };
        Ok(WritePlan::Copy(CopyPlan { copy, host, fill, from, len }))
    }

    /// Begins a copy. `mapping` is the entry that follows, `old` the entry before.
    fn begin_copy(
        &mut self,
        place: EntryPlace,
        at: GuestOffset,
        new: Option<HostCluster>,
        (old, mapping): (Mapping, Mapping),
    ) -> Copying<R> {
        let cluster = self.geometry.guest_cluster(at);
        let copy = ClusterCopy { cluster, slice: place.slice, index: place.index, new, old, mapping };
        self.copies.begin(copy)
    }

    /// Maps a cluster that was filled durably.
    pub fn copied(&mut self, copy: Copying<R>) -> Ticket {
        let Some(ClusterCopy { slice, index, new, old, mapping, .. }) = self.copies.end(copy) else {
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
        // Requests of other queues wait for the cluster.
        self.wakers.wake();
        ticket
    }
}
