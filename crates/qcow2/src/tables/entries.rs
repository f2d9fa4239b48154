//! The entries of cached slices, for a look or for a change.

use super::Tables;
use super::cluster_run::ClusterRun;
use super::plan::{Stop, Ticket};
use super::state::TableState;
use crate::format::entry::{BAD, Mapping, RawEntry, UNWRITTEN, decode, encode};
use crate::format::geometry::{GuestOffset, SliceIndex};
use crate::runtime::Runtime;
use crate::slices::{WayIndex, memory_bits, on_disk, with_bits};
use rustix::io::Errno;

/// An entry of a cached slice, and a byte of its cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryPlace {
    pub(super) slice: SliceIndex,
    pub(super) way: WayIndex,
    pub(super) index: usize,
    /// The byte, relative to the cluster.
    pub(super) within: u64,
}

impl<R: Runtime> Tables<R> {
    /// Finds the cached slice of `at`. For a change of its entries, its table must be our own.
    pub(super) fn place(
        &mut self,
        at: GuestOffset,
        to_change: bool,
        waker: &R::Waker,
    ) -> Result<EntryPlace, Stop> {
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
        Ok(EntryPlace { slice, way, index, within: at.0 % self.geometry.cluster() })
    }

    /// Returns an entry and its memory bits.
    pub(super) fn mapping(&mut self, way: WayIndex, index: usize) -> Result<(Mapping, u64), Stop> {
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

    /// Returns the number of entries of a slice.
    pub(super) fn entries(&self) -> usize {
        (self.options.unit / self.geometry.entry_bytes()) as usize
    }

    /// Changes an entry in memory. The caller notes the change of the block.
    pub(super) fn set_entry(&mut self, way: WayIndex, index: usize, mapping: Mapping) {
        let raw: RawEntry = with_bits(encode(self.geometry, mapping), UNWRITTEN);
        self.slices.edit(way, index..index + 1, |_, _| raw);
    }

    /// Ends the copies whose owners gave up.
    pub(super) fn end_given_up(&mut self) {
        for new in self.copies.end_given_up() {
            self.retire(ClusterRun { start: new.0, len: 1 }, Ticket::default(), false);
        }
    }

    /// Asks for clusters, and lets the request wait for them.
    pub(super) fn wait_for_reserve<T>(&mut self) -> Result<T, Stop> {
        self.demand().map_err(Stop::Fail)?;
        Err(Stop::Wait)
    }
}
