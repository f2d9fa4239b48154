//! The memory of a queue.

use kickless_memory::Area;

/// A queue's memory, zeroed, at the addresses that the device knows.
#[derive(Debug)]
pub struct Areas {
    /// The descriptors; at a multiple of 16.
    pub desc: Area,
    /// The driver's area: the avail ring, or the packed ring's driver event suppression. At a multiple of 4.
    pub driver: Area,
    /// The device's area: the used ring, or the packed ring's device event suppression. At a multiple of 4.
    pub device: Area,
}
