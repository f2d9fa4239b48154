//! Tests look-ups and the choice of ways.

use super::*;
use crate::format::entry::{UNWRITTEN, encode};
use crate::format::geometry::Version;

fn data(geometry: Geometry, host: u64) -> RawEntry {
    encode(geometry, Mapping::Data { host: HostOffset(host), copied: true })
}

#[test]
fn runs_join_what_is_contiguous() {
    let geometry = Geometry::new(Version::V3, 9, 4, false).unwrap();
    let slices = Slices::new(geometry, 512, 0);
    let unwritten = with_bits(data(geometry, 0x1400), UNWRITTEN);
    let entries =
        [data(geometry, 0x1000), data(geometry, 0x1200), unwritten, RawEntry::default(), RawEntry::default()];
    let at = slices.choose(SliceIndex(0), |_| true).unwrap();
    slices.fill(at, SliceIndex(0), true, entries.into_iter());
    let look = |at, len| slices.look(GuestOffset(at), len);
    assert_eq!(look(512, 100), Look::Data { host: HostOffset(0x1200), len: 100, in_place: true });
    assert_eq!(look(100, 4096), Look::Data { host: HostOffset(0x1064), len: 924, in_place: true });
    assert_eq!(look(1024, 4096), Look::Data { host: HostOffset(0x1400), len: 512, in_place: false });
    assert_eq!(look(1536, 1024), Look::Below { len: 1024 });
    assert_eq!(look(1 << 20, 512), Look::Miss(SliceIndex(32)));
    slices.settle(at, SliceIndex(0), false);
    assert_eq!(look(0, 1), Look::Data { host: HostOffset(0x1000), len: 1, in_place: false });
}

#[test]
fn subclusters_have_answers_of_their_own() {
    let geometry = Geometry::new(Version::V3, 14, 4, true).unwrap();
    let slices = Slices::new(geometry, 512, 0);
    let mapping =
        Mapping::Parts { host: Some(HostOffset(0x8000)), copied: true, allocated: 0b0110, zero: 0b1000 };
    let at = slices.choose(SliceIndex(0), |_| true).unwrap();
    slices.fill(at, SliceIndex(0), true, [encode(geometry, mapping)].into_iter());
    let look = |at, len| slices.look(GuestOffset(at), len);
    assert_eq!(look(0, 4096), Look::Below { len: 512 });
    assert_eq!(look(512, 4096), Look::Data { host: HostOffset(0x8200), len: 1024, in_place: true });
    assert_eq!(look(1536, 4096), Look::Zero { len: 512 });
    assert_eq!(look(2048, 1 << 20), Look::Below { len: (31 << 14) + (28 << 9) });
}

#[test]
fn a_slice_that_must_stay_is_not_chosen() {
    let geometry = Geometry::new(Version::V3, 9, 4, false).unwrap();
    let slices = Slices::new(geometry, 512, 0);
    for n in 0..4 {
        let slice = SliceIndex(n * 4);
        let at = slices.choose(slice, |_| false).unwrap();
        slices.fill(at, slice, true, std::iter::empty());
    }
    assert_eq!(slices.choose(SliceIndex(16), |_| false), None);
    let at = slices.choose(SliceIndex(16), |slice| slice.0 == 8).unwrap();
    assert_eq!(slices.find(SliceIndex(8)), Some(at));
}
