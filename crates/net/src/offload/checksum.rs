//! Completes checksums of TCP and UDP.

use crate::frame::header::Checksum;
use kickless_spec::checksum::Sum;

/// Bytes of a checksum.
const LEN: usize = 2;

/// Completes the checksum of a frame, whose field holds the sum of the pseudo-header. Returns `false` if the
/// field is outside of the frame.
pub fn complete_checksum(frame: &mut [u8], at: Checksum) -> bool {
    let Some(covered) = frame.get_mut(usize::from(at.start)..) else { return false };
    let sum = Sum::default().with(covered);
    let offset = usize::from(at.offset);
    let Some(field) = covered.get_mut(offset..offset + LEN) else { return false };
    field.copy_from_slice(&finish(sum));
    true
}

/// Returns the checksum for this sum. A checksum of 0 means "none" in UDP, so it becomes 0xffff, which is
/// equal in arithmetic of ones' complement.
pub(super) fn finish(sum: Sum) -> [u8; LEN] {
    match sum.checksum() {
        [0, 0] => [0xff; LEN],
        checksum => checksum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Adds pairs one by one, as RFC 1071 describes it.
    fn reference(bytes: &[u8]) -> u16 {
        bytes.chunks(2).fold(0u16, |sum, pair| {
            let pair = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
            let (sum, carry) = sum.overflowing_add(pair);
            sum + u16::from(carry)
        })
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_rfc(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0..300usize) {
            let expected = reference(&bytes);
            prop_assert_eq!(Sum::default().with(&bytes).to_bytes(), expected.to_be_bytes());
            // A sum can be continued at each even offset.
            let (first, second) = bytes.split_at((cut & !1).min(bytes.len()));
            prop_assert_eq!(Sum::default().with(first).with(second).to_bytes(), expected.to_be_bytes());
        }

        /// A completed checksum makes the sum of all covered bytes 0xffff.
        #[test]
        fn a_completed_checksum_is_right(
            mut frame in prop::collection::vec(any::<u8>(), 0..200),
            start in 0..220u16,
            offset in 0..220u16,
        ) {
            let before = frame.clone();
            let fits = usize::from(start) + usize::from(offset) + LEN <= frame.len();
            prop_assert_eq!(complete_checksum(&mut frame, Checksum { start, offset }), fits);
            if !fits {
                prop_assert_eq!(frame, before);
            } else if offset % 2 == 0 {
                // The field held a part of the sum (a pseudo-header's), which the checksum has to include.
                let field = usize::from(start + offset);
                let partial = u16::from_be_bytes([before[field], before[field + 1]]);
                let (sum, carry) = reference(&frame[usize::from(start)..]).overflowing_add(partial);
                let all = sum + u16::from(carry);
                prop_assert!(all == u16::MAX || all == 0);
            }
        }
    }
}
