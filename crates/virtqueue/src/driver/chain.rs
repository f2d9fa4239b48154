//! Chains as the driver submits them and gets them back.

use kickless_memory::Area;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Address, as the device addresses memory.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Whether the device writes it, instead of reading it. Writable buffers come last in a chain.
    pub writable: bool,
}

/// Memory for an indirect table. Only its chain uses it while the chain is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// The area that contains the memory.
    pub area: &'a Area,
    /// Offset in the area. The table has 16 bytes for each buffer of the chain.
    pub offset: usize,
    /// Address, as the device addresses memory.
    pub addr: u64,
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The id of the chain. It is not free before [`Completer::give_back`](super::Completer::give_back).
    pub id: u16,
    /// Bytes that the device claims to have written into the writable buffers. With IN_ORDER, the device
    /// tells this only for the last chain of a batch. For the others, this is the number of bytes that it may
    /// have written.
    pub len: u32,
}

/// There are not enough free descriptors or ids for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct NoRoom;

/// Returns the number of buffers of a chain. No buffers, or more than 65535, are an error.
pub(super) fn chain_len(buffers: &[Buffer]) -> Result<u16, NoRoom> {
    debug_assert!(buffers.is_sorted_by_key(|buffer| buffer.writable), "writable buffers come last");
    match u16::try_from(buffers.len()) {
        Ok(0) | Err(_) => Err(NoRoom),
        Ok(len) => Ok(len),
    }
}

/// Returns the number of bytes that the device may write.
pub(super) fn writable(buffers: &[Buffer]) -> u32 {
    buffers
        .iter()
        .fold(0, |sum: u32, buffer| sum.saturating_add(if buffer.writable { buffer.len } else { 0 }))
}
