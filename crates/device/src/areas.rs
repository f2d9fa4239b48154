//! Addresses of a ring's areas.

use kickless_memory::Iova;
use kickless_virtqueue::device::Addresses;

/// Where a ring's areas are said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Areas {
    /// By the front-end's addresses.
    User(Addresses),
    /// By the device's, for a ring that was made with an [`Iommu`](crate::Iommu).
    Iova(IovaAddresses),
}

/// Where a ring's areas are, as a device behind a vIOMMU sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IovaAddresses {
    /// The descriptor table, or the packed ring.
    pub desc: Iova,
    /// The available ring, or the packed ring's driver event suppression.
    pub avail: Iova,
    /// The used ring, or the packed ring's device event suppression.
    pub used: Iova,
    /// What to mark in the log as written in place of the used ring.
    pub log: Option<Iova>,
}
