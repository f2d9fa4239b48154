//! Runs writers, harvests and changes at once, and checks the harvests against a model.
//!
//! Each written byte is in a harvest that is handed out after the write. It is in the next
//! [`Harvester::harvest_last`] at the latest.
//!
//! Each writer has its own words. It writes increasing numbers into words that follow from its seed. So the
//! harvester can compute, from a writer's progress, the least value of each of its words in the copy of the
//! harvested pages.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_dirty_log::{Harvester, Method, Mmu, Pages, Space, Writer};
use kickless_memory::{Gpa, Iova, Map, Slot, UserAddr};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Length of the logged slot. One large leaf maps all of it.
const LEN: u64 = GIB;
/// Addresses at which the space maps the slot again, by leaves of each size.
const ALIASES: [u64; 3] = [GIB, 2 * GIB + 2 * MIB, 4 * GIB + PAGE];
/// Address at which the space maps the slot at times, by a leaf that is broken up piece by piece.
const REMAPPED: u64 = 8 * GIB;
const WRITERS: u64 = 4;
/// Numbers that each writer writes.
const WRITES: u64 = if cfg!(debug_assertions) { 60_000 } else { 400_000 };

fn slot(gpa: u64, len: u64) -> Slot {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    Slot::map(&file, 0, Gpa(gpa), UserAddr(0), len).unwrap()
}

#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    /// Returns the page of a write: most often one of a few, so that all writers meet there.
    fn page(&mut self) -> u64 {
        match self.next(10) {
            0..=5 => self.next(70),
            6..=8 => 512 + self.next(512),
            _ => self.next(64) * (LEN / PAGE / 64),
        }
    }
}

/// The number that each writer has reached.
type Progress = Arc<[AtomicU64; WRITERS as usize]>;

/// Writes 1, 2, 3 ... to its word of pages that follow from `seed`.
fn write_all(id: u64, mut writer: Writer, direct: bool, map: &Arc<Map>, progress: &Progress) {
    let (mut pages, mut ways) = (Random(id), Random(id + 100));
    for number in 1..=WRITES {
        let base = if direct { 0 } else { ALIASES[ways.next(3) as usize] };
        let offset = pages.page() * PAGE + id * 8;
        let is_external = ways.next(8) == 0;
        if is_external {
            // Writes as an asynchronous read would that was submitted long ago.
            map.write_obj(Gpa(offset), &number).unwrap();
        }
        let mut write = |base| match is_external {
            true => writer.log_external_write(Iova(base + offset), 8),
            false => writer.write_obj(Iova(base + offset), &number),
        };
        // If the page is not mapped there now, uses the other mapping.
        if direct || ways.next(3) > 0 || write(REMAPPED).is_err() {
            write(base).unwrap();
        }
        progress[id as usize].store(number, Ordering::Release);
        match ways.next(64) {
            0 => thread::yield_now(),
            1 => drop(writer.offline()),
            2 => {
                let _away = writer.offline();
                thread::yield_now();
            }
            3..=40 => writer.quiesce(),
            _ => {}
        }
    }
}

/// Changes unused mappings and slots, in the same tables and lists, until `stop` is set. At times it logs its
/// own slot.
fn churn(mmu: &Arc<Mmu>, space: &Arc<Space>, stop: &AtomicBool) {
    let mut random = Random(77);
    let other = Gpa(64 * GIB);
    let mut log = None;
    while !stop.load(Ordering::Relaxed) {
        let (gpa, len) = (random.next(600) * PAGE, (random.next(3) + 1) * PAGE);
        let place = Iova(ALIASES[2] + LEN + 32 * MIB + random.next(8) * MIB);
        if space.map(place, Gpa(gpa), len, true).is_ok() && random.next(2) == 0 {
            space.unmap(place, len).unwrap();
        }
        match random.next(20) {
            0..4 => remap(space, &mut random),
            4 => space.unmap(Iova(ALIASES[2] + LEN + 32 * MIB), 10 * MIB).unwrap(),
            5 => _ = mmu.add(slot(other.0, 8 * MIB)),
            6 => _ = mmu.remove(other),
            7 => log = Harvester::enable(mmu, other, Method::Protect).ok(),
            8 => log = None,
            _ => {}
        }
        if log.is_none() && random.next(4) == 0 {
            thread::yield_now();
        }
    }
}

/// Maps the slot by its largest leaf, breaks this mapping up by unmapping a page, or unmaps the rest. Writers
/// use the mapping.
fn remap(space: &Space, random: &mut Random) {
    if space.map(Iova(REMAPPED), Gpa(0), LEN, true).is_ok() {
        return;
    }
    let (at, len) = match random.next(8) {
        0 => (0, LEN),
        _ => (random.page() * PAGE, PAGE),
    };
    space.unmap(Iova(REMAPPED + at), len).unwrap();
}

/// The copy of the harvested pages, and the least values that it must have.
struct Model {
    copy: Vec<u8>,
    pages: Pages,
    writers: Vec<(Random, u64)>,
    least: Vec<Vec<(u64, u64)>>,
}

impl Model {
    fn new(map: &Map) -> Self {
        let mut copy = vec![0; LEN as usize];
        // Pages that no writer uses are zero.
        for page in (0..1024).chain((0..64).map(|n| n * (LEN / PAGE / 64))) {
            let at = (page * PAGE) as usize;
            map.read(Gpa(page * PAGE), &mut copy[at..at + PAGE as usize]).unwrap();
        }
        let writers = (0..WRITERS).map(|id| (Random(id), 0)).collect();
        Self { copy, pages: Pages::default(), writers, least: vec![Vec::new(); WRITERS as usize] }
    }

    /// Adds the writes up to this progress to the least values.
    fn follow(&mut self, progress: &[u64]) {
        for (id, (pages, done)) in self.writers.iter_mut().enumerate() {
            for number in *done + 1..=progress[id] {
                self.least[id].push((pages.page() * PAGE + id as u64 * 8, number));
            }
            *done = progress[id];
        }
    }

    fn copy(&mut self, map: &Map) {
        for (gpa, len) in self.pages.ranges() {
            let (at, len) = (gpa.0 as usize, len as usize);
            map.read(gpa, &mut self.copy[at..at + len]).unwrap();
        }
    }

    fn word(&self, at: u64) -> u64 {
        let bytes = &self.copy[at as usize..][..8];
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Checks that the copy has the least values.
    fn check(&mut self) {
        for id in 0..WRITERS as usize {
            for (at, number) in std::mem::take(&mut self.least[id]) {
                let copied = self.word(at);
                assert!(copied >= number, "writer {id} wrote {number} to {at:#x}, and {copied} was copied");
            }
        }
    }
}

/// Tells a thread to stop when it is dropped, so also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn stress(method: Method) {
    let memory = slot(0, LEN);
    let map = Arc::new(Map::new(vec![memory.clone()]).unwrap());
    let mmu = Mmu::new();
    mmu.add(memory).unwrap();
    let space = Arc::new(Space::new(&mmu));
    for alias in ALIASES {
        space.map(Iova(alias), Gpa(0), LEN, true).unwrap();
    }
    let progress: Progress = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|id| {
                let direct = id % 2 == 0;
                let writer = if direct { Writer::direct(&mmu) } else { Writer::within(&space) };
                let (map, progress) = (&map, &progress);
                scope.spawn(move || write_all(id, writer, direct, map, progress))
            })
            .collect();
        let changes = scope.spawn(|| churn(&mmu, &space, &stop));
        let stopper = Stop(&stop);
        let mut random = Random(5);
        // The log is turned off in the middle, and on again.
        for part in 1..=2 {
            let mut log = Harvester::enable(&mmu, Gpa(0), method).unwrap();
            let mut model = Model::new(&map);
            let mut rounds = 0;
            loop {
                let came: Vec<u64> = progress.iter().map(|done| done.load(Ordering::Acquire)).collect();
                let ended = came.iter().all(|done| *done == WRITES);
                rounds += 1;
                if ended || random.next(4) == 0 {
                    model.follow(&came);
                    log.harvest_last(.., &mut model.pages);
                    model.copy(&map);
                    model.check();
                } else if random.next(4) == 0 {
                    let middle = Gpa(random.next(64) * PAGE);
                    for range in [Gpa(0)..middle, middle..Gpa(LEN)] {
                        log.harvest(range, &mut model.pages);
                        model.copy(&map);
                    }
                } else {
                    log.harvest(.., &mut model.pages);
                    model.copy(&map);
                }
                if ended || part == 1 && came.iter().all(|done| *done > WRITES / 2) {
                    break;
                }
            }
            assert!(rounds > 0);
            log.disable();
        }
        drop(stopper);
        changes.join().unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

#[test]
fn no_write_is_lost_with_marks() {
    stress(Method::Marks);
}

#[test]
fn no_write_is_lost_with_protection() {
    stress(Method::Protect);
}
