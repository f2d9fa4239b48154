//! Loads slices into the cache.

use super::Tables;
use super::blocks::Block;
use super::ops::{OpPurpose, SliceLoad, TableOpKind};
use super::state::TableState;
use crate::format::entry::{BAD, Mapping, PlainHosts, RawEntry, decode, load_entries, plain_hosts};
use crate::format::geometry::{Geometry, HostOffset, SliceIndex};
use crate::runtime::Runtime;
use crate::slices::WayIndex;
use rustix::io::Errno;

/// The bytes that are read at once where the cache has room for all tables: a whole table of the default
/// size, as in QEMU. Its 8192 entries take some 30 microseconds under the lock. So random requests to a table
/// wait for two reads at most, and a table that one request needs costs 4 KiB.
const READ_BYTES: u64 = 64 << 10;

impl<R: Runtime> Tables<R> {
    /// Loads a slice. The waker is signalled when it is there, or at once if it is there already.
    ///
    /// # Errors
    /// An earlier attempt failed, the table cannot be there, or there is no memory.
    pub fn want(&mut self, slice: SliceIndex, waker: &R::Waker) -> Result<(), Errno> {
        self.end_given_up();
        if let Some(errno) = self.failed_loads.take(&slice) {
            return Err(errno);
        }
        if self.slices.find(slice).is_some() {
            R::wake(waker);
            return Ok(());
        }
        self.wakers.add(waker);
        if self.loading.contains_key(&slice) || self.l1.copies.contains_key(&self.table_of(slice)) {
            return Ok(());
        }
        match self.table_state(self.table_of(slice)) {
            TableState::Bad => {
                self.found_bad();
                Err(Errno::IO)
            }
            TableState::Absent => {
                let way = self.choose_way(slice)?;
                if let Some(way) = way {
                    self.slices.fill_blank(way, slice, false);
                    R::wake(waker);
                }
                Ok(())
            }
            TableState::Own(table) | TableState::Shared(table) => {
                let load = self.load_for(slice);
                self.start_load(load, table)
            }
        }
    }

    /// Returns the slices to read for one of them. The first read of a table reads this slice alone. The next
    /// one reads others too, but only if no slice ever has to leave the cache for them. So their buffers take
    /// no more memory than the cache.
    fn load_for(&self, wanted: SliceIndex) -> SliceLoad {
        let alone = SliceLoad { first: wanted, count: 1, wanted };
        let per_table = self.slices_per_table();
        let all = self.geometry.l1_entries_for(self.size).saturating_mul(per_table);
        if !self.slices.has_room(all) {
            return alone;
        }
        // Both numbers are powers of two, so the slices are in one table.
        let count = per_table.min(READ_BYTES / self.options.unit).max(1);
        let load = SliceLoad { first: SliceIndex(wanted.0 - wanted.0 % count), count, wanted };
        let is_known = |slice| self.slices.find(slice).is_some() || self.loading.contains_key(&slice);
        if load.slices().any(is_known) { load } else { alone }
    }

    fn start_load(&mut self, load: SliceLoad, table: HostOffset) -> Result<(), Errno> {
        let unit = self.options.unit;
        let buffer = self.ops.buffer(load.count * unit, unit)?;
        let at = self.place_in(table, load.first);
        self.ops.queue(OpPurpose::Load(load), TableOpKind::Read { at, buffer });
        for slice in load.slices() {
            if self.slices.find(slice).is_none() {
                let at = self.place_in(table, slice);
                self.loading.entry(slice).or_insert(at);
            }
        }
        Ok(())
    }

    /// Chooses a way for a slice. If all have changes that are not written, the request waits, or fails with
    /// the error of such a write.
    fn choose_way(&mut self, slice: SliceIndex) -> Result<Option<WayIndex>, Errno> {
        let may_go =
            |old: SliceIndex| !self.blocks.is_dirty(Block::Slice(old)) && !self.copies.use_slice(old);
        if let Some(way) = self.slices.choose(slice, may_go) {
            return Ok(Some(way));
        }
        let neighbours: Vec<_> = self.slices.neighbours(slice).collect();
        for old in neighbours {
            if let Some(errno) = self.blocks.failure(Block::Slice(old)) {
                self.blocks.need(Block::Slice(old));
                return Err(errno);
            }
        }
        Ok(None)
    }

    /// Takes slices that were read.
    pub(super) fn loaded(&mut self, load: SliceLoad, buffer: Option<R::Buffer>, result: Result<(), Errno>) {
        let buffer = match (buffer, result) {
            (Some(buffer), Ok(())) => buffer,
            (_, result) => return self.load_failed(load, result.err().unwrap_or(Errno::IO)),
        };
        for (slice, bytes) in load.slices().zip(buffer.chunks_exact(self.options.unit as usize)) {
            self.slice_loaded(slice, bytes);
        }
    }

    fn load_failed(&mut self, load: SliceLoad, errno: Errno) {
        for slice in load.slices() {
            self.loading.remove(&slice);
        }
        let wanted = load.wanted;
        let table = match self.table_state(self.table_of(wanted)) {
            TableState::Own(table) | TableState::Shared(table) => Some(table),
            TableState::Absent | TableState::Bad => None,
        };
        // Only a part of the slices may be unreadable.
        let alone = SliceLoad { first: wanted, count: 1, wanted };
        let is_again = load.count > 1 && table.is_some_and(|table| self.start_load(alone, table).is_ok());
        if !is_again {
            self.failed_loads.put(wanted, errno);
        }
    }

    /// Takes a slice that was read.
    fn slice_loaded(&mut self, slice: SliceIndex, bytes: &[u8]) {
        // It was in the cache already, or another read has brought it.
        let Some(from) = self.loading.remove(&slice) else { return };
        let table = self.table_of(slice);
        let now = match self.table_state(table) {
            TableState::Own(at) | TableState::Shared(at) => Some(self.place_in(at, slice)),
            TableState::Absent | TableState::Bad => None,
        };
        if now != Some(from) {
            // The table was copied meanwhile. The request asks again.
            return;
        }
        match self.choose_way(slice) {
            Ok(Some(way)) => {
                let (settled, geometry) = (self.is_settled(table), self.geometry);
                let entries = load_entries(geometry, bytes);
                if is_zero(bytes) {
                    self.slices.fill_blank(way, slice, settled);
                } else if self.are_all_data(bytes) {
                    self.slices.fill(way, slice, settled, entries);
                } else {
                    let is_data = |host| self.is_data(geometry.host_cluster(host).0);
                    let entries = entries.map(|raw| checked(geometry, raw, is_data));
                    self.slices.fill(way, slice, settled, entries);
                }
            }
            // The request asks again.
            Ok(None) => {}
            Err(errno) => {
                self.failed_loads.put(slice, errno);
            }
        }
    }

    /// Returns whether a cluster of the file can have data.
    #[inline]
    fn is_data(&self, cluster: u64) -> bool {
        cluster < self.bound && !self.known.contains(cluster)
    }

    /// Returns whether all entries of a slice can be true, by a look at all of them together. If not, each is
    /// looked at by itself, which takes several times as long.
    fn are_all_data(&self, bytes: &[u8]) -> bool {
        let cluster = |host| self.geometry.host_cluster(host).0;
        match plain_hosts(self.geometry, bytes) {
            PlainHosts::None => true,
            PlainHosts::Within(first, last) => {
                cluster(last) < self.bound && !self.known.has_any(cluster(first), cluster(last))
            }
            PlainHosts::Unknown => false,
        }
    }
}

/// Returns whether all bytes of a slice are zero.
fn is_zero(bytes: &[u8]) -> bool {
    // Without an early end, this takes 16 bytes at a time.
    bytes.as_chunks::<8>().0.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word)) == 0
}

/// Returns an entry from the disk, marked if it cannot be true: if not all its clusters are those of data.
#[inline]
fn checked(geometry: Geometry, raw: RawEntry, is_data: impl Fn(HostOffset) -> bool) -> RawEntry {
    if raw == RawEntry::default() {
        return raw;
    }
    let is_good = match decode(geometry, raw) {
        Ok(Mapping::Data { host, .. } | Mapping::Zero { kept: Some(host), .. }) => is_data(host),
        Ok(Mapping::Parts { host: Some(host), .. }) => is_data(host),
        // At least one byte is there. Those behind the end of the last sector do not count.
        Ok(Mapping::Compressed { at, len }) => is_data(at) && is_data(HostOffset(at.0 + u64::from(len) - 1)),
        Ok(_) => true,
        Err(_) => false,
    };
    match is_good {
        true => raw,
        // Entries of compressed clusters have no memory bits. A slice with a bad entry is never written, so
        // nothing else of the entry is needed.
        false => RawEntry { word: BAD, bitmap: 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::encode;
    use crate::format::geometry::Version;
    use crate::slices::memory_bits;

    /// Clusters of data are those below 10.
    #[test]
    fn an_entry_that_leaves_the_clusters_of_data_is_marked() {
        let geometry = Geometry::new(Version::V3, 12, 4, false).unwrap();
        let host = |cluster: u64| HostOffset(cluster << 12);
        let is_bad = |mapping| {
            let is_data = |at| geometry.host_cluster(at).0 < 10;
            memory_bits(checked(geometry, encode(geometry, mapping), is_data)) & BAD != 0
        };
        for copied in [false, true] {
            let data = |at| Mapping::Data { host: host(at), copied };
            let zero = |at| Mapping::Zero { kept: Some(host(at)), copied };
            assert_eq!([data(9), data(10), zero(9), zero(10)].map(is_bad), [false, true, false, true]);
        }
        // Its last byte may lie in the next cluster.
        let compressed = |at, len| Mapping::Compressed { at: HostOffset(at), len };
        let end = host(10).0;
        let inside = [compressed(end - 512, 512), compressed(end - 4096, 4096)];
        let outside = [compressed(end - 512, 1024), compressed(end, 512), compressed(1 << 40, 512)];
        assert_eq!((inside.map(is_bad), outside.map(is_bad)), ([false; 2], [true; 3]));
    }
}
