//! Addresses of a ring's areas.

use kickless_memory::Iova;
use kickless_virtqueue::device::Addresses;

/// The addresses of a ring's areas, as the front-end gave them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Areas {
    /// Addresses of the front-end.
    User(Addresses),
    /// Addresses of the device, for a ring that was made with an [`Iommu`](crate::Iommu).
    Iova(IovaAddresses),
}

/// The addresses of a ring's areas, as a device behind a vIOMMU sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IovaAddresses {
    /// The descriptor table, or the packed ring.
    pub desc: Iova,
    /// The available ring, or the packed ring's driver event suppression.
    pub avail: Iova,
    /// The used ring, or the packed ring's device event suppression.
    pub used: Iova,
    /// The address to mark in the log for the used ring.
    pub log: Option<Iova>,
}
