//! Loads slices into the cache.

use super::Tables;
use super::blocks::Block;
use super::l1_table::TableState;
use super::op::TableOpKind;
use super::ops::Purpose;
use crate::qcow2::format::entry::{BAD, Mapping, RawEntry, decode, load_entries};
use crate::qcow2::format::geometry::{Geometry, HostOffset, SliceIndex};
use crate::qcow2::slices::WayIndex;
use kickless_io::{AlignedBuf, Errno, Waker};

impl Tables {
    /// Loads a slice. The waker is signalled when it is there, or at once if it is there already.
    pub(crate) fn want(&mut self, slice: SliceIndex, waker: &Waker) -> Result<(), Errno> {
        self.end_given_up();
        if let Some(errno) = self.failed_loads.take(&slice) {
            return Err(errno);
        }
        if self.slices.find(slice).is_some() {
            waker.wake();
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
                    self.slices.fill(way, slice, false, std::iter::empty());
                    waker.wake();
                }
                Ok(())
            }
            TableState::Own(table) | TableState::Shared(table) => {
                let at = self.place_in(table, slice);
                let buffer = self.ops.buffer(self.options.unit)?;
                self.ops.queue(Purpose::Slice(slice), TableOpKind::Read { at, buffer });
                self.loading.insert(slice, at);
                Ok(())
            }
        }
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

    /// Takes a slice that was read.
    pub(super) fn slice_loaded(
        &mut self,
        slice: SliceIndex,
        buffer: Option<AlignedBuf>,
        result: Result<(), Errno>,
    ) {
        let from = self.loading.remove(&slice);
        let (Ok(()), Some(buffer)) = (result, buffer) else {
            self.failed_loads.put(slice, result.err().unwrap_or(Errno::IO));
            return;
        };
        let table = self.table_of(slice);
        let now = match self.table_state(table) {
            TableState::Own(at) | TableState::Shared(at) => Some(self.place_in(at, slice)),
            TableState::Absent | TableState::Bad => None,
        };
        if now != from {
            // The table was copied meanwhile. The request asks again.
            return;
        }
        match self.choose_way(slice) {
            Ok(Some(way)) => {
                let (geometry, known, bound) = (self.geometry, &self.known, self.bound);
                let is_data = |host| {
                    geometry.host_cluster(host).0 < bound && !known.contains(geometry.host_cluster(host).0)
                };
                let entries = load_entries(geometry, &buffer).map(|raw| checked(geometry, raw, is_data));
                self.slices.fill(way, slice, self.is_settled(table), entries);
            }
            // The request asks again.
            Ok(None) => {}
            Err(errno) => {
                self.failed_loads.put(slice, errno);
            }
        }
    }
}

/// Returns an entry from the disk, marked if it cannot be true: if not all its clusters are those of data.
fn checked(geometry: Geometry, raw: RawEntry, is_data: impl Fn(HostOffset) -> bool) -> RawEntry {
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
    use crate::qcow2::format::entry::encode;
    use crate::qcow2::format::geometry::Version;
    use crate::qcow2::slices::memory_bits;

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
