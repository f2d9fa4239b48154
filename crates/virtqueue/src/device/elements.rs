//! The outcome of a pop, and used elements that the driver has not seen.

use crate::RingError;

/// A used element that was pushed while the queue had no areas. The driver has not seen it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpublishedUsed {
    /// The head, or the id in a packed ring.
    pub id: u16,
    /// Bytes written.
    pub len: u32,
    /// Descriptors of the chain in a packed ring; 0 in a split one. With IN_ORDER, also those of older chains
    /// for which this element stands.
    pub descriptors: u16,
}

/// The result of a pop that translates addresses.
pub type Popped = Result<PopOutcome, RingError>;

/// The outcome of a pop that translates addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PopOutcome {
    /// There is nothing to pop.
    Empty,
    /// A chain was popped.
    Chain,
    /// The next chain cannot be popped before its missing translations are known.
    MissingTranslation,
    /// The next chain needs more translations than one pop does. Pop again to continue.
    Unfinished,
}
