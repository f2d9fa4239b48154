//! The header, which is at the beginning of an image.

use super::bad_image::BadImage;
use super::geometry::{Geometry, HostOffset};

/// The header of an image.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    /// The sizes of clusters, tables and entries.
    pub(crate) geometry: Geometry,
    /// The size of the virtual disk in bytes, rounded down to whole sectors.
    pub(crate) size: u64,
    /// The backing image.
    pub(crate) backing: Option<Backing>,
    /// The active L1 table, in entries of 8 bytes.
    pub(crate) l1: TableAt,
    /// The refcount table, in entries of 8 bytes.
    pub(crate) refcounts: TableAt,
    /// The snapshot table, and the number of snapshots.
    pub(crate) snapshots: (HostOffset, u32),
    /// The incompatible feature bits.
    pub(crate) incompatible: u64,
    /// The compatible feature bits.
    pub(crate) compatible: u64,
    /// The autoclear feature bits.
    pub(crate) autoclear: u64,
    /// The method of compressed clusters.
    pub(crate) compression: Compression,
    /// The persistent bitmaps, if they are consistent.
    pub(crate) bitmaps: Option<Bitmaps>,
    /// The length of the header without its extensions.
    pub(crate) header_bytes: u32,
}

/// The name of a backing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    /// At most 1023 bytes.
    pub(crate) name: Vec<u8>,
    /// The name of its format, if the image states it.
    pub(crate) format: Option<String>,
}

/// A format of a backing image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackingFormat {
    /// The bytes of the disk.
    Raw,
    /// This format.
    Qcow2,
}

/// The place of a table with entries of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableAt {
    /// The offset in the file.
    pub(crate) at: HostOffset,
    /// The number of entries.
    pub(crate) entries: u64,
}

/// The directory of the persistent bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bitmaps {
    /// The number of bitmaps.
    pub(crate) count: u32,
    /// The place of the directory.
    pub(crate) at: HostOffset,
    /// The size of the directory in bytes.
    pub(crate) bytes: u64,
}

/// The method of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Deflate without a header.
    Zlib,
    /// Zstandard frames.
    Zstd,
}

/// One change of the header. All bytes of a change lie in the first 512, so it cannot be torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderChange {
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

impl Header {
    /// Returns the length of the first cluster, for [`parse`](Self::parse). `start` is the beginning of the
    /// file, 24 bytes at least.
    pub(crate) fn first_cluster(_start: &[u8]) -> Result<u64, BadImage> {
        Err(BadImage::Magic)
    }

    /// Parses the first cluster. If the file is shorter than that, `first` is the whole file. `file_bytes` is
    /// the length of the file.
    pub(crate) fn parse(_first: &[u8], _file_bytes: u64) -> Result<Self, BadImage> {
        Err(BadImage::Magic)
    }

    /// Returns whether the reference counts may be wrong.
    pub(crate) fn is_dirty(&self) -> bool {
        self.incompatible & 1 != 0
    }

    /// Returns whether the image must not be written.
    pub(crate) fn is_corrupt(&self) -> bool {
        self.incompatible & 2 != 0
    }
}

impl Backing {
    /// Returns the format if the image states a supported one.
    pub(crate) fn known_format(&self) -> Result<BackingFormat, BadImage> {
        match self.format.as_deref() {
            Some("raw") => Ok(BackingFormat::Raw),
            Some("qcow2") => Ok(BackingFormat::Qcow2),
            Some(other) => Err(BadImage::BackingFormat(other.to_owned())),
            None => Err(BadImage::BackingFormatMissing),
        }
    }
}

/// Changes the header in `first`, which has at least the first 512 bytes of the image.
pub(crate) fn apply(_first: &mut [u8], _change: HeaderChange) {}
