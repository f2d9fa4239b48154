//! The shapes of rings that tests of both ends try.

use super::{AVAIL, DESC, TABLES, USED, USER};
use kickless_memory::{UserAddr, View};
use kickless_virtqueue::device::Options;
use kickless_virtqueue::driver::Areas;

/// The size and the features of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub size: u16,
    pub event_idx: bool,
    pub indirect: bool,
    pub packed: bool,
    pub in_order: bool,
    /// Whether there is an in-flight buffer.
    pub tracked: bool,
}

impl Shape {
    pub fn split(size: u16, event_idx: bool, indirect: bool) -> Self {
        Self { size, event_idx, indirect, packed: false, in_order: false, tracked: false }
    }

    pub fn packed(size: u16, event_idx: bool, indirect: bool) -> Self {
        Self { packed: true, ..Self::split(size, event_idx, indirect) }
    }

    /// Returns the options of both ends.
    pub fn options(self) -> Options {
        let Self { size, event_idx, indirect, .. } = self;
        let options = match self.packed {
            true => Options::packed(size, event_idx, indirect),
            false => Options::new(size, event_idx, indirect),
        };
        options.unwrap().with_in_order(self.in_order)
    }

    /// Returns the index at which a device begins.
    pub fn base(self) -> u16 {
        if self.packed { 1 << 15 } else { 0 }
    }
}

/// Returns the areas of a ring as its driver uses them.
pub fn areas(view: &View) -> Areas {
    let area = |gpa: u64, len: u64| view.map().area(UserAddr(USER + gpa), len as usize, 16).unwrap();
    Areas {
        desc: area(DESC, AVAIL - DESC),
        driver: area(AVAIL, USED - AVAIL),
        device: area(USED, TABLES - USED),
    }
}
