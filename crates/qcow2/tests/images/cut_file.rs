//! A file that remembers what may be on stable storage.

use fastrand::Rng;
use std::collections::BTreeMap;

pub(crate) const SECTOR: usize = 512;
pub(crate) type Sector = [u8; SECTOR];

/// The number of a write in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WriteId(u64);

/// The file. Its length is a multiple of a sector.
#[derive(Debug, Default)]
pub(crate) struct CutFile {
    /// All completed writes.
    now: Vec<u8>,
    /// The writes before the last sync.
    durable: Vec<u8>,
    /// The values since the last sync, in the order of completion.
    later: BTreeMap<usize, Vec<(u64, Sector)>>,
    later_len: Vec<(u64, usize)>,
    in_flight: BTreeMap<WriteId, (usize, Vec<u8>)>,
    /// Its length never changes.
    is_device: bool,
    /// The number of completed writes.
    completed: u64,
    next: u64,
}

impl CutFile {
    pub(crate) fn new(bytes: Vec<u8>, is_device: bool) -> Self {
        Self { now: bytes.clone(), durable: bytes, is_device, ..Self::default() }
    }

    pub(crate) fn now(&self) -> &[u8] {
        &self.now
    }

    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        into.fill(0);
        let end = (at + into.len()).min(self.now.len());
        if at < end {
            into[..end - at].copy_from_slice(&self.now[at..end]);
        }
    }

    pub(crate) fn submit(&mut self, at: usize, bytes: Vec<u8>) -> WriteId {
        assert!(at.is_multiple_of(SECTOR) && bytes.len().is_multiple_of(SECTOR), "unaligned write");
        let is_inside = at + bytes.len() <= self.now.len();
        assert!(!self.is_device || is_inside, "a write at {at} beyond the end of the device");
        self.next += 1;
        self.in_flight.insert(WriteId(self.next), (at, bytes));
        WriteId(self.next)
    }

    /// Lets a write in flight end after so many bytes.
    pub(crate) fn shorten(&mut self, id: WriteId, len: usize) {
        self.in_flight.get_mut(&id).unwrap().1.truncate(len);
    }

    /// Completes a write.
    pub(crate) fn complete(&mut self, id: WriteId) {
        let (at, bytes) = self.in_flight.remove(&id).unwrap();
        self.completed += 1;
        for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            self.land(at / SECTOR + index, sector);
        }
    }

    /// Completes a write that is on stable storage then.
    pub(crate) fn complete_durable(&mut self, id: WriteId) {
        let (at, len) = self.in_flight.get(&id).map(|(at, bytes)| (*at, bytes.len())).unwrap();
        self.complete(id);
        for sector in at / SECTOR..(at + len) / SECTOR {
            self.settle(sector, u64::MAX);
        }
    }

    /// Fails a write. Each sector is written or not.
    pub(crate) fn fail(&mut self, id: WriteId, rng: &mut Rng) {
        let (at, bytes) = self.in_flight.remove(&id).unwrap();
        self.completed += 1;
        for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            if rng.bool() {
                self.land(at / SECTOR + index, sector);
            }
        }
    }

    fn land(&mut self, sector: usize, bytes: &Sector) {
        let at = sector * SECTOR;
        if self.now.len() < at + SECTOR {
            self.now.resize(at + SECTOR, 0);
            self.later_len.push((self.completed, at + SECTOR));
        }
        self.now[at..at + SECTOR].copy_from_slice(bytes);
        self.later.entry(sector).or_default().push((self.completed, *bytes));
    }

    pub(crate) fn sync_begins(&self) -> u64 {
        self.completed
    }

    /// Ends a sync: the writes that had completed when it began are on stable storage.
    pub(crate) fn synced(&mut self, mark: u64) {
        for (_, len) in self.later_len.extract_if(.., |(number, _)| *number <= mark) {
            if self.durable.len() < len {
                self.durable.resize(len, 0);
            }
        }
        let sectors: Vec<usize> = self.later.keys().copied().collect();
        for sector in sectors {
            self.settle(sector, mark);
        }
    }

    fn settle(&mut self, sector: usize, mark: u64) {
        let Some(values) = self.later.get_mut(&sector) else { return };
        let mut settled = values.extract_if(.., |(number, _)| *number <= mark);
        if let Some((_, bytes)) = settled.by_ref().last() {
            let at = sector * SECTOR;
            if self.durable.len() < at + SECTOR {
                self.durable.resize(at + SECTOR, 0);
            }
            self.durable[at..at + SECTOR].copy_from_slice(&bytes);
        }
        drop(settled);
        if values.is_empty() {
            self.later.remove(&sector);
        }
    }

    /// Returns the file after a kill: all completed writes, and any part of those in flight.
    pub(crate) fn kill(&self, rng: &mut Rng) -> Vec<u8> {
        let mut file = self.now.clone();
        let mut writes: Vec<_> = self.in_flight.values().collect();
        rng.shuffle(&mut writes);
        for (at, bytes) in writes {
            let share = rng.choice([0.0, 0.5, 1.0]).unwrap();
            for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
                if rng.f64() < share {
                    put(&mut file, at / SECTOR + index, sector);
                }
            }
        }
        file
    }

    /// Returns the file after a power cut: each sector has one of its values since the last sync.
    pub(crate) fn power_cut(&self, rng: &mut Rng) -> Vec<u8> {
        let mut values: BTreeMap<usize, Vec<&Sector>> = BTreeMap::new();
        for (sector, list) in &self.later {
            values.entry(*sector).or_default().extend(list.iter().map(|(_, bytes)| bytes));
        }
        for (at, bytes) in self.in_flight.values() {
            for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
                values.entry(at / SECTOR + index).or_default().push(sector);
            }
        }
        let mut file = self.durable.clone();
        // Few losses, and few survivors, are likely as well.
        let lost = rng.choice([0.05, 0.3, 0.7, 0.95]).unwrap();
        for (sector, list) in values {
            if rng.f64() >= lost {
                let recent = rng.bool();
                let index = if recent { list.len() - 1 } else { rng.usize(..list.len()) };
                put(&mut file, sector, list[index]);
            }
        }
        if rng.bool() {
            let lens = std::iter::once(self.durable.len()).chain(self.later_len.iter().map(|(_, len)| *len));
            let lens: Vec<usize> = lens.collect();
            file.resize(lens[rng.usize(..lens.len())], 0);
        }
        file
    }
}

fn put(file: &mut Vec<u8>, sector: usize, bytes: &Sector) {
    let at = sector * SECTOR;
    if file.len() < at + SECTOR {
        file.resize(at + SECTOR, 0);
    }
    file[at..at + SECTOR].copy_from_slice(bytes);
}
