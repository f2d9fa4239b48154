//! The blocks of a pcapng file (IETF draft-ietf-opsawg-pcapng), in the byte order of this machine.
//!
//! A capture file consists of a section header, one interface, its statistics, and a packet block for each
//! frame. The statistics come before the packets and have a fixed length, so that they can be written again
//! in place.

use std::time::Duration;

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

/// The first bytes of each file, in both byte orders.
pub(super) const MAGIC: [u8; 4] = SECTION.to_ne_bytes();

const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const VERSION: [u16; 2] = [1, 0];
const LINK_ETHERNET: u16 = 1;

/// Ends the options of a block.
const OPTION_END: u16 = 0;
const SECTION_APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_RESOLUTION: u16 = 9;
/// Time stamps in nanoseconds, as a power of ten.
const NANOSECONDS: u8 = 9;
const STATISTICS_START: u16 = 2;
const STATISTICS_END: u16 = 3;
const STATISTICS_RECEIVED: u16 = 4;
const STATISTICS_DROPPED: u16 = 5;
const PACKET_FLAGS: u16 = 2;
const PACKET_QUEUE: u16 = 6;

/// The bytes of a packet block without those of the frame: five fields after its type and length, two options
/// with values of four bytes, the end of the options, and the length again.
const PACKET_OVERHEAD: usize = 8 + 20 + 2 * 8 + 4 + 4;

/// The direction of a frame, as the guest sees it. The values are those of a packet's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Direction {
    /// The guest has received the frame.
    Inbound = 1,
    /// The guest has sent the frame.
    Outbound = 2,
}

/// The numbers of a statistics block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Statistics {
    /// The times since the epoch at which the capture began and at which the numbers were taken.
    pub(super) start: Duration,
    pub(super) now: Duration,
    /// All frames, those that were dropped included.
    pub(super) received: u64,
    pub(super) dropped: u64,
}

/// Appends the header of a file, and its interface. The file has at most `len_max` bytes of each frame.
pub(super) fn push_head(into: &mut Vec<u8>, interface: &str, len_max: u32) {
    push_block(into, SECTION, |block| {
        block.extend(BYTE_ORDER.to_ne_bytes());
        VERSION.iter().for_each(|part| block.extend(part.to_ne_bytes()));
        // The length of the section is not known.
        block.extend(u64::MAX.to_ne_bytes());
        push_option(block, SECTION_APPLICATION, concat!("kickless ", env!("CARGO_PKG_VERSION")).as_bytes());
        push_option(block, OPTION_END, &[]);
    });
    push_block(into, INTERFACE, |block| {
        block.extend(LINK_ETHERNET.to_ne_bytes());
        block.extend([0; 2]);
        block.extend(len_max.to_ne_bytes());
        if !interface.is_empty() {
            push_option(block, INTERFACE_NAME, interface.as_bytes());
        }
        push_option(block, INTERFACE_RESOLUTION, &[NANOSECONDS]);
        push_option(block, OPTION_END, &[]);
    });
}

/// Appends the statistics of the interface.
pub(super) fn push_statistics(into: &mut Vec<u8>, statistics: &Statistics) {
    let Statistics { start, now, received, dropped } = statistics;
    push_block(into, STATISTICS, |block| {
        block.extend(0u32.to_ne_bytes());
        push_time(block, *now);
        for (code, time) in [(STATISTICS_START, start), (STATISTICS_END, now)] {
            block.extend([code, 8].map(u16::to_ne_bytes).as_flattened());
            push_time(block, *time);
        }
        push_option(block, STATISTICS_RECEIVED, &received.to_ne_bytes());
        push_option(block, STATISTICS_DROPPED, &dropped.to_ne_bytes());
        push_option(block, OPTION_END, &[]);
    });
}

/// Returns the length of the block of a frame that has `len` bytes in the file.
pub(super) fn packet_len(len: usize) -> usize {
    PACKET_OVERHEAD + len.next_multiple_of(4)
}

/// A frame for a packet block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) time: Duration,
    pub(super) direction: Direction,
    pub(super) pair: u16,
    /// The length of the frame, and of its first part that is in the file.
    pub(super) len: usize,
    pub(super) captured: usize,
}

impl Packet {
    /// Appends the block of the frame, whose first bytes `read` copies.
    pub(super) fn push(&self, into: &mut Vec<u8>, read: impl FnOnce(&mut [u8])) {
        push_block(into, PACKET, |block| {
            block.extend(0u32.to_ne_bytes());
            push_time(block, self.time);
            // Lossless, because a frame is no longer than that.
            [self.captured, self.len].iter().for_each(|len| block.extend((*len as u32).to_ne_bytes()));
            let start = block.len();
            block.resize(start + self.captured.next_multiple_of(4), 0);
            read(&mut block[start..start + self.captured]);
            push_option(block, PACKET_FLAGS, &(self.direction as u32).to_ne_bytes());
            push_option(block, PACKET_QUEUE, &u32::from(self.pair).to_ne_bytes());
            push_option(block, OPTION_END, &[]);
        });
    }
}

/// Appends a block with its length before and behind its body.
fn push_block(into: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = into.len();
    into.extend(kind.to_ne_bytes());
    into.extend([0; 4]);
    body(into);
    // Lossless, because a block is a frame and some fields.
    let len = ((into.len() - start + 4) as u32).to_ne_bytes();
    into[start + 4..start + 8].copy_from_slice(&len);
    into.extend(len);
}

fn push_option(block: &mut Vec<u8>, code: u16, value: &[u8]) {
    block.extend(code.to_ne_bytes());
    // Lossless: the name of a device is the longest value.
    block.extend((value.len() as u16).to_ne_bytes());
    block.extend(value);
    block.resize(block.len().next_multiple_of(4), 0);
}

/// Appends a time stamp, the upper half first.
fn push_time(block: &mut Vec<u8>, time: Duration) {
    // Lossless until the year 2554.
    let nanos = time.as_nanos() as u64;
    block.extend(((nanos >> 32) as u32).to_ne_bytes());
    block.extend((nanos as u32).to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_block_has_the_length_that_is_told() {
        for captured in [0, 1, 14, 60, 61, 62, 63, 64, 65_550] {
            let packet = Packet {
                time: Duration::ZERO,
                direction: Direction::Inbound,
                pair: 0,
                len: 70_000,
                captured,
            };
            let mut block = Vec::new();
            packet.push(&mut block, |bytes| assert_eq!(bytes.len(), captured));
            assert_eq!(block.len(), packet_len(captured));
            assert_eq!(block[4..8], block[block.len() - 4..]);
        }
    }

    #[test]
    fn statistics_have_one_length() {
        let len = |statistics| {
            let mut block = Vec::new();
            push_statistics(&mut block, &statistics);
            block.len()
        };
        let largest = Statistics { now: Duration::MAX, received: u64::MAX, dropped: 1, ..Default::default() };
        assert_eq!(len(Statistics::default()), len(largest));
    }
}
