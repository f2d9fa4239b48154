//! The rule for the moments at which completions of a batch are shown to the driver.

/// The numbers of completions that are shown together before [`Vring::publish`](super::Vring::publish) shows
/// the rest. A group is never split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShowAfter {
    /// The first completions of a batch are shown when there are this many. Not zero.
    pub first: u32,
    /// The later ones are shown when there are this many. Not zero.
    pub then: u32,
}

impl ShowAfter {
    /// Shows the first completion at once, and the others sixteen at a time. The driver takes completions and
    /// makes new requests of them while the device goes on. Otherwise the two take turns: when the device is
    /// done, the driver has found nothing and is about to sleep.
    pub const EARLY: Self = Self { first: 1, then: 16 };

    /// Shows nothing before [`Vring::publish`](super::Vring::publish).
    pub const PUBLISH: Self = Self { first: u32::MAX, then: u32::MAX };
}
