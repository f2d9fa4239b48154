//! The reference counts in a refcount block, of 1 to 64 bits each, and the refcount table.

use super::entry::{BadEntry, OFFSET_LIMIT};
use super::geometry::{Geometry, HostOffset};

/// The lower 9 bits of an entry of the refcount table are reserved.
const RESERVED: u64 = 1 << 9;

/// A count is above the largest one of the image's width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a reference count of {0} does not fit")]
pub struct CountTooLarge(pub u64);

/// Returns a count of a block. `index` is below the number of counts in `block`.
pub fn get(geometry: Geometry, block: &[u8], index: u64) -> u64 {
    let (index, bits) = (index as usize, geometry.refcount_bits() as usize);
    if bits < 8 {
        // Bit 0 of a byte comes first.
        let shift = index * bits % 8;
        return u64::from(block[index * bits / 8] >> shift) & geometry.refcount_max();
    }
    let bytes = bits / 8;
    block[index * bytes..][..bytes].iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
}

/// Changes a count of a block. `index` is below the number of counts in `block`.
///
/// # Errors
/// The count is too large for the width of the image.
pub fn set(geometry: Geometry, block: &mut [u8], index: u64, count: u64) -> Result<(), CountTooLarge> {
    let (max, index, bits) = (geometry.refcount_max(), index as usize, geometry.refcount_bits() as usize);
    if count > max {
        return Err(CountTooLarge(count));
    }
    if bits < 8 {
        let shift = index * bits % 8;
        let byte = &mut block[index * bits / 8];
        *byte = *byte & !((max as u8) << shift) | (count as u8) << shift;
        return Ok(());
    }
    let bytes = bits / 8;
    block[index * bytes..][..bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
    Ok(())
}

/// Decodes an entry of the refcount table: the place of the refcount block. Encoded, it is the plain offset.
pub(crate) fn decode_block(geometry: Geometry, word: u64) -> Result<Option<HostOffset>, BadEntry> {
    let at = HostOffset(word);
    match () {
        () if word == 0 => Ok(None),
        () if !word.is_multiple_of(RESERVED) => Err(BadEntry::Reserved),
        () if word >= OFFSET_LIMIT => Err(BadEntry::Offset(word)),
        () if !geometry.is_aligned(at) => Err(BadEntry::Alignment(word)),
        () => Ok(Some(at)),
    }
}
