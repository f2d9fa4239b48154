//! The cache of L2 tables, which requests read without a lock.
//!
//! Each way of a set is a sequence lock: its number is odd while `Tables` changes it. A reader that has seen
//! the number change looks again. Several words of one entry change together for that reason.

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;

use super::format::entry::{self, BAD, MEMORY_BITS, Mapping, RawEntry};
use super::format::geometry::{Geometry, GuestCluster, GuestOffset, HostOffset, SliceIndex};
use kickless_sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::OnceLock;

/// The slices that can be in one set.
const WAYS: usize = if cfg!(loom) { 1 } else { 4 };
/// The smallest number of sets.
const SETS_MIN: u64 = if cfg!(loom) { 1 } else { 4 };
/// 2^64 over the golden ratio: a multiplication by it carries each bit into the upper half (Knuth, The Art of
/// Computer Programming, volume 3, section 6.4).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// The number of attempts of a look-up.
const ATTEMPTS: usize = 3;
/// Set in a tag if the table above is written, and only the active L1 table refers to it.
const SETTLED: u64 = 1 << 63;
/// Compressed entries have no memory bits: the bits belong to their offset.
const COMPRESSED: u64 = 1 << 62;

/// The longest run from a place with one answer, inside one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Bytes of the file.
    Data {
        /// The place of the first byte.
        host: HostOffset,
        /// The number of bytes.
        len: u64,
        /// Writes may go there: no other entry uses the cluster, and the mapping is written.
        in_place: bool,
    },
    /// Zeroes.
    Zero {
        /// The number of bytes.
        len: u64,
    },
    /// The backing image has it. Without one, it is zeroes.
    Below {
        /// The number of bytes.
        len: u64,
    },
    /// Compressed data of one cluster.
    Compressed {
        /// The place of the compressed data.
        at: HostOffset,
        /// The number of bytes there.
        bytes: u32,
        /// The guest's cluster.
        cluster: GuestCluster,
        /// The number of bytes of the request that lie in the cluster.
        len: u64,
    },
    /// The slice is not cached. `Tables::want` loads it.
    Miss(SliceIndex),
    /// The entry cannot be true.
    Bad,
}

/// The cache. Only `Tables` changes it, under its mutex.
#[derive(Debug)]
pub struct Slices {
    geometry: Geometry,
    unit: u64,
    sets: Box<[[Way; WAYS]]>,
}

#[derive(Debug, Default)]
struct Way {
    seq: AtomicU32,
    /// The number of the slice plus 1, and `SETTLED`. 0: empty.
    tag: AtomicU64,
    used: AtomicU32,
    /// Not 0: an entry cannot be true.
    has_bad: AtomicU32,
    /// The entries. Without words, all entries are 0.
    words: OnceLock<Box<[AtomicU64]>>,
}

/// The place of a slice in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WayIndex(usize, usize);

impl Slices {
    /// Makes an empty cache of about `cache_bytes`, but at least 4 sets of slices of `unit` bytes. Memory is
    /// taken when a slice with entries is first used.
    pub fn new(geometry: Geometry, unit: u64, cache_bytes: u64) -> Self {
        // Rounded up, so that the cache has room for all slices if it has that many bytes.
        let sets = cache_bytes.div_ceil(unit * WAYS as u64).max(SETS_MIN);
        Self { geometry, unit, sets: (0..sets).map(|_| Default::default()).collect() }
    }

    /// Looks up the mapping of `at`, for at most `len` bytes. The caller holds a pin.
    pub fn look(&self, at: GuestOffset, len: u64) -> Look {
        let (slice, index) = self.geometry.slice(self.unit, at);
        for _ in 0..ATTEMPTS {
            let mut is_torn = false;
            for way in &self.sets[self.set_of(slice)] {
                let seq = way.seq.load(Ordering::Acquire);
                let tag = way.tag.load(Ordering::Relaxed);
                if tag & !SETTLED != slice.0 + 1 {
                    continue;
                }
                let look = match way.words.get() {
                    Some(words) => self.run(words, index, at, len, tag & SETTLED != 0),
                    None => self.blank(index, at, len),
                };
                // Pairs with the fence of `change`.
                fence(Ordering::Acquire);
                if seq.is_multiple_of(2) && way.seq.load(Ordering::Relaxed) == seq {
                    if way.used.load(Ordering::Relaxed) == 0 {
                        way.used.store(1, Ordering::Relaxed);
                    }
                    return look;
                }
                is_torn = true;
            }
            if !is_torn {
                break;
            }
        }
        Look::Miss(slice)
    }

    /// Returns whether the first `slices` slices can all be cached at once.
    pub(super) fn has_room(&self, slices: u64) -> bool {
        // They are distributed over the sets in turn.
        slices <= (self.sets.len() * WAYS) as u64
    }

    /// Returns the set of a slice.
    ///
    /// Each run of as many slices as there are sets has one in each set. Each run begins at a pseudo-random
    /// one: otherwise, slices at equal distances, such as those of the block groups of a file system, would
    /// have the same few sets.
    fn set_of(&self, slice: SliceIndex) -> usize {
        let sets = self.sets.len() as u64;
        let (run, within) = (slice.0 / sets, slice.0 % sets);
        let mixed = run.wrapping_mul(GOLDEN);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(GOLDEN);
        // Scales 32 bits to a set without a division. The largest cache has 2^25 sets.
        let first = ((mixed >> 32) * sets) >> 32;
        let set = first + within;
        (if set < sets { set } else { set - sets }) as usize
    }

    /// Returns the answer of a slice whose entries are all 0.
    fn blank(&self, index: usize, at: GuestOffset, len: u64) -> Look {
        let cluster = self.geometry.cluster();
        let left = (self.entries() - index as u64) * cluster - at.0 % cluster;
        Look::Below { len: len.min(left) }
    }

    /// Returns the number of entries of a slice.
    fn entries(&self) -> u64 {
        self.unit / self.geometry.entry_bytes()
    }

    /// Joins the pieces from `at` that have one answer.
    fn run(&self, words: &[AtomicU64], index: usize, at: GuestOffset, len: u64, settled: bool) -> Look {
        let cluster = self.geometry.cluster();
        let entries = self.entries() as usize;
        let mut within = at.0 % cluster;
        let (mut index, mut done) = (index, 0);
        let mut result = Look::Bad;
        while done < len && index < entries {
            let raw = self.load(words, index);
            let (piece, piece_len) = self.piece(raw, at, within, settled);
            let taken = piece_len.min(len - done);
            result = match (result, piece) {
                (_, Look::Bad | Look::Compressed { .. }) if done > 0 => break,
                (Look::Data { host, len, in_place }, Look::Data { host: next, in_place: same, .. })
                    if done > 0 && host.0 + len == next.0 && in_place == same =>
                {
                    Look::Data { host, len: len + taken, in_place }
                }
                (Look::Zero { len }, Look::Zero { .. }) if done > 0 => Look::Zero { len: len + taken },
                (Look::Below { len }, Look::Below { .. }) if done > 0 => Look::Below { len: len + taken },
                (_, _) if done > 0 => break,
                (_, Look::Data { host, in_place, .. }) => Look::Data { host, len: taken, in_place },
                (_, Look::Zero { .. }) => Look::Zero { len: taken },
                (_, Look::Below { .. }) => Look::Below { len: taken },
                (_, Look::Compressed { at, bytes, cluster, .. }) => {
                    return Look::Compressed { at, bytes, cluster, len: taken };
                }
                (_, other) => return other,
            };
            done += taken;
            within += piece_len;
            if within == cluster {
                (within, index) = (0, index + 1);
            }
        }
        result
    }

    /// Returns the answer for the byte `within` of an entry's cluster, and the bytes to the end of its piece.
    fn piece(&self, raw: RawEntry, at: GuestOffset, within: u64, settled: bool) -> (Look, u64) {
        let left = self.geometry.cluster() - within;
        let flags = memory_bits(raw);
        if flags & BAD != 0 {
            return (Look::Bad, left);
        }
        let Ok(mapping) = entry::decode(self.geometry, on_disk(raw)) else { return (Look::Bad, left) };
        let may_write = settled && flags == 0;
        let data = |host: HostOffset, copied: bool| Look::Data {
            host: HostOffset(host.0 + within),
            len: 0,
            in_place: copied && may_write,
        };
        match mapping {
            Mapping::Unallocated => (Look::Below { len: 0 }, left),
            Mapping::Zero { .. } => (Look::Zero { len: 0 }, left),
            Mapping::Data { host, copied } => (data(host, copied), left),
            Mapping::Compressed { at: place, len } => {
                let cluster = self.geometry.guest_cluster(at);
                (Look::Compressed { at: place, bytes: len, cluster, len: 0 }, left)
            }
            Mapping::Parts { host, copied, allocated, zero } => {
                let size = self.geometry.subcluster();
                let bit = 1u32 << (within / size);
                let look = match host {
                    Some(host) if allocated & bit != 0 => data(host, copied),
                    _ if zero & bit != 0 => Look::Zero { len: 0 },
                    _ => Look::Below { len: 0 },
                };
                (look, size - within % size)
            }
        }
    }

    fn load(&self, words: &[AtomicU64], index: usize) -> RawEntry {
        let load = |at: usize| words[at].load(Ordering::Relaxed);
        if self.geometry.extended {
            RawEntry { word: load(2 * index), bitmap: load(2 * index + 1) }
        } else {
            RawEntry { word: load(index), bitmap: 0 }
        }
    }

    // The rest is called under the mutex of `Tables`.

    /// Returns the place of a cached slice.
    pub(super) fn find(&self, slice: SliceIndex) -> Option<WayIndex> {
        let set = self.set_of(slice);
        let way = self.sets[set].iter().position(|way| way.slice() == Some(slice))?;
        Some(WayIndex(set, way))
    }

    /// Chooses a way for a slice: an empty one, or one not used lately whose slice `may_go`.
    pub(super) fn choose(&self, slice: SliceIndex, may_go: impl Fn(SliceIndex) -> bool) -> Option<WayIndex> {
        let set = self.set_of(slice);
        let ways = &self.sets[set];
        if let Some(empty) = ways.iter().position(|way| way.slice().is_none()) {
            return Some(WayIndex(set, empty));
        }
        for _ in 0..2 {
            for (index, way) in ways.iter().enumerate() {
                if way.slice().is_some_and(&may_go) && way.used.swap(0, Ordering::Relaxed) == 0 {
                    return Some(WayIndex(set, index));
                }
            }
        }
        None
    }

    /// Returns the slices in the set of `slice`.
    pub(super) fn neighbours(&self, slice: SliceIndex) -> impl Iterator<Item = SliceIndex> {
        self.sets[self.set_of(slice)].iter().filter_map(Way::slice)
    }

    /// Puts a slice into a way.
    pub(super) fn fill(
        &self,
        at: WayIndex,
        slice: SliceIndex,
        settled: bool,
        entries: impl Iterator<Item = RawEntry>,
    ) {
        let extended = self.geometry.extended;
        self.change(at, |way| {
            let words = self.words(way);
            way.tag.store(tag(slice, settled), Ordering::Relaxed);
            way.used.store(1, Ordering::Relaxed);
            let (mut bits, mut filled) = (0, 0);
            if extended {
                for (raw, [word, bitmap]) in entries.zip(words.as_chunks::<2>().0) {
                    bits |= memory_bits(raw);
                    word.store(raw.word, Ordering::Relaxed);
                    bitmap.store(raw.bitmap, Ordering::Relaxed);
                    filled += 2;
                }
            } else {
                for (raw, word) in entries.zip(words) {
                    bits |= memory_bits(raw);
                    word.store(raw.word, Ordering::Relaxed);
                    filled += 1;
                }
            }
            words[filled..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
            way.has_bad.store(u32::from(bits & BAD != 0), Ordering::Relaxed);
        });
    }

    /// Puts a slice into a way whose entries are all 0. It takes no memory, unless the way has some already.
    pub(super) fn fill_blank(&self, at: WayIndex, slice: SliceIndex, settled: bool) {
        self.change(at, |way| {
            way.tag.store(tag(slice, settled), Ordering::Relaxed);
            way.used.store(1, Ordering::Relaxed);
            let words = way.words.get().into_iter().flatten();
            words.for_each(|word| word.store(0, Ordering::Relaxed));
            way.has_bad.store(0, Ordering::Relaxed);
        });
    }

    /// Returns whether an entry of a slice cannot be true. Then the slice must not change: on disk, such an
    /// entry would lose the bits that say so.
    pub(super) fn has_bad(&self, at: WayIndex) -> bool {
        self.sets[at.0][at.1].has_bad.load(Ordering::Relaxed) != 0
    }

    /// Says whether the table of a cached slice is written and not shared.
    pub(super) fn settle(&self, at: WayIndex, slice: SliceIndex, settled: bool) {
        self.change(at, |way| way.tag.store(tag(slice, settled), Ordering::Relaxed));
    }

    pub(super) fn is_settled(&self, at: WayIndex) -> bool {
        self.sets[at.0][at.1].tag.load(Ordering::Relaxed) & SETTLED != 0
    }

    /// Empties a way.
    pub(super) fn empty(&self, at: WayIndex) {
        self.change(at, |way| way.tag.store(0, Ordering::Relaxed));
    }

    /// Returns an entry with its memory bits.
    pub(super) fn entry(&self, at: WayIndex, index: usize) -> RawEntry {
        self.sets[at.0][at.1].words.get().map_or(RawEntry::default(), |words| self.load(words, index))
    }

    /// Changes entries. `edit` gets each one with its memory bits, and returns the new one.
    pub(super) fn edit(
        &self,
        at: WayIndex,
        indexes: impl IntoIterator<Item = usize>,
        mut edit: impl FnMut(usize, RawEntry) -> RawEntry,
    ) {
        let extended = self.geometry.extended;
        self.change(at, |way| {
            let words = self.words(way);
            for index in indexes {
                let new = edit(index, self.load(words, index));
                if extended {
                    words[2 * index].store(new.word, Ordering::Relaxed);
                    words[2 * index + 1].store(new.bitmap, Ordering::Relaxed);
                } else {
                    words[index].store(new.word, Ordering::Relaxed);
                }
            }
        });
    }

    /// Returns the words of a way, all 0 at first.
    fn words<'a>(&self, way: &'a Way) -> &'a [AtomicU64] {
        way.words.get_or_init(|| (0..self.unit / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn change(&self, at: WayIndex, change: impl FnOnce(&Way)) {
        let way = &self.sets[at.0][at.1];
        let seq = way.seq.load(Ordering::Relaxed);
        way.seq.store(seq.wrapping_add(1), Ordering::Relaxed);
        // Pairs with the fence of `look`.
        fence(Ordering::Release);
        change(way);
        way.seq.store(seq.wrapping_add(2), Ordering::Release);
    }
}

impl Way {
    fn slice(&self) -> Option<SliceIndex> {
        let tag = self.tag.load(Ordering::Relaxed) & !SETTLED;
        tag.checked_sub(1).map(SliceIndex)
    }
}

fn tag(slice: SliceIndex, settled: bool) -> u64 {
    (slice.0 + 1) | if settled { SETTLED } else { 0 }
}

/// Returns the memory bits of an entry.
pub(super) fn memory_bits(raw: RawEntry) -> u64 {
    if raw.word & COMPRESSED != 0 { 0 } else { raw.word & MEMORY_BITS }
}

/// Returns an entry without its memory bits.
pub(super) fn on_disk(raw: RawEntry) -> RawEntry {
    RawEntry { word: raw.word & !memory_bits(raw), ..raw }
}

/// Returns an entry with a memory bit, if it can have one.
pub(super) fn with_bits(raw: RawEntry, bits: u64) -> RawEntry {
    let bits = if raw.word & COMPRESSED != 0 { 0 } else { bits };
    RawEntry { word: raw.word | bits, ..raw }
}
