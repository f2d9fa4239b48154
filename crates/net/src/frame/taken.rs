//! The result of taking one frame from a port.

/// The result of taking one frame from a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// There is none, or the port was not checked.
    Nothing,
    /// A frame is held now.
    Held,
    /// This number of frames was delivered.
    Delivered(u32),
    /// A frame was dropped and counted.
    Dropped,
}
