//! Runs the device's end of a ring in memory that a hostile driver writes. The ring is split or packed, with
//! or without IN_ORDER, in one piece or in several.
//!
//! The input has the queue's shape, the layout of its areas, the first content of the memory, and a sequence
//! of operations. These are operations of the device and writes by the driver. No input may cause a panic, a
//! long run, or a chain that breaks the promises of `pop`.
#![no_main]

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, LazyLock};

use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
use kickless_virtqueue::device::{Addresses, Direction, Metadata, Options, Queue, SingleChain};
use kickless_virtqueue::packed::RingPosition;
use kickless_virtqueue::{Chain, ChainId, INDIRECT_CHAIN_MAX};
use libfuzzer_sys::fuzz_target;

/// Two slots meet here. The first page is the descriptor table of 256 entries. The rings and the memory for
/// indirect tables follow.
const SEAM: u64 = 0x3000;
const END: u64 = 0x4000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
const ADDRESSES: Addresses =
    Addresses { desc: UserAddr(DESC), avail: UserAddr(AVAIL), used: UserAddr(USED), log: None };

/// Distance of the second part of a divided area from its usual address. With it, the part is not aligned and
/// lies in another slot.
const ELSEWHERE: u64 = 0x1c02;

static FILE: LazyLock<OwnedFd> = LazyLock::new(|| {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, END).expect("room");
    file
});

/// Maps the memory in slots that begin at these addresses.
fn view(starts: &[u64]) -> Arc<View> {
    let ends = starts.iter().skip(1).chain([&END]);
    let slot = |(start, end): (&u64, &u64)| {
        Slot::map(&*FILE, *start, Gpa(*start), UserAddr(*start), end - start).expect("a mapping")
    };
    Arc::new(View::new(Map::new(starts.iter().zip(ends).map(slot).collect()).expect("no overlap")))
}

static MEMORY: LazyLock<Arc<View>> = LazyLock::new(|| view(&[0, SEAM]));
/// The same memory with slots that meet in each area: inside a descriptor, between two descriptors, inside
/// the avail and used rings, and behind their indices.
static IN_SLOTS: LazyLock<Arc<View>> =
    LazyLock::new(|| view(&[0, 0x18, 0x82, 0x1000, 0x1002, 0x1004, 0x1108, 0x1802, 0x1806, 0x1908, SEAM]));

/// The layout of the areas.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// Each area is in one slot.
    Whole,
    /// Areas cross slots.
    InSlots,
    /// Each area is in two parts, as behind a vIOMMU. The first part is this number of 64ths of it.
    InPieces(u8),
}

impl Layout {
    fn new(byte: u8) -> Self {
        match byte % 4 {
            0 | 1 => Self::Whole,
            2 => Self::InSlots,
            _ => Self::InPieces(byte / 4),
        }
    }

    fn view(self) -> &'static Arc<View> {
        match self {
            Self::InSlots => &IN_SLOTS,
            _ => &MEMORY,
        }
    }

    /// Returns the offset of the second part in an area of this length.
    fn cut(self, len: usize) -> usize {
        match self {
            Self::InPieces(part) => len * usize::from(part) / 64 & !1,
            _ => len,
        }
    }

    fn metadata(self, options: &Options) -> Metadata {
        if !matches!(self, Self::InPieces(_)) {
            return Metadata::map(self.view(), &ADDRESSES, options).expect("inside and aligned");
        }
        let lens = options.area_lens();
        let pieces = |start: u64, len: usize| {
            let cut = self.cut(len);
            let second = (UserAddr(start + cut as u64 + ELSEWHERE), len - cut);
            let all = [(UserAddr(start), cut), second];
            // The first part starts at the area's address, so it has the needed alignment.
            if cut == 0 { vec![(UserAddr(start), len)] } else { all.to_vec() }
        };
        let areas = [pieces(DESC, lens[0]), pieces(AVAIL, lens[1]), pieces(USED, lens[2])];
        Metadata::map_pieces(self.view(), &areas, None, options).expect("inside and aligned")
    }

    /// Writes two bytes of an area that begins at `start`, as the driver.
    fn write(self, start: u64, len: usize, offset: usize, value: u16) {
        let cut = self.cut(len);
        let apart = if (1..=offset).contains(&cut) { ELSEWHERE } else { 0 };
        let at = Gpa(start + offset as u64 + apart);
        MEMORY.map().write_obj(at, &value.to_le_bytes()).expect("inside");
    }
}

fuzz_target!(|data: &[u8]| {
    let [size, flags, layout, start_low, start_high, image_low, image_high, rest @ ..] = data else { return };
    let (event_idx, indirect) = (flags & 1 != 0, flags & 2 != 0);
    let options = match flags & 4 {
        0 => Options::new(1 << (size % 9), event_idx, indirect),
        _ => Options::packed(u16::from(*size) + 1, event_idx, indirect),
    };
    let Ok(options) = options else { return };
    let image = usize::from(u16::from_le_bytes([*image_low, *image_high])).min(rest.len()).min(END as usize);
    let (image, ops) = rest.split_at(image);
    let mut memory = [0; END as usize];
    memory[..image.len()].copy_from_slice(image);
    MEMORY.map().write(Gpa(0), &memory).expect("inside");
    let start = u16::from_le_bytes([*start_low, *start_high]);
    Device::new(options.with_in_order(flags & 8 != 0), Layout::new(*layout), start).run(ops);
});

/// A device that uses its queue correctly, and its record of the queue.
struct Device {
    queue: Queue,
    options: Options,
    layout: Layout,
    chain: Chain,
    /// Chains that the queue counts as taken, oldest first, and whether the device has completed them.
    taken: VecDeque<(ChainId, bool)>,
    /// Chains popped after those, as credit.
    credit: VecDeque<ChainId>,
}

impl Device {
    fn new(options: Options, layout: Layout, start: u16) -> Self {
        let queue = Queue::new(options, layout.metadata(&options), start);
        let (taken, credit) = (VecDeque::new(), VecDeque::new());
        Self { queue, options, layout, chain: Chain::default(), taken, credit }
    }

    fn run(&mut self, mut ops: &[u8]) {
        while let [op, rest @ ..] = ops {
            ops = rest;
            let detail = op >> 4;
            match op % 16 {
                // A queue with credit only pops credit.
                0..4 => self.pop(!self.credit.is_empty()),
                4 if detail < 8 => self.use_credit(),
                4 => (0..=detail / 2 % 4).for_each(|_| self.unpop()),
                5 => self.pop(true),
                6 => write(&mut ops),
                7 => self.offer(detail),
                8 if detail < 10 => self.push(detail),
                8 => self.push_group(detail),
                9 => drop(self.queue.publish()),
                10 => drop(self.queue.arm()),
                11 => self.queue.disarm(),
                12 if detail % 4 == 3 => self.replace(),
                12 => self.queue.unmap(),
                13 => {
                    // At times, the layout changes.
                    if detail >= 8 {
                        self.layout = Layout::new(detail.wrapping_mul(0x1d));
                    }
                    self.queue.remap(self.layout.metadata(&self.options));
                }
                14 if detail < 8 => self.peek(detail),
                14 => self.queue.show(),
                _ => {
                    assert!(self.queue.pending() <= self.queue.size());
                    assert!(self.queue.broken().is_none() || !self.queue.has_work());
                }
            }
            assert_eq!(usize::from(self.queue.in_flight()), self.taken.len());
            assert_eq!(usize::from(self.queue.credit()), self.credit.len());
            assert!(self.taken.len() + self.credit.len() <= usize::from(self.queue.size()));
        }
    }

    fn pop(&mut self, credit: bool) {
        let (queue, chain) = (&mut self.queue, &mut self.chain);
        let (next, broken) = (queue.next_avail(), queue.broken());
        let popped = match credit {
            true => queue.pop_credit(self.layout.view(), chain),
            false => queue.pop(self.layout.view(), chain),
        };
        queue.prefetch(self.layout.view());
        match popped {
            Ok(true) => {
                assert!(broken.is_none() && queue.is_mapped());
                assert!(self.options.is_packed() || chain.id.head() < queue.size());
                let buffers = chain.readable().len() + chain.writable().len();
                assert!(buffers <= usize::from(queue.size().max(INDIRECT_CHAIN_MAX)));
                assert!(chain.readable().iter().chain(chain.writable()).all(|b| b.len != 0));
                let len = |buffers: &[kickless_virtqueue::Buffer]| {
                    buffers.iter().map(|b| u64::from(b.len)).sum::<u64>()
                };
                assert_eq!(chain.readable_len(), len(chain.readable()));
                assert_eq!(chain.writable_len(), len(chain.writable()));
                assert!(chain.readable_len() + chain.writable_len() <= 1 << 32);
                if self.options.is_packed() {
                    assert!(RingPosition::from_bits(queue.next_avail()).index < queue.size());
                    let taken = self.taken.iter().filter(|(_, done)| !done).map(|(id, _)| id);
                    assert!(
                        taken.chain(&self.credit).all(|id| id.head() != chain.id.head()),
                        "a head is in flight twice"
                    );
                } else {
                    // The driver chooses the heads, and may use one twice.
                    assert_eq!(queue.next_avail(), next.wrapping_add(1));
                }
                match credit {
                    true => self.credit.push_back(chain.id),
                    false => self.taken.push_back((chain.id, false)),
                }
            }
            Ok(false) => assert!(broken.is_none() && queue.next_avail() == next),
            Err(error) => {
                assert!(broken.is_none_or(|broken| broken == error), "an error must stay");
                assert_eq!(queue.broken(), Some(error));
                assert_eq!(queue.next_avail(), next);
            }
        }
    }

    /// Reads chains of a single descriptor, and completes some of them.
    fn peek(&mut self, detail: u8) {
        let (next, size) = (self.queue.next_avail(), self.options.size());
        let direction = if detail % 2 == 0 { Direction::Readable } else { Direction::Writable };
        let mut chains = [SingleChain::default(); 5];
        let found = self.queue.peek(self.layout.view(), direction, &mut chains);
        let is_idle = self.taken.is_empty() && self.credit.is_empty();
        let is_usable = self.queue.is_mapped() && self.queue.broken().is_none();
        assert!(found == 0 || (is_idle && is_usable && found <= usize::from(size)));
        assert_eq!(self.queue.next_avail(), next);
        assert!(chains[..found].iter().all(|chain| chain.buffer.len != 0));
        let done = found.min(usize::from(detail / 2) + 1);
        chains[..done].iter_mut().for_each(|chain| chain.written = u32::from(detail));
        self.queue.complete_peeked(&chains[..done]);
        let expected = match self.options.is_packed() {
            true => RingPosition::from_bits(next).after(done as u16, size).bits(),
            false => next.wrapping_add(done as u16),
        };
        assert!(done == 0 || self.queue.next_avail() == expected);
    }

    fn use_credit(&mut self) {
        let used = self.queue.use_credit();
        assert_eq!(used, !self.credit.is_empty() && self.queue.is_mapped());
        if used {
            self.taken.extend(self.credit.pop_front().map(|id| (id, false)));
        }
    }

    /// Returns the newest chain of the credit. The index moves back by as much as its pop moved it.
    fn unpop(&mut self) {
        let (next, size) = (self.queue.next_avail(), self.options.size());
        let newest = self.credit.pop_back();
        assert_eq!(self.queue.unpop(), newest.map(|id| id.head()));
        let now = self.queue.next_avail();
        if newest.is_none() {
            assert_eq!(now, next);
        } else if self.options.is_packed() {
            let count =
                (1..=size).find(|count| RingPosition::from_bits(now).after(*count, size).bits() == next);
            assert!(count.is_some() && RingPosition::from_bits(now).index < size);
        } else {
            assert_eq!(now, next.wrapping_sub(1));
        }
        assert!(self.queue.broken().is_some() || newest.is_none() || self.queue.credit() < size);
    }

    /// Pushes consecutive chains together.
    fn push_group(&mut self, detail: u8) {
        let Some(at) = self.taken.iter().position(|(_, done)| !done) else { return };
        let open = self.taken.iter().skip(at).take_while(|(_, done)| !done).take(usize::from(detail % 8));
        let group: Vec<_> = open.map(|(id, _)| (*id, u32::from(detail))).collect();
        self.queue.push_group(&group);
        self.taken.iter_mut().skip(at).take(group.len()).for_each(|(_, done)| *done = true);
        self.forget_done();
    }

    /// Forgets chains that the device has completed.
    fn forget_done(&mut self) {
        if !self.options.in_order() {
            self.taken.retain(|(_, done)| !done);
        }
        while self.taken.front().is_some_and(|(_, done)| *done) {
            self.taken.pop_front();
        }
    }

    /// Makes a chain available as the driver, correctly or with small errors.
    fn offer(&mut self, detail: u8) {
        let next = self.queue.next_avail();
        if self.options.is_packed() {
            let place = RingPosition::from_bits(next)
                .after(u16::from(detail % 4) % self.options.size(), self.options.size());
            let (id, at) = (u16::from(detail % 8) << (detail / 8 * 13), place.at());
            self.layout.write(DESC, self.options.area_lens()[0], at + 12, id);
            self.layout.write(DESC, self.options.area_lens()[0], at + 14, place.available());
        } else {
            let index = next.wrapping_add(u16::from(detail));
            self.layout.write(AVAIL, self.options.area_lens()[1], 2, index);
        }
    }

    fn push(&mut self, detail: u8) {
        let open: Vec<usize> = (0..self.taken.len()).filter(|at| !self.taken[*at].1).collect();
        let Some(nth) = usize::from(detail).checked_rem(open.len()) else { return };
        let at = open[nth];
        self.queue.push(self.taken[at].0, u32::from(detail));
        self.taken[at].1 = true;
        self.forget_done();
    }

    /// Continues with another queue where this one stopped.
    fn replace(&mut self) {
        while self.queue.credit() > 0 {
            self.unpop();
        }
        let next = self.queue.next_avail();
        let unpublished = self.queue.take_unpublished();
        assert!(unpublished.len() <= usize::from(self.options.size()));
        *self = Self::new(self.options, self.layout, next);
        self.queue.push_unpublished(&unpublished);
    }
}

/// Writes eight bytes at any address as the driver.
fn write(ops: &mut &[u8]) {
    let [low, high, a, b, c, d, e, f, g, h, rest @ ..] = ops else { return };
    let at = u64::from(u16::from_le_bytes([*low, *high])) % (END - 8);
    MEMORY.map().write(Gpa(at), &[*a, *b, *c, *d, *e, *f, *g, *h]).expect("inside");
    *ops = rest;
}
