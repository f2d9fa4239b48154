//! The reasons why an image is refused.

/// The reason why an image is refused. Each is the end of "{disk} cannot be used: ...".
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadImage {
    /// The magic number is another one.
    #[error("it is not a qcow2 image")]
    Magic,
    /// The file is shorter than its first cluster's header.
    #[error("it ends within its header")]
    Short,
    /// QEMU has no such version.
    #[error("it has version {0} of the format, and only 2 and 3 are supported")]
    Version(u32),
    /// The logarithm of the cluster size is out of bounds.
    #[error("its clusters of 2^{0} bytes are not between 512 bytes and 2 MiB")]
    ClusterBits(u32),
    /// The logarithm of the width is out of bounds.
    #[error("its reference counts of 2^{0} bits are not possible in this version of the format")]
    RefcountOrder(u32),
    /// A subcluster would be smaller than a sector.
    #[error("its clusters of {0} bytes are too small for subclusters")]
    SmallSubclusters(u64),
    /// The header is shorter than its version demands, or longer than a cluster.
    #[error("its header of {0} bytes has an impossible length")]
    HeaderLength(u32),
    /// A header extension ends outside of the first cluster.
    #[error("a header extension of type {0:#x} does not fit into the first cluster")]
    ExtensionLength(u32),
    /// A header extension has an impossible length or contents.
    #[error("its header extension {0} is damaged")]
    Extension(&'static str),
    /// The data is encrypted.
    #[error("it is encrypted, which is not supported")]
    Encrypted,
    /// The data is in an external data file.
    #[error("its data is in another file, which is not supported")]
    DataFile,
    /// Incompatible feature bits that are not known, by number and name.
    #[error("it has incompatible features that are not supported: {0}")]
    Features(String),
    /// A compression method that is not known.
    #[error("its compression method {0} is not supported")]
    Compression(u8),
    /// The feature bit of the compression method contradicts the method.
    #[error("its header contradicts itself about the compression method")]
    CompressionBit,
    /// The corrupt bit is set.
    #[error("it is marked as corrupt: repair it with `qemu-img check -r all`")]
    Corrupt,
    /// The size is not a possible size of a disk.
    #[error("its size of {0} bytes is impossible")]
    Size(u64),
    /// The L1 table does not map the whole virtual disk.
    #[error("its level 1 table has {entries} entries, and its size of {size} bytes needs more")]
    L1Short {
        /// The number of entries.
        entries: u64,
        /// The size of the virtual disk in bytes.
        size: u64,
    },
    /// A table is larger than QEMU permits.
    #[error("its {table} has {bytes} bytes, and at most {max} are supported")]
    TableSize {
        /// The name of the table.
        table: &'static str,
        /// The size in bytes.
        bytes: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// A table lies outside of the file, in the header, or not at the beginning of a cluster.
    #[error("its {table} cannot be at offset {at:#x}")]
    TablePlace {
        /// The name of the table.
        table: &'static str,
        /// The offset in the file.
        at: u64,
    },
    /// Nothing counts references.
    #[error("it has no refcount table")]
    NoRefcounts,
    /// More snapshots than QEMU permits.
    #[error("it has {0} snapshots, and at most 65536 are supported")]
    Snapshots(u32),
    /// A snapshot's entry is damaged.
    #[error("the entry of snapshot number {0} is damaged")]
    Snapshot(u32),
    /// The name of the backing image is too long, or lies outside of the first cluster.
    #[error("the name of its backing image is damaged")]
    BackingName,
    /// The image names a backing image without its format.
    #[error(
        "its format is not stated, and guessing it would let a guest choose it (qemu-img rebase -u -F FORMAT -b FILE states it)"
    )]
    BackingFormatMissing,
    /// The format of the backing image is neither raw nor qcow2.
    #[error("its format {0:?} is not supported")]
    BackingFormat(String),
}
