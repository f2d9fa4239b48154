//! Compares the refcounts, flags and contents of a cut image. It shares no code with the tables.

use super::builder::{Shape, below};
use super::stamps::inflated;
use kickless_qcow2::check;
use kickless_qcow2::entry::{Mapping, decode, decode_l1, load_entries};
use kickless_qcow2::refcount;
use kickless_testing::Stamp;

/// The clusters to check at a time: some windows for an image of the largest size here.
const WINDOW: u64 = 1000;
/// The clusters beyond the end of the file to look at.
const BEYOND: u64 = 200;

/// A file after a cut.
pub(crate) struct Judge<'a> {
    pub(crate) file: &'a [u8],
    pub(crate) shape: Shape,
}

/// The result of comparing refcounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) leaks: u64,
}

impl Judge<'_> {
    fn word(&self, at: u64) -> u64 {
        self.file.get(at as usize..at as usize + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().unwrap()))
    }

    fn word32(&self, at: u64) -> u64 {
        self.word(at) >> 32
    }

    fn cluster(&self) -> u64 {
        self.shape.geometry.cluster()
    }

    fn table(&self, at: u64) -> &[u8] {
        &self.file[at as usize..][..self.cluster() as usize]
    }

    fn count(&self, cluster: u64) -> u64 {
        let geometry = self.shape.geometry;
        let (table, clusters) = (self.word(48), self.word32(56));
        let block = cluster / geometry.block_entries();
        if block >= clusters * self.cluster() / 8 {
            return 0;
        }
        match self.word(table + block * 8) {
            0 => 0,
            at if at + self.cluster() > self.file.len() as u64 => 0,
            at => refcount::get(geometry, self.table(at), cluster % geometry.block_entries()),
        }
    }

    /// Returns the number of clusters within the file with a count of 0.
    pub(crate) fn free(&self) -> u64 {
        let clusters = self.file.len() as u64 / self.cluster();
        (0..clusters).filter(|cluster| self.count(*cluster) == 0).count() as u64
    }

    pub(crate) fn size(&self) -> u64 {
        self.word(24)
    }

    /// Compares refcounts and flags with all references.
    pub(crate) fn check(&self) -> Result<Verdict, String> {
        let report = check(&self.file, WINDOW).map_err(|error| error.to_string())?;
        if !report.is_sound() {
            return Err(format!("the check finds {report:?}"));
        }
        let clusters = (self.file.len() as u64).div_ceil(self.cluster());
        // Counts may be raised beyond the end.
        let beyond = (clusters..clusters + BEYOND).filter(|cluster| self.count(*cluster) > 0).count();
        Ok(Verdict { leaks: report.leaks + beyond as u64 })
    }

    /// Returns the contents of a used sector.
    pub(crate) fn read(&self, sector: usize) -> Stamp {
        let (geometry, offset) = (self.shape.geometry, self.shape.offset(sector));
        let table = self.word(self.word(40) + offset / geometry.table_span() * 8);
        let Ok(Some((table, _))) = decode_l1(geometry, table) else { return below(self.shape, offset) };
        let index = offset % geometry.table_span() / self.cluster();
        let raw = load_entries(geometry, self.table(table.0)).nth(index as usize).unwrap();
        let within = offset % self.cluster();
        match decode(geometry, raw).unwrap() {
            Mapping::Unallocated => below(self.shape, offset),
            Mapping::Zero { .. } => 0,
            Mapping::Data { host, .. } => self.word(host.0 + within),
            Mapping::Compressed { at, .. } => inflated(self.word(at.0), within),
            Mapping::Parts { host, allocated, zero, .. } => {
                let bit = 1u32 << (within / geometry.subcluster());
                match host {
                    Some(host) if allocated & bit != 0 => self.word(host.0 + within),
                    _ if zero & bit != 0 => 0,
                    _ => below(self.shape, offset),
                }
            }
        }
    }

    pub(crate) fn sectors(&self) -> impl Iterator<Item = Stamp> {
        (0..self.shape.sectors()).map(|sector| self.read(sector))
    }
}
