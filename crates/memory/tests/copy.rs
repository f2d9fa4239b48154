//! Tests of copies from one guest's memory to another's, against a model.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::fault::{self, Damaged};
use kickless_memory::{Gpa, Log, Map, Marks, Slot, Unmapped, UserAddr, View};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

const PAGE: u64 = 4096;

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn slot(file: &OwnedFd, gpa: u64, len: u64) -> Slot {
    Slot::map(file, 0, Gpa(gpa), UserAddr(gpa), len).unwrap()
}

fn view(slots: Vec<Slot>) -> View {
    View::new(Map::new(slots).unwrap())
}

fn log() -> Arc<Log> {
    Arc::new(Log::map(file(PAGE), 0, PAGE).unwrap())
}

fn pages(log: &Log) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    log.harvest(|page| assert!(pages.insert(page)));
    pages
}

/// A slot of a case: the unmapped bytes before it, its length, and the bytes that its file keeps when it is
/// cut short.
type Part = (u64, u64, Option<u64>);

/// A guest's memory, and its bytes by address.
struct Guest {
    view: View,
    log: Arc<Log>,
    marks: Marks,
    bytes: Vec<Option<u8>>,
}

impl Guest {
    /// Makes memory of these parts, with other contents for each `seed`.
    fn new(parts: &[Part], seed: u8) -> Self {
        let (mut slots, mut files, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for &(gap, len, kept) in parts {
            bytes.resize(bytes.len() + gap as usize, None);
            let start = bytes.len();
            let file = file(len);
            slots.push(slot(&file, start as u64, len));
            files.push((file, start..start + len as usize, kept));
            bytes.extend((0..len).map(|at| Some((at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed)));
        }
        let map = Map::new(slots).unwrap();
        for (gpa, byte) in bytes.iter().enumerate() {
            if let Some(byte) = byte {
                map.write_obj(Gpa(gpa as u64), byte).unwrap();
            }
        }
        for (file, range, kept) in files {
            let Some(kept) = kept else { continue };
            ftruncate(file, kept).unwrap();
            // Bytes that a file has lost read as zeros.
            bytes[range].iter_mut().skip(kept as usize).for_each(|byte| *byte = Some(0));
        }
        let log = log();
        let view = View::new(map).with_log(Some(log.clone())).unwrap();
        let mut marks = Marks::off();
        marks.set_view(&view);
        Self { view, log, marks, bytes }
    }

    fn range(&self, gpa: u64, len: u64) -> Option<Vec<u8>> {
        let range = self.bytes.get(gpa as usize..(gpa + len) as usize);
        // No bytes are everywhere.
        if len == 0 { Some(Vec::new()) } else { range?.iter().copied().collect() }
    }

    fn check(&self) {
        for (gpa, byte) in self.bytes.iter().enumerate() {
            assert_eq!(self.view.read_obj(Gpa(gpa as u64)).ok(), *byte, "at {gpa:#x}");
        }
    }
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let gap = prop_oneof![3 => Just(0u64), 1 => 1u64..700];
    let len = prop_oneof![1u64..600, Just(PAGE), 1u64..3 * PAGE];
    let part = (gap, len, prop::option::weighted(0.25, 0.0..1.0f64));
    let cut = |(gap, len, kept): (u64, u64, Option<f64>)| (gap, len, kept.map(|k| (k * len as f64) as u64));
    prop::collection::vec(part.prop_map(cut), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn copies_do_what_the_model_does(
        target in parts(),
        source in parts(),
        copies in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64, prop_oneof![0u64..800, 0..3 * PAGE]), 1..8),
    ) {
        fault::guard().unwrap();
        let (mut target, source) = (Guest::new(&target, 0x55), Guest::new(&source, 0));
        for (to, at, len) in copies {
            let address = |guest: &Guest, part: f64| (guest.bytes.len() as f64 * part) as u64;
            let (to, at) = (address(&target, to), address(&source, at));
            let copied = target.view.copy_from(Gpa(to), &source.view, Gpa(at), len, &mut target.marks);
            target.marks.commit();
            let mut marked = BTreeSet::new();
            match (target.range(to, len), source.range(at, len)) {
                (None, _) => assert_eq!(copied, Err(Unmapped { addr: to, len })),
                (_, None) => assert_eq!(copied, Err(Unmapped { addr: at, len })),
                (_, Some(from)) => {
                    assert_eq!(copied, Ok(()));
                    let written = target.bytes.iter_mut().skip(to as usize).zip(from);
                    written.for_each(|(byte, from)| *byte = Some(from));
                    if len > 0 {
                        marked.extend(to / PAGE..=(to + len - 1) / PAGE);
                    }
                }
            }
            assert_eq!(pages(&target.log), marked);
        }
        target.check();
        source.check();
        assert_eq!(pages(&source.log), BTreeSet::new());
    }
}

/// A file that is cut short damages the memory of its own guest only, whichever end of a copy that is.
#[test]
fn a_cut_damages_its_own_guest_only() {
    fault::guard().unwrap();
    for cut_source in [false, true] {
        let files = [file(4 * PAGE), file(4 * PAGE)];
        let [target, source] = files.each_ref().map(|file| view(vec![slot(file, 0, 4 * PAGE)]));
        source.map().write(Gpa(0), &[7; 4 * PAGE as usize]).unwrap();
        ftruncate(&files[usize::from(cut_source)], PAGE).unwrap();
        let before = fault::damages();
        target.copy_from(Gpa(100), &source, Gpa(50), 2 * PAGE, &mut Marks::off()).unwrap();
        assert_ne!(fault::damages(), before);
        let damaged = |view: &View| matches!(view.damaged(), Some(Damaged::Memory { .. }));
        assert_eq!((damaged(&target), damaged(&source)), (!cut_source, cut_source));
        let mut copy = [9; 2 * PAGE as usize];
        target.read(Gpa(100), &mut copy).unwrap();
        let kept = if cut_source { PAGE as usize - 50 } else { copy.len() };
        assert!(copy[..kept].iter().all(|byte| *byte == 7) && copy[kept..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn the_last_byte_of_the_address_space() {
    let top = u64::MAX - PAGE + 1;
    // The copy crosses from slot to slot in the one, and not in the other.
    let target = view(vec![slot(&file(PAGE), top, PAGE), slot(&file(PAGE), top - PAGE, PAGE)]);
    let source = view(vec![slot(&file(2 * PAGE), top - PAGE, 2 * PAGE)]);
    let at = Gpa(top - 1000);
    source.map().write(at, &[7; 1000 + PAGE as usize]).unwrap();
    for len in [1000 + PAGE, 1001, 1] {
        target.copy_from(at, &source, at, len, &mut Marks::off()).unwrap();
    }
    assert_eq!(target.read_obj::<u8>(Gpa(u64::MAX)), Ok(7));
    for (to, from) in [(Gpa(u64::MAX), Gpa(top)), (Gpa(top), Gpa(u64::MAX))] {
        let refused = target.copy_from(to, &source, from, 2, &mut Marks::off());
        assert_eq!(refused, Err(Unmapped { addr: u64::MAX, len: 2 }));
    }
    assert!(target.copy_from(Gpa(top), &source, Gpa(top), u64::MAX, &mut Marks::off()).is_err());
}

/// Two ranges of one guest can be the same memory. Each byte of the copy is then one of the source's.
#[test]
fn ranges_that_share_memory() {
    let file = file(2 * PAGE);
    let low = slot(&file, 0, 2 * PAGE);
    let again =
        Slot::map_or_share(&file, 0, Gpa(8 * PAGE), UserAddr(0), 2 * PAGE, std::slice::from_ref(&low));
    let view = view(vec![low, again.unwrap()]);
    for (to, at) in [(100, 0), (0, 100), (8 * PAGE + 100, 0), (50, 8 * PAGE), (8 * PAGE, 0)] {
        view.map().write(Gpa(0), &[1; 1100]).unwrap();
        view.copy_from(Gpa(to), &view, Gpa(at), 1000, &mut Marks::off()).unwrap();
        let mut copy = [0; 1000];
        view.read(Gpa(to), &mut copy).unwrap();
        assert_eq!(copy, [1; 1000], "{to:#x} {at:#x}");
    }
}

/// A copy into an earlier view is marked at the addresses that its memory has now.
#[test]
fn marks_go_to_the_present_addresses() {
    let file = file(PAGE);
    let old = slot(&file, 0, PAGE);
    let new = Slot::map_or_share(&file, 0, Gpa(9 * PAGE), UserAddr(0), PAGE, std::slice::from_ref(&old));
    let (old, new) = (view(vec![old]), view(vec![new.unwrap()]));
    let (log, mut marks) = (log(), Marks::off());
    marks.set_view(&new.with_log(Some(log.clone())).unwrap());
    let source = view(vec![slot(&self::file(PAGE), 0, PAGE)]);
    old.copy_from(Gpa(10), &source, Gpa(20), 300, &mut marks).unwrap();
    marks.commit();
    assert_eq!(pages(&log), BTreeSet::from([9]));
}
