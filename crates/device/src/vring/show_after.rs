//! When completions of a batch are shown to the driver.

/// How many completions of a batch are shown together before [`Vring::publish`](super::Vring::publish) shows the rest. A group is
/// never split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShowAfter {
    /// The first of a batch are shown when they are so many. Not zero.
    pub first: u32,
    /// The others are shown when they are so many. Not zero.
    pub then: u32,
}

impl ShowAfter {
    /// Shows the first completion at once, and the others sixteen at a time. The driver takes completions, and makes the next requests
    /// of them, while the device goes on. Otherwise the two work in turns, and a driver that has found nothing is about to
    /// sleep when the device is done.
    pub const EARLY: Self = Self { first: 1, then: 16 };

    /// Shows nothing before [`Vring::publish`](super::Vring::publish).
    pub const PUBLISH: Self = Self { first: u32::MAX, then: u32::MAX };
}
