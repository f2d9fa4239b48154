//! Cuts answers to the length that a command asks for.

/// Returns at most `allocation` bytes of an answer. A short allocation length is no error, and the lengths in
/// the answer stay those of all of it (SPC-4, section 4.2.5.6).
pub(crate) fn cut(mut bytes: Vec<u8>, allocation: u32) -> Vec<u8> {
    bytes.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
    bytes
}
