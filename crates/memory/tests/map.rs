//! Tests of slots, maps, areas and buffers, with values that a front-end and a guest could send.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::{
    Area, Error, Gpa, Iov, Map, Marks, PinnedByte, Purpose, SLOTS_MAX, Slot, Unmapped, UserAddr, View,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const PAGE: u64 = 4096;

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

/// Returns a slot with a file of its own. Its user address is its guest-physical address.
fn slot(gpa: u64, len: u64) -> Slot {
    Slot::map(file(len), 0, Gpa(gpa), UserAddr(gpa), len).unwrap()
}

fn map(slots: &[(u64, u64)]) -> Map {
    Map::new(slots.iter().map(|&(gpa, len)| slot(gpa, len)).collect()).unwrap()
}

fn view(slots: &[(u64, u64)]) -> Arc<View> {
    Arc::new(View::new(map(slots)))
}

mod slots {
    use super::*;

    fn refused(offset: u64, gpa: u64, user: u64, len: u64) -> Error {
        Slot::map(file(4 * PAGE), offset, Gpa(gpa), UserAddr(user), len).unwrap_err()
    }

    #[test]
    fn empty() {
        assert!(matches!(refused(0, 0x5000, 0, 0), Error::Empty { purpose: Purpose::Region(Gpa(0x5000)) }));
    }

    #[test]
    fn wraps() {
        for (offset, gpa, user, len, what) in [
            (0, u64::MAX, 0, 2, "guest address"),
            (0, 1, 0, u64::MAX, "mmap offset"),
            (0, 2, 0, u64::MAX, "guest address"),
            (0, 0, u64::MAX, PAGE, "user address"),
            (u64::MAX, 0, 0, PAGE, "mmap offset"),
            (u64::MAX - PAGE + 1, 0, 0, PAGE, "mmap offset"),
        ] {
            match refused(offset, gpa, user, len) {
                Error::Wraps { field, len: told, .. } => assert_eq!((field, told), (what, len)),
                // The check of the file's end uses the same sum, which does not wrap here.
                Error::FileTooShort { .. } if gpa == 1 => {}
                other => unreachable!("{other}"),
            }
        }
    }

    #[test]
    fn longer_than_the_file() {
        for (offset, len) in [(0, 4 * PAGE + 1), (1, 4 * PAGE), (4 * PAGE, 1), (0, u64::MAX), (1 << 63, PAGE)]
        {
            match refused(offset, 0, 0, len) {
                Error::FileTooShort { needs, has, .. } => {
                    assert_eq!((needs, has), (offset + len, 4 * PAGE));
                }
                other => unreachable!("{other}"),
            }
        }
    }

    #[test]
    fn files_that_cannot_be_mapped() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let refused = Slot::map(&pipe, 0, Gpa(0), UserAddr(0), PAGE).unwrap_err();
        assert!(matches!(refused, Error::Mmap { .. }), "{refused}");
        // Far more than the address space, of a device that has no size.
        let zero = std::fs::File::open("/dev/zero").unwrap();
        assert!(Slot::map(&zero, 0, Gpa(0), UserAddr(0), 1 << 62).is_err());
    }

    #[test]
    fn the_last_byte_of_the_address_space() {
        let top = u64::MAX - PAGE + 1;
        let map = map(&[(top, PAGE)]);
        map.write(Gpa(u64::MAX - 3), b"last").unwrap();
        assert_eq!(map.read_obj::<[u8; 4]>(Gpa(u64::MAX - 3)), Ok(*b"last"));
        assert!(map.write(Gpa(u64::MAX - 3), b"wraps").is_err());
        assert!(map.contains(Gpa(top), PAGE) && !map.contains(Gpa(top), PAGE + 1));
        assert!(map.area(UserAddr(u64::MAX - 3), 4, 4).is_ok());
        assert!(map.area(UserAddr(u64::MAX - 3), 5, 4).is_err());
    }

    #[test]
    fn any_offset_in_the_file() {
        let file = file(4 * PAGE);
        let whole = Map::new(vec![Slot::map(&file, 0, Gpa(0), UserAddr(0), 4 * PAGE).unwrap()]).unwrap();
        whole.write(Gpa(PAGE + 123), b"odd").unwrap();
        let part = Map::new(vec![Slot::map(&file, PAGE + 123, Gpa(0), UserAddr(0), 100).unwrap()]).unwrap();
        assert_eq!(part.read_obj::<[u8; 3]>(Gpa(0)), Ok(*b"odd"));
        assert!(!part.contains(Gpa(0), 101));
    }

    #[test]
    fn the_same_bytes_are_mapped_once() {
        let file = file(4 * PAGE);
        let old = Map::new(vec![Slot::map(&file, 0, Gpa(0), UserAddr(0), 2 * PAGE).unwrap()]).unwrap();
        let again = |offset, len| {
            Slot::map_or_share(&file, offset, Gpa(PAGE), UserAddr(7), len, old.slots()).unwrap()
        };
        let mapping = old.slots()[0].mapping();
        assert!(Arc::ptr_eq(again(0, 2 * PAGE).mapping(), mapping));
        assert!(!Arc::ptr_eq(again(0, PAGE).mapping(), mapping));
        assert!(!Arc::ptr_eq(again(PAGE, 2 * PAGE).mapping(), mapping));
        let other = Slot::map_or_share(super::file(4 * PAGE), 0, Gpa(0), UserAddr(0), 2 * PAGE, old.slots());
        assert!(!Arc::ptr_eq(other.unwrap().mapping(), mapping));
    }
}

mod maps {
    use super::*;

    #[test]
    fn overlaps() {
        for (a, b) in [
            ((0, PAGE), (0, PAGE)),
            ((0, 2 * PAGE), (PAGE, PAGE)),
            ((0, PAGE + 1), (PAGE, PAGE)),
            ((PAGE, PAGE), (0, 4 * PAGE)),
            ((u64::MAX - PAGE + 1, PAGE), (u64::MAX, 1)),
        ] {
            for (a, b) in [(a, b), (b, a)] {
                let both = Map::new(vec![slot(a.0, a.1), slot(b.0, b.1)]);
                assert!(matches!(both, Err(Error::Overlaps { .. })), "{a:?} {b:?}");
                match Map::new(vec![slot(a.0, a.1)]).unwrap().with(slot(b.0, b.1)) {
                    Err(Error::Overlaps { gpa, other }) => assert_eq!((gpa.0, other.0), (b.0, a.0)),
                    _ => unreachable!("{a:?} {b:?}"),
                }
            }
        }
        assert!(Map::new(vec![slot(PAGE, PAGE), slot(0, PAGE)]).is_ok(), "neighbours");
    }

    #[test]
    fn as_many_as_there_can_be() {
        let file = file(PAGE);
        let slots = |n: u64| {
            (0..n)
                .map(|i| Slot::map(&file, 0, Gpa(2 * i * PAGE), UserAddr(i * PAGE), PAGE).unwrap())
                .collect()
        };
        let map = Map::new(slots(SLOTS_MAX as u64)).unwrap();
        for i in 0..SLOTS_MAX as u64 {
            let gpa = 2 * i * PAGE;
            assert!(map.contains(Gpa(gpa), PAGE) && !map.contains(Gpa(gpa), PAGE + 1));
            assert!(!map.contains(Gpa(gpa + PAGE), 1));
            assert_eq!(map.gpa_of(UserAddr(i * PAGE + 5)), Some(Gpa(gpa + 5)));
        }
        assert!(matches!(
            Map::new(slots(SLOTS_MAX as u64 + 1)),
            Err(Error::TooMany { count: 510, max: 509 })
        ));
        assert!(matches!(map.with(slot(1 << 40, PAGE)), Err(Error::TooMany { .. })));
    }

    #[test]
    fn removal_names_the_whole_slot() {
        let map = map(&[(0, PAGE), (PAGE, PAGE)]);
        for (gpa, user, len) in [(0, PAGE, PAGE), (PAGE, 0, PAGE), (0, 0, 2 * PAGE), (1, 1, PAGE - 1)] {
            let refused = map.without(Gpa(gpa), UserAddr(user), len);
            assert!(matches!(refused, Err(Error::NoSuchSlot { .. })));
        }
        let (less, removed) = map.without(Gpa(0), UserAddr(0), PAGE).unwrap();
        assert_eq!((removed.gpa(), less.slots().len()), (Gpa(0), 1));
        assert!(!less.contains(Gpa(0), 1) && less.contains(Gpa(PAGE), PAGE));
        assert!(map.contains(Gpa(0), 2 * PAGE), "the old map is as it was");
    }

    #[test]
    fn writes_beyond_guest_memory_change_nothing() {
        let map = map(&[(0, PAGE), (PAGE, PAGE)]);
        let refused = map.write(Gpa(2 * PAGE - 4), b"too long");
        assert_eq!(refused, Err(Unmapped { addr: 2 * PAGE - 4, len: 8 }));
        assert_eq!(map.write_obj(Gpa(2 * PAGE - 4), &u64::MAX), Err(Unmapped { addr: 2 * PAGE - 4, len: 8 }));
        assert_eq!(map.read_obj::<u32>(Gpa(2 * PAGE - 4)), Ok(0));
        assert!(map.read_obj::<u64>(Gpa(2 * PAGE - 4)).is_err());
        assert!(map.read(Gpa(u64::MAX), &mut [0; 2]).is_err());
        assert!(map.contains(Gpa(u64::MAX), 0), "nothing is everywhere");
        assert!(!map.contains(Gpa(0), u64::MAX) && !map.contains(Gpa(u64::MAX), u64::MAX));
        assert!(Map::default().read_obj::<u8>(Gpa(0)).is_err());
    }

    #[test]
    fn values_at_any_alignment() {
        let map = map(&[(0, PAGE), (PAGE, PAGE)]);
        // The last values cross from one slot to the next.
        for at in (0..16).chain(PAGE - 8..PAGE + 8) {
            let value = 0x0102_0304_0506_0708_u64.wrapping_mul(at + 1);
            map.write_obj(Gpa(at), &value).unwrap();
            assert_eq!(map.read_obj::<u64>(Gpa(at)), Ok(value));
        }
    }

    #[test]
    fn spans() {
        let map = map(&[(0, PAGE), (PAGE, PAGE)]);
        map.write_obj(Gpa(16), &7u64).unwrap();
        let span = map.span(Gpa(8), 100).unwrap();
        assert_eq!((span.len(), span.is_empty(), span.read::<u64>(8)), (100, false, 7));
        assert!(map.span(Gpa(0), PAGE).is_some());
        assert!(map.span(Gpa(1), PAGE).is_none(), "over the seam");
        assert!(map.span(Gpa(2 * PAGE), 1).is_none());
        assert!(map.span(Gpa(0), u64::MAX).is_none());
    }

    #[test]
    #[should_panic(expected = "out of its span")]
    fn a_span_ends() {
        let map = map(&[(0, PAGE)]);
        let _ = map.span(Gpa(0), 20).unwrap().read::<u64>(13);
    }
}

mod areas {
    use super::*;

    #[test]
    fn bounds_and_alignment() {
        let map = map(&[(PAGE, PAGE), (2 * PAGE, PAGE)]);
        let area = |user, len, align| map.area(UserAddr(user), len, align).is_ok();
        assert!(area(PAGE, PAGE as usize, 16) && area(2 * PAGE - 16, 16, 16));
        assert!(!area(PAGE, PAGE as usize + 1, 16), "no area over a seam");
        assert!(!area(PAGE - 1, 2, 1) && !area(3 * PAGE, 1, 1) && !area(0, 1, 1));
        assert!(!area(PAGE + 8, 16, 16) && area(PAGE + 8, 16, 8));
        assert!(!area(PAGE, usize::MAX, 1) && !area(u64::MAX, usize::MAX, 1));
    }

    /// The front-end's addresses may overlap. A slot that holds the whole area is used.
    #[test]
    fn overlapping_user_addresses() {
        let slot = |gpa, len| Slot::map(file(len), 0, Gpa(gpa), UserAddr(0), len).unwrap();
        let map = Map::new(vec![slot(0, PAGE), slot(1 << 20, 4 * PAGE)]).unwrap();
        map.write(Gpa(0), b"1").unwrap();
        map.write(Gpa(1 << 20), b"2").unwrap();
        assert_eq!(map.area(UserAddr(0), PAGE as usize, 16).unwrap().read::<u8>(0), b'1');
        assert_eq!(map.area(UserAddr(0), PAGE as usize + 1, 16).unwrap().read::<u8>(0), b'2');
    }

    fn small() -> Area {
        map(&[(0, PAGE)]).area(UserAddr(16), 8, 16).unwrap()
    }

    #[test]
    fn words_are_little_endian() {
        let map = map(&[(0, PAGE)]);
        let area = map.area(UserAddr(16), 8, 16).unwrap();
        area.store_u16(6, 0x1234, Ordering::Relaxed);
        assert_eq!(map.read_obj::<[u8; 2]>(Gpa(22)), Ok([0x34, 0x12]));
        map.write(Gpa(16), &[1, 2]).unwrap();
        assert_eq!(area.load_u16(0, Ordering::Acquire), 0x0201);
        area.write(1, &[9u8; 7]);
        assert_eq!((area.read::<u8>(0), area.read::<[u8; 7]>(1)), (1, [9; 7]));
        assert_eq!(map.read_obj::<u8>(Gpa(24)), Ok(0));
    }

    #[test]
    #[should_panic(expected = "out of its area")]
    fn load_past_the_end() {
        small().load_u16(8, Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "out of its area")]
    fn read_over_the_end() {
        small().read::<u32>(6);
    }

    #[test]
    #[should_panic(expected = "out of its area")]
    fn write_far_away() {
        small().write(usize::MAX, &1u8);
    }
}

mod lifetimes {
    use super::*;

    #[test]
    fn a_mapping_is_unmapped_with_its_last_user() {
        let view = view(&[(0, PAGE)]);
        let released = view.map().slots()[0].mapping().released();
        let area = view.map().area(UserAddr(0), 16, 16).unwrap();
        let mut iov = Iov::default();
        iov.push(&view, Gpa(0), 16).unwrap();
        drop(view);
        assert!(!released.is_unused());
        drop(area);
        assert!(!released.is_unused(), "a request is in flight");
        iov.clear(&mut Marks::off());
        assert!(!released.is_unused(), "kept for the next request");
        iov.unpin_unless(&Arc::new(View::default()), &mut Marks::off());
        assert!(released.is_unused() && released.is_unused());
    }

    #[test]
    fn an_area_alone_keeps_its_memory() {
        let view = view(&[(0, PAGE), (PAGE, PAGE)]);
        let released = [0, 1].map(|i| view.map().slots()[i].mapping().released());
        let area = view.map().area(UserAddr(PAGE), 16, 16).unwrap();
        drop(view);
        area.write(0, &1u64);
        assert!(released[0].is_unused(), "only what holds the area stays");
        assert!(!released[1].is_unused());
        drop(area);
        assert!(released[1].is_unused());
    }

    #[test]
    fn a_wait_ends_when_another_thread_releases_the_mapping() {
        let view = view(&[(0, PAGE)]);
        let released = view.map().slots()[0].mapping().released();
        assert!(!released.wait(Duration::from_millis(20)));
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(view);
        });
        assert!(released.wait(Duration::from_secs(20)));
        thread.join().unwrap();
    }
}

mod iovs {
    use super::*;

    #[test]
    fn one_view_at_a_time() {
        let (a, b) = (view(&[(0, PAGE)]), view(&[(0, PAGE)]));
        let mut iov = Iov::default();
        iov.push(&a, Gpa(0), 8).unwrap();
        assert!(iov.push(&b, Gpa(0), 8).is_err());
        assert_eq!((iov.len(), iov.segments().len()), (8, 1));
        iov.clear(&mut Marks::off());
        iov.push(&b, Gpa(0), 8).unwrap();
        iov.unpin_unless(&b, &mut Marks::off());
        iov.push(&b, Gpa(0), 8).unwrap();
    }

    #[test]
    fn a_range_outside_of_memory_changes_nothing() {
        let view = view(&[(0, PAGE), (2 * PAGE, PAGE)]);
        let mut iov = Iov::default();
        iov.push(&view, Gpa(0), 8).unwrap();
        for (gpa, len) in [(PAGE - 1, 2), (PAGE, 1), (0, u32::MAX), (u64::MAX, 2), (3 * PAGE - 1, 2)] {
            assert_eq!(iov.push(&view, Gpa(gpa), len), Err(Unmapped { addr: gpa, len: u64::from(len) }));
        }
        iov.push(&view, Gpa(u64::MAX), 0).unwrap();
        assert_eq!((iov.len(), iov.segments().len()), (8, 1));
    }

    #[test]
    fn neighbours_become_one_segment() {
        let view = view(&[(0, PAGE)]);
        let mut iov = Iov::default();
        for gpa in [0, 512, 1024, 3072, 2048] {
            iov.push(&view, Gpa(gpa), 512).unwrap();
        }
        assert_eq!(iov.segments().iter().map(|s| s.iov_len).collect::<Vec<_>>(), [1536, 512, 512]);
        assert!(iov.is_aligned(512, 512) && !iov.is_aligned(1024, 1024) && iov.is_aligned(1024, 512));
    }

    /// A used-up segment does not grow.
    #[test]
    fn pushed_after_all_was_used() {
        let view = view(&[(0, PAGE)]);
        let mut iov = Iov::default();
        iov.push(&view, Gpa(0), 100).unwrap();
        iov.advance(100, &mut Marks::off());
        iov.push(&view, Gpa(100), 50).unwrap();
        assert_eq!((iov.len(), iov.segments().len()), (50, 1));
        iov.advance(u64::MAX, &mut Marks::off());
        assert!(iov.is_empty() && iov.segments().is_empty());
    }
}

/// Splits at every place, after a part was used up.
#[test]
fn split_into_parts() {
    let view = view(&[(0, 2 * PAGE)]);
    let bytes: Vec<u8> = (0..60).collect();
    let (marks, mut front) = (&mut Marks::off(), Iov::default());
    for at in 0..=60u64 {
        let mut iov = Iov::default();
        for gpa in [0, 100, 200, 300] {
            iov.push(&view, Gpa(gpa), 20).unwrap();
        }
        iov.advance(20, marks);
        iov.write(0, &bytes, marks);
        iov.split_to(at, &mut front, marks);
        assert_eq!((front.len(), iov.len()), (at, 60 - at));
        let mut read = [0; 60];
        assert_eq!(front.read(0, &mut read) as u64, at);
        iov.read(0, &mut read[at as usize..]);
        assert_eq!(read[..], bytes);
        // The front's bytes are not those of the other part.
        front.zero(u64::MAX, marks);
        let mut rest = vec![0; 60 - at as usize];
        iov.read(0, &mut rest);
        assert_eq!(rest, bytes[at as usize..]);
        front.advance(at, marks);
        assert!(front.is_empty());
    }
    front.release(marks);
    let other = self::view(&[(0, PAGE)]);
    front.push(&other, Gpa(0), 8).unwrap();
}

/// Guest memory as a plain array, for slots anywhere in 64 pages.
struct Model {
    bytes: Vec<u8>,
    present: Vec<bool>,
}

impl Model {
    fn has(&self, gpa: u64, len: u64) -> bool {
        gpa.checked_add(len)
            .is_some_and(|end| len == 0 || (gpa..end).all(|a| self.present.get(a as usize) == Some(&true)))
    }
}

/// Generates slots: lengths, and the gap before each, which is often zero.
fn layout() -> impl Strategy<Value = Vec<(u64, u64)>> {
    proptest::collection::vec((prop_oneof![3 => Just(0), 1 => 1u64..5000], 1u64..9000), 1..20).prop_map(
        |parts| {
            let mut at = 0;
            parts
                .into_iter()
                .map(|(gap, len)| {
                    let start = at + gap;
                    at = start + len;
                    (start, len)
                })
                .collect()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_range_of_any_layout(
        slots in layout(),
        ranges in proptest::collection::vec((0u64..150_000, 0usize..12_000, any::<u8>()), 1..40),
    ) {
        let view = view(&slots);
        let mut model = Model { bytes: vec![0; 1 << 18], present: vec![false; 1 << 18] };
        for &(gpa, len) in &slots {
            model.present[gpa as usize..(gpa + len) as usize].fill(true);
        }
        let end = slots.last().map_or(0, |&(gpa, len)| gpa + len);
        for (start, len, fill) in ranges {
            let gpa = start % (end + 10);
            let there = model.has(gpa, len as u64);
            prop_assert_eq!(view.contains(Gpa(gpa), len as u64), there);
            let data: Vec<u8> = (0..len).map(|i| fill.wrapping_add(i as u8)).collect();
            prop_assert_eq!(view.map().write(Gpa(gpa), &data).is_ok(), there);
            let mut iov = Iov::default();
            prop_assert_eq!(iov.push(&view, Gpa(gpa), len as u32).is_ok(), there);
            if there {
                model.bytes[gpa as usize..][..len].copy_from_slice(&data);
                prop_assert_eq!(iov.len(), len as u64);
                prop_assert_eq!(iov.segments().iter().map(|s| s.iov_len).sum::<usize>(), len);
            }
        }
        let mut seen = vec![0; end as usize];
        for &(gpa, len) in &slots {
            view.read(Gpa(gpa), &mut seen[gpa as usize..][..len as usize]).unwrap();
        }
        prop_assert_eq!(&seen, &model.bytes[..end as usize]);
    }

    #[test]
    fn buffers_behave_like_one_string_of_bytes(
        slots in layout(),
        pushes in proptest::collection::vec((0u64..150_000, 0u32..4000), 1..20),
        copies in proptest::collection::vec((0u64..40_000, 0usize..6000, any::<bool>(), any::<u8>()), 0..10),
        steps in proptest::collection::vec(0u64..9000, 0..10),
    ) {
        let view = view(&slots);
        let end = slots.last().map_or(0, |&(gpa, len)| gpa + len);
        let mut iov = Iov::default();
        // The guest address of each byte.
        let mut gpas = Vec::new();
        for (start, len) in pushes {
            let gpa = start % end;
            if iov.push(&view, Gpa(gpa), len).is_ok() {
                gpas.extend(gpa..gpa + u64::from(len));
            }
        }
        let look = |gpa: u64| view.read_obj::<u8>(Gpa(gpa)).unwrap();
        let mut steps = steps.into_iter();
        for (offset, len, write, fill) in copies {
            prop_assert_eq!(iov.len(), gpas.len() as u64);
            let rest = gpas.get(offset as usize..).unwrap_or(&[]);
            let n = rest.len().min(len);
            if write {
                prop_assert_eq!(iov.write(offset, &vec![fill; len], &mut Marks::off()), n);
                prop_assert!(rest[..n].iter().all(|&gpa| look(gpa) == fill));
            } else {
                let mut copy = vec![fill; len];
                prop_assert_eq!(iov.read(offset, &mut copy), n);
                prop_assert!(rest[..n].iter().zip(&copy).all(|(&gpa, &byte)| look(gpa) == byte));
            }
            if let Some(step) = steps.next() {
                iov.advance(step, &mut Marks::off());
                gpas.drain(..gpas.len().min(step as usize));
            }
        }
    }

    /// Any numbers get an answer, and no arithmetic overflows.
    #[test]
    fn any_numbers(gpa: u64, user: u64, len: u64, ask: u64, ask_len: u64, offset: u64) {
        let shifted = len >> (len % 64);
        if let Ok(slot) = Slot::map(file(1 << 16), offset >> (offset % 64), Gpa(gpa), UserAddr(user), shifted) {
            prop_assert!(shifted <= 1 << 16);
            let map = Map::new(vec![slot]).unwrap();
            let inside = ask >= gpa && ask - gpa < shifted && ask_len <= shifted - (ask - gpa);
            prop_assert_eq!(map.contains(Gpa(ask), ask_len), inside || ask_len == 0);
            prop_assert!(map.contains(Gpa(gpa), shifted));
            prop_assert_eq!(map.gpa_of(UserAddr(user)), Some(Gpa(gpa)));
            let _ = map.area(UserAddr(ask), ask_len as usize, 16);
            let _ = map.with(Slot::map(file(PAGE), 0, Gpa(ask), UserAddr(0), 1).unwrap());
        }
    }
}

mod pinned_byte {
    use super::*;

    #[test]
    fn is_written_after_its_memory_was_removed() {
        let (view, other, mut marks) = (view(&[(0, PAGE)]), view(&[]), Marks::off());
        let released = view.map().slots()[0].mapping().released();
        let alias = view.map().slots()[0].clone();
        let mut byte = PinnedByte::default();
        byte.set(&view, Gpa(PAGE - 1));
        drop(view);
        assert!(byte.write(7, &mut marks));
        assert_eq!(Map::new(vec![alias]).unwrap().read_obj::<u8>(Gpa(PAGE - 1)), Ok(7));
        assert!(!released.is_unused(), "the byte holds its memory");
        byte.unpin_unless(&other, &mut marks);
        assert!(released.is_unused());
        assert!(!byte.write(8, &mut marks), "the byte has no memory");
    }

    #[test]
    fn is_in_guest_memory() {
        let (view, mut marks) = (view(&[(0, PAGE)]), Marks::off());
        let mut byte = PinnedByte::default();
        assert!(!byte.write(1, &mut marks));
        byte.set(&view, Gpa(0));
        byte.set(&view, Gpa(PAGE));
        assert!(!byte.write(1, &mut marks), "an earlier byte is written");
        byte.set(&view, Gpa(1));
        byte.unpin_unless(&view, &mut marks);
        assert!(!byte.write(1, &mut marks), "a byte of an earlier request is written");
        assert_eq!(view.read_obj::<u16>(Gpa(0)), Ok(0));
    }
}
