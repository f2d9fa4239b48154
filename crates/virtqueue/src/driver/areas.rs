//! The memory that a queue lies in.

use kickless_memory::Area;

/// A queue's memory, zeroed, at the addresses that the device was told.
#[derive(Debug)]
pub struct Areas {
    /// The descriptors; at a multiple of 16.
    pub desc: Area,
    /// What the driver writes: the avail ring, or the packed ring's driver event suppression. At a multiple of 4.
    pub driver: Area,
    /// What the device writes: the used ring, or the packed ring's device event suppression. At a multiple of 4.
    pub device: Area,
}
