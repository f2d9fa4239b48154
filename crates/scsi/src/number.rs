//! Reads and writes the integers of SCSI, which are big-endian.

/// Returns the number in these bytes. Only the last eight count.
pub(crate) fn big_endian(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Returns `number`, or the largest number that the field holds.
pub(crate) fn at_most_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(big_endian(&[]), 0);
        assert_eq!(big_endian(&[1, 2, 3]), 0x1_0203);
        assert_eq!(big_endian(&[9, 0xff, 0, 0, 0, 0, 0, 0, 0xfe]), 0xff00_0000_0000_00fe);
        assert_eq!((at_most_u32(7), at_most_u32(1 << 32)), (7, u32::MAX));
    }
}
