//! The test frames that a null port delivers.
//!
//! They are broadcast frames. Their EtherType is for local experiments (IEEE 802, 0x88B5), so that no network
//! stack answers them:
//! ```text
//!   0  destination (6)   source (6)   EtherType (2)   magic (4)
//!  18  pair (2)   number (8)   length (4)   checksum (4)
//!  36  pattern
//! ```
//! Numbers are little-endian. The checksum covers all other bytes.

use kickless_spec::net::{FRAME_MAX, Header, MAC_LEN};

const ETHER_TYPE: [u8; 2] = 0x88b5u16.to_be_bytes();
const MAGIC: [u8; 4] = *b"kkl1";
/// The source address for a card without an address. Its second bit marks it as locally administered.
const SOURCE: [u8; MAC_LEN] = [2, b'k', b'k', b'l', 0, 1];

const PAIR: usize = 18;
const NUMBER: usize = 20;
const LENGTH: usize = 28;
const CHECKSUM: usize = 32;
const PATTERN: usize = 36;

/// The contents of a test frame.
#[derive(Clone, Copy, Debug)]
pub struct TestFrame {
    /// The pair of rings that receives it.
    pub pair: u16,
    /// Its number among the frames of the pair, from 0.
    pub number: u64,
}

impl TestFrame {
    /// The shortest test frame: the shortest Ethernet frame, without its check sequence.
    pub const LEN_MIN: u32 = 60;
    /// The longest test frame.
    pub const LEN_MAX: u32 = (FRAME_MAX - size_of::<Header>()) as u32;

    /// Writes the test frame into `frame`, whose length becomes the length of the test frame.
    ///
    /// # Panics
    /// `frame` is shorter than [`TestFrame::LEN_MIN`].
    pub fn write(self, source: Option<[u8; MAC_LEN]>, frame: &mut [u8]) {
        let len = frame.len() as u32;
        let (head, pattern) = frame.split_at_mut(PATTERN);
        head[..MAC_LEN].fill(0xff);
        head[MAC_LEN..2 * MAC_LEN].copy_from_slice(&source.unwrap_or(SOURCE));
        head[12..14].copy_from_slice(&ETHER_TYPE);
        head[14..PAIR].copy_from_slice(&MAGIC);
        head[PAIR..NUMBER].copy_from_slice(&self.pair.to_le_bytes());
        head[NUMBER..LENGTH].copy_from_slice(&self.number.to_le_bytes());
        head[LENGTH..CHECKSUM].copy_from_slice(&len.to_le_bytes());
        for (n, byte) in pattern.iter_mut().enumerate() {
            *byte = (n as u64).wrapping_add(self.number) as u8;
        }
        let checksum = checksum(&head[..CHECKSUM], pattern);
        head[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Returns the FNV-1a hash of both parts.
fn checksum(head: &[u8], pattern: &[u8]) -> u32 {
    let bytes = head.iter().chain(pattern);
    bytes.fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::parse_test_frame;

    #[test]
    fn a_written_frame_is_read_and_a_changed_one_refused() {
        for len in [TestFrame::LEN_MIN as usize, 61, 1514, TestFrame::LEN_MAX as usize] {
            let mut bytes = vec![0; len];
            TestFrame { pair: 3, number: 0x0102_0304_0506 }.write(Some([2, 0, 0, 0, 0, 9]), &mut bytes);
            assert_eq!(parse_test_frame(&bytes), Some((3, 0x0102_0304_0506)));
            for at in [0, 11, 13, 17, 20, 30, 33, 40, len - 1] {
                bytes[at] ^= 1;
                assert_eq!(parse_test_frame(&bytes), None, "{at}");
                bytes[at] ^= 1;
            }
            assert_eq!(parse_test_frame(&bytes[..len - 1]), None);
            bytes.push(0);
            assert_eq!(parse_test_frame(&bytes), None);
        }
        assert_eq!(parse_test_frame(&[]), None);
    }
}
