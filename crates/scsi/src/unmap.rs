//! The parameter list of UNMAP (SBC-3, UNMAP command).

use crate::number::big_endian;
use crate::sense::Sense;
use crate::unit::{Blocks, Properties, UnmapLimits};

/// Length of the head of the list.
const HEAD: usize = 8;
/// Length of a descriptor.
const DESCRIPTOR: usize = 16;

/// Returns the number of bytes of a parameter list that the device reads. It need not read more than this,
/// because a longer list has too many ranges.
pub fn unmap_len_max(disk: &Properties) -> usize {
    let ranges = disk.unmap.map_or(0, |unmap| unmap.ranges_max);
    usize::from(u16::MAX).min(HEAD.saturating_add((ranges as usize).saturating_mul(DESCRIPTOR)))
}

/// Returns the ranges of a parameter list. Empty ranges are left out.
///
/// `list_len` is the length of the list in the command, and `list` its first bytes, at most
/// [`unmap_len_max`]. A descriptor that is not complete is ignored.
///
/// # Errors
/// The list ends within its head or its descriptors, has too many ranges or blocks, or a range that is not
/// within the disk. Then none of the ranges is freed.
pub fn unmap<'a>(
    list_len: u16,
    list: &'a [u8],
    disk: &Properties,
) -> Result<impl Iterator<Item = Blocks> + Clone + use<'a>, Sense> {
    let list_len = usize::from(list_len);
    // An empty list is no error.
    let descriptors = if list_len == 0 { &[] } else { descriptors(list_len, list, disk)? };
    let blocks_max = match disk.unmap {
        None => 0,
        Some(UnmapLimits { blocks_max: UnmapLimits::NO_LIMIT, .. }) => u64::MAX,
        Some(unmap) => unmap.blocks_max.into(),
    };
    let mut total: u64 = 0;
    for (nth, range) in ranges(descriptors).enumerate() {
        disk.range(range.first, range.count)?;
        total = total.saturating_add(range.count);
        if total > blocks_max {
            let count_at = HEAD + nth * DESCRIPTOR + 8;
            return Err(Sense::invalid_parameter(u16::try_from(count_at).unwrap_or(u16::MAX), 7));
        }
    }
    Ok(ranges(descriptors).filter(|range| !range.is_empty()))
}

/// Returns the complete descriptors of a list that is not empty.
fn descriptors<'a>(
    list_len: usize,
    list: &'a [u8],
    disk: &Properties,
) -> Result<&'a [[u8; DESCRIPTOR]], Sense> {
    let head = list.get(..HEAD).ok_or(Sense::LIST_LENGTH)?;
    let (data_len, descriptors_len) = (big_endian(&head[..2]) as usize, big_endian(&head[2..4]) as usize);
    // UNMAP DATA LENGTH does not count itself.
    if data_len + 2 > list_len || descriptors_len + HEAD > list_len {
        return Err(Sense::LIST_LENGTH);
    }
    let count = descriptors_len / DESCRIPTOR;
    if count > disk.unmap.map_or(0, |unmap| unmap.ranges_max as usize) {
        return Err(Sense::invalid_parameter(2, 7));
    }
    let bytes = list.get(HEAD..HEAD + count * DESCRIPTOR).ok_or(Sense::LIST_LENGTH)?;
    Ok(bytes.as_chunks().0)
}

fn ranges(descriptors: &[[u8; DESCRIPTOR]]) -> impl Iterator<Item = Blocks> + Clone {
    descriptors
        .iter()
        .map(|bytes| Blocks { first: big_endian(&bytes[..8]), count: big_endian(&bytes[8..12]) })
}
