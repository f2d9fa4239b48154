//! Tests the translations of a vIOMMU against a model that has one entry for each page.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::{
    Access, Gpa, Iotlb, Iova, IovaRange, Map, Miss, Slot, Tlb, TranslateError, Translated, UpdateError,
    UserAddr,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

const PAGE: u64 = 4096;
const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// First front-end's address of guest memory.
const USER: u64 = 0x7e00_0000_0000;
/// Bytes of guest memory. Sparse files cost nothing.
const LOW: u64 = 2 * GIB;
const HIGH: u64 = 4 * GIB;

/// Returns two slots. Their front-end's addresses are contiguous, and their guest-physical ones are not.
fn map() -> Map {
    let slot = |gpa, user, len| {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        Slot::map(&file, 0, Gpa(gpa), UserAddr(user), len).unwrap()
    };
    Map::new(vec![slot(0, USER, LOW), slot(HIGH, USER + LOW, GIB)]).unwrap()
}

/// Returns the map's guest-physical address for a front-end's page.
fn gpa(user: u64) -> Option<u64> {
    match user.checked_sub(USER)? {
        low if low < LOW => Some(low),
        high if high < LOW + GIB => Some(high - LOW + HIGH),
        _ => None,
    }
}

fn pieces(tlb: &mut Tlb, map: &Map, iova: u64, len: u64, access: Access) -> Vec<(Translated, u64)> {
    let mut all = Vec::new();
    tlb.translate(map, Iova(iova), len, access, |to, len| all.push((to, len)));
    all
}

fn one(tlb: &mut Tlb, map: &Map, iova: u64, access: Access) -> Translated {
    let all = pieces(tlb, map, iova, 1, access);
    assert_eq!((all.len(), all[0].1), (1, 1));
    all[0].0
}

fn update(iotlb: &mut Iotlb, iova: u64, len: u64, user: u64, access: Access) -> Result<bool, UpdateError> {
    iotlb.update(Iova(iova), len, UserAddr(user), access)?;
    Ok(iotlb.take_stale().is_some())
}

#[test]
fn impossible_translations_are_refused() {
    let mut iotlb = Iotlb::default();
    let rw = Access::BOTH;
    let refused =
        |iotlb: &mut Iotlb, iova, len, user, access| update(iotlb, iova, len, user, access).unwrap_err();
    assert!(matches!(refused(&mut iotlb, 0, 0, USER, rw), UpdateError::Empty { .. }));
    assert!(matches!(refused(&mut iotlb, 0, PAGE, USER, Access::NONE), UpdateError::NoAccess { .. }));
    let top = u64::MAX - PAGE + 1;
    for (iova, user, len) in [(top, USER, 2 * PAGE), (0, top, 2 * PAGE), (PAGE, 0, u64::MAX)] {
        assert!(matches!(refused(&mut iotlb, iova, len, user, rw), UpdateError::Wraps { .. }));
    }
    for (iova, user, len) in [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 1), (PAGE / 2, PAGE / 2, PAGE)] {
        assert!(matches!(refused(&mut iotlb, iova, len, user, rw), UpdateError::Misaligned { .. }));
    }
    // The last page of all is allowed.
    assert_eq!(update(&mut iotlb, top, PAGE, USER, rw), Ok(false));
    let (map, mut tlb) = (map(), Tlb::new(iotlb.table().clone()));
    assert_eq!(one(&mut tlb, &map, u64::MAX, rw), Translated::To(Gpa(PAGE - 1)));
    assert_eq!(
        pieces(&mut tlb, &map, u64::MAX, 2, rw),
        [(Translated::To(Gpa(PAGE - 1)), 1), (Translated::Unmapped, 1)],
        "a range that wraps is unmapped"
    );
}

#[test]
fn leaves_of_all_sizes_lead_to_each_of_their_pages() {
    let map = map();
    for (iova, len, user) in
        [(0, GIB, 0), (5 * GIB - MIB2, GIB + 2 * MIB2, PAGE), (3 * GIB - PAGE, MIB2, MIB2 + 5 * PAGE)]
    {
        let mut iotlb = Iotlb::default();
        update(&mut iotlb, iova, len, USER + user, Access::BOTH).unwrap();
        let mut tlb = Tlb::new(iotlb.table().clone());
        for offset in [0, PAGE - 1, PAGE, len / 2 + 7, len - PAGE, len - 1] {
            let to = Translated::To(Gpa(gpa(USER + user + offset).unwrap()));
            assert_eq!(one(&mut tlb, &map, iova + offset, Access::BOTH), to);
        }
        assert_eq!(one(&mut tlb, &map, iova + len, Access::READ), Translated::Missing);
        // One piece for each slot.
        let whole = pieces(&mut tlb, &map, iova, len, Access::WRITE);
        assert_eq!(whole.iter().map(|(_, len)| len).sum::<u64>(), len);
        assert_eq!(whole, [(Translated::To(Gpa(user)), len)]);
    }
}

#[test]
fn access_is_limited_by_the_translation() {
    let (map, mut iotlb) = (map(), Iotlb::default());
    let mut tlb = Tlb::new(iotlb.table().clone());
    update(&mut iotlb, 0, PAGE, USER, Access::READ).unwrap();
    assert_eq!(one(&mut tlb, &map, 5, Access::READ), Translated::To(Gpa(5)));
    assert_eq!(one(&mut tlb, &map, 5, Access::WRITE), Translated::Missing);
    assert_eq!(one(&mut tlb, &map, 5, Access::BOTH), Translated::Missing);
    // More access needs no flush. Less access is a change.
    assert_eq!(update(&mut iotlb, 0, PAGE, USER, Access::BOTH), Ok(false));
    assert_eq!(one(&mut tlb, &map, 5, Access::WRITE), Translated::To(Gpa(5)));
    assert_eq!(update(&mut iotlb, 0, PAGE, USER, Access::WRITE), Ok(true));
    assert_eq!(update(&mut iotlb, 0, PAGE, USER, Access::WRITE), Ok(false), "the same again");
    assert_eq!(update(&mut iotlb, 0, PAGE, USER + PAGE, Access::WRITE), Ok(true), "another address");
    tlb.flush();
    assert_eq!(one(&mut tlb, &map, 5, Access::READ), Translated::Missing);
    assert_eq!(one(&mut tlb, &map, 5, Access::WRITE), Translated::To(Gpa(PAGE + 5)));
}

#[test]
fn translations_out_of_memory_are_unmapped_until_memory_is_added() {
    let mut iotlb = Iotlb::default();
    update(&mut iotlb, 0, 2 * PAGE, USER + LOW + GIB - PAGE, Access::BOTH).unwrap();
    let (with, without) = (map(), Map::default());
    let mut tlb = Tlb::new(iotlb.table().clone());
    assert_eq!(one(&mut tlb, &without, 0, Access::READ), Translated::Unmapped);
    assert_eq!(one(&mut tlb, &with, 0, Access::READ), Translated::To(Gpa(HIGH + GIB - PAGE)));
    assert_eq!(one(&mut tlb, &with, PAGE, Access::READ), Translated::Unmapped);
    // Another view: the entry has not changed, and leads out of memory again.
    tlb.flush();
    assert_eq!(one(&mut tlb, &without, 0, Access::READ), Translated::Unmapped);
    assert!(!tlb.is_missing(), "there is nothing to ask for");
}

#[test]
fn each_missing_page_is_reported_once() {
    let (map, mut iotlb) = (map(), Iotlb::default());
    update(&mut iotlb, PAGE, PAGE, USER, Access::READ).unwrap();
    let mut tlb = Tlb::new(iotlb.table().clone());
    tlb.begin();
    assert_eq!(
        pieces(&mut tlb, &map, 100, 3 * PAGE, Access::READ),
        [
            (Translated::Missing, PAGE - 100),
            (Translated::To(Gpa(0)), PAGE),
            (Translated::Missing, PAGE + 100)
        ]
    );
    pieces(&mut tlb, &map, 100, 4, Access::READ);
    let miss = |page: u64| Miss { page: Iova(page * PAGE), access: Access::READ };
    assert_eq!(tlb.missing(), [miss(0), miss(2), miss(3)]);
    assert_eq!(tlb.ranges(), [IovaRange::new(Iova(100), 3 * PAGE), IovaRange::new(Iova(100), 4)]);
    // A refusal is for this request. The next request asks again.
    [0, 2, 3].into_iter().for_each(|page| tlb.refuse(miss(page)));
    tlb.begin();
    assert_eq!(pieces(&mut tlb, &map, 0, PAGE, Access::READ), [(Translated::Unmapped, PAGE)]);
    assert!(!tlb.is_missing());
    tlb.clear_refusals();
    assert_eq!(pieces(&mut tlb, &map, 0, PAGE, Access::READ), [(Translated::Missing, PAGE)]);
    // Many misses are reported in parts.
    tlb.begin();
    assert_eq!(pieces(&mut tlb, &map, GIB, GIB, Access::WRITE), [(Translated::Missing, GIB)]);
    assert_eq!(tlb.missing().len(), 256);
    assert!(tlb.is_missing());
    // An invalidation withdraws a refusal, because the guest has changed something.
    tlb.refuse(miss(0));
    tlb.drop_range(IovaRange::new(Iova(0), 1));
    assert_eq!(one(&mut tlb, &map, 0, Access::READ), Translated::Missing);
}

#[test]
fn areas_have_as_few_pieces_as_possible() {
    let mut iotlb = Iotlb::default();
    let mut tlb = Tlb::new(iotlb.table().clone());
    let at = |tlb: &mut Tlb, iova: u64, len: u64| {
        tlb.begin();
        tlb.user(Iova(iova), len as usize, Access::BOTH)
    };
    update(&mut iotlb, 0, 2 * PAGE, USER, Access::BOTH).unwrap();
    assert_eq!(at(&mut tlb, 16, PAGE), Ok(vec![(UserAddr(USER + 16), PAGE as usize)]));
    assert_eq!(at(&mut tlb, 0, 2 * PAGE), Ok(vec![(UserAddr(USER), 2 * PAGE as usize)]));
    assert_eq!(at(&mut tlb, 16, 2 * PAGE), Err(TranslateError::Missing));
    assert_eq!(tlb.missing(), [Miss { page: Iova(2 * PAGE), access: Access::BOTH }]);
    update(&mut iotlb, 2 * PAGE, PAGE, USER + 8 * PAGE, Access::BOTH).unwrap();
    let pieces = vec![(UserAddr(USER + 16), 2 * PAGE as usize - 16), (UserAddr(USER + 8 * PAGE), 16)];
    assert_eq!(at(&mut tlb, 16, 2 * PAGE), Ok(pieces));
    assert!(
        matches!(at(&mut tlb, u64::MAX, 2), Err(TranslateError::Unmapped(_) | TranslateError::Missing)),
        "wraps"
    );
    assert_eq!(at(&mut tlb, 5 * PAGE, 1), Err(TranslateError::Missing));
    tlb.refuse(Miss { page: Iova(5 * PAGE), access: Access::BOTH });
    assert!(matches!(at(&mut tlb, 5 * PAGE, 1), Err(TranslateError::Unmapped(_))), "refused");
}

/// A large leaf is looked up as one, and dropped as one.
#[test]
fn a_large_leaf_is_one_lookup() {
    let (map, mut iotlb) = (map(), Iotlb::default());
    update(&mut iotlb, GIB, GIB, USER, Access::BOTH).unwrap();
    update(&mut iotlb, MIB2, MIB2, USER + LOW - MIB2, Access::READ).unwrap();
    let mut tlb = Tlb::new(iotlb.table().clone());
    let looks = |tlb: &mut Tlb, iova: u64, len: u64, access| {
        tlb.take_lookups();
        let pieces = pieces(tlb, &map, iova, len, access);
        (pieces, tlb.take_lookups())
    };
    // Once through the table, once from the cache.
    for _ in 0..2 {
        assert_eq!(looks(&mut tlb, GIB, GIB, Access::WRITE), (vec![(Translated::To(Gpa(0)), GIB)], 1));
        let (found, count) = looks(&mut tlb, MIB2 + 5, MIB2 - 5, Access::READ);
        assert_eq!((found, count), (vec![(Translated::To(Gpa(LOW - MIB2 + 5)), MIB2 - 5)], 1));
    }
    assert_eq!(one(&mut tlb, &map, MIB2, Access::WRITE), Translated::Missing);
    // An invalidation of one page drops the whole leaf.
    iotlb.invalidate(IovaRange::new(Iova(GIB + 77 * PAGE), PAGE));
    tlb.drop_range(iotlb.take_stale().unwrap());
    assert_eq!(one(&mut tlb, &map, GIB, Access::READ), Translated::Missing);
    // Small invalidations drop only the large leaves that they touch.
    assert_eq!(looks(&mut tlb, MIB2, MIB2, Access::READ).1, 1);
    tlb.drop_range(IovaRange::new(Iova(2 * MIB2), PAGE));
    tlb.drop_range(IovaRange::new(Iova(MIB2 - PAGE), PAGE));
    iotlb.invalidate(IovaRange::new(Iova(MIB2), MIB2));
    assert_ne!(
        one(&mut tlb, &map, MIB2, Access::READ),
        Translated::Missing,
        "it was not told to drop it yet"
    );
    tlb.drop_range(IovaRange::new(Iova(MIB2 + PAGE), PAGE));
    assert_eq!(one(&mut tlb, &map, MIB2, Access::READ), Translated::Missing);
}

/// A leaf that crosses from one slot to the next is looked up page by page.
#[test]
fn a_large_leaf_in_two_slots_is_not_one_lookup() {
    let (map, mut iotlb) = (map(), Iotlb::default());
    update(&mut iotlb, 0, MIB2, USER + LOW - MIB2 / 2, Access::BOTH).unwrap();
    let mut tlb = Tlb::new(iotlb.table().clone());
    let found = pieces(&mut tlb, &map, 0, MIB2, Access::READ);
    let middle = gpa(USER + LOW).map(|at| (Translated::To(Gpa(at)), MIB2 / 2));
    assert_eq!(
        found,
        [(Translated::To(Gpa(LOW - MIB2 / 2)), MIB2 / 2)].into_iter().chain(middle).collect::<Vec<_>>()
    );
    assert_eq!(u64::from(tlb.take_lookups()), MIB2 / PAGE);
}

/// The epoch changes when a watched translation may become invalid, and at no other time.
#[test]
fn the_epoch_changes_with_watched_translations() {
    let (map, mut iotlb) = (map(), Iotlb::default());
    update(&mut iotlb, 0, 8 * PAGE, USER, Access::BOTH).unwrap();
    let mut tlb = Tlb::new(iotlb.table().clone());
    tlb.begin();
    pieces(&mut tlb, &map, PAGE, PAGE, Access::READ);
    tlb.watch();
    let epoch = tlb.epoch();
    tlb.begin();
    pieces(&mut tlb, &map, 5 * PAGE, PAGE, Access::READ);
    tlb.drop_range(IovaRange::new(Iova(5 * PAGE), PAGE));
    assert_eq!(tlb.epoch(), epoch);
    tlb.drop_range(IovaRange::new(Iova(2 * PAGE - 1), 1));
    assert_ne!(tlb.epoch(), epoch);
    let epoch = tlb.epoch();
    tlb.flush();
    assert_ne!(tlb.epoch(), epoch);
}

/// A front-end that sends translations without end costs bounded memory. A request that needs more than that
/// is served all the same.
#[test]
fn a_flood_is_bounded_and_evicts_nothing_that_is_pinned() {
    const NODES: u32 = 64;
    let (map, mut iotlb) = (map(), Iotlb::new(NODES));
    let mut tlb = Tlb::new(iotlb.table().clone());
    let pinned = IovaRange::new(Iova(7 * GIB), PAGE);
    update(&mut iotlb, 7 * GIB, PAGE, USER + 3 * PAGE, Access::BOTH).unwrap();
    let mut evicted = 0;
    for i in 0..4096 {
        // A node of its own for each.
        let iova = (i * 37 % 1000) * GIB + MIB2 * (i % 512);
        while let Err(error) = update(&mut iotlb, iova, PAGE, USER, Access::BOTH) {
            assert!(matches!(error, UpdateError::Full { .. }));
            assert!(iotlb.evict(|range| range.overlaps(pinned)));
            tlb.drop_range(iotlb.take_stale().unwrap());
            evicted += 1;
            assert!(iotlb.has_nodes_in_limbo());
            iotlb.quiesced();
        }
        assert_eq!(one(&mut tlb, &map, iova, Access::READ), Translated::To(Gpa(0)));
        assert_eq!(one(&mut tlb, &map, 7 * GIB, Access::READ), Translated::To(Gpa(3 * PAGE)), "{i}");
    }
    assert!(evicted > 1000);
    assert!(iotlb.bytes() <= (NODES as usize + 1) * (4096 + 16), "{}", iotlb.bytes());
    // If everything is pinned, there is no room, and no endless loop.
    assert!(!iotlb.evict(|_| true));
    iotlb.invalidate(IovaRange::ALL);
    iotlb.quiesced();
    assert!(!iotlb.evict(|_| false), "nothing is left");
}

#[test]
fn nodes_come_back_only_after_a_quiescent_point() {
    let mut iotlb = Iotlb::new(6);
    update(&mut iotlb, 0, PAGE, USER, Access::BOTH).unwrap();
    iotlb.invalidate(IovaRange::ALL);
    let full = |iotlb: &mut Iotlb| update(iotlb, 5 * GIB, PAGE, USER, Access::BOTH);
    assert!(matches!(full(&mut iotlb), Err(UpdateError::Full { .. })));
    iotlb.quiesced();
    assert!(!iotlb.has_nodes_in_limbo());
    assert!(full(&mut iotlb).is_ok());
}

#[test]
fn tables_without_translations_take_little_memory() {
    // 1 TiB without a vIOMMU: only the map's slots take memory.
    assert!(size_of::<Slot>() * 509 < 1 << 20);
    // A vIOMMU that maps it all in leaves of 1 GiB: the root, three levels of one node, and two nodes of 512
    // leaves.
    let mut iotlb = Iotlb::default();
    update(&mut iotlb, 0, 1 << 40, USER, Access::BOTH).unwrap();
    assert!(iotlb.bytes() < 1 << 20, "{}", iotlb.bytes());
}

#[derive(Clone, Debug)]
enum Op {
    Update { iova: u64, pages: u64, user: u64, access: u8 },
    Invalidate { iova: u64, pages: u64 },
    Evict,
    Quiesce,
    NewView,
}

/// Generates addresses that are likely to meet: a few pages around the ends of leaves of each size, and some
/// in between.
fn places() -> impl Strategy<Value = u64> {
    let seams = [0, MIB2, 2 * MIB2, GIB, 2 * GIB, 512 * GIB];
    (proptest::sample::select(seams.to_vec()), 0u64..6).prop_map(|(seam, page)| seam + page * PAGE)
}

fn lengths() -> impl Strategy<Value = u64> {
    prop_oneof![5 => 1u64..6, 2 => Just(512u64), 1 => 500u64..1100, 1 => Just(512 * 512u64)]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let update = (places(), lengths(), 0u64..700_000, 1u8..4)
        .prop_map(|(iova, pages, user, access)| Op::Update { iova, pages, user: USER + user * PAGE, access });
    let invalidate = (places(), lengths()).prop_map(|(iova, pages)| Op::Invalidate { iova, pages });
    proptest::collection::vec(
        prop_oneof![
            6 => update,
            3 => invalidate,
            1 => Just(Op::Evict),
            1 => Just(Op::Quiesce),
            1 => Just(Op::NewView)
        ],
        1..40,
    )
}

fn access(bits: u8) -> Access {
    [Access::NONE, Access::READ, Access::WRITE, Access::BOTH][usize::from(bits)]
}

/// The valid translation of each page, as ranges. The table may have forgotten some of them.
#[derive(Default)]
struct Model {
    /// By the first page of each range: number of pages, front-end's address, and allowed access.
    ranges: BTreeMap<u64, (u64, u64, u8)>,
}

impl Model {
    fn get(&self, page: u64) -> Option<(u64, u8)> {
        let (first, (pages, user, access)) = self.ranges.range(..=page).next_back()?;
        (page - first < *pages).then(|| (user + (page - first) * PAGE, *access))
    }

    fn remove(&mut self, first: u64, pages: u64) {
        let end = first + pages;
        let touched: Vec<_> = self
            .ranges
            .range(..end)
            .map(|(at, range)| (*at, *range))
            .filter(|(at, range)| at + range.0 > first)
            .collect();
        for (at, (count, user, access)) in touched {
            self.ranges.remove(&at);
            if at < first {
                self.ranges.insert(at, (first - at, user, access));
            }
            if at + count > end {
                self.ranges.insert(end, (at + count - end, user + (end - at) * PAGE, access));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The table has valid translations only, and the last one that it was given. A cache that is told of
    /// each change agrees with the table.
    #[test]
    fn table_and_cache_agree_with_the_model(ops in ops()) {
        let (memory, none) = (map(), Map::default());
        let mut iotlb = Iotlb::new(40);
        let mut tlb = Tlb::new(iotlb.table().clone());
        let mut model = Model::default();
        let mut view = &memory;
        for op in ops {
            let mut fresh = None;
            match op {
                Op::Update { iova, pages, user, access: bits } => {
                    while let Err(error) = iotlb.update(Iova(iova), pages * PAGE, UserAddr(user), access(bits)) {
                        prop_assert!(matches!(error, UpdateError::Full { .. }), "{error}");
                        prop_assert!(iotlb.evict(|_| false));
                        iotlb.quiesced();
                    }
                    model.remove(iova / PAGE, pages);
                    model.ranges.insert(iova / PAGE, (pages, user, bits));
                    fresh = Some((iova, pages));
                }
                Op::Invalidate { iova, pages } => {
                    iotlb.invalidate(IovaRange::new(Iova(iova), pages * PAGE));
                    model.remove(iova / PAGE, pages);
                }
                Op::Evict => {
                    iotlb.evict(|_| false);
                }
                Op::Quiesce => iotlb.quiesced(),
                Op::NewView => {
                    view = if std::ptr::eq(view, &memory) { &none } else { &memory };
                    tlb.flush();
                }
            }
            if let Some(range) = iotlb.take_stale() {
                tlb.drop_range(range);
            }
            for seam in [0, MIB2, 2 * MIB2, GIB, 2 * GIB, 512 * GIB] {
                for page in (seam / PAGE).saturating_sub(3)..seam / PAGE + 8 {
                    for (wanted, bits) in [(Access::READ, 1), (Access::WRITE, 2)] {
                        let truth = model.get(page).filter(|(_, allowed)| allowed & bits == bits);
                        let found = one(&mut tlb, view, page * PAGE, wanted);
                        let told = fresh.is_some_and(|(iova, pages)| page >= iova / PAGE && page - iova / PAGE < pages);
                        match (truth, found) {
                            (_, Translated::Missing) => prop_assert!(!told || truth.is_none(), "{page:#x} was just told"),
                            (None, _) => prop_assert!(false, "{page:#x} {wanted:?} leads to {found:?}"),
                            (Some((user, _)), found) => {
                                let to = gpa(user).filter(|_| std::ptr::eq(view, &memory));
                                let to = to.map_or(Translated::Unmapped, |gpa| Translated::To(Gpa(gpa)));
                                prop_assert_eq!(found, to);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// An update of a part of a leaf drops the leaf, even if there is no room for the part.
#[test]
fn a_leaf_that_cannot_be_split_is_removed() {
    let (map, mut iotlb) = (map(), Iotlb::new(3));
    update(&mut iotlb, 0, GIB, USER, Access::BOTH).unwrap();
    let full = iotlb.update(Iova(PAGE), PAGE, UserAddr(USER), Access::BOTH);
    assert!(matches!(full, Err(UpdateError::Full { .. })));
    assert!(iotlb.take_stale().is_some());
    let full = iotlb.update(Iova(PAGE), PAGE, UserAddr(USER), Access::BOTH);
    assert!(matches!(full, Err(UpdateError::Full { .. })));
    assert!(iotlb.take_stale().is_none(), "once");
    let mut tlb = Tlb::new(iotlb.table().clone());
    assert_eq!(one(&mut tlb, &map, 0, Access::READ), Translated::Missing);
}
