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
    let mut of_one_set = (0..).map(SliceIndex).filter(|slice| slices.set_of(*slice) == 1);
    let kept: Vec<_> = of_one_set.by_ref().take(WAYS).collect();
    for slice in &kept {
        let at = slices.choose(*slice, |_| false).unwrap();
        slices.fill(at, *slice, true, std::iter::empty());
    }
    let next = of_one_set.next().unwrap();
    assert_eq!(slices.choose(next, |_| false), None);
    let at = slices.choose(next, |slice| slice == kept[2]).unwrap();
    assert_eq!(slices.find(kept[2]), Some(at));
}

/// Returns how many slices of these find a way while all before them stay.
fn kept(cache: &Slices, slices: impl Iterator<Item = u64>) -> usize {
    let fits = |slice: u64| {
        let at = cache.choose(SliceIndex(slice), |_| false)?;
        cache.fill_blank(at, SliceIndex(slice), true);
        Some(())
    };
    slices.filter_map(fits).count()
}

#[test]
fn as_many_slices_as_there_are_ways_fit() {
    let geometry = Geometry::new(Version::V3, 16, 4, false).unwrap();
    for sets in [4, 5, 1000, 1024] {
        let cache = Slices::new(geometry, 4096, sets * WAYS as u64 * 4096);
        let all = sets * WAYS as u64;
        assert_eq!(kept(&cache, 0..all), all as usize, "{sets} sets");
        assert!(cache.has_room(all) && !cache.has_room(all + 1), "{sets} sets");
    }
}

/// Half as many slices as there are ways, at each distance. Slices at random would lose 4 % of them.
#[test]
fn slices_at_equal_distances_have_many_sets() {
    let geometry = Geometry::new(Version::V3, 16, 4, false).unwrap();
    for sets in [1000, 2048] {
        for power in 0..24 {
            for distance in [1 << power, 3 << power, (1 << power) + 1] {
                let cache = Slices::new(geometry, 4096, sets * WAYS as u64 * 4096);
                let asked = sets * WAYS as u64 / 2;
                let kept = kept(&cache, (0..asked).map(|at| at * distance));
                assert!(kept as u64 > asked * 7 / 8, "{sets} sets, distance {distance}: {kept} of {asked}");
            }
        }
    }
}
