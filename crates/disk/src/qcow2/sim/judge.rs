//! Compares the refcounts, flags and contents of a cut image. It shares no code with the tables.

use super::builder::{Shape, below};
use super::model::Stamp;
use crate::qcow2::format::entry::{Mapping, counted, decode, decode_l1, load_entries};
use crate::qcow2::format::refcount;

/// The number of the write that stands for the backing image.
pub(super) const BELOW: u64 = 0xff_ffff;
const WRITE_BITS: u32 = 24;
/// The clusters beyond the end of the file to look at.
const BEYOND: u64 = 200;

/// Returns the contents that a write leaves in a sector.
pub(super) fn stamp_of(offset: u64, write: u64) -> Stamp {
    (offset + 1) << WRITE_BITS | write
}

/// Returns whether the contents are those of a sector: zeroes, or any write there.
pub(super) fn is_of(stamp: Stamp, offset: u64) -> bool {
    stamp == 0 || stamp >> WRITE_BITS == offset + 1
}

/// A file after a cut.
pub(super) struct Judge<'a> {
    pub(super) file: &'a [u8],
    pub(super) shape: Shape,
}

/// The result of comparing refcounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) leaks: u64,
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

    pub(super) fn size(&self) -> u64 {
        self.word(24)
    }

    /// Compares refcounts and flags with all references.
    pub(super) fn check(&self) -> Result<Verdict, String> {
        let geometry = self.shape.geometry;
        let clusters = (self.file.len() as u64).div_ceil(self.cluster());
        let mut references = vec![0u64; clusters as usize];
        let mut copied = Vec::new();
        let mut refer = |cluster: u64, why: &str| match references.get_mut(cluster as usize) {
            Some(count) => {
                *count += 1;
                Ok(())
            }
            None => Err(format!("{why} refers to cluster {cluster} beyond the end at {clusters}")),
        };
        refer(0, "file")?;
        let (table, table_clusters) = (self.word(48), self.word32(56));
        for part in 0..table_clusters {
            refer(table / self.cluster() + part, "header")?;
        }
        for block in 0..table_clusters * self.cluster() / 8 {
            let at = self.word(table + block * 8);
            if at != 0 {
                refer(at / self.cluster(), "refcount table")?;
            }
        }
        let mut roots = vec![(self.word(40), self.word32(36), true)];
        if self.word32(60) > 0 {
            let at = self.word(64);
            refer(at / self.cluster(), "header")?;
            roots.push((self.word(at), self.word32(at + 8), false));
        }
        for (l1, entries, is_active) in roots {
            for part in 0..(entries * 8).div_ceil(self.cluster()) {
                refer(l1 / self.cluster() + part, "header")?;
            }
            for index in 0..entries {
                let word = self.word(l1 + index * 8);
                let Some((at, flag)) = decode_l1(geometry, word).map_err(|e| format!("L1: {e}"))? else {
                    continue;
                };
                refer(at.0 / self.cluster(), "L1")?;
                if is_active {
                    copied.push((at.0 / self.cluster(), flag));
                }
                if at.0 + self.cluster() > self.file.len() as u64 {
                    return Err("L2 table beyond the end".to_owned());
                }
                for raw in load_entries(geometry, self.table(at.0)) {
                    let mapping = decode(geometry, raw).map_err(|e| format!("L2: {e}: {raw:x?}"))?;
                    for host in counted(geometry, mapping) {
                        refer(host.0, "L2")?;
                    }
                    match mapping {
                        Mapping::Data { host, copied: flag }
                        | Mapping::Zero { kept: Some(host), copied: flag }
                        | Mapping::Parts { host: Some(host), copied: flag, .. }
                            if is_active =>
                        {
                            copied.push((host.0 / self.cluster(), flag));
                        }
                        _ => {}
                    }
                }
            }
        }
        // Counts may be raised beyond the end.
        let beyond = (clusters..clusters + BEYOND).filter(|cluster| self.count(*cluster) > 0).count();
        let mut verdict = Verdict { leaks: beyond as u64 };
        for (cluster, references) in references.iter().enumerate() {
            let count = self.count(cluster as u64);
            if count < *references {
                return Err(format!("cluster {cluster} has refcount {count}, and {references} references"));
            }
            verdict.leaks += u64::from(count > *references);
        }
        for (cluster, flag) in copied {
            let count = self.count(cluster);
            if flag != (count == 1) {
                return Err(format!("cluster {cluster} has refcount {count}, and COPIED is {flag}"));
            }
        }
        Ok(verdict)
    }

    /// Returns the contents of a used sector.
    pub(super) fn read(&self, sector: usize) -> Stamp {
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

    pub(super) fn sectors(&self) -> impl Iterator<Item = Stamp> {
        (0..self.shape.sectors()).map(|sector| self.read(sector))
    }
}

/// Returns the contents of a sector of a compressed cluster.
pub(super) fn inflated(first: Stamp, within: u64) -> Stamp {
    first + (within << WRITE_BITS)
}
