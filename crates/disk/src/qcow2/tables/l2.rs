//! Plans of writes and of clearing, which change L2 entries.

use super::Tables;
use super::blocks::Block;
use super::l1_table::TableState;
use super::plan::{Clear, ClearPlan, CopyFrom, CopyPlan, Stop, Under, WritePlan};
use super::rule::Rule;
use crate::qcow2::format::entry::{BAD, Mapping, decode};
use crate::qcow2::format::geometry::{GuestOffset, HostCluster, HostOffset, SliceIndex, Version};
use crate::qcow2::slices::{WayIndex, memory_bits, on_disk};
use kickless_io::{Errno, Waker};

/// A cached slice whose entries may change.
#[derive(Clone, Copy, Debug)]
struct Place {
    slice: SliceIndex,
    way: WayIndex,
    index: usize,
    within: u64,
}

impl Tables {
    /// Plans a write of `len` bytes at `at`. `under` is about all clusters that the range touches, whole. The
    /// caller holds a pin, and drops it before it waits.
    pub(crate) fn plan_write(&mut self, at: GuestOffset, len: u64, under: Under, waker: &Waker) -> WritePlan {
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
        waker: &Waker,
    ) -> Result<WritePlan, Stop> {
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

    /// Finds the cached slice of `at`. For a change of its entries, its table must be our own.
    fn place(&mut self, at: GuestOffset, to_change: bool, waker: &Waker) -> Result<Place, Stop> {
        if self.is_bad {
            return Err(Stop::Fail(Errno::IO));
        }
        let (slice, index) = self.geometry.slice(self.options.unit, at);
        let table = self.table_of(slice);
        if let Some(errno) = self.l1.failed.take(&table) {
            return Err(Stop::Fail(errno));
        }
        if self.l1.copies.contains_key(&table) {
            // A failed move of the L1 table is tried again.
            return if self.l1_moves() { self.wait_for_reserve() } else { Err(Stop::Wait) };
        }
        let Some(way) = self.slices.find(slice) else {
            self.want(slice, waker).map_err(Stop::Fail)?;
            return Err(Stop::Wait);
        };
        if to_change && self.slices.has_bad(way) {
            self.found_bad();
            return Err(Stop::Fail(Errno::IO));
        }
        if to_change {
            match self.table_state(table) {
                TableState::Own(_) => {}
                TableState::Absent | TableState::Shared(_) if self.l1_moves() => {
                    return self.wait_for_reserve();
                }
                TableState::Absent if self.link_table(table) => {}
                TableState::Shared(at) => match self.count_of(at).map_err(Stop::Fail)? {
                    None => return self.wait_for_reserve(),
                    // Only the flag was missing.
                    Some(1) => self.own_table(table, at),
                    Some(_) if self.copy_table(table, at) => return Err(Stop::Wait),
                    Some(_) => return self.wait_for_reserve(),
                },
                TableState::Absent => return self.wait_for_reserve(),
                TableState::Bad => {
                    self.found_bad();
                    return Err(Stop::Fail(Errno::IO));
                }
            }
        }
        if self.copies.has(self.geometry.guest_cluster(at)) {
            return Err(Stop::Wait);
        }
        Ok(Place { slice, way, index, within: at.0 % self.geometry.cluster() })
    }

    fn wait_for_reserve<T>(&mut self) -> Result<T, Stop> {
        self.demand().map_err(Stop::Fail)?;
        Err(Stop::Wait)
    }

    /// Returns an entry and its memory bits.
    fn mapping(&mut self, way: WayIndex, index: usize) -> Result<(Mapping, u64), Stop> {
        let raw = self.slices.entry(way, index);
        let flags = memory_bits(raw);
        match decode(self.geometry, on_disk(raw)) {
            Ok(mapping) if flags & BAD == 0 => Ok((mapping, flags)),
            _ => {
                self.found_bad();
                Err(Stop::Fail(Errno::IO))
            }
        }
    }

    /// Writes to a cluster that is our own, and to those that follow it in the file.
    fn plan_in_place(&mut self, place: Place, host: HostOffset, len: u64, flags: u64) -> WritePlan {
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
    fn in_place(&mut self, place: Place, host: HostOffset, len: u64, flags: u64) -> WritePlan {
        if flags == 0 && self.slices.is_settled(place.way) {
            return WritePlan::InPlace { host, len };
        }
        WritePlan::Fresh { host, len, ticket: self.ticket(place.slice) }
    }

    /// Returns the number of entries of a slice.
    pub(super) fn entries(&self) -> usize {
        (self.options.unit / self.geometry.entry_bytes()) as usize
    }

    /// Maps clusters of the reserve where the old contents are zeroes (R2).
    fn plan_fresh(
        &mut self,
        place: Place,
        at: GuestOffset,
        len: u64,
        below: bool,
    ) -> Result<WritePlan, Stop> {
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
        place: Place,
        at: GuestOffset,
        len: u64,
        old: Mapping,
        from: CopyFrom,
    ) -> Result<WritePlan, Stop> {
        self.check_space()?;
        let Some(run) = self.reserve.take(1) else { return self.wait_for_reserve() };
        let new = HostCluster(run.start);
        let host = self.geometry.host_offset(new);
        let mapping = Mapping::Data { host, copied: true };
        let guest = self.geometry.guest_cluster(at);
        let copy = self.begin_copy(guest, (place.slice, place.index), Some(new), (old, mapping));
        Ok(WritePlan::Copy(CopyPlan { copy, host, fill: 0..self.geometry.cluster(), from, len }))
    }

    /// Writes to allocated subclusters in place, or fills others in the same cluster (R3).
    fn plan_part(
        &mut self,
        place: Place,
        at: GuestOffset,
        len: u64,
        (old, flags): (Mapping, u64),
        (host, allocated, zero): (HostOffset, u32, u32),
    ) -> Result<WritePlan, Stop> {
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
        let guest = self.geometry.guest_cluster(at);
        let copy = self.begin_copy(guest, (place.slice, place.index), None, (old, mapping));
        let from = CopyFrom::Parts { host, allocated, zero };
        Ok(WritePlan::Copy(CopyPlan { copy, host, fill, from, len }))
    }

    /// Unmaps or zeroes whole clusters of a range, at most one slice.
    pub(crate) fn clear(&mut self, at: GuestOffset, len: u64, how: Clear, waker: &Waker) -> ClearPlan {
        self.end_given_up();
        let plan = match self.try_clear(at, len, how, waker) {
            Ok(plan) => plan,
            Err(Stop::Fail(errno)) => ClearPlan::Fail(errno),
            Err(Stop::Wait) => {
                self.wakers.add(waker);
                ClearPlan::Wait
            }
        };
        self.progress();
        plan
    }

    fn try_clear(&mut self, at: GuestOffset, len: u64, how: Clear, waker: &Waker) -> Result<ClearPlan, Stop> {
        let place = self.place(at, false, waker)?;
        let cluster = self.geometry.cluster();
        let left = (self.entries() - place.index) as u64 * cluster - place.within;
        let len = len.min(left);
        if place.within != 0 || len < cluster {
            return self.clear_part(place, len.min(cluster - place.within));
        }
        let (mut changes, mut count) = (Vec::new(), 0);
        let mut data = None;
        for index in place.index..place.index + (len / cluster) as usize {
            let guest = GuestOffset(at.0 + count * cluster);
            if self.copies.has(self.geometry.guest_cluster(guest)) {
                break;
            }
            let (old, _) = self.mapping(place.way, index)?;
            match self.cleared(old, how) {
                Some(new) if new != old => changes.push((index, old, new)),
                Some(_) => {}
                None => {
                    data = Some(ClearPlan::Data { len: cluster });
                    break;
                }
            }
            count += 1;
        }
        match data {
            Some(data) if count == 0 => return Ok(data),
            _ if count == 0 => return Err(Stop::Wait),
            _ => {}
        }
        if !changes.is_empty() {
            self.check_space()?;
            // This may copy the table, and then the request comes again.
            self.place(at, true, waker)?;
            for (index, _, new) in &changes {
                self.set_entry(place.way, *index, *new);
            }
            self.blocks.change(Block::Slice(place.slice));
        }
        let ticket = self.ticket(place.slice);
        for (_, old, new) in changes {
            if !matches!(new, Mapping::Zero { kept: Some(_), .. }) {
                self.retire_mapping(old, ticket, true);
            }
        }
        Ok(ClearPlan::Done { len: count * cluster, ticket })
    }

    /// Returns the entry of a cleared cluster. `None`: zeroes must be written as data.
    fn cleared(&self, old: Mapping, how: Clear) -> Option<Mapping> {
        let has_zero = self.geometry.version != Version::V2;
        match (how, old) {
            (_, Mapping::Unallocated) if !self.has_backing => Some(old),
            (_, Mapping::Zero { kept: None, .. }) | (Clear::Zero, Mapping::Zero { .. }) => Some(old),
            (Clear::Zero, Mapping::Data { host, copied: true }) if has_zero => {
                Some(Mapping::Zero { kept: Some(host), copied: true })
            }
            (Clear::Zero, Mapping::Parts { host: Some(host), copied: true, .. }) => {
                Some(Mapping::Zero { kept: Some(host), copied: true })
            }
            (Clear::Zero, Mapping::Data { copied: true, .. }) => None,
            _ if !self.has_backing => Some(Mapping::Unallocated),
            _ if has_zero => Some(Mapping::Zero { kept: None, copied: false }),
            // A discard is advice.
            (Clear::Discard, _) => Some(old),
            _ => None,
        }
    }

    /// Clears a part of a cluster. Where it reads as zeroes already, only earlier changes are waited for.
    fn clear_part(&mut self, place: Place, len: u64) -> Result<ClearPlan, Stop> {
        let is_zero = match self.mapping(place.way, place.index)?.0 {
            Mapping::Zero { .. } => true,
            Mapping::Unallocated => !self.has_backing,
            _ => false,
        };
        if !is_zero {
            return Ok(ClearPlan::Data { len });
        }
        Ok(ClearPlan::Done { len, ticket: self.ticket(place.slice) })
    }
}
