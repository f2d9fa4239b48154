//! The header, which is at the beginning of an image.

use super::bad_image::BadImage;
use super::entry::OFFSET_LIMIT;
use super::extensions::{self, Bitmaps, Extensions};
use super::geometry::{Geometry, HostOffset, V2_REFCOUNT_ORDER, Version};
use super::numbers::{be32, be64};

/// The header of an image.
#[derive(Clone, Debug)]
pub struct Header {
    /// The sizes of clusters, tables and entries.
    pub geometry: Geometry,
    /// The size of the virtual disk in bytes, rounded down to whole sectors.
    pub size: u64,
    /// The backing image.
    pub backing: Option<Backing>,
    /// The active L1 table, in entries of 8 bytes.
    pub l1: TableAt,
    /// The refcount table, in entries of 8 bytes.
    pub refcounts: TableAt,
    /// The snapshot table, and the number of snapshots.
    pub snapshots: (HostOffset, u32),
    /// The incompatible feature bits.
    pub incompatible: u64,
    /// The autoclear feature bits.
    pub autoclear: u64,
    /// The method of compressed clusters.
    pub compression: Compression,
    /// The persistent bitmaps, if they are consistent.
    pub bitmaps: Option<Bitmaps>,
}

/// The name of a backing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// At most 1023 bytes.
    pub name: Vec<u8>,
    /// The name of its format, if the image states it.
    pub format: Option<String>,
}

/// A format of a backing image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingFormat {
    /// The bytes of the disk.
    Raw,
    /// This format.
    Qcow2,
}

/// The place of a table with entries of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableAt {
    /// The offset in the file.
    pub at: HostOffset,
    /// The number of entries.
    pub entries: u64,
}

/// The method of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Deflate without a header.
    Zlib,
    /// Zstandard frames.
    Zstd,
}

/// One change of the header. All bytes of a change lie in the first 512, so it cannot be torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderChange {
    /// A larger virtual disk, with its L1 table.
    L1AndSize {
        /// The place of the L1 table.
        l1: HostOffset,
        /// The number of its entries.
        entries: u32,
        /// The size of the virtual disk in bytes.
        size: u64,
    },
    /// Another refcount table.
    Refcounts {
        /// Its place.
        at: HostOffset,
        /// The number of its clusters.
        clusters: u32,
    },
    /// The reference counts are right.
    ClearDirty,
    /// The tables are wrong. The bit exists in version 3 only.
    SetCorrupt,
    /// All autoclear features are given up.
    ClearAutoclear,
}

/// The unit of the size of a virtual disk in bytes.
const SECTOR: u64 = 512;
/// The magic number, `QFI` and 0xfb.
const MAGIC: u32 = 0x5146_49fb;
/// The bytes of the header of version 2, and the least bytes of version 3.
const V2_BYTES: u32 = 72;
const V3_BYTES: u32 = 104;
/// The offsets of fields.
const VERSION: usize = 4;
const SIZE: usize = 24;
const L1_ENTRIES: usize = 36;
const L1: usize = 40;
const REFCOUNTS: usize = 48;
const REFCOUNT_CLUSTERS: usize = 56;
const INCOMPATIBLE: usize = 72;
const AUTOCLEAR: usize = 88;
const COMPRESSION: usize = 104;

/// Bits of incompatible features.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_METHOD: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_METHOD | EXTENDED_L2;
/// The autoclear bit of consistent bitmaps.
const BITMAPS_CONSISTENT: u64 = 1 << 0;

/// The limits of QEMU, in bytes.
pub(crate) const L1_MAX: u64 = 32 << 20;
pub(crate) const REFCOUNTS_MAX: u64 = 8 << 20;
const NAME_MAX: usize = 1023;
/// The largest number of snapshots, as in QEMU.
const SNAPSHOTS_MAX: u32 = 65536;

impl Header {
    /// Returns the length of the first cluster, for [`parse`](Self::parse). `start` is the beginning of the
    /// file, 24 bytes at least.
    ///
    /// # Errors
    /// The bytes are not the beginning of an image.
    pub fn first_cluster(start: &[u8]) -> Result<u64, BadImage> {
        version(start)?;
        let bits = be32(start, 20);
        // Version and width are checked later.
        Ok(Geometry::new(Version::V2, bits, V2_REFCOUNT_ORDER, false)?.cluster())
    }

    /// Parses the first cluster. If the file is shorter than that, `first` is the whole file. `file_bytes` is
    /// the length of the file in bytes.
    ///
    /// # Errors
    /// The reason why the image is refused.
    pub fn parse(first: &[u8], file_bytes: u64) -> Result<Self, BadImage> {
        let version = version(first)?;
        let (cluster, header_bytes) = (Self::first_cluster(first)?, header_bytes(first, version)?);
        let first = &first[..first.len().min(cluster as usize)];
        if first.len() < header_bytes as usize {
            return Err(BadImage::Short);
        }
        let field = |at| if version == Version::V3 { be64(first, at) } else { 0 };
        let (incompatible, autoclear) = (field(INCOMPATIBLE), field(AUTOCLEAR));
        let (backing_at, backing_bytes) = (be64(first, 8), be32(first, 16) as usize);
        // The name of the backing image follows the extensions.
        let end = if backing_at == 0 { cluster } else { backing_at.min(cluster) };
        let end = (end as usize).min(first.len()).max(header_bytes as usize);
        let extensions = extensions::parse(&first[header_bytes as usize..end])?;
        check_features(first, incompatible, &extensions)?;

        let order = if version == Version::V3 { be32(first, 96) } else { V2_REFCOUNT_ORDER };
        let geometry = Geometry::new(version, be32(first, 20), order, incompatible & EXTENDED_L2 != 0)?;
        let size = size(first)?;
        let l1 = HostOffset(be64(first, L1));
        let l1 = place_of_l1(l1, u64::from(be32(first, L1_ENTRIES)), geometry, file_bytes)?;
        if l1.entries < geometry.l1_entries_for(size) {
            return Err(BadImage::L1Short { entries: l1.entries, size });
        }
        let compression = compression(first, header_bytes, incompatible)?;
        let name = backing_name(first, backing_at, backing_bytes)?;
        let format = extensions.backing_format;
        let bitmaps = extensions.bitmaps.filter(|_| autoclear & BITMAPS_CONSISTENT != 0);
        if let Some(Bitmaps { at, bytes, .. }) = bitmaps {
            check_place("bitmap directory", at, bytes, geometry, file_bytes)?;
        }
        Ok(Self {
            geometry,
            size,
            backing: name.map(|name| Backing { name, format }),
            l1,
            refcounts: place_of_refcounts(first, geometry, file_bytes)?,
            snapshots: place_of_snapshots(first, geometry, file_bytes)?,
            incompatible,
            autoclear,
            compression,
            bitmaps,
        })
    }

    /// Returns whether the reference counts may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Returns whether the image must not be written.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }
}

fn version(first: &[u8]) -> Result<Version, BadImage> {
    match (be32(first, 0), be32(first, VERSION)) {
        (MAGIC, 2) => Ok(Version::V2),
        (MAGIC, 3) => Ok(Version::V3),
        (MAGIC, other) => Err(BadImage::Version(other)),
        _ => Err(BadImage::Magic),
    }
}

fn header_bytes(first: &[u8], version: Version) -> Result<u32, BadImage> {
    let least = if version == Version::V3 { V3_BYTES } else { V2_BYTES };
    if first.len() < least as usize {
        return Err(BadImage::Short);
    }
    let bytes = if version == Version::V3 { be32(first, 100) } else { V2_BYTES };
    let fits = bytes >= least && u64::from(bytes) <= Header::first_cluster(first)?;
    if fits { Ok(bytes) } else { Err(BadImage::HeaderLength(bytes)) }
}

fn check_features(first: &[u8], incompatible: u64, extensions: &Extensions) -> Result<(), BadImage> {
    if be32(first, 32) != 0 || extensions.encryption {
        return Err(BadImage::Encrypted);
    }
    if incompatible & DATA_FILE != 0 {
        return Err(BadImage::DataFile);
    }
    let name = |bit: u8| {
        let named = extensions.names.iter().find(|(number, name)| *number == bit && !name.is_empty());
        named.map_or_else(|| format!("bit {bit}"), |(_, name)| name.clone())
    };
    let unknown: Vec<_> = (0..64).filter(|bit| incompatible & !KNOWN & (1 << bit) != 0).map(name).collect();
    if unknown.is_empty() { Ok(()) } else { Err(BadImage::Features(unknown.join(", "))) }
}

fn compression(first: &[u8], header_bytes: u32, incompatible: u64) -> Result<Compression, BadImage> {
    let is_there = header_bytes as usize > COMPRESSION;
    let method = if is_there { first[COMPRESSION] } else { 0 };
    match (method, incompatible & COMPRESSION_METHOD != 0) {
        (0, false) => Ok(Compression::Zlib),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => Err(BadImage::CompressionBit),
        _ => Err(BadImage::Compression(method)),
    }
}

fn size(first: &[u8]) -> Result<u64, BadImage> {
    let size = be64(first, SIZE);
    if size > i64::MAX as u64 { Err(BadImage::Size(size)) } else { Ok(size - size % SECTOR) }
}

/// Checks that a table is aligned, behind the first cluster, and in the file.
fn check_place(
    table: &'static str,
    at: HostOffset,
    bytes: u64,
    geometry: Geometry,
    file_bytes: u64,
) -> Result<(), BadImage> {
    let is_in_file = at.0.checked_add(bytes).is_some_and(|end| end <= file_bytes.min(OFFSET_LIMIT));
    match geometry.is_aligned(at) && at.0 > 0 && is_in_file {
        true => Ok(()),
        false => Err(BadImage::TablePlace { table, at: at.0 }),
    }
}

/// Checks the place of an L1 table. An empty one may be anywhere.
pub(super) fn place_of_l1(
    at: HostOffset,
    entries: u64,
    geometry: Geometry,
    file_bytes: u64,
) -> Result<TableAt, BadImage> {
    let (table, bytes) = ("level 1 table", entries * 8);
    if bytes > L1_MAX {
        return Err(BadImage::TableSize { table, bytes, max: L1_MAX });
    }
    if entries > 0 {
        check_place(table, at, bytes, geometry, file_bytes)?;
    }
    Ok(TableAt { at, entries })
}

fn place_of_refcounts(first: &[u8], geometry: Geometry, file_bytes: u64) -> Result<TableAt, BadImage> {
    let (table, at) = ("refcount table", HostOffset(be64(first, REFCOUNTS)));
    let bytes = u64::from(be32(first, REFCOUNT_CLUSTERS)) * geometry.cluster();
    match bytes {
        0 => return Err(BadImage::NoRefcounts),
        1..=REFCOUNTS_MAX => check_place(table, at, bytes, geometry, file_bytes)?,
        _ => return Err(BadImage::TableSize { table, bytes, max: REFCOUNTS_MAX }),
    }
    Ok(TableAt { at, entries: bytes / 8 })
}

fn place_of_snapshots(
    first: &[u8],
    geometry: Geometry,
    file_bytes: u64,
) -> Result<(HostOffset, u32), BadImage> {
    let (count, at) = (be32(first, 60), HostOffset(be64(first, 64)));
    match count {
        0 => {}
        1..=SNAPSHOTS_MAX => check_place("snapshot table", at, 0, geometry, file_bytes)?,
        _ => return Err(BadImage::Snapshots(count)),
    }
    Ok((at, count))
}

fn backing_name(first: &[u8], at: u64, bytes: usize) -> Result<Option<Vec<u8>>, BadImage> {
    if at == 0 || bytes == 0 {
        return Ok(None);
    }
    let rest = usize::try_from(at).ok().and_then(|at| first.get(at..));
    let name = rest.and_then(|rest| rest.get(..bytes)).filter(|name| !name.contains(&0));
    name.filter(|name| name.len() <= NAME_MAX).map(|name| Some(name.to_vec())).ok_or(BadImage::BackingName)
}

impl Backing {
    /// Returns the format if the image states a supported one.
    pub fn known_format(&self) -> Result<BackingFormat, BadImage> {
        match self.format.as_deref() {
            Some("raw") => Ok(BackingFormat::Raw),
            Some("qcow2") => Ok(BackingFormat::Qcow2),
            Some(other) => Err(BadImage::BackingFormat(other.to_owned())),
            None => Err(BadImage::BackingFormatMissing),
        }
    }
}

impl HeaderChange {
    /// Changes the header in `first`, which has at least the first 512 bytes of the image. Version 2 has no
    /// feature bits, so changes of them do nothing there.
    pub fn apply(self, first: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| first[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            HeaderChange::L1AndSize { l1, entries, size } => {
                put(SIZE, &size.to_be_bytes());
                put(L1_ENTRIES, &entries.to_be_bytes());
                put(L1, &l1.0.to_be_bytes());
            }
            HeaderChange::Refcounts { at, clusters } => {
                put(REFCOUNTS, &at.0.to_be_bytes());
                put(REFCOUNT_CLUSTERS, &clusters.to_be_bytes());
            }
            _ if be32(first, VERSION) < 3 => {}
            HeaderChange::ClearDirty => {
                let bits = be64(first, INCOMPATIBLE) & !DIRTY;
                first[INCOMPATIBLE..][..8].copy_from_slice(&bits.to_be_bytes());
            }
            HeaderChange::SetCorrupt => {
                let bits = be64(first, INCOMPATIBLE) | CORRUPT;
                first[INCOMPATIBLE..][..8].copy_from_slice(&bits.to_be_bytes());
            }
            HeaderChange::ClearAutoclear => first[AUTOCLEAR..][..8].fill(0),
        }
    }
}
