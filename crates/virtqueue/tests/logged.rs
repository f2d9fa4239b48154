//! Tests that the device's writes to a ring are marked in the log: each page, after its last write, and no
//! other page.
#![allow(clippy::unwrap_used, reason = "tests")]

mod model;

use kickless_memory::{Gpa, Log, Map, Slot, UserAddr, View};
use kickless_spec::ring::{DESC_F_WRITE, PackedDesc, RING_ENTRIES, RING_IDX, used_len};
use kickless_testing::Random;
use kickless_virtqueue::device::{Addresses, LoggedAt, Metadata, Options, Queue, UnpublishedUsed};
use kickless_virtqueue::packed::RingPosition;
use kickless_virtqueue::{Chain, ChainId};
use model::{AVAIL, DESC, USED, USER, desc};
use std::collections::BTreeSet;
use std::sync::Arc;

const PAGE: u64 = 4096;
const LEN: u64 = 0x10_0000;
/// The address for marks of a split ring's used ring.
const LOGGED_AT: u64 = 0xc_0000;

fn memory() -> (Arc<View>, Arc<Log>) {
    let file = |name, len| {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    };
    let slot = Slot::map(file("guest", LEN), 0, Gpa(0), UserAddr(USER), LEN).unwrap();
    let log = Arc::new(Log::map(file("log", 4096), 0, LEN / PAGE / 8).unwrap());
    let view = View::new(Map::new(vec![slot]).unwrap()).with_log(Some(log.clone())).unwrap();
    (Arc::new(view), log)
}

/// A driver that makes every descriptor of its ring one writable buffer, and offers them in order.
struct Rig {
    view: Arc<View>,
    log: Arc<Log>,
    options: Options,
    queue: Queue,
    /// Number of chains that it has offered, and that the device has.
    next: RingPosition,
    avail: u16,
    offered: u16,
    popped: Vec<ChainId>,
    /// The length that the device reports.
    len: u32,
    /// Pages that the device has written and that no harvest has found yet.
    owed: BTreeSet<u64>,
    written: BTreeSet<u64>,
}

impl Rig {
    fn new(options: Options) -> Self {
        let (view, log) = memory();
        let map = view.map();
        if !options.is_packed() {
            for index in 0..options.size() {
                map.write_obj(Gpa(DESC + 16 * u64::from(index)), &desc(0, 1, DESC_F_WRITE, 0)).unwrap();
                let entry = AVAIL + (RING_ENTRIES + 2 * usize::from(index)) as u64;
                map.write_obj(Gpa(entry), &index.to_le_bytes()).unwrap();
            }
        }
        let metadata = Self::metadata(&view, &options);
        let next_avail = if options.is_packed() { RingPosition::FIRST.bits() } else { 0 };
        let queue = Queue::logged(options, metadata, next_avail, &view);
        let (owed, written) = (BTreeSet::new(), BTreeSet::new());
        let next = RingPosition::FIRST;
        Self {
            view,
            log,
            options,
            queue,
            next,
            avail: 0,
            offered: 0,
            popped: Vec::new(),
            len: 0,
            owed,
            written,
        }
    }

    fn metadata(view: &Arc<View>, options: &Options) -> Metadata {
        let [desc, avail, used] = [DESC, AVAIL, USED].map(|gpa| UserAddr(USER + gpa));
        Metadata::map(view, &Addresses { desc, avail, used, log: Some(Gpa(LOGGED_AT)) }, options).unwrap()
    }

    /// All bytes that the device may write: the descriptors of a packed ring, and the used ring or the
    /// corresponding area of a packed ring.
    fn bytes(&self) -> [(u64, Vec<u8>); 2] {
        [DESC, USED].map(|gpa| {
            let mut bytes = vec![0; 16 * usize::from(self.options.size())];
            self.view.map().read(Gpa(gpa), &mut bytes).unwrap();
            (gpa, bytes)
        })
    }

    /// Runs the device, and records what it has written.
    fn device<T>(&mut self, run: impl FnOnce(&mut Queue) -> T) -> T {
        let before = self.bytes();
        let result = run(&mut self.queue);
        let after = self.bytes();
        for ((gpa, before), (_, after)) in before.into_iter().zip(after) {
            let changed =
                (gpa..).zip(before.iter().zip(&after)).filter(|(_, (before, after))| before != after);
            for (at, _) in changed {
                let marked = if self.options.is_packed() { at } else { at - USED + LOGGED_AT };
                self.owed.insert(marked / PAGE);
            }
        }
        self.written.extend(&self.owed);
        result
    }

    /// Checks that the written pages are marked.
    fn harvest(&mut self) {
        let mut found = BTreeSet::new();
        self.log.harvest(|page| {
            found.insert(page);
        });
        assert!(self.owed.is_subset(&found), "found {:x?}, owed {:x?}", found, self.owed);
        // Flags and event indices may be written with the same value.
        let mut near = std::mem::take(&mut self.written);
        near.insert(if self.options.is_packed() { USED } else { LOGGED_AT } / PAGE);
        near.insert((LOGGED_AT + used_len(self.options.size(), true) as u64 - 1) / PAGE);
        assert!(found.is_subset(&near), "found {found:x?}, written {near:x?}");
        self.owed.clear();
    }

    fn offer(&mut self, count: u16) {
        let size = self.options.size();
        for _ in 0..count.min(size - self.offered) {
            self.offered += 1;
            if self.options.is_packed() {
                let (at, flags) = (self.next.at() as u64, self.next.available() | DESC_F_WRITE);
                let entry = PackedDesc {
                    addr: 0.into(),
                    len: 1.into(),
                    id: self.next.index.into(),
                    flags: flags.into(),
                };
                self.view.map().write_obj(Gpa(DESC + at), &entry).unwrap();
                self.next = self.next.after(1, size);
            } else {
                self.avail = self.avail.wrapping_add(1);
                self.view.map().write_obj(Gpa(AVAIL + RING_IDX as u64), &self.avail.to_le_bytes()).unwrap();
            }
        }
    }

    fn run(&mut self, random: &mut Random) {
        let (view, mut chain) = (self.view.clone(), Chain::default());
        // No element is written with the same value.
        self.len += 1;
        let len = self.len;
        match random.below(9) {
            0..=1 => self.offer(random.below(600) as u16),
            2 => {
                for _ in 0..random.below(600) {
                    if !self.queue.pop(&view, &mut chain).unwrap() {
                        break;
                    }
                    self.popped.push(chain.id);
                }
            }
            3..=4 => {
                let count = random.below(self.popped.len() as u64 + 1) as usize;
                // A split ring uses its entries in order, because the driver offers them again in order.
                let pushed: Vec<ChainId> = self.popped.drain(..count).collect();
                self.offered -= count as u16;
                self.device(|queue| {
                    for (nth, head) in pushed.iter().enumerate() {
                        queue.push(*head, len);
                        if nth % 100 == 99 {
                            queue.show();
                        }
                    }
                    let _ = queue.publish();
                });
                self.harvest();
            }
            5 => {
                let _ = self.device(Queue::arm);
                self.harvest();
            }
            6 => {
                self.device(Queue::disarm);
                self.harvest();
            }
            7 => {
                let metadata = Self::metadata(&view, &self.options);
                self.device(|queue| queue.remap(metadata));
                self.harvest();
            }
            _ => {
                // The areas go away, chains complete meanwhile, and the areas come back.
                let (metadata, popped) = (Self::metadata(&view, &self.options), self.popped.split_off(0));
                self.offered -= popped.len() as u16;
                self.device(|queue| {
                    queue.unmap();
                    popped.iter().for_each(|head| queue.push(*head, len));
                    let _ = queue.publish();
                    queue.remap(metadata);
                    let _ = queue.publish();
                });
                self.harvest();
            }
        }
    }
}

fn check(options: Options) {
    let mut random = Random(u64::from(options.size()) + u64::from(options.event_idx()));
    let mut rig = Rig::new(options);
    for _ in 0..400 {
        rig.run(&mut random);
    }
}

#[test]
fn split() {
    for event_idx in [false, true] {
        check(Options::new(2048, event_idx, false).unwrap());
    }
}

#[test]
fn packed() {
    for event_idx in [false, true] {
        check(Options::packed(2048, event_idx, false).unwrap());
        check(Options::packed(1500, event_idx, false).unwrap());
    }
}

/// Maps a layout that a vIOMMU can make: the used ring's second page lies before its first page, which ends
/// within the last element.
fn in_swapped_pages(view: &Arc<View>, log: LoggedAt, options: &Options) -> Metadata {
    let [desc_len, avail_len, used_len] = options.area_lens();
    let at = |gpa| UserAddr(USER + gpa);
    let used = vec![(at(USED + PAGE), PAGE as usize), (at(USED), used_len - PAGE as usize)];
    let areas = [vec![(at(DESC), desc_len)], vec![(at(AVAIL), avail_len)], used];
    Metadata::map_pieces(view, &areas, Some(log), options).unwrap()
}

#[test]
fn pages_of_a_used_ring_are_marked_where_they_lie() {
    let options = Options::new(512, true, false).unwrap();
    for log in [LoggedAt::Gpa(Gpa(USED + PAGE)), LoggedAt::InPlace] {
        let (view, log_of_view) = memory();
        let metadata = in_swapped_pages(&view, log, &options);
        let mut queue = Queue::logged(options, metadata, 0, &view);
        for index in 0..512u64 {
            view.map().write_obj(Gpa(DESC + 16 * index), &desc(0, 1, DESC_F_WRITE, 0)).unwrap();
            let entry = Gpa(AVAIL + RING_ENTRIES as u64 + 2 * index);
            view.map().write_obj(entry, &(index as u16).to_le_bytes()).unwrap();
        }
        view.map().write_obj(Gpa(AVAIL + RING_IDX as u64), &512u16.to_le_bytes()).unwrap();
        let mut chain = Chain::default();
        while queue.pop(&view, &mut chain).unwrap() {
            queue.push(chain.id, 1);
        }
        let _ = queue.publish();
        queue.marks().commit();
        let mut found = BTreeSet::new();
        log_of_view.harvest(|page| {
            found.insert(page);
        });
        assert_eq!(found, BTreeSet::from([USED / PAGE, USED / PAGE + 1]));
    }
}

/// A ring stopped with completions that its driver had not seen, and the front-end made it smaller.
#[test]
fn more_completions_than_fit_are_dropped() {
    let options = Options::new(512, true, false).unwrap();
    for (count, shown) in [(512, 512), (2000, 0), (513, 0)] {
        let (view, _) = memory();
        let mut queue = Queue::unmapped(options, count, &view);
        let unpublished: Vec<_> =
            (0..count).map(|id| UnpublishedUsed { id, len: 1, descriptors: 0 }).collect();
        queue.push_unpublished(&unpublished);
        queue.remap(in_swapped_pages(&view, LoggedAt::InPlace, &options));
        let _ = queue.publish();
        // The first page of the used ring lies behind the second.
        let idx: u16 = view.map().read_obj(Gpa(USED + PAGE + RING_IDX as u64)).unwrap();
        assert_eq!(u16::from_le(idx), shown, "{count} completions");
    }
}
