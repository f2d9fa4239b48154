//! Tests parameter lists of UNMAP.

mod common;

use common::{DISK, PLAIN};
use kickless_scsi::{Blocks, Properties, Sense, UnmapLimits, unmap, unmap_len_max};
use proptest::prelude::*;

/// Returns a list with these ranges, and its lengths.
fn list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let len = 16 * ranges.len() as u16;
    let mut bytes = [(len + 6).to_be_bytes(), len.to_be_bytes(), [0; 2], [0; 2]].concat();
    for (first, count) in ranges {
        bytes.extend(first.to_be_bytes());
        bytes.extend(count.to_be_bytes());
        bytes.extend([0; 4]);
    }
    bytes
}

fn parse(bytes: &[u8]) -> Result<Vec<Blocks>, Sense> {
    unmap(bytes.len() as u16, bytes, &DISK).map(Iterator::collect)
}

#[test]
fn ranges() {
    let range = |first, count| Blocks { first, count };
    assert_eq!(parse(&list(&[(8, 16), (4095, 1)])), Ok(vec![range(8, 16), range(4095, 1)]));
    // Empty ranges and empty lists are no errors.
    assert_eq!(parse(&list(&[(8, 0), (0, 1), (4096, 0)])), Ok(vec![range(0, 1)]));
    assert_eq!(parse(&list(&[])), Ok(vec![]));
    assert_eq!(parse(&[]), Ok(vec![]));
    // A descriptor that is not complete is ignored.
    let mut odd = list(&[(8, 16), (9, 9)]);
    odd[3] -= 1;
    assert_eq!(parse(&odd), Ok(vec![range(8, 16)]));
    // The list may be longer than its descriptors.
    let mut long = list(&[(8, 16)]);
    long.extend([0xff; 40]);
    assert_eq!(parse(&long), Ok(vec![range(8, 16)]));
}

#[test]
fn ranges_are_within_the_disk_and_the_limits() {
    for range in [(4096, 1), (4000, 97), (u64::MAX, 1), (u64::MAX, 0), (4097, 0)] {
        assert_eq!(parse(&list(&[(0, 1), range])), Err(Sense::OUT_OF_RANGE), "{range:?}");
    }
    assert!(parse(&list(&[(0, 500), (0, 500)])).is_ok());
    assert_eq!(parse(&list(&[(0, 1001)])), Err(Sense::invalid_parameter(16, 7)));
    assert_eq!(parse(&list(&[(0, 500), (0, 500), (0, 1)])), Err(Sense::invalid_parameter(48, 7)));
    assert!(parse(&list(&[(0, 1); 4])).is_ok());
    assert_eq!(parse(&list(&[(0, 1); 5])), Err(Sense::invalid_parameter(2, 7)));
}

/// SBC-3, block limits VPD page: the largest number says that there is no limit.
#[test]
fn the_largest_number_is_no_limit() {
    let bytes = list(&[(0, u32::MAX), (0, 1)]);
    let total = |blocks_max| {
        let limits = UnmapLimits { blocks_max, ..DISK.unmap.unwrap() };
        let disk = Properties { blocks: 1 << 33, unmap: Some(limits), ..DISK };
        let ranges = unmap(bytes.len() as u16, &bytes, &disk)?;
        Ok(ranges.map(|range| range.count).sum::<u64>())
    };
    assert_eq!(total(u32::MAX), Ok(1 << 32));
    assert_eq!(total(u32::MAX - 1), Err(Sense::invalid_parameter(16, 7)));
}

#[test]
fn lists_that_are_too_short() {
    let whole = list(&[(0, 1), (8, 1)]);
    for len in 1..whole.len() {
        assert_eq!(parse(&whole[..len]), Err(Sense::LIST_LENGTH), "{len}");
    }
    // Each of the lengths leaves the list.
    for at in [1, 3] {
        let mut bytes = whole.clone();
        bytes[at] += 1;
        assert_eq!(parse(&bytes), Err(Sense::LIST_LENGTH));
    }
    // The command has a longer list than the caller read.
    assert_eq!(unmap(40, &whole[..39], &DISK).err(), Some(Sense::LIST_LENGTH));
}

#[test]
fn a_caller_reads_no_more_than_it_needs() {
    assert_eq!((unmap_len_max(&DISK), unmap_len_max(&PLAIN)), (72, 8));
    let limits = UnmapLimits { ranges_max: u32::MAX, ..DISK.unmap.unwrap() };
    assert_eq!(unmap_len_max(&Properties { unmap: Some(limits), ..DISK }), 65535);
    let bytes = list(&[(0, 1); 5]);
    let len = bytes.len() as u16;
    assert_eq!(unmap(len, &bytes[..72], &DISK).err(), Some(Sense::invalid_parameter(2, 7)));
}

proptest! {
    #[test]
    fn any_list_has_a_result(list_len: u16, list in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(ranges) = unmap(list_len, &list, &DISK) {
            let total: u64 = ranges.clone().map(|range| range.count).sum();
            prop_assert!(total <= 1000 && ranges.count() <= 4);
        }
    }
}
