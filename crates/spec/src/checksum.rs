//! The checksum of IP, TCP and UDP (RFC 1071).

/// A sum of bytes in ones' complement. The bytes are numbers of 16 bits, two by two.
///
/// ```
/// use kickless_spec::checksum::Sum;
///
/// // The example of RFC 1071, section 3.
/// let sum = Sum::default().with(&[0x00, 0x01, 0xf2, 0x03]).with(&[0xf4, 0xf5, 0xf6, 0xf7]);
/// assert_eq!((sum.to_bytes(), sum.checksum()), ([0xdd, 0xf2], [0x22, 0x0d]));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum(
    /// Of numbers in the order of this processor, because the sum of swapped bytes is the swapped sum.
    u64,
);

impl Sum {
    /// Returns the sum with these bytes added. A last single byte is the first of two, so nothing but zeroes
    /// may follow it.
    #[inline]
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Self {
        // Numbers of 32 bits give the same sum after folding. 2^32 of them fit, and no packet has so many.
        let (words, rest) = bytes.as_chunks::<4>();
        let mut sum = words.iter().fold(self.0, |sum, word| sum + u64::from(u32::from_ne_bytes(*word)));
        let (pairs, last) = rest.as_chunks::<2>();
        for pair in pairs {
            sum += u64::from(u16::from_ne_bytes(*pair));
        }
        if let [last] = last {
            sum += u64::from(u16::from_ne_bytes([*last, 0]));
        }
        Self(sum)
    }

    /// Returns the sum of 16 bits, as it is in a packet.
    #[inline]
    pub fn to_bytes(self) -> [u8; 2] {
        self.fold().to_ne_bytes()
    }

    /// Returns the checksum, as it is in a packet.
    #[inline]
    pub fn checksum(self) -> [u8; 2] {
        (!self.fold()).to_ne_bytes()
    }

    fn fold(self) -> u16 {
        let mut sum = self.0;
        while sum > u64::from(u16::MAX) {
            sum = (sum & u64::from(u16::MAX)) + (sum >> 16);
        }
        // Lossless after the loop.
        sum as u16
    }
}
