//! A chain as the driver gives it to the device, and gets it back.

use kickless_memory::Area;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is, as the device addresses memory.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it, instead of reading it. These come last in a chain.
    pub writable: bool,
}

/// Room for an indirect table, which nobody else uses while its chain is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// The memory that it is in.
    pub area: &'a Area,
    /// Where in there it begins; it is as long as the chain has buffers, 16 bytes for each.
    pub offset: usize,
    /// The same place as the device addresses memory.
    pub addr: u64,
}

/// A chain that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Which. It stays taken until [`Completer::give_back`](super::Completer::give_back).
    pub id: u16,
    /// How many bytes the device says it wrote into its writable buffers. With IN_ORDER it says so of the last chain of
    /// a batch only; of the others this is what it may have written.
    pub len: u32,
}

/// There are not enough descriptors, or ids, for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct NoRoom;

/// How many buffers a chain has; it must have some.
#[inline]
pub(super) fn chain_len(buffers: &[Buffer]) -> Result<u16, NoRoom> {
    debug_assert!(buffers.is_sorted_by_key(|buffer| buffer.writable), "writable buffers come last");
    match u16::try_from(buffers.len()) {
        Ok(0) | Err(_) => Err(NoRoom),
        Ok(len) => Ok(len),
    }
}

/// How many bytes the device may write.
#[inline]
pub(super) fn writable(buffers: &[Buffer]) -> u32 {
    buffers
        .iter()
        .fold(0, |sum: u32, buffer| sum.saturating_add(if buffer.writable { buffer.len } else { 0 }))
}
