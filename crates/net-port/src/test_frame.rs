//! The frames that a null port delivers.
//!
//! They are broadcast, of an EtherType for local experiments (IEEE 802, 0x88B5), so that no stack answers them:
//! ```text
//!   0  destination (6)   source (6)   EtherType (2)   magic (4)
//!  18  pair (2)   number (8)   length (4)   checksum (4)
//!  36  pattern
//! ```
//! Numbers are little-endian. The checksum covers all other bytes.

use kickless_spec::net::{FRAME_MAX, Header, MAC_LEN};

const ETHER_TYPE: [u8; 2] = 0x88b5u16.to_be_bytes();
const MAGIC: [u8; 4] = *b"kkl1";
/// Source address where the card has none: one that is administered locally.
const SOURCE: [u8; MAC_LEN] = [2, b'k', b'k', b'l', 0, 1];

const PAIR: usize = 18;
const NUMBER: usize = 20;
const LENGTH: usize = 28;
const CHECKSUM: usize = 32;
const PATTERN: usize = 36;

/// What a test frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestFrame {
    /// The pair of rings that it is for.
    pub pair: u16,
    /// Its number among the frames of the pair, from 0.
    pub number: u64,
}

/// Bytes are no whole test frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these bytes are no whole test frame")]
pub struct NotATestFrame;

impl TestFrame {
    /// The shortest test frame: the shortest Ethernet frame, without its check sequence.
    pub const LEN_MIN: u32 = 60;
    /// The longest test frame.
    pub const LEN_MAX: u32 = (FRAME_MAX - size_of::<Header>()) as u32;

    /// Fills `frame`.
    ///
    /// # Panics
    /// It is shorter than [`TestFrame::LEN_MIN`].
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

    /// Reads a frame of exactly these bytes.
    ///
    /// # Errors
    /// It is none, is not whole, or has been changed.
    pub fn read(frame: &[u8]) -> Result<Self, NotATestFrame> {
        let (head, pattern) = frame.split_at_checked(PATTERN).ok_or(NotATestFrame)?;
        let is_ours = head[12..14] == ETHER_TYPE && head[14..PAIR] == MAGIC;
        let len = (frame.len() as u32).to_le_bytes();
        let checksum = checksum(&head[..CHECKSUM], pattern).to_le_bytes();
        if !is_ours || head[LENGTH..CHECKSUM] != len || head[CHECKSUM..] != checksum {
            return Err(NotATestFrame);
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| head[at + n]));
        Ok(Self { pair: u16::from_le_bytes([head[PAIR], head[PAIR + 1]]), number: number(NUMBER) })
    }
}

/// FNV-1a of both.
fn checksum(head: &[u8], pattern: &[u8]) -> u32 {
    let bytes = head.iter().chain(pattern);
    bytes.fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let frame = TestFrame { pair: 3, number: 0x0102_0304_0506 };
        for len in [TestFrame::LEN_MIN as usize, 61, 1514, TestFrame::LEN_MAX as usize] {
            let mut bytes = vec![0; len];
            frame.write(None, &mut bytes);
            assert_eq!(TestFrame::read(&bytes), Ok(frame));
            for at in [0, 6, 12, 14, PAIR, NUMBER, LENGTH, CHECKSUM, PATTERN, len - 1] {
                bytes[at] ^= 0x10;
                assert_eq!(TestFrame::read(&bytes), Err(NotATestFrame), "{at}");
                bytes[at] ^= 0x10;
            }
            assert_eq!(TestFrame::read(&bytes[..len - 1]), Err(NotATestFrame));
            bytes.push(0);
            assert_eq!(TestFrame::read(&bytes), Err(NotATestFrame));
        }
        assert_eq!(TestFrame::read(&[]), Err(NotATestFrame));
    }
}
