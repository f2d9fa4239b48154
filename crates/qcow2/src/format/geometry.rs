//! The sizes of an image's clusters, tables and entries, and the arithmetic with them.

use super::bad_image::BadImage;

/// A byte offset in the image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostOffset(pub u64);

/// A byte offset on the virtual disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// The number of a cluster of the image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostCluster(pub u64);

/// The number of a cluster of the virtual disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestCluster(pub u64);

/// The number of a slice, which is a unit of table I/O of an L2 table. If a table has `k` slices, then table
/// `t` has the slices `t * k` to `(t + 1) * k - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceIndex(pub u64);

/// The version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Without feature bits and zero clusters.
    V2,
    /// With them.
    V3,
}

/// The bits of the smallest and the largest cluster: 512 bytes and 2 MiB, as in QEMU.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// The bits of the smallest cluster with subclusters, which are then 512 bytes long.
const EXTENDED_BITS_MIN: u32 = 14;
/// The number of subclusters of a cluster in an image with extended entries.
const SUBCLUSTERS: u32 = 32;
/// The order of the only width in version 2: 16 bits.
pub(super) const V2_REFCOUNT_ORDER: u32 = 4;
/// The order of the largest width: 64 bits.
const REFCOUNT_ORDER_MAX: u32 = 6;

/// The sizes that an image chooses when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The version of the format.
    pub version: Version,
    /// The binary logarithm of a cluster's size in bytes.
    pub cluster_bits: u32,
    /// The binary logarithm of a reference count's width in bits.
    pub refcount_order: u32,
    /// L2 entries have 16 bytes, with a bitmap of subclusters.
    pub extended: bool,
}

impl Geometry {
    /// Makes a geometry within the bounds of the format.
    ///
    /// # Errors
    /// A size is outside of the bounds of the version.
    pub fn new(
        version: Version,
        cluster_bits: u32,
        refcount_order: u32,
        extended: bool,
    ) -> Result<Self, BadImage> {
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(BadImage::ClusterBits(cluster_bits));
        }
        let is_wide = version == Version::V2 && refcount_order != V2_REFCOUNT_ORDER;
        if refcount_order > REFCOUNT_ORDER_MAX || is_wide {
            return Err(BadImage::RefcountOrder(refcount_order));
        }
        if extended && (version == Version::V2 || cluster_bits < EXTENDED_BITS_MIN) {
            return Err(BadImage::SmallSubclusters(1 << cluster_bits));
        }
        Ok(Self { version, cluster_bits, refcount_order, extended })
    }

    /// Returns the number of bytes of a cluster.
    pub fn cluster(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the number of bytes of an L2 entry.
    pub fn entry_bytes(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Returns the number of entries of an L2 table, which fills a cluster.
    pub fn table_entries(self) -> u64 {
        self.cluster() / self.entry_bytes()
    }

    /// Returns the number of bytes of the virtual disk that one L2 table maps.
    pub fn table_span(self) -> u64 {
        self.table_entries() << self.cluster_bits
    }

    /// Returns the number of subclusters of a cluster, which is 1 without extended entries.
    pub fn subclusters(self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// Returns the number of bytes of a subcluster.
    pub fn subcluster(self) -> u64 {
        self.cluster() / u64::from(self.subclusters())
    }

    /// Returns the width of a reference count in bits.
    pub fn refcount_bits(self) -> u32 {
        1 << self.refcount_order
    }

    /// Returns the largest reference count.
    pub fn refcount_max(self) -> u64 {
        u64::MAX >> (u64::BITS - self.refcount_bits())
    }

    /// Returns the number of reference counts in a refcount block, which fills a cluster.
    pub fn block_entries(self) -> u64 {
        (self.cluster() * 8) >> self.refcount_order
    }

    /// Returns the slice of `unit` bytes with the L2 entry for a place of the virtual disk, and the number of
    /// the entry in the slice.
    pub fn slice(self, unit: u64, at: GuestOffset) -> (SliceIndex, usize) {
        let (entry, entries) = (at.0 >> self.cluster_bits, unit / self.entry_bytes());
        (SliceIndex(entry / entries), (entry % entries) as usize)
    }

    /// Returns the number of L1 entries that a virtual disk of `size` bytes needs.
    pub fn l1_entries_for(self, size: u64) -> u64 {
        size.div_ceil(self.table_span())
    }

    /// Returns the number of the guest's cluster at a place of the virtual disk.
    pub fn guest_cluster(self, at: GuestOffset) -> GuestCluster {
        GuestCluster(at.0 >> self.cluster_bits)
    }

    /// Returns the number of the cluster of the file at an offset.
    pub fn host_cluster(self, at: HostOffset) -> HostCluster {
        HostCluster(at.0 >> self.cluster_bits)
    }

    /// Returns the offset of a cluster of the file. `cluster` is below 2^56 / 512.
    pub fn host_offset(self, cluster: HostCluster) -> HostOffset {
        HostOffset(cluster.0 << self.cluster_bits)
    }

    /// Returns whether an offset is the beginning of a cluster.
    pub fn is_aligned(self, at: HostOffset) -> bool {
        at.0.is_multiple_of(self.cluster())
    }
}
