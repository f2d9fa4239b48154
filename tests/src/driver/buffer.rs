//! Describes the buffers that the driver gives to the device and takes back.

use kickless_memory::Gpa;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its address.
    pub addr: Gpa,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

/// A used element: a chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain.
    pub head: u16,
    /// Number of bytes that the device reports as written.
    pub len: u32,
}
