//! Bounds the segments of a packet, whose number and headers a guest chooses. Has no state.

use kickless_spec::net::FRAME_MAX;

/// The most segments of a packet: 64 KiB in segments of 512 bytes. The least MTU that each IPv4 host takes,
/// 576, has room for more beside TCP's timestamps. Linux has the same limit for UDP (`UDP_MAX_SEGMENTS`).
pub const SEGMENTS_MAX: usize = 128;
/// The most bytes of all segments of a packet: those of the longest frame, and as many again for the headers
/// that each segment repeats.
pub const SEGMENTED_BYTES_MAX: usize = 2 * FRAME_MAX;
/// The lengths of the headers of TCP and UDP without options.
pub(crate) const TCP_HEADER: u32 = 20;
pub(crate) const UDP_HEADER: u32 = 8;
/// The length of the longest header of TCP.
const TCP_HEADER_MAX: u32 = 60;
/// Bytes before TCP or UDP that [`SEGMENTS_MAX`] segments may repeat, with the longest header of TCP.
const SHORT_HEADERS: u32 = (FRAME_MAX / SEGMENTS_MAX) as u32 - TCP_HEADER_MAX;

/// Returns the most segments that a kernel makes of a frame of `len` bytes whose transport header is said to
/// begin at `start`, and has `header_len` bytes at least. The headers and `size` are the driver's, so `start`
/// may be a lie, and the header of TCP may be longer. Linux 6.18 refuses a packet whose `start` is a lie.
pub(crate) fn count_max(len: u32, start: u16, header_len: u32, size: u16) -> u32 {
    let headers = SHORT_HEADERS.min(start.into()) + header_len;
    len.saturating_sub(headers).div_ceil(u32::from(size).max(1))
}

/// Returns whether a frame may be passed on, for a kernel or the card of the receiver to segment. Refuses
/// nothing that [`Segments::of`](super::Segments::of) takes, unless the headers before TCP have more than
/// some 450 bytes.
///
/// Only the header of the frame decides, because the driver can change the rest until it is copied. The
/// arguments are those of [`count_max`].
#[inline]
pub(crate) fn may_be_segmented(len: u32, start: u16, size: u16) -> bool {
    let start = u32::from(start);
    let behind = len.saturating_sub(start.min(SHORT_HEADERS));
    behind <= SEGMENTS_MAX as u32 * u32::from(size) + TCP_HEADER_MAX
        && (start <= SHORT_HEADERS || repeats_little(len, start, size))
}

/// Returns whether segments with long headers stay below [`SEGMENTED_BYTES_MAX`].
#[cold]
fn repeats_little(len: u32, start: u32, size: u16) -> bool {
    let behind = len.saturating_sub(start) as usize;
    is_bounded((start + TCP_HEADER_MAX) as usize, behind, size.into())
}

/// Returns whether the card segments a packet with these numbers of bytes into segments of `size`.
pub(super) fn is_bounded(headers: usize, payload: usize, size: usize) -> bool {
    let count = payload.div_ceil(size).max(1);
    count <= SEGMENTS_MAX && payload + count * headers <= SEGMENTED_BYTES_MAX
}
