//! The memory of a queue.

use crate::device::Options;
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

impl Areas {
    /// Checks that each area is long enough for a queue with these options.
    ///
    /// # Panics
    /// Panics if one is not.
    pub(super) fn check_lens(&self, options: &Options) {
        for (area, len) in [&self.desc, &self.driver, &self.device].into_iter().zip(options.area_lens()) {
            assert!(area.len() >= len, "an area of {} bytes, but {len} are needed", area.len());
        }
    }
}
