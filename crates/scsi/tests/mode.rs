//! Tests mode pages byte for byte, and parameter lists of MODE SELECT.

mod common;

use common::{DISK, READ_ONLY};
use kickless_scsi::{BlockDescriptor, Mode, ModeSelect, ModeSense, PageControl, Pages, Properties, Sense};
use proptest::prelude::*;

const DEFAULT: Mode = Mode { write_cache: true, sense_descriptors: false };
const OTHER: Mode = Mode { write_cache: false, sense_descriptors: true };
const REQUEST: ModeSense = ModeSense {
    is_long: false,
    descriptor: BlockDescriptor::Short,
    control: PageControl::Current,
    pages: Pages::All,
    allocation: 255,
};
const SHORT: [u8; 8] = [0, 0, 0x10, 0, 0, 0, 2, 0];
const LONG: [u8; 16] = [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0];

fn caching(flags: u8) -> [u8; 20] {
    let mut page = [0; 20];
    page[..3].copy_from_slice(&[0x08, 18, flags]);
    page
}

fn control(flags: u8) -> [u8; 12] {
    [0x0a, 10, flags, 0x10, 0, 0, 0, 0, 0, 0, 0, 0]
}

#[test]
fn all_pages() {
    let bytes = DEFAULT.sense(&REQUEST, DEFAULT, &DISK);
    assert_eq!(bytes, [&[43, 0, 0x10, 8][..], &SHORT, &caching(4), &control(2)].concat());
    // The length is that of all data.
    assert_eq!(DEFAULT.sense(&ModeSense { allocation: 4, ..REQUEST }, DEFAULT, &DISK), [43, 0, 0x10, 8]);
    let read_only = DEFAULT.sense(&REQUEST, DEFAULT, &READ_ONLY);
    assert_eq!(read_only[2], 0x90);
}

#[test]
fn long_answers() {
    let long = ModeSense { is_long: true, ..REQUEST };
    let bytes = DEFAULT.sense(&long, DEFAULT, &DISK);
    assert_eq!(bytes[..16], [&[0, 46, 0, 0x10, 0, 0, 0, 8][..], &SHORT].concat());
    let bytes = DEFAULT.sense(&ModeSense { descriptor: BlockDescriptor::Long, ..long }, DEFAULT, &DISK);
    assert_eq!(bytes[..24], [&[0, 54, 0, 0x10, 1, 0, 0, 16][..], &LONG].concat());
    let bytes = DEFAULT.sense(&ModeSense { descriptor: BlockDescriptor::None, ..long }, DEFAULT, &DISK);
    assert_eq!(bytes[..10], [0, 38, 0, 0x10, 0, 0, 0, 0, 0x08, 18]);
    let large = Properties { blocks: 1 << 40, ..DISK };
    assert_eq!(DEFAULT.sense(&REQUEST, DEFAULT, &large)[4..8], [0xff; 4]);
}

#[test]
fn page_controls() {
    let sense = |control, pages| {
        let request = ModeSense { control, pages, descriptor: BlockDescriptor::None, ..REQUEST };
        OTHER.sense(&request, DEFAULT, &DISK)[4..].to_vec()
    };
    assert_eq!(sense(PageControl::Current, Pages::Caching), caching(0));
    assert_eq!(sense(PageControl::Default, Pages::Caching), caching(4));
    assert_eq!(sense(PageControl::Changeable, Pages::Caching), caching(4));
    assert_eq!(sense(PageControl::Current, Pages::Control), control(6));
    assert_eq!(sense(PageControl::Default, Pages::Control), control(2));
    let mask = [0x0a, 10, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(sense(PageControl::Changeable, Pages::Control), mask);
}

fn select(is_long: bool, list: &[u8]) -> Result<Mode, Sense> {
    let request = ModeSelect { is_long, list_len: list.len() as u16 };
    DEFAULT.select(&request, list, &DISK)
}

#[test]
fn values_are_selected() {
    let list = |parts: &[&[u8]]| select(false, &[&[0, 0, 0x10, 0], &parts.concat()[..]].concat());
    assert_eq!(list(&[]), Ok(DEFAULT));
    assert_eq!(select(false, &[]), Ok(DEFAULT));
    assert_eq!(list(&[&caching(0)]), Ok(Mode { write_cache: false, ..DEFAULT }));
    assert_eq!(list(&[&control(6)]), Ok(Mode { sense_descriptors: true, ..DEFAULT }));
    assert_eq!(list(&[&control(6), &caching(0)]), Ok(OTHER));
    // The last one counts, and PS is ignored.
    assert_eq!(list(&[&caching(0), &caching(4)]), Ok(DEFAULT));
    let mut saveable = caching(0);
    saveable[0] |= 0x80;
    assert_eq!(list(&[&saveable]), Ok(Mode { write_cache: false, ..DEFAULT }));
}

#[test]
fn a_driver_may_return_what_it_got() {
    for (is_long, descriptor) in [
        (false, BlockDescriptor::None),
        (false, BlockDescriptor::Short),
        (true, BlockDescriptor::None),
        (true, BlockDescriptor::Short),
        (true, BlockDescriptor::Long),
    ] {
        let request = ModeSense { is_long, descriptor, ..REQUEST };
        assert_eq!(select(is_long, &OTHER.sense(&request, DEFAULT, &DISK)), Ok(OTHER));
    }
}

#[test]
fn block_descriptors_change_nothing() {
    let short = |descriptor: [u8; 8]| select(false, &[&[0, 0, 0, 8], &descriptor[..]].concat());
    assert_eq!(short(SHORT), Ok(DEFAULT));
    assert_eq!(short([0, 0, 0, 0, 0, 0, 2, 0]), Ok(DEFAULT));
    assert_eq!(short([0xff, 0xff, 0xff, 0xff, 9, 0, 2, 0]), Ok(DEFAULT));
    assert_eq!(short([0, 0, 0x11, 0, 0, 0, 2, 0]), Err(Sense::invalid_parameter(4, 7)));
    assert_eq!(short([0, 0, 0x10, 0, 0, 0, 0x10, 0]), Err(Sense::invalid_parameter(9, 7)));
    let long = |lba: u8, len: u8, descriptor: &[u8]| {
        select(true, &[&[0, 0, 0, 0, lba, 0, 0, len], descriptor].concat())
    };
    assert_eq!(long(1, 16, &LONG), Ok(DEFAULT));
    assert_eq!(long(0, 8, &SHORT), Ok(DEFAULT));
    let mut other = LONG;
    other[14] = 0x10;
    assert_eq!(long(1, 16, &other), Err(Sense::invalid_parameter(20, 7)));
    assert_eq!(long(0, 16, &LONG), Err(Sense::invalid_parameter(6, 7)));
    assert_eq!(long(1, 8, &SHORT), Err(Sense::invalid_parameter(6, 7)));
    assert_eq!(long(1, 16, &LONG[..15]), Err(Sense::LIST_LENGTH));
    assert_eq!(select(false, &[0, 0, 0, 16]), Err(Sense::invalid_parameter(3, 7)));
}

#[test]
fn lists_that_are_wrong() {
    let list = |page: &[u8]| select(false, &[&[0; 4], page].concat());
    for len in [1, 3] {
        assert_eq!(select(false, &[0; 8][..len]), Err(Sense::LIST_LENGTH));
        assert_eq!(select(true, &[0; 8][..len + 4]), Err(Sense::LIST_LENGTH));
    }
    // A page that is cut off, in its head or behind it.
    assert_eq!(list(&caching(0)[..1]), Err(Sense::LIST_LENGTH));
    assert_eq!(list(&caching(0)[..19]), Err(Sense::LIST_LENGTH));
    // Unknown pages, a page with a subpage, and a wrong length.
    assert_eq!(list(&[0x01, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Err(Sense::invalid_parameter(4, 5)));
    assert_eq!(list(&[0x3f, 0]), Err(Sense::invalid_parameter(4, 5)));
    assert_eq!(list(&[0x4a, 1, 0, 0]), Err(Sense::invalid_parameter(4, 6)));
    assert_eq!(list(&[0x0a, 11, 2, 0x10]), Err(Sense::invalid_parameter(5, 7)));
    // Bits that do not change.
    assert_eq!(list(&caching(5)), Err(Sense::invalid_parameter(6, 0)));
    assert_eq!(list(&control(0)), Err(Sense::invalid_parameter(6, 1)));
    let mut swp = control(2);
    swp[4] = 0x08;
    assert_eq!(list(&swp), Err(Sense::invalid_parameter(8, 3)));
    // The second page is wrong, and nothing changes.
    assert_eq!(list(&[&caching(0)[..], &control(0)].concat()), Err(Sense::invalid_parameter(26, 1)));
}

proptest! {
    #[test]
    fn any_list_has_a_result(is_long: bool, list in prop::collection::vec(any::<u8>(), 0..256)) {
        let _ = select(is_long, &list);
    }
}
