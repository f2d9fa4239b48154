//! A parser of the frames that a null port delivers.

/// Returns the pair and the number of a test frame, if `frame` is one that is whole and unchanged. The
/// format is in `test_frame.rs` of the crate `net-port`.
pub fn parse_test_frame(frame: &[u8]) -> Option<(u16, u64)> {
    let (head, pattern) = frame.split_at_checked(36)?;
    let (head, checksum) = head.split_at(32);
    let hashed = head.iter().chain(pattern);
    let hash = hashed.fold(0x811c_9dc5_u32, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let is_whole = head[28..] == (frame.len() as u32).to_le_bytes() && checksum == hash.to_le_bytes();
    let pair = u16::from_le_bytes([head[18], head[19]]);
    let number = u64::from_le_bytes(head[20..28].try_into().ok()?);
    (is_whole && head[12..18] == *b"\x88\xb5kkl1").then_some((pair, number))
}
