//! Buffers that the driver hands to the device and gets back.

use kickless_memory::Gpa;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is.
    pub addr: Gpa,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

/// What the device gave back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub head: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}
