//! Tests of the dirty log: refused logs, and marks against a model.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::{Error, Gpa, Iov, Log, Map, Marks, PinnedByte, Purpose, Ram, Slot, UserAddr, View};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn log(len: u64) -> Log {
    Log::map(file(len), 0, len).unwrap()
}

/// Returns a view without memory that has this log.
fn logged(log: &Arc<Log>) -> View {
    View::default().with_log(Some(log.clone())).unwrap()
}

fn pages(log: &Log) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    log.harvest(|page| assert!(pages.insert(page)));
    pages
}

#[test]
fn logs_that_cannot_be_mapped() {
    let file = file(4096);
    let error = |offset, len| Log::map(&file, offset, len).unwrap_err();
    assert!(matches!(error(0, 0), Error::Empty { purpose: Purpose::Log }));
    assert!(matches!(error(4, 8), Error::Misaligned { offset: 4, .. }));
    assert!(matches!(error(u64::MAX - 7, 16), Error::Wraps { .. }));
    assert!(matches!(error(8, 4096), Error::FileTooShort { needs: 4104, has: 4096, .. }));
    let (read_end, _) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Log::map(read_end, 0, 8).unwrap_err(), Error::Mmap { .. }));
    assert_eq!(Log::map(&file, 4088, 3).unwrap().len(), 3);
}

#[test]
fn too_small_names_both_sizes() {
    let slot = |gpa, len| Slot::map(file(len), 0, Gpa(gpa), UserAddr(0), len).unwrap();
    let map = Map::new(vec![slot(0, 1 << 20), slot(1 << 32, 1 << 15)]).unwrap();
    // 2^20 pages below the second slot, and 8 in it.
    let (needs, has) = ((1 << 17) + 1, 1 << 17);
    log(needs).covers(&map).unwrap();
    let error = log(has).covers(&map).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a log of 131072 bytes is too small: guest memory up to 0x100007fff takes 131073 bytes"
    );
    log(1).covers(&Map::default()).unwrap();
}

#[test]
fn bits_lie_where_the_specification_says() {
    let file = file(8192);
    let log = Arc::new(Log::map(&file, 64, 32).unwrap());
    let mut marks = Marks::off();
    marks.set_view(&logged(&log));
    for page in [0u64, 9, 63, 64, 200] {
        marks.wrote(Gpa(page * 4096 + 17), 1);
    }
    marks.commit();
    let mut bytes = [0; 8192];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    let mut expected = [0u8; 8192];
    for (byte, bit) in [(0, 0), (1, 1), (7, 7), (8, 0), (25, 0)] {
        expected[64 + byte] |= 1 << bit;
    }
    assert_eq!(bytes, expected);
}

/// A log of 3 bytes has 24 pages, and no mark goes past them.
#[test]
fn marks_past_the_end_of_the_log_are_dropped() {
    let file = file(4096);
    let log = Arc::new(Log::map(&file, 0, 3).unwrap());
    let mut marks = Marks::off();
    marks.set_view(&logged(&log));
    marks.wrote(Gpa(64 * 4096), 1 << 30);
    marks.wrote(Gpa(u64::MAX - 5), 100);
    marks.commit();
    assert!(!marks.take_newly_set());
    let mut bytes = [0; 4096];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 4096]);
}

#[test]
fn bytes_behind_a_log_that_ends_within_a_word_stay() {
    let file = file(16);
    let (odd, whole) = (Log::map(&file, 0, 11).unwrap(), Arc::new(Log::map(&file, 0, 16).unwrap()));
    let odd = Arc::new(odd);
    let mut marks = Marks::off();
    marks.set_view(&logged(&odd));
    marks.wrote(Gpa(87 * 4096), 2 * 4096);
    marks.commit();
    assert!(marks.take_newly_set());
    assert!(odd.is_marked(Gpa(87 * 4096)) && !whole.is_marked(Gpa(88 * 4096)));
    // All bits are past the end, so there is nothing to set.
    marks.wrote(Gpa(88 * 4096), 4096);
    marks.commit();
    assert!(!marks.take_newly_set());
    let mut others = Marks::off();
    others.set_view(&logged(&whole));
    others.wrote(Gpa(90 * 4096), 1);
    others.commit();
    assert!(!odd.is_marked(Gpa(90 * 4096)));
    assert_eq!(pages(&odd), BTreeSet::from([87]));
    assert_eq!(pages(&whole), BTreeSet::from([90]));
}

#[test]
fn newly_set_bits_are_those_that_were_clear() {
    let log = Arc::new(log(4096));
    let mut marks = Marks::off();
    marks.wrote(Gpa(0), 1);
    marks.commit();
    assert!(!marks.is_on() && !marks.is_pending() && !marks.take_newly_set());
    marks.set_view(&logged(&log));
    marks.wrote(Gpa(0), 4097);
    assert!(marks.is_pending());
    assert_eq!(pages(&log), BTreeSet::new());
    marks.commit();
    assert!(marks.take_newly_set() && !marks.take_newly_set() && !marks.is_pending());
    marks.wrote(Gpa(4096), 1);
    marks.commit_fenced();
    assert!(!marks.take_newly_set());
    assert_eq!(pages(&log), [0, 1].into());
    marks.wrote(Gpa(4096), 1);
    marks.commit();
    assert!(marks.take_newly_set());
}

#[test]
fn marks_go_to_the_log_of_the_view_at_the_write() {
    let (old, new) = (Arc::new(log(4096)), Arc::new(log(8192)));
    let mut marks = Marks::off();
    marks.set_view(&logged(&old));
    marks.wrote(Gpa(0), 1);
    marks.set_view(&logged(&new));
    marks.wrote(Gpa(4096), 1);
    marks.set_view(&View::default());
    marks.wrote(Gpa(8192), 1);
    marks.commit();
    assert_eq!((pages(&old), pages(&new)), ([0].into(), [1].into()));
    // The marks hold no reference to a log that they do not write any more.
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
}

/// Bytes of a slot.
const SLOT: u64 = 3 << 12;
/// Distance from one slot to the next.
const APART: u64 = 1 << 16;

/// Returns a view of this many slots. Every third slot shows the same bytes as the one before it.
fn view(slots: u64) -> (Arc<View>, Arc<Log>) {
    let mut map = Map::default();
    let mut last = file(SLOT);
    for nth in 0..slots {
        if nth % 3 != 2 {
            last = file(SLOT);
        }
        let (gpa, user) = (Gpa(nth * APART), UserAddr(nth * APART));
        map = map.with(Slot::map_or_share(&last, 0, gpa, user, SLOT, map.slots()).unwrap()).unwrap();
    }
    let log = Arc::new(log((slots * APART) >> 15));
    (Arc::new(View::new(map).with_log(Some(log.clone())).unwrap()), log)
}

/// Returns the pages of `len` bytes at `offset` of a slot, and the pages that show the same bytes.
fn pages_of(slots: u64, slot: u64, offset: u64, len: u64) -> BTreeSet<u64> {
    let twin = match slot % 3 {
        1 if slot + 1 < slots => slot + 1,
        2 => slot - 1,
        _ => slot,
    };
    let touched = offset / 4096..=(offset + len - 1) / 4096;
    touched.flat_map(|page| [slot, twin].map(|slot| slot * (APART / 4096) + page)).collect()
}

/// A buffer that the kernel fills is marked as far as the kernel reports, or as a whole without a report.
#[test]
fn buffers_that_the_kernel_fills() {
    for slots in [1, 5, 40] {
        let (view, log) = view(slots);
        let mut marks = Marks::off();
        marks.set_view(&view);
        let found = |marks: &mut Marks| {
            marks.commit();
            pages(&log)
        };
        for slot in 0..slots {
            let mut iov = Iov::default();
            iov.push(&view, Gpa(slot * APART + 100), 2 * 4096).unwrap();
            // The kernel only reads from it: nothing is marked.
            assert_eq!(iov.segments().len(), 1);
            iov.advance(10, &mut marks);
            assert_eq!(found(&mut marks), BTreeSet::new());
            // A part, and then another.
            iov.segments_to_fill();
            iov.advance(4000 - 10, &mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 110, 3990));
            iov.advance(10, &mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 4100, 10));
            // A part that is split off marks its own bytes.
            let mut front = Iov::default();
            iov.split_to(20, &mut front, &mut marks);
            assert_eq!(found(&mut marks), BTreeSet::new());
            front.advance(20, &mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 4110, 20));
            // The operation failed: the kernel may have written the rest.
            iov.clear(&mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 4130, 2 * 4096 + 100 - 4130));
            iov.clear(&mut marks);
            // The kernel was not given the next request.
            iov.push(&view, Gpa(slot * APART), 4096).unwrap();
            iov.clear(&mut marks);
            assert_eq!(found(&mut marks), BTreeSet::new());
            // The kernel wrote the first bytes only.
            iov.push(&view, Gpa(slot * APART), 2 * 4096).unwrap();
            iov.segments_to_fill();
            iov.advance(10, &mut marks);
            iov.seal();
            iov.clear(&mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 0, 10));
        }
    }
}

#[test]
fn copies_of_our_own() {
    for slots in [1, 5, 40] {
        let (view, log) = view(slots);
        let (mut marks, ram) = (Marks::off(), Ram::new(1 << 20).unwrap());
        marks.set_view(&view);
        for slot in 0..slots {
            let at = Gpa(slot * APART + 4090);
            let mut iov = Iov::default();
            iov.push(&view, at, 5000).unwrap();
            assert_eq!(iov.write(4, &[1; 3], &mut marks), 3);
            marks.commit();
            assert_eq!(pages(&log), pages_of(slots, slot, 4094, 3));
            assert_eq!(ram.copy_from(0, &iov), 5000);
            assert_eq!(ram.copy_to((1 << 20) - 4, &mut iov, &mut marks), 4);
            marks.commit();
            assert_eq!(pages(&log), pages_of(slots, slot, 4090, 4));
            assert_eq!(ram.copy_to(0, &mut iov, &mut marks), 5000);
            iov.clear(&mut marks);
            marks.commit();
            assert_eq!(pages(&log), pages_of(slots, slot, 4090, 5000));
        }
        assert!(view.map().read(Gpa(slots * APART), &mut [0]).is_err());
    }
}

/// A request is marked where its memory is at the completion, or where the memory was before it was removed.
/// It is always marked before it releases its view.
#[test]
fn memory_that_moves_under_a_request() {
    const AT: [u64; 3] = [0, 1 << 20, 2 << 20];
    let (data, other, log) = (file(SLOT), file(SLOT), Arc::new(log(4096)));
    let slot = |file: &OwnedFd, gpa, old: &Map| {
        Slot::map_or_share(file, 0, Gpa(gpa), UserAddr(gpa), SLOT, old.slots()).unwrap()
    };
    let view = |map: &Map| Arc::new(View::new(map.clone()).with_log(Some(log.clone())).unwrap());
    let first = Map::new(vec![slot(&data, AT[0], &Map::default())]).unwrap();
    // Other memory is at the old address.
    let moved = vec![slot(&other, AT[0], &first), slot(&data, AT[1], &first)];
    let moved = Map::new(moved).unwrap();
    let removed = moved.without(Gpa(AT[1]), UserAddr(AT[1]), SLOT).unwrap().0;
    let twice = moved.with(slot(&data, AT[2], &moved)).unwrap();
    let at = |places: &[u64], pages: &[u64]| -> BTreeSet<u64> {
        places.iter().flat_map(|at| pages.iter().map(move |page| at / 4096 + page)).collect()
    };
    for (maps, places) in [
        (vec![&first], &AT[..1]),
        (vec![&first, &moved], &AT[1..2]),
        (vec![&first, &moved, &moved], &AT[1..2]),
        (vec![&first, &moved, &removed], &AT[1..2]),
        (vec![&first, &moved, &twice], &AT[1..3]),
        (vec![&first, &removed], &AT[..1]),
        // The marks get no `set_view` for the change in between.
        (vec![&first, &Map::default(), &Map::default()], &AT[..1]),
    ] {
        for logged_since in 0..maps.len() {
            let submitted = view(maps[0]);
            let mut marks = Marks::off();
            let [mut read, mut copied] = [Iov::default(), Iov::default()];
            for iov in [&mut read, &mut copied] {
                iov.push(&submitted, Gpa(AT[0] + 4096 + 7), 4096).unwrap();
            }
            read.segments_to_fill();
            let mut status = PinnedByte::default();
            status.set(&submitted, Gpa(AT[0] + 4096));
            for map in &maps[logged_since..] {
                marks.set_view(&view(map));
            }
            if logged_since > 0 && std::ptr::eq(maps[maps.len() - 1], &removed) {
                // The memory was removed while there was no log.
                continue;
            }
            let current = view(maps[maps.len() - 1]);
            marks.set_view(&current);
            assert_eq!(copied.write(4090, &[1; 6], &mut marks), 6);
            assert!(status.write(1, &mut marks));
            submitted.write_obj(Gpa(AT[0]), &1u8, &mut marks).unwrap();
            marks.commit();
            assert_eq!(pages(&log), at(places, &[0, 1, 2]), "{places:x?} since {logged_since}");
            submitted.write(Gpa(AT[0] + 4095), &[1; 2], &mut marks).unwrap();
            read.advance(4, &mut marks);
            let mut pin = Some(submitted);
            View::unpin_unless(&mut pin, &current, &mut marks);
            assert!(pin.is_none());
            assert_eq!(pages(&log), at(places, &[0, 1]), "{places:x?} since {logged_since}");
            // The operation failed half-way.
            read.unpin_unless(&current, &mut marks);
            assert_eq!(pages(&log), at(places, &[1, 2]), "{places:x?} since {logged_since}");
        }
    }
}

/// Gathered marks are in the log when a change of memory is answered.
#[test]
fn gathered_marks_are_committed_before_memory_changes() {
    let (view, log) = view(5);
    let mut marks = Marks::off();
    marks.set_view(&view);
    view.write_obj(Gpa(APART), &0u8, &mut marks).unwrap();
    assert_eq!(pages(&log), BTreeSet::new());
    marks.set_view(&View::new(Map::default()).with_log(Some(log.clone())).unwrap());
    assert_eq!(pages(&log), BTreeSet::from([APART / 4096]));
}

/// A log that is too small for the memory is refused.
#[test]
fn a_view_has_a_log_that_covers_it() {
    let (whole, _) = view(5);
    let small = Arc::new(log(((5 * APART) >> 15) - 2));
    let refused = View::new(whole.map().clone()).with_log(Some(small)).map(drop);
    assert!(matches!(refused, Err(Error::LogTooSmall { .. })));
}

proptest! {
    /// A harvest finds all pages that were written and committed, and no others.
    #[test]
    fn harvests_find_written_pages(
        steps in prop::collection::vec((0u64..1 << 26, 1u64..1 << 17, 0u8..20), 1..100)
    ) {
        let log = Arc::new(log(((1 << 26) >> 15) + 8));
        let mut marks = Marks::off();
        marks.set_view(&logged(&log));
        // `owed`: pages written since a harvest found them last. `written`: pages written since a harvest
        // after a commit of all. Some marks are committed early, for lack of room.
        let (mut owed, mut written) = (BTreeSet::new(), BTreeSet::new());
        for (gpa, len, then) in steps {
            marks.wrote(Gpa(gpa), len);
            let touched = gpa / 4096..=(gpa + len - 1) / 4096;
            owed.extend(touched.clone());
            written.extend(touched);
            if then < 2 {
                let committed = then == 0;
                if committed {
                    marks.commit();
                }
                let found = pages(&log);
                prop_assert!(found.is_subset(&written));
                owed.retain(|page| !found.contains(page));
                prop_assert!(owed.is_empty() || !committed);
                if committed {
                    written.clear();
                }
            }
        }
        marks.commit();
        let found = pages(&log);
        prop_assert!(owed.is_subset(&found) && found.is_subset(&written));
    }
}
