//! Knows which values each sector may have, and compares what a guest reads.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, bail, ensure};
use kickless_testing::{Random, SectorModel, Stamp};

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// The contents that the disk may have.
pub struct Oracle {
    model: SectorModel,
    now: u64,
    /// The time of the last loss.
    lost_at: u64,
    next_stamp: Stamp,
    snapshots: BTreeMap<String, SectorModel>,
}

/// A change of sectors that has begun.
#[derive(Clone, Debug)]
pub struct Change {
    sectors: Range<usize>,
    stamp: Stamp,
    started: u64,
}

impl Oracle {
    /// Makes the oracle of a disk of zeroes.
    pub fn new(sectors: usize) -> Oracle {
        let model = SectorModel::new(std::iter::repeat_n(0, sectors));
        Oracle { model, now: 1, lost_at: 0, next_stamp: 1, snapshots: BTreeMap::new() }
    }

    /// Returns the number of sectors.
    pub fn sectors(&self) -> usize {
        self.model.sectors()
    }

    /// Returns a time after all events so far.
    pub fn now(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Notes the start of a write. Returns its data too.
    pub fn write(&mut self, sectors: Range<usize>) -> (Change, Vec<u8>) {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        let data = sectors.clone().flat_map(|sector| contents(sector, stamp)).collect();
        (self.change(sectors, stamp), data)
    }

    /// Notes the start of a request that leaves zeroes.
    pub fn zero(&mut self, sectors: Range<usize>) -> Change {
        self.change(sectors, 0)
    }

    fn change(&mut self, sectors: Range<usize>, stamp: Stamp) -> Change {
        let started = self.now();
        sectors.clone().for_each(|sector| self.model.start(sector, stamp, started));
        Change { sectors, stamp, started }
    }

    /// Notes the end of a change. One that is not sure may have happened or not, sector by sector. A durable
    /// one is on stable storage.
    pub fn end(&mut self, change: &Change, is_sure: bool, is_durable: bool) {
        let (id, now) = ((change.stamp, change.started), self.now());
        // Its answer may be older than the loss.
        let is_sure = is_sure && change.started > self.lost_at;
        for sector in change.sectors.clone() {
            self.model.end(sector, id, is_sure, now);
            if is_sure && is_durable {
                self.model.written_through(sector, id);
            }
        }
    }

    /// Notes that all requests that had ended at `began` are on stable storage.
    pub fn flushed(&mut self, began: u64) {
        self.model.flushed(began);
    }

    /// Notes that all requests that have ended are on stable storage, where each host finds them.
    pub fn all_flushed(&mut self) {
        let now = self.now();
        self.model.flushed(now);
    }

    /// Notes that unflushed requests may be lost.
    pub fn lost(&mut self) {
        self.lost_at = self.now();
        self.model.lost();
    }

    /// Returns whether a request has succeeded that may not be on stable storage.
    pub fn has_unflushed(&self) -> bool {
        self.model.has_unflushed()
    }

    /// Returns the values that a read may return which begins now.
    pub fn readable(&self, sectors: Range<usize>) -> Vec<Vec<Stamp>> {
        sectors.map(|sector| self.model.readable(sector)).collect()
    }

    /// Compares the data of a read that begins at `first` with the values that it may return.
    ///
    /// # Errors
    /// A sector has another value.
    pub fn compare(&self, first: usize, readable: &[Vec<Stamp>], data: &[u8]) -> Result<()> {
        for (index, (bytes, stamps)) in data.chunks(SECTOR).zip(readable).enumerate() {
            let sector = first + index;
            if stamps.iter().any(|stamp| bytes == contents(sector, *stamp)) {
                continue;
            }
            let word = u64::from_le_bytes(bytes[..8].try_into()?);
            // Names the value if it is one of this disk.
            let found = (0..self.next_stamp)
                .flat_map(|stamp| [sector, word as usize >> 32].map(|of| (of, stamp)))
                .find(|(of, stamp)| bytes == contents(*of, *stamp));
            let Some((of, stamp)) = found else {
                bail!("sector {sector} has bytes that were never written, {:02x?}", &bytes[..16])
            };
            bail!(
                "sector {sector} has value {stamp} of sector {of}, but may have {stamps:?} only; {:?}",
                self.model.values(sector)
            );
        }
        ensure!(data.len() == readable.len() * SECTOR, "a read of {} bytes", data.len());
        Ok(())
    }

    /// Changes the size. What is added is zero, and on stable storage.
    pub fn resize(&mut self, sectors: usize) {
        self.model.resize(sectors);
    }

    /// Replaces the contents by zeroes, and forgets the snapshots.
    pub fn replace(&mut self, sectors: usize) {
        self.model = SectorModel::new(std::iter::repeat_n(0, sectors));
        self.snapshots.clear();
    }

    /// Returns the names of the snapshots.
    pub fn snapshots(&self) -> impl Iterator<Item = &String> {
        self.snapshots.keys()
    }

    /// Takes a snapshot of a disk that nothing uses.
    pub fn take_snapshot(&mut self, name: &str) {
        self.snapshots.insert(name.to_owned(), self.model.clone());
    }

    /// Returns to a snapshot.
    pub fn apply_snapshot(&mut self, name: &str) {
        if let Some(model) = self.snapshots.get(name) {
            self.model = model.clone();
        }
    }

    /// Forgets a snapshot.
    pub fn delete_snapshot(&mut self, name: &str) {
        self.snapshots.remove(name);
    }
}

/// Returns the contents of a sector with this value.
fn contents(sector: usize, stamp: Stamp) -> Vec<u8> {
    if stamp == 0 {
        return vec![0; SECTOR];
    }
    // The first word names the sector and the value. The rest differs from sector to sector.
    let name = (sector as u64) << 32 | stamp;
    let mut bytes = Random(name).bytes(SECTOR as u64);
    bytes[..8].copy_from_slice(&name.to_le_bytes());
    bytes
}
