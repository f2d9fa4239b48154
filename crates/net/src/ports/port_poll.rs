//! The check of a port for its next frame.

use std::time::Duration;

/// The interval at which a spinning worker checks a port. A system call for that takes about 0.2 us, so the
/// worker spends most of its time on rings. A loop port is checked in each poll.
pub(crate) const PORT_INTERVAL: Duration = Duration::from_micros(2);

/// The result of taking one frame from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// There is none, or the source was not checked.
    Nothing,
    /// A frame is held now.
    Held,
    /// This number of frames was delivered.
    Delivered(u32),
    /// A frame was dropped and counted.
    Dropped,
}
