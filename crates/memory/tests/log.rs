//! The log of a front-end: what is refused, and what is marked, against a model.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::{Gpa, Iov, Log, LogError, Map, Marks, Ram, Slot, UserAddr, View};
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

/// A view of nothing with a log.
fn logged(log: &Arc<Log>) -> View {
    View::default().with_log(Some(log.clone())).unwrap()
}

fn pages(log: &Log) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    log.harvest(|page| assert!(pages.insert(page)));
    pages
}

#[test]
fn what_cannot_be_mapped() {
    let file = file(4096);
    let error = |offset, len| Log::map(&file, offset, len).unwrap_err();
    assert!(matches!(error(0, 0), LogError::Empty));
    assert!(matches!(error(4, 8), LogError::Misaligned { offset: 4 }));
    assert!(matches!(error(u64::MAX - 7, 16), LogError::Wraps { .. }));
    assert!(matches!(error(8, 4096), LogError::FileTooShort { needs: 4104, has: 4096 }));
    let (read_end, _) = rustix::pipe::pipe().unwrap();
    assert!(matches!(Log::map(read_end, 0, 8).unwrap_err(), LogError::Mmap { .. }));
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

/// What lies past the end of a log is nobody's: a log of 3 bytes has 24 pages, and no mark goes past them.
#[test]
fn nothing_past_the_end() {
    let file = file(4096);
    let log = Arc::new(Log::map(&file, 0, 3).unwrap());
    let mut marks = Marks::off();
    marks.set_view(&logged(&log));
    marks.wrote(Gpa(64 * 4096), 1 << 30);
    marks.wrote(Gpa(u64::MAX - 5), 100);
    marks.commit();
    assert!(!marks.take_news());
    let mut bytes = [0; 4096];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 4096]);
}

#[test]
fn what_follows_a_log_that_ends_within_a_word_stays() {
    let file = file(16);
    let (odd, whole) = (Log::map(&file, 0, 11).unwrap(), Arc::new(Log::map(&file, 0, 16).unwrap()));
    let odd = Arc::new(odd);
    let mut marks = Marks::off();
    marks.set_view(&logged(&odd));
    marks.wrote(Gpa(87 * 4096), 2 * 4096);
    marks.commit();
    assert!(marks.take_news());
    assert!(odd.is_marked(Gpa(87 * 4096)) && !whole.is_marked(Gpa(88 * 4096)));
    // All of its bits past the end: there is nothing to set.
    marks.wrote(Gpa(88 * 4096), 4096);
    marks.commit();
    assert!(!marks.take_news());
    let mut others = Marks::off();
    others.set_view(&logged(&whole));
    others.wrote(Gpa(90 * 4096), 1);
    others.commit();
    assert!(!odd.is_marked(Gpa(90 * 4096)));
    assert_eq!(pages(&odd), BTreeSet::from([87]));
    assert_eq!(pages(&whole), BTreeSet::from([90]));
}

#[test]
fn news_are_bits_that_were_clear() {
    let log = Arc::new(log(4096));
    let mut marks = Marks::off();
    marks.wrote(Gpa(0), 1);
    marks.commit();
    assert!(!marks.is_on() && !marks.is_pending() && !marks.take_news());
    marks.set_view(&logged(&log));
    marks.wrote(Gpa(0), 4097);
    assert!(marks.is_pending());
    assert_eq!(pages(&log), BTreeSet::new());
    marks.commit();
    assert!(marks.take_news() && !marks.take_news() && !marks.is_pending());
    marks.wrote(Gpa(4096), 1);
    marks.commit_fenced();
    assert!(!marks.take_news());
    assert_eq!(pages(&log), [0, 1].into());
    marks.wrote(Gpa(4096), 1);
    marks.commit();
    assert!(marks.take_news());
}

#[test]
fn a_new_log_gets_what_comes_and_the_old_one_what_was() {
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
    // Nothing of ours keeps a log that is not written any more.
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
}

/// Bytes of a slot, and how far slots are apart.
const SLOT: u64 = 3 << 12;
const APART: u64 = 1 << 16;

/// So many slots, of which every third shows the same bytes as the one before it.
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

/// The pages of `len` bytes at `offset` of a slot, and those that show the same bytes.
fn pages_of(slots: u64, slot: u64, offset: u64, len: u64) -> BTreeSet<u64> {
    let twin = match slot % 3 {
        1 if slot + 1 < slots => slot + 1,
        2 => slot - 1,
        _ => slot,
    };
    let touched = offset / 4096..=(offset + len - 1) / 4096;
    touched.flat_map(|page| [slot, twin].map(|slot| slot * (APART / 4096) + page)).collect()
}

/// What the kernel was given to fill is marked as far as it says that it has, and all of it if it says nothing.
#[test]
fn what_the_kernel_wrote() {
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
            // Written from: nothing is marked.
            assert_eq!(iov.segments().len(), 1);
            iov.advance(10, &mut marks);
            assert_eq!(found(&mut marks), BTreeSet::new());
            // A part, and then another.
            iov.segments_to_fill();
            iov.advance(4000 - 10, &mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 110, 3990));
            iov.advance(10, &mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 4100, 10));
            // It failed: the rest may have been written.
            iov.clear(&mut marks);
            assert_eq!(found(&mut marks), pages_of(slots, slot, 4110, 2 * 4096 + 100 - 4110));
            iov.clear(&mut marks);
            // The next request has been given to nobody.
            iov.push(&view, Gpa(slot * APART), 4096).unwrap();
            iov.clear(&mut marks);
            assert_eq!(found(&mut marks), BTreeSet::new());
        }
    }
}

#[test]
fn what_we_write_ourselves() {
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

/// A request in flight is marked where its memory is when it is done; where it was, if it is gone by then; and always before
/// it lets go of it.
#[test]
fn memory_that_moves_under_a_request() {
    const AT: [u64; 3] = [0, 1 << 20, 2 << 20];
    let (data, other, log) = (file(SLOT), file(SLOT), Arc::new(log(4096)));
    let slot = |file: &OwnedFd, gpa, old: &Map| {
        Slot::map_or_share(file, 0, Gpa(gpa), UserAddr(gpa), SLOT, old.slots()).unwrap()
    };
    let view = |map: &Map| Arc::new(View::new(map.clone()).with_log(Some(log.clone())).unwrap());
    let first = Map::new(vec![slot(&data, AT[0], &Map::default())]).unwrap();
    // Something else is where it was.
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
        // Nobody has told of the change in between.
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
            for map in &maps[logged_since..] {
                marks.set_view(&view(map));
            }
            if logged_since > 0 && std::ptr::eq(maps[maps.len() - 1], &removed) {
                // It was removed while nothing was marked.
                continue;
            }
            let current = view(maps[maps.len() - 1]);
            marks.set_view(&current);
            assert_eq!(copied.write(4090, &[1; 6], &mut marks), 6);
            submitted.write_obj(Gpa(AT[0]), &1u8, &mut marks).unwrap();
            marks.commit();
            assert_eq!(pages(&log), at(places, &[0, 2]), "{places:x?} since {logged_since}");
            submitted.write(Gpa(AT[0] + 4095), &[1; 2], &mut marks).unwrap();
            read.advance(4, &mut marks);
            let mut pin = Some(submitted);
            View::unpin_unless(&mut pin, &current, &mut marks);
            assert!(pin.is_none());
            assert_eq!(pages(&log), at(places, &[0, 1]), "{places:x?} since {logged_since}");
            // It failed half-way.
            read.unpin_unless(&current, &mut marks);
            assert_eq!(pages(&log), at(places, &[1, 2]), "{places:x?} since {logged_since}");
        }
    }
}

/// What was gathered is in the log when a change is answered.
#[test]
fn what_was_gathered_is_marked_before_memory_changes() {
    let (view, log) = view(5);
    let mut marks = Marks::off();
    marks.set_view(&view);
    view.write_obj(Gpa(APART), &0u8, &mut marks).unwrap();
    assert_eq!(pages(&log), BTreeSet::new());
    marks.set_view(&View::new(Map::default()).with_log(Some(log.clone())).unwrap());
    assert_eq!(pages(&log), BTreeSet::from([APART / 4096]));
}

/// A log that is too small for memory makes no view.
#[test]
fn a_view_has_a_log_that_covers_it() {
    let (whole, _) = view(5);
    let small = Arc::new(log(((5 * APART) >> 15) - 2));
    let refused = View::new(whole.map().clone()).with_log(Some(small)).map(drop);
    assert!(matches!(refused, Err(LogError::TooSmall { .. })));
}

proptest! {
    /// What was written and committed is found by the next harvest; what was not written is not.
    #[test]
    fn marks_what_was_written(
        steps in prop::collection::vec((0u64..1 << 26, 1u64..1 << 17, 0u8..20), 1..100)
    ) {
        let log = Arc::new(log(((1 << 26) >> 15) + 8));
        let mut marks = Marks::off();
        marks.set_view(&logged(&log));
        // Since it was found last; and since all was committed and found: a part is committed early, for want of room.
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
