//! What the device says, checked against what is in flight.

use super::chain::Completed;
use super::shared::{Record, Shared};

/// What a device said that cannot be. Latched: the queue is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lie {
    /// The used index moved on by more than the queue's size.
    #[error("the used index went from {from} to {to} in a queue of {size}")]
    Index {
        /// Where it was.
        from: u16,
        /// Where it is said to be.
        to: u16,
        /// The queue's size.
        size: u16,
    },
    /// An id that is not in flight: never made available, or used twice.
    #[error("it used id {id}, which is not in flight")]
    Id {
        /// The id.
        id: u32,
    },
    /// More bytes than the chain's writable buffers have.
    #[error("it wrote {len} bytes into the {room} that id {id} has for it")]
    Length {
        /// The id.
        id: u16,
        /// What it says.
        len: u32,
        /// What there is.
        room: u32,
    },
}

/// Whether what the device says of an id can be.
#[inline]
pub(super) fn check(shared: &Shared, id: u32, len: u32) -> Result<Completed, Lie> {
    let (id, Record { writable: room, .. }) = shared.in_flight(id).ok_or(Lie::Id { id })?;
    if len > room { Err(Lie::Length { id, len, room }) } else { Ok(Completed { id, len }) }
}
