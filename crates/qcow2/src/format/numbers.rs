//! Reads numbers of a structure. A number outside of the bytes is 0.

/// Returns the big-endian number of 16 bits at an offset.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |number| u16::from_be_bytes(*number))
}

/// Returns the big-endian number of 32 bits at an offset.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |number| u32::from_be_bytes(*number))
}

/// Returns the big-endian number of 64 bits at an offset.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |number| u64::from_be_bytes(*number))
}
