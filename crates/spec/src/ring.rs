//! The split and the packed virtqueue (virtio 1.3, sections 2.7 and 2.8).
//!
//! A split virtqueue has three areas, each contiguous in the driver's address space:
//! - the descriptor table: 16-byte aligned, `16 * size` bytes;
//! - the available ring: 2-byte aligned, `6 + 2 * size` bytes;
//! - the used ring: 4-byte aligned, `6 + 8 * size` bytes.
//!
//! The last two bytes of each ring are an event index. The side that writes the ring says there when it wants
//! to be notified of an entry in the other ring. These bytes exist in memory only if
//! [`EVENT_IDX`](crate::features::Features::EVENT_IDX) was negotiated.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The largest size of a split virtqueue (virtio 1.3, section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 32768;

/// Descriptor flag: the chain continues at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer (otherwise it reads it).
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// `avail.flags`: the driver wants no calls. Advisory; ignored once EVENT_IDX is negotiated.
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `used.flags`: the device wants no kicks. Advisory; zero once EVENT_IDX is negotiated.
pub const USED_F_NO_NOTIFY: u16 = 1;

/// `struct virtq_desc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Desc {
    /// Guest-physical address of the buffer (an IOVA with ACCESS_PLATFORM).
    pub addr: U64,
    /// Its length in bytes.
    pub len: U32,
    /// `DESC_F_*`.
    pub flags: U16,
    /// Index of the next descriptor, if `DESC_F_NEXT`.
    pub next: U16,
}

/// `struct virtq_used_elem`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct UsedElem {
    /// Head of the chain that was used.
    pub id: U32,
    /// Bytes that the device wrote, from the first byte of the first writable buffer on.
    pub len: U32,
}

/// Offset of `flags` in both rings.
pub const RING_FLAGS: usize = 0;
/// Offset of `idx` in both rings.
pub const RING_IDX: usize = 2;
/// Offset of `ring[0]` in both rings.
pub const RING_ENTRIES: usize = 4;

/// Returns the bytes of the descriptor table.
pub const fn desc_len(size: u16) -> usize {
    size_of::<Desc>() * size as usize
}

/// Returns the bytes of the available ring.
pub const fn avail_len(size: u16, event_idx: bool) -> usize {
    RING_ENTRIES + 2 * size as usize + if event_idx { 2 } else { 0 }
}

/// Returns the bytes of the used ring.
pub const fn used_len(size: u16, event_idx: bool) -> usize {
    RING_ENTRIES + size_of::<UsedElem>() * size as usize + if event_idx { 2 } else { 0 }
}

/// Packed ring, descriptor flag: has the value of the driver's wrap counter after the driver made the
/// descriptor available.
pub const PACKED_F_AVAIL: u16 = 1 << 7;
/// Packed ring, descriptor flag: has the value of the device's wrap counter after the device used the
/// descriptor.
pub const PACKED_F_USED: u16 = 1 << 15;

/// `struct pvirtq_desc`: a descriptor of the packed virtqueue (virtio 1.3, section 2.8.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PackedDesc {
    /// Guest-physical address of the buffer (an IOVA with ACCESS_PLATFORM).
    pub addr: U64,
    /// Length of the buffer in bytes. In a used descriptor, the bytes that the device wrote into the chain.
    pub len: U32,
    /// The driver's number for the chain. Only the chain's last descriptor and the used descriptor have it.
    pub id: U16,
    /// `DESC_F_*` and `PACKED_F_*`.
    pub flags: U16,
}

/// Offset of `len` in a packed descriptor.
pub const PACKED_LEN: usize = 8;

/// Offset of `id` in a packed descriptor.
pub const PACKED_ID: usize = 12;

/// Offset of `flags` in a packed descriptor.
pub const PACKED_FLAGS: usize = 14;

/// Bytes of a packed ring's event suppression structure (virtio 1.3, section 2.8.14). Each side writes one.
pub const EVENT_LEN: usize = 4;
/// Offset of a field of 16 bits: the descriptor that the side waits for (low 15 bits), and its wrap counter.
pub const EVENT_OFF_WRAP: usize = 0;
/// Offset of `EVENT_F_*`.
pub const EVENT_FLAGS: usize = 2;
/// The wrap counter at `EVENT_OFF_WRAP`.
pub const EVENT_WRAP: u16 = 1 << 15;
/// At `EVENT_FLAGS`: notify me of every descriptor.
pub const EVENT_F_ENABLE: u16 = 0;
/// At `EVENT_FLAGS`: do not notify me.
pub const EVENT_F_DISABLE: u16 = 1;
/// At `EVENT_FLAGS`: notify me of the descriptor at `EVENT_OFF_WRAP`. Needs EVENT_IDX.
pub const EVENT_F_DESC: u16 = 2;

/// Returns whether an index that moved from `old` to `new` passed the event index `event`. If it did, the
/// other side wants a notification (virtio 1.3, section 2.7.10). The comparison is modulo 65536.
pub const fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout() {
        assert_eq!((desc_len(256), avail_len(256, true), used_len(256, true)), (4096, 518, 2054));
        assert_eq!((avail_len(1, false), used_len(1, false)), (6, 12));
        assert_eq!(desc_len(QUEUE_SIZE_MAX), 512 << 10);
    }

    #[test]
    fn event_in_every_window() {
        for old in [0u16, 1, 100, 65_530, 65_535] {
            for n in 0..300u16 {
                let new = old.wrapping_add(n);
                for at in 0..300u16 {
                    let event = old.wrapping_add(at);
                    assert_eq!(event_passed(event, new, old), at < n, "old {old} new {new} event {event}");
                }
            }
        }
    }
}
