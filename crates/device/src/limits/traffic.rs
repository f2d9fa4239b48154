//! The requests and frames that the limits of a device count.

/// The requests that are limited together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Data from the device to the driver.
    Read,
    /// Data from the driver to the device, and all other requests.
    Write,
}

/// The traffic of a task that the limits of its device count, and the part of a poll that they hold.
///
/// In each poll, the task tells its ring what it carries ([`Vring::charge`](crate::Vring::charge),
/// [`Vring::charge_request`](crate::Vring::charge_request)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Frames in this direction. The task is not polled while this direction is in debt. Frames of the driver
    /// wait in the ring then, and those for the driver at the port.
    Frames(Direction),
    /// Requests in both directions. The direction of a request is not known before it is popped. Any debt
    /// therefore holds all requests of the ring. The task is polled for the requests that it has popped, and
    /// pops no others while [`Vring::held_ns`](crate::Vring::held_ns) says so.
    Requests,
}

impl Traffic {
    /// Returns the places of the limits that hold this traffic: all requests, reads, writes.
    pub(super) fn places(self) -> &'static [usize] {
        match self {
            Self::Frames(direction) => direction.places(),
            Self::Requests => &[0, 1, 2],
        }
    }
}

impl Direction {
    /// Returns the places of the limits that count this direction: that of all requests, and its own.
    pub(super) fn places(self) -> &'static [usize] {
        match self {
            Self::Read => &[0, 1],
            Self::Write => &[0, 2],
        }
    }
}
