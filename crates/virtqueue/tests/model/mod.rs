//! A small driver, with its guest memory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses a part of it")]

pub mod shape;

use kickless_memory::{Area, Gpa, Map, Slot, UserAddr, View};
use kickless_spec::ring::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, RING_ENTRIES, RING_FLAGS,
    RING_IDX, USED_F_NO_NOTIFY, UsedElem, avail_len, desc_len, event_passed, used_len,
};
use kickless_testing::memfd;
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// First front-end's address.
pub const USER: u64 = 0x7f00_0000_0000;
pub const DESC: u64 = 0;
pub const AVAIL: u64 = 0x8_0000;
pub const USED: u64 = 0xa_0000;
/// First address of indirect tables, which may go to the end of memory.
pub const TABLES: u64 = 0x10_0000;
pub const MEMORY: u64 = 0x20_0000;

/// Boundary of two slots that are contiguous in guest memory, but not in ours.
pub const SEAM: u64 = 0x18_0000;

pub fn memory() -> Arc<View> {
    memory_twice(&[]).0
}

/// Returns the same memory twice: as [`memory`] makes it, and split into slots at these increasing offsets of
/// the first slot.
pub fn memory_twice(seams: &[u64]) -> (Arc<View>, Arc<View>) {
    let files = [SEAM, MEMORY - SEAM].map(memfd);
    let view = |seams: &[u64]| {
        let starts = [&[0], seams].concat();
        let ends = seams.iter().copied().chain([SEAM]);
        let slot = |(start, end): (&u64, u64)| {
            Slot::map(&files[0], *start, Gpa(*start), UserAddr(USER + start), end - start).unwrap()
        };
        let mut slots: Vec<Slot> = starts.iter().zip(ends).map(slot).collect();
        slots.push(Slot::map(&files[1], 0, Gpa(SEAM), UserAddr(USER + SEAM), MEMORY - SEAM).unwrap());
        Arc::new(View::new(Map::new(slots).unwrap()))
    };
    (view(&[]), view(seams))
}

pub const ADDRESSES: Addresses = Addresses {
    desc: UserAddr(USER + DESC),
    avail: UserAddr(USER + AVAIL),
    used: UserAddr(USER + USED),
    log: None,
};

/// One buffer as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    pub addr: u64,
    pub len: u32,
    pub writable: bool,
}

pub struct Driver {
    pub view: Arc<View>,
    pub options: Options,
    desc: Area,
    avail: Area,
    used: Area,
    free: Vec<u16>,
    /// The descriptors of each chain, by head.
    chains: Vec<Vec<u16>>,
    next_table: u64,
    avail_idx: u16,
    /// `avail.idx` as the device sees it.
    published: u16,
    used_idx: u16,
}

impl Driver {
    /// Makes a ring both of whose indices are `start`.
    pub fn new(options: Options, start: u16) -> Self {
        let view = memory();
        let (size, event_idx) = (options.size(), options.event_idx());
        let area = |addr, len| view.map().area(UserAddr(USER + addr), len, 4).unwrap();
        let (desc, avail, used) = (
            area(DESC, desc_len(size)),
            area(AVAIL, avail_len(size, event_idx)),
            area(USED, used_len(size, event_idx)),
        );
        avail.store_u16(RING_IDX, start, Ordering::Relaxed);
        used.store_u16(RING_IDX, start, Ordering::Relaxed);
        Self {
            view,
            options,
            desc,
            avail,
            used,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            next_table: TABLES,
            avail_idx: start,
            published: start,
            used_idx: start,
        }
    }

    pub fn metadata(&self) -> Metadata {
        Metadata::map(&self.view, &ADDRESSES, &self.options).unwrap()
    }

    /// Makes a device that begins at this driver's index. The driver has offered nothing before.
    pub fn device(&self) -> Queue {
        Queue::new(self.options, self.metadata(), self.used_idx)
    }

    /// Writes a descriptor without checks.
    pub fn write_desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.desc.write(16 * usize::from(index), &desc(addr, len, flags, next));
    }

    /// Puts any number into the next avail entry.
    pub fn offer(&mut self, head: u16) {
        let slot = usize::from(self.avail_idx & (self.options.size() - 1));
        self.avail.store_u16(RING_ENTRIES + 2 * slot, head, Ordering::Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Adds a chain. Its buffers from `direct` on are in an indirect table, if there are any. Returns its
    /// head, or `None` if the ring is full.
    pub fn add(&mut self, bufs: &[Buf], direct: usize) -> Option<u16> {
        let tail = &bufs[direct..];
        let count = direct + usize::from(!tail.is_empty());
        if count > self.free.len() {
            return None;
        }
        let indices: Vec<u16> = self.free.split_off(self.free.len() - count);
        for (i, &index) in indices.iter().enumerate() {
            let next = indices.get(i + 1);
            let more = if next.is_some() { DESC_F_NEXT } else { 0 };
            let next = next.copied().unwrap_or(0xffff);
            if i < direct {
                let b = bufs[i];
                let flags = more | if b.writable { DESC_F_WRITE } else { 0 };
                self.write_desc(index, b.addr, b.len, flags, next);
            } else {
                let table = self.write_table(tail);
                self.write_desc(index, table, 16 * tail.len() as u32, DESC_F_INDIRECT, next);
            }
        }
        let head = indices[0];
        self.chains[usize::from(head)] = indices;
        self.offer(head);
        Some(head)
    }

    /// Chooses the memory of a table. Each address is reused at some time, but no test has that many tables
    /// in flight.
    fn write_table(&mut self, bufs: &[Buf]) -> u64 {
        let bytes = 16 * bufs.len() as u64;
        if self.next_table + bytes > MEMORY {
            self.next_table = TABLES;
        }
        let table = self.next_table;
        self.next_table += bytes;
        for (i, b) in bufs.iter().enumerate() {
            let last = i + 1 == bufs.len();
            let flags = if b.writable { DESC_F_WRITE } else { 0 } | if last { 0 } else { DESC_F_NEXT };
            let next = if last { 0 } else { i as u16 + 1 };
            self.view.map().write_obj(Gpa(table + 16 * i as u64), &desc(b.addr, b.len, flags, next)).unwrap();
        }
        table
    }

    /// Shows all added chains to the device. Returns whether to kick it.
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.avail_idx);
        self.publish_as(self.avail_idx);
        if self.options.event_idx() {
            let event = self.used.load_u16(used_len(self.options.size(), false), Ordering::Relaxed);
            event_passed(event, self.published, old)
        } else {
            self.used.load_u16(RING_FLAGS, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    /// Publishes any index.
    pub fn publish_as(&self, idx: u16) {
        self.avail.store_u16(RING_IDX, idx, Ordering::Release);
        // Partner of the device's fence in `arm`.
        fence(Ordering::SeqCst);
    }

    /// Takes the next used element.
    pub fn take(&mut self) -> Option<(u16, u32)> {
        if self.used.load_u16(RING_IDX, Ordering::Acquire) == self.used_idx {
            return None;
        }
        let slot = usize::from(self.used_idx & (self.options.size() - 1));
        let elem: UsedElem = self.used.read(RING_ENTRIES + 8 * slot);
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = u16::try_from(elem.id.get()).unwrap();
        let chain = std::mem::take(&mut self.chains[usize::from(head)]);
        assert!(!chain.is_empty(), "head {head} came back twice");
        self.free.extend(chain);
        Some((head, elem.len.get()))
    }

    /// Asks for a call at the next used element. Returns whether there was one already.
    pub fn enable_calls(&self) -> bool {
        if self.options.event_idx() {
            let at = avail_len(self.options.size(), false);
            self.avail.store_u16(at, self.used_idx, Ordering::Relaxed);
        } else {
            self.avail.store_u16(RING_FLAGS, 0, Ordering::Relaxed);
        }
        // Partner of the device's fence in `publish`.
        fence(Ordering::SeqCst);
        self.used.load_u16(RING_IDX, Ordering::Relaxed) != self.used_idx
    }

    /// Asks for no calls. (With EVENT_IDX it just does not ask again.)
    pub fn disable_calls(&self) {
        if !self.options.event_idx() {
            self.avail.store_u16(RING_FLAGS, AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
        }
    }
}

pub fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Desc {
    Desc { addr: addr.into(), len: len.into(), flags: flags.into(), next: next.into() }
}
