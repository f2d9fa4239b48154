//! Checks used elements against the chains in flight.

use super::chain::Completed;
use super::chain_tables::{ChainTables, Record};

/// An impossible used index or used element. The error is latched, and the queue is unusable afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsedError {
    /// The used index moved on by more than the queue's size.
    #[error("the used index went from {from} to {to} in a queue of {size}")]
    Index {
        /// The previous index.
        from: u16,
        /// The index in the ring.
        to: u16,
        /// The queue's size.
        size: u16,
    },
    /// An id that is not in flight: it was never made available, or used twice.
    #[error("it used id {id}, which is not in flight")]
    Id {
        /// The id.
        id: u32,
    },
    /// The device claims more bytes than the chain's writable buffers have.
    #[error("it wrote {len} bytes into the {room} that id {id} has for it")]
    Length {
        /// The id.
        id: u16,
        /// The claimed bytes.
        len: u32,
        /// The bytes of the writable buffers.
        room: u32,
    },
}

/// Checks a used id and its length.
pub(super) fn check(tables: &ChainTables, id: u32, len: u32) -> Result<Completed, UsedError> {
    let (id, Record { writable: room, .. }) = tables.in_flight(id).ok_or(UsedError::Id { id })?;
    if len > room { Err(UsedError::Length { id, len, room }) } else { Ok(Completed { id, len }) }
}
