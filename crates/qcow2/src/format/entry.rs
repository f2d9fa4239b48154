//! The entries of L1 and L2 tables.

use super::geometry::{Geometry, HostCluster, HostOffset, Version};

/// The cluster has exactly one reference.
const COPIED: u64 = 1 << 63;
/// The entry describes compressed data.
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes. Standard entries of version 3 only.
const ZERO: u64 = 1 << 0;
/// The bits of a host offset. Below are 512 bytes, and at most 2^56 bytes can be addressed.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The first offset that cannot be addressed.
pub(crate) const OFFSET_LIMIT: u64 = 1 << 56;

/// A standard entry in memory has changed since the last write of its block was issued.
pub(crate) const UNWRITTEN: u64 = 1 << 1;
/// A standard entry in memory has changed, and the write in flight has the change.
pub(crate) const WRITING: u64 = 1 << 2;
/// An entry in memory cannot be true.
pub(crate) const BAD: u64 = 1 << 3;
/// The bits that an entry in memory may have besides those on disk, where they are reserved.
pub(crate) const MEMORY_BITS: u64 = UNWRITTEN | WRITING | BAD;

/// The unit of the length of compressed data.
const SECTOR: u64 = 512;

/// One L2 entry as stored, in host byte order. `bitmap` is 0 in images without subclusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawEntry {
    /// The descriptor of the cluster.
    pub word: u64,
    /// The bitmap of subclusters: allocated in the lower half, zero in the upper half.
    pub bitmap: u64,
}

/// The place of a guest's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The backing image has it. Without one, it reads as zeroes.
    Unallocated,
    /// Reads as zeroes.
    Zero {
        /// A cluster that the entry keeps. Its bytes are unknown.
        kept: Option<HostOffset>,
        /// Only this entry refers to the kept cluster.
        copied: bool,
    },
    /// A cluster of the file.
    Data {
        /// Its place, at the beginning of a cluster.
        host: HostOffset,
        /// Only this entry refers to it.
        copied: bool,
    },
    /// Compressed data.
    Compressed {
        /// The place, of any alignment.
        at: HostOffset,
        /// The number of bytes to the end of its last sector.
        len: u32,
    },
    /// A cluster with subclusters in different states. A subcluster in neither set is in the backing image,
    /// and none is in both. With extended entries only.
    Parts {
        /// The cluster of the file, at its beginning. Without it, no subcluster is allocated.
        host: Option<HostOffset>,
        /// Only this entry refers to it.
        copied: bool,
        /// The subclusters with data, one bit for each.
        allocated: u32,
        /// The subclusters that read as zeroes.
        zero: u32,
    },
}

/// The reason why an entry cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEntry {
    /// Bits that must be 0.
    #[error("reserved bits are set")]
    Reserved,
    /// The offset is not at the beginning of a cluster.
    #[error("the offset {0:#x} is not aligned")]
    Alignment(u64),
    /// The offset is above 2^56.
    #[error("the offset {0:#x} is too large")]
    Offset(u64),
    /// Compressed data with the flag that permits writes in place.
    #[error("compressed data has the flag COPIED")]
    CopiedCompressed,
    /// A subcluster is allocated and zero.
    #[error("a subcluster is both allocated and zero")]
    BothBits,
    /// A subcluster is allocated without a cluster.
    #[error("subclusters are allocated without a cluster")]
    NoCluster,
}

/// Returns the binary logarithm of the limit of an offset of compressed data. The length is above it.
fn compressed_bits(geometry: Geometry) -> u32 {
    62 - (geometry.cluster_bits - 8)
}

/// Decodes an L2 entry as it is on disk. Each entry of a table that is read is decoded.
///
/// # Errors
/// The reason why the entry cannot be true.
#[inline(always)]
pub fn decode(geometry: Geometry, raw: RawEntry) -> Result<Mapping, BadEntry> {
    let RawEntry { word, bitmap } = raw;
    if word & COMPRESSED != 0 {
        return decode_compressed(geometry, raw);
    }
    let flags = if geometry.extended || geometry.version == Version::V2 { 0 } else { ZERO };
    if word & !(COPIED | OFFSET | flags) != 0 || !geometry.extended && bitmap != 0 {
        return Err(BadEntry::Reserved);
    }
    let (host, copied) = place(geometry, word)?;
    if geometry.extended {
        return decode_parts(host, copied, bitmap);
    }
    Ok(match host {
        _ if word & ZERO != 0 => Mapping::Zero { kept: host, copied },
        Some(host) => Mapping::Data { host, copied },
        None => Mapping::Unallocated,
    })
}

/// Returns the cluster that a standard entry names, and whether its reference is the only one.
#[inline(always)]
fn place(geometry: Geometry, word: u64) -> Result<(Option<HostOffset>, bool), BadEntry> {
    let host = HostOffset(word & OFFSET);
    match () {
        // The flag without a cluster has no meaning.
        () if host.0 == 0 => Ok((None, false)),
        () if geometry.is_aligned(host) => Ok((Some(host), word & COPIED != 0)),
        () => Err(BadEntry::Alignment(host.0)),
    }
}

#[inline(never)]
fn decode_compressed(geometry: Geometry, RawEntry { word, bitmap }: RawEntry) -> Result<Mapping, BadEntry> {
    let bits = compressed_bits(geometry);
    let (at, sectors) = (word & ((1 << bits) - 1), (word & !(COPIED | COMPRESSED)) >> bits);
    match () {
        () if bitmap != 0 => Err(BadEntry::Reserved),
        () if word & COPIED != 0 => Err(BadEntry::CopiedCompressed),
        () if at >= OFFSET_LIMIT => Err(BadEntry::Offset(at)),
        // At most 2^13 + 1 sectors.
        () => {
            Ok(Mapping::Compressed { at: HostOffset(at), len: ((sectors + 1) * SECTOR - at % SECTOR) as u32 })
        }
    }
}

#[inline(never)]
fn decode_parts(host: Option<HostOffset>, copied: bool, bitmap: u64) -> Result<Mapping, BadEntry> {
    let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
    Ok(match (host, allocated, zero) {
        _ if allocated & zero != 0 => return Err(BadEntry::BothBits),
        (None, 1.., _) => return Err(BadEntry::NoCluster),
        (None, 0, 0) => Mapping::Unallocated,
        (_, 0, u32::MAX) => Mapping::Zero { kept: host, copied },
        (Some(host), u32::MAX, 0) => Mapping::Data { host, copied },
        _ => Mapping::Parts { host, copied, allocated, zero },
    })
}

/// Encodes an L2 entry. Offsets are those of a decoded entry or of a cluster below 2^56.
pub fn encode(geometry: Geometry, mapping: Mapping) -> RawEntry {
    let word = |host: Option<HostOffset>, copied: bool| {
        host.map_or(0, |host| host.0 | if copied { COPIED } else { 0 })
    };
    let all = u64::from(u32::MAX);
    match mapping {
        Mapping::Unallocated => RawEntry::default(),
        Mapping::Zero { kept, copied } if geometry.extended => {
            RawEntry { word: word(kept, copied), bitmap: all << 32 }
        }
        Mapping::Zero { kept, copied } => RawEntry { word: word(kept, copied) | ZERO, bitmap: 0 },
        Mapping::Data { host, copied } => {
            RawEntry { word: word(Some(host), copied), bitmap: if geometry.extended { all } else { 0 } }
        }
        Mapping::Compressed { at, len } => {
            let sectors = (at.0 % SECTOR + u64::from(len)).div_ceil(SECTOR) - 1;
            RawEntry { word: COMPRESSED | sectors << compressed_bits(geometry) | at.0, bitmap: 0 }
        }
        Mapping::Parts { host, copied, allocated, zero } => {
            RawEntry { word: word(host, copied), bitmap: u64::from(zero) << 32 | u64::from(allocated) }
        }
    }
}

/// Decodes an L1 entry: the L2 table, and whether its reference is the only one.
///
/// # Errors
/// The reason why the entry cannot be true.
pub fn decode_l1(geometry: Geometry, word: u64) -> Result<Option<(HostOffset, bool)>, BadEntry> {
    if word & !(COPIED | OFFSET) != 0 {
        return Err(BadEntry::Reserved);
    }
    let (table, copied) = place(geometry, word)?;
    Ok(table.map(|table| (table, copied)))
}

/// Encodes the L1 entry of an L2 table with one reference.
pub fn encode_l1(table: HostOffset) -> u64 {
    table.0 | COPIED
}

/// Returns the host clusters that a mapping counts, each once for this entry.
pub fn counted(geometry: Geometry, mapping: Mapping) -> impl Iterator<Item = HostCluster> {
    let (at, len) = match mapping {
        Mapping::Unallocated => (HostOffset(0), 0),
        Mapping::Zero { kept: host, .. } | Mapping::Parts { host, .. } => {
            host.map_or((HostOffset(0), 0), |host| (host, 1))
        }
        Mapping::Data { host, .. } => (host, 1),
        Mapping::Compressed { at, len } => (at, u64::from(len)),
    };
    let first = geometry.host_cluster(at).0;
    let end = if len == 0 { first } else { geometry.host_cluster(HostOffset(at.0 + len - 1)).0 + 1 };
    (first..end).map(HostCluster)
}

/// Returns the cluster whose reference count the flag COPIED is about, and the flag.
pub(crate) fn flagged(mapping: Mapping) -> Option<(HostOffset, bool)> {
    match mapping {
        Mapping::Data { host, copied } => Some((host, copied)),
        Mapping::Zero { kept: host, copied } | Mapping::Parts { host, copied, .. } => {
            host.map(|host| (host, copied))
        }
        Mapping::Unallocated | Mapping::Compressed { .. } => None,
    }
}

/// Returns the host clusters that an entry seems to refer to that cannot be true. QEMU counts them.
pub(crate) fn claimed(geometry: Geometry, raw: RawEntry) -> impl Iterator<Item = HostCluster> {
    let (at, len) = match raw.word & COMPRESSED {
        0 => (raw.word & OFFSET, geometry.cluster()),
        _ => {
            let bits = compressed_bits(geometry);
            let (at, sectors) = (raw.word & ((1 << bits) - 1), (raw.word & !(COPIED | COMPRESSED)) >> bits);
            (at, (sectors + 1) * SECTOR - at % SECTOR)
        }
    };
    let cluster = |at| geometry.host_cluster(HostOffset(at)).0;
    // Nothing is at 0 but the header.
    let (first, end) = if at == 0 { (0, 0) } else { (cluster(at), cluster(at + len - 1) + 1) };
    (first..end).map(HostCluster)
}

/// Returns the place of the L2 table that an L1 entry seems to refer to that cannot be true. QEMU counts what
/// is in that table.
pub(crate) fn claimed_table(geometry: Geometry, word: u64) -> Option<HostOffset> {
    Some(HostOffset(word & OFFSET)).filter(|at| at.0 > 0 && geometry.is_aligned(*at))
}

/// Returns an entry that cannot be true without the flag COPIED, if it has that. QEMU leaves it to compressed
/// data.
pub(crate) fn bad_without_copied(raw: RawEntry) -> Option<u64> {
    (raw.word & (COMPRESSED | COPIED) == COPIED).then_some(raw.word & !COPIED)
}

/// Returns an entry without its cluster, if the place of that is not aligned and nothing reads it.
pub(crate) fn without_misplaced(geometry: Geometry, raw: RawEntry) -> Option<RawEntry> {
    let is_unread = match geometry.extended {
        true => raw.bitmap as u32 == 0,
        false => geometry.version == Version::V3 && raw.word & ZERO != 0,
    };
    let is_misplaced = raw.word & COMPRESSED == 0 && !geometry.is_aligned(HostOffset(raw.word & OFFSET));
    let word = if geometry.extended { 0 } else { ZERO };
    (is_misplaced && is_unread).then_some(RawEntry { word, ..raw })
}

/// Returns the standard entry or L1 entry with another flag COPIED.
pub(crate) fn with_copied(word: u64, copied: bool) -> u64 {
    if copied { word | COPIED } else { word & !COPIED }
}

/// Returns the entries in a part of an L2 table.
pub fn load_entries(geometry: Geometry, bytes: &[u8]) -> impl Iterator<Item = RawEntry> {
    let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
    let size = geometry.entry_bytes() as usize;
    bytes.chunks_exact(size).map(move |entry| RawEntry {
        word: word(entry),
        bitmap: if geometry.extended { word(&entry[8..]) } else { 0 },
    })
}

/// The hosts of all entries of a part of an L2 table, if they need no closer look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlainHosts {
    /// Each entry decodes, and none has a host.
    None,
    /// Each entry decodes to whole clusters at these places or between them, or to none.
    Within(HostOffset, HostOffset),
    /// There may be other entries.
    Unknown,
}

/// Looks at all entries of a part of an L2 table together, without decoding them.
pub(crate) fn plain_hosts(geometry: Geometry, bytes: &[u8]) -> PlainHosts {
    if geometry.extended {
        return PlainHosts::Unknown;
    }
    // An entry without a host becomes the largest number in `lowest`.
    let (mut any, mut lowest, mut highest) = (0, u64::MAX, 0);
    for word in bytes.as_chunks::<8>().0 {
        let word = u64::from_be_bytes(*word);
        any |= word;
        lowest = lowest.min((word & OFFSET).wrapping_sub(1));
        highest = highest.max(word & OFFSET);
    }
    let flags = if geometry.version == Version::V2 { 0 } else { ZERO };
    match () {
        () if any & !(COPIED | OFFSET | flags) != 0 => PlainHosts::Unknown,
        () if !geometry.is_aligned(HostOffset(any & OFFSET)) => PlainHosts::Unknown,
        () if highest == 0 => PlainHosts::None,
        () => PlainHosts::Within(HostOffset(lowest + 1), HostOffset(highest)),
    }
}

/// Stores an entry in a part of an L2 table, which has room for it.
pub fn store_entry(geometry: Geometry, bytes: &mut [u8], index: usize, raw: RawEntry) {
    let size = geometry.entry_bytes() as usize;
    let entry = &mut bytes[index * size..][..size];
    entry[..8].copy_from_slice(&raw.word.to_be_bytes());
    if geometry.extended {
        entry[8..].copy_from_slice(&raw.bitmap.to_be_bytes());
    }
}
