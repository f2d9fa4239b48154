//! The cache of L2 tables, which requests read without a lock.

use super::format::geometry::{Geometry, GuestCluster, GuestOffset, HostOffset, SliceIndex};

/// The longest run from a place with one answer, inside one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
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
pub(crate) struct Slices {
    geometry: Geometry,
    unit: u64,
}

impl Slices {
    /// Makes an empty cache of at most `cache_bytes`, but at least 4 sets of slices of `unit` bytes.
    pub(crate) fn new(geometry: Geometry, unit: u64, _cache_bytes: u64) -> Self {
        Self { geometry, unit }
    }

    /// Looks up the mapping of `at`, for at most `len` bytes. The caller holds a pin.
    pub(crate) fn look(&self, at: GuestOffset, _len: u64) -> Look {
        Look::Miss(self.geometry.slice(self.unit, at).0)
    }
}
