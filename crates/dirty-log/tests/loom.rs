//! Models of the dirty log, in every order that the memory model allows, up to a number of preemptions.
//!
//! They test the code of the crate, with tables of two entries and lists of two cells in a block. loom does
//! not watch guest memory, so a watched word stands for it. [`Writer::log_external_write`] does all steps of
//! a write except the copy. With protection, a write is that call and then the store; with marks, it is the
//! store and then that call. Harvested pages are copied, and at the end the copy must equal the memory.
//!
//! Each of these mistakes was seen to make a model fail:
//! - the bit is set before the entry is made writable;
//! - bits are handed out without a wait;
//! - caches are not emptied;
//! - pages are protected before their bits are taken;
//! - either fence is left out;
//! - the last harvest does not begin with a wait;
//! - an address is moved in a list after its old cell was cleared, a block is walked in the other direction,
//!   or the ends of chains are not checked;
//! - an entry leaves its list before it is emptied;
//! - a removal does not wait;
//! - a writer comes online without release.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-dirty-log --release --test loom`
#![cfg(loom)]
#![allow(
    dead_code,
    unused_imports,
    unsafe_code,
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "tests"
)]

use kickless_dirty_log::{Harvester, Method, Mmu, Pages, Space, Writer};
use kickless_memory::{Gpa, Iova, Slot, UserAddr};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// The lengths of two slots at address 0: one page, and one leaf that is split twice before the write.
const LENS: [u64; 2] = [PAGE, 4 * PAGE];

/// Maps a slot. Call it within the model, because loom watches the registry of mappings.
fn map_slot(gpa: u64, len: u64) -> Slot {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    Slot::map(&file, 0, Gpa(gpa), UserAddr(0), len).unwrap()
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// A guest with one watched word, and a copy of the word.
struct Guest {
    mmu: Arc<Mmu>,
    word: Arc<AtomicU64>,
    log: Harvester,
    pages: Pages,
    copy: u64,
}

impl Guest {
    fn new(slot: usize, method: Method) -> Self {
        let mmu = Mmu::new();
        mmu.add(map_slot(0, LENS[slot])).unwrap();
        let log = Harvester::enable(&mmu, Gpa(0), method).unwrap();
        Self { mmu, word: Arc::new(AtomicU64::new(0)), log, pages: Pages::default(), copy: 0 }
    }

    fn gpa(&self) -> Gpa {
        self.log.gpa()
    }

    fn harvest(&mut self, last: bool) {
        if last {
            self.log.harvest_last(.., &mut self.pages);
        } else {
            self.log.harvest(.., &mut self.pages);
        }
        if self.pages.contains(self.gpa()) {
            self.copy = self.word.load(Ordering::Relaxed);
        }
    }

    fn finish(mut self) {
        self.harvest(true);
        assert_eq!(self.copy, self.word.load(Ordering::Relaxed), "lost");
    }
}

/// The time of the store: before or after the call that logs it.
#[derive(Clone, Copy)]
enum Store {
    Before,
    After,
}

fn write(writer: &mut Writer, word: &AtomicU64, store: Store) {
    write_at(writer, 0, word, store);
}

fn write_at(writer: &mut Writer, page: u64, word: &AtomicU64, store: Store) {
    if matches!(store, Store::Before) {
        word.fetch_add(1, Ordering::Relaxed);
    }
    let written = writer.log_external_write(Iova(page + 8), 8).is_ok();
    if matches!(store, Store::After) && written {
        word.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs `writes` against a harvest, and then a last harvest. The harvester is the spawned thread, because
/// then it needs one preemption less to begin in the middle of a write.
fn against_harvest(preemptions: usize, slot: usize, method: Method, writes: fn(&mut Writer, &AtomicU64)) {
    check(preemptions, move || {
        let mut guest = Guest::new(slot, method);
        let (mut writer, word) = (Writer::direct(&guest.mmu), guest.word.clone());
        let harvester = thread::spawn(move || {
            guest.harvest(false);
            guest
        });
        writes(&mut writer, &word);
        drop(writer);
        harvester.join().unwrap().finish();
    });
}

/// Runs two writers of the same page against a harvest.
fn two_against_harvest(preemptions: usize, slot: usize, method: Method, store: Store) {
    check(preemptions, move || {
        let mut guest = Guest::new(slot, method);
        let (mut writer, word) = (Writer::direct(&guest.mmu), guest.word.clone());
        let (mut other, other_word) = (Writer::direct(&guest.mmu), guest.word.clone());
        let harvester = thread::spawn(move || {
            guest.harvest(false);
            guest
        });
        let second = thread::spawn(move || write(&mut other, &other_word, store));
        write(&mut writer, &word, store);
        drop(writer);
        second.join().unwrap();
        harvester.join().unwrap().finish();
    });
}

fn twice(writer: &mut Writer, word: &AtomicU64, store: Store) {
    write(writer, word, store);
    writer.quiesce();
    write(writer, word, store);
}

#[test]
fn no_write_is_lost_by_protection() {
    against_harvest(3, 0, Method::Protect, |writer, word| twice(writer, word, Store::After));
    two_against_harvest(2, 0, Method::Protect, Store::After);
}

#[test]
fn no_write_is_lost_by_marks() {
    against_harvest(3, 0, Method::Marks, |writer, word| twice(writer, word, Store::Before));
    two_against_harvest(2, 0, Method::Marks, Store::Before);
}

/// The data of an asynchronous read is in memory before its completion is seen.
#[test]
fn no_completion_is_lost_by_protection() {
    against_harvest(3, 0, Method::Protect, |writer, word| twice(writer, word, Store::Before));
}

#[test]
fn no_write_is_lost_in_a_leaf_that_is_split() {
    against_harvest(3, 1, Method::Protect, |writer, word| twice(writer, word, Store::After));
    two_against_harvest(1, 1, Method::Protect, Store::After);
}

/// The second harvest begins while the writer is alive, after its write is done. The writer need not have
/// passed a quiescent point since.
#[test]
fn the_last_harvest_waits_for_a_writer_that_is_about_to_mark() {
    check(2, || {
        let mut guest = Guest::new(0, Method::Protect);
        let done = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (mut writer, word) = (Writer::direct(&guest.mmu), guest.word.clone());
                let done = done.clone();
                thread::spawn(move || {
                    write(&mut writer, &word, Store::After);
                    done.fetch_add(1, Ordering::Release);
                })
            })
            .collect();
        if done.load(Ordering::Acquire) == 1 {
            let written = guest.word.load(Ordering::Relaxed);
            guest.harvest(true);
            assert!(guest.copy >= written.min(1), "lost");
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        guest.finish();
    });
}

/// No harvest waits for a sleeping writer.
#[test]
fn no_write_is_lost_by_an_offline_writer() {
    against_harvest(3, 0, Method::Protect, |writer, word| {
        write(writer, word, Store::After);
        drop(writer.offline());
        write(writer, word, Store::After);
    });
}

/// Turns the log on while a writer runs, `after` another log was turned off. Later writes are in the log, and
/// earlier ones are in memory to be copied.
fn turned_on(preemptions: usize, slot: usize, method: Method, store: Store, after: Option<Method>) {
    check(preemptions, move || {
        let mmu = Mmu::new();
        mmu.add(map_slot(0, LENS[slot])).unwrap();
        let before = after.map(|method| Harvester::enable(&mmu, Gpa(0), method).unwrap());
        let word = Arc::new(AtomicU64::new(0));
        let mut writer = Writer::direct(&mmu);
        let switcher = thread::spawn({
            let word = word.clone();
            move || {
                drop(before);
                let log = Harvester::enable(&mmu, Gpa(0), method).unwrap();
                let copy = word.load(Ordering::Relaxed);
                Guest { mmu, word, log, pages: Pages::default(), copy }
            }
        });
        twice(&mut writer, &word, store);
        drop(writer);
        switcher.join().unwrap().finish();
    });
}

#[test]
fn no_write_is_lost_when_the_log_is_turned_on() {
    turned_on(3, 0, Method::Marks, Store::Before, None);
    turned_on(3, 0, Method::Protect, Store::After, None);
    turned_on(3, 1, Method::Protect, Store::After, None);
}

/// Split leaves of the old log are joined, and its bits freed.
#[test]
fn no_write_is_lost_when_a_log_replaces_another() {
    for (before, now, store) in [
        (Method::Marks, Method::Protect, Store::After),
        (Method::Protect, Method::Protect, Store::After),
        (Method::Protect, Method::Marks, Store::Before),
    ] {
        turned_on(2, 0, now, store, Some(before));
        turned_on(2, 1, now, store, Some(before));
    }
}

/// Two harvests of different slots at once. Each hands out the pages of its own slot.
#[test]
fn no_write_is_lost_to_another_harvest() {
    for (method, store) in [(Method::Protect, Store::After), (Method::Marks, Store::Before)] {
        check(2, move || {
            let mmu = Mmu::new();
            let places = [0, PAGE];
            let guests = places.map(|gpa| {
                mmu.add(if gpa == 0 { map_slot(0, LENS[0]) } else { map_slot(PAGE, PAGE) }).unwrap();
                let log = Harvester::enable(&mmu, Gpa(gpa), method).unwrap();
                let word = Arc::new(AtomicU64::new(0));
                Guest { mmu: mmu.clone(), word, log, pages: Pages::default(), copy: 0 }
            });
            let words = guests.each_ref().map(|guest| guest.word.clone());
            let mut writer = Writer::direct(&mmu);
            let harvesters = guests.map(|mut guest| {
                thread::spawn(move || {
                    guest.harvest(false);
                    guest
                })
            });
            for (gpa, word) in places.into_iter().zip(&words) {
                write_at(&mut writer, gpa, word, store);
            }
            drop(writer);
            harvesters.into_iter().for_each(|harvester| harvester.join().unwrap().finish());
        });
    }
}

/// A mapping is added during a harvest, and written through at once.
#[test]
fn no_write_is_lost_through_a_new_mapping() {
    for (slot, method, store) in [
        (0, Method::Protect, Store::After),
        (1, Method::Protect, Store::After),
        (0, Method::Marks, Store::Before),
    ] {
        check(3, move || {
            let mut guest = Guest::new(slot, method);
            let (space, word) = (Arc::new(Space::new(&guest.mmu)), guest.word.clone());
            let len = if slot == 0 { PAGE } else { 4 * PAGE };
            let mapper = thread::spawn(move || {
                space.map(Iova(0), Gpa(0), len, true).unwrap();
                let mut writer = Writer::within(&space);
                twice(&mut writer, &word, store);
                drop(writer);
                space
            });
            guest.harvest(false);
            let space = mapper.join().unwrap();
            guest.finish();
            drop(space);
        });
    }
}

/// Maps `mapped` bytes of guest memory a second time, and unmaps a page of them during a harvest. Writes
/// through the mapping, if they succeed, are not lost.
fn unmapped_under_a_harvest(slot: usize, mapped: u64, unmapped: Iova, preemptions: usize) {
    check(preemptions, move || {
        let mut guest = Guest::new(slot, Method::Protect);
        let space = Arc::new(Space::new(&guest.mmu));
        space.map(Iova(0), Gpa(0), mapped, true).unwrap();
        let (mut writer, word) = (Writer::within(&space), guest.word.clone());
        // The entry is writable when the race begins.
        write(&mut writer, &word, Store::After);
        let unmapper = thread::spawn({
            let space = space.clone();
            move || space.unmap(unmapped, PAGE).unwrap()
        });
        {
            let _away = writer.offline();
            guest.harvest(false);
        }
        write(&mut writer, &word, Store::After);
        drop(writer);
        unmapper.join().unwrap();
        guest.finish();
    });
}

/// A mapping is removed, and its entry from the list, before, during or after a harvest's walk.
#[test]
fn no_write_is_lost_through_a_removed_mapping() {
    unmapped_under_a_harvest(0, PAGE, Iova(0), 3);
}

/// A large mapping is broken up, because another page of it is unmapped.
#[test]
fn no_write_is_lost_when_a_mapping_is_broken_up() {
    unmapped_under_a_harvest(1, 4 * PAGE, Iova(2 * PAGE), 2);
}

/// No writer uses removed memory. An exclusive access follows the removal, so that loom finds every later
/// use.
///
/// (This model showed that a writer that comes back from a sleep must announce that with release.)
#[test]
fn removed_memory_is_not_used() {
    check(3, || {
        let mmu = Mmu::new();
        mmu.add(map_slot(0, LENS[0])).unwrap();
        let memory = Arc::new(UnsafeCell::new(0));
        let mut writer = Writer::direct(&mmu);
        let remover = thread::spawn({
            let memory = memory.clone();
            move || {
                mmu.remove(Gpa(0)).unwrap();
                memory.with_mut(|_| ());
            }
        });
        for round in 0..3 {
            if writer.log_external_write(Iova(0), 8).is_ok() {
                memory.with(|_| ());
            }
            if round == 1 {
                drop(writer.offline());
            } else {
                writer.quiesce();
            }
        }
        drop(writer);
        remover.join().unwrap();
    });
}
