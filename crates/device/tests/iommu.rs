//! A vring behind a vIOMMU. The test takes the part of its session.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_device::{Areas, Iommu, IotlbMisses, IovaAddresses, Stopped, Update, Vring, VringParts, Waker};
use kickless_memory::{Access, Gpa, Iotlb, Iova, IovaRange, Miss, UserAddr, View};
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use kickless_testing::{guest_memory, vring_parts, with_subscriber};
use kickless_virtqueue::device::Options;
use kickless_virtqueue::{Buffer, Chain, ChainId};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const PAGE: u64 = 4096;
const LEN: u64 = 64 * PAGE;
const USER: u64 = 0x7e00_0000_0000;
/// The distance from a guest address to the address at which the device sees it.
const IOVA: u64 = 0xffff_0000_0000;
/// Guest addresses of the areas, each on a page of its own.
const DESC: u64 = PAGE;
const AVAIL: u64 = 2 * PAGE;
const USED: u64 = 3 * PAGE;
const BUFFERS: u64 = 8 * PAGE;

struct Setup {
    vring: Vring,
    iotlb: Iotlb,
    misses: Arc<IotlbMisses>,
    view: Arc<View>,
    avail: u16,
    /// Popped by [`Setup::pop`], by head.
    ids: HashMap<u16, ChainId>,
}

fn range(gpa: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova(IOVA + gpa), len)
}

impl Setup {
    fn new() -> Self {
        let (view, iotlb) = (guest_memory(LEN, USER), Iotlb::default());
        let misses = Arc::new(IotlbMisses::new(Waker::new().unwrap()));
        let areas = Areas::Iova(IovaAddresses {
            desc: Iova(IOVA + DESC),
            avail: Iova(IOVA + AVAIL),
            used: Iova(IOVA + USED),
            log: None,
        });
        let iommu = Some(Iommu { table: iotlb.table().clone(), misses: misses.clone() });
        let parts = vring_parts(&view, Options::new(16, false, true).unwrap(), areas);
        let vring = Vring::new(VringParts { index: 3, iommu, ..parts }).unwrap();
        Self { vring, iotlb, misses, view, avail: 0, ids: HashMap::new() }
    }

    /// Makes a ring with one chain of more pages than one pop translates. The chain begins at the returned
    /// address, and was popped once without success.
    fn with_unfinished_chain() -> (Self, Chain, u64) {
        const PAGES: u64 = 1500;
        let mut setup = Self::with_ring();
        setup.tell(BUFFERS, 8, Access::BOTH);
        let far = 1 << 32;
        for page in 0..PAGES {
            setup.answer_at(far + page * PAGE, 1, BUFFERS + page % 2 * 2 * PAGE, Access::READ);
        }
        setup.offer(0, (far, (PAGES * PAGE) as u32), (BUFFERS, 1));
        let mut chain = Chain::default();
        assert!(!setup.vring.pop(&mut chain) && setup.vring.take_unfinished());
        (setup, chain, far)
    }

    /// Makes a ring whose areas are translated.
    fn with_ring() -> Self {
        let mut setup = Self::new();
        setup.tell(DESC, 1, Access::READ);
        setup.tell(AVAIL, 1, Access::READ);
        setup.tell(USED, 1, Access::BOTH);
        assert!(!setup.pop());
        assert!(setup.sent().is_empty());
        setup
    }

    /// Sends a translation as the front-end, requested or not. Returns the queues that it woke.
    fn tell(&mut self, gpa: u64, pages: u64, access: Access) -> Vec<u16> {
        self.answer_at(gpa, pages, gpa, access)
    }

    fn answer_at(&mut self, gpa: u64, pages: u64, to: u64, access: Access) -> Vec<u16> {
        self.iotlb.update(Iova(IOVA + gpa), pages * PAGE, UserAddr(USER + to), access).unwrap();
        let woken = self.misses.answered(range(gpa, pages * PAGE), access);
        if !woken.is_empty() {
            self.vring.apply(Update::Poll);
        }
        woken
    }

    fn invalidate(&mut self, gpa: u64, len: u64) -> Receiver<Infallible> {
        self.iotlb.invalidate(range(gpa, len));
        let (done, all_done) = channel();
        self.vring.apply(Update::Invalidate(self.iotlb.take_stale().unwrap(), done));
        all_done
    }

    /// Refuses the translation of the avail ring as the front-end, and sends all others.
    fn refuse_the_avail_ring(&mut self) {
        for (number, miss) in self.misses.take_unsent() {
            if miss.page == Iova(IOVA + AVAIL) {
                let refusal = self.misses.replied(number, &miss).unwrap();
                self.vring.apply(Update::TranslationRefused(refusal.miss));
            }
        }
        self.tell(DESC, 1, Access::READ);
        self.tell(USED, 1, Access::BOTH);
    }

    fn sent(&self) -> Vec<(u64, Access)> {
        self.misses.take_unsent().into_iter().map(|(_, miss)| (miss.page.0 - IOVA, miss.access)).collect()
    }

    fn pop(&mut self) -> bool {
        let mut chain = Chain::default();
        let popped = self.vring.pop(&mut chain);
        if popped {
            self.ids.insert(chain.id.head(), chain.id);
        }
        popped
    }

    /// Pops a chain. One pop may translate only a part of it.
    fn pop_whole(&mut self, chain: &mut Chain) -> bool {
        loop {
            if self.vring.pop(chain) {
                return true;
            }
            if !self.vring.take_unfinished() {
                return false;
            }
            assert!(self.vring.has_work(), "it does not stand");
        }
    }

    /// Completes the chain with this head.
    fn push(&mut self, head: u16, len: u32) {
        let id = self.ids.remove(&head).unwrap();
        self.vring.push(id, len);
    }

    /// Offers a chain of a readable and a writable buffer.
    fn offer(&mut self, head: u16, readable: (u64, u32), writable: (u64, u32)) {
        let at = |index: u16| Gpa(DESC + 16 * u64::from(index));
        self.view.map().write_obj(at(head), &desc(readable, DESC_F_NEXT, head + 1)).unwrap();
        self.view.map().write_obj(at(head + 1), &desc(writable, DESC_F_WRITE, 0)).unwrap();
        self.make_available(head);
    }

    fn make_available(&mut self, head: u16) {
        let entry = Gpa(AVAIL + 4 + 2 * u64::from(self.avail % 16));
        self.view.map().write_obj(entry, &head.to_le_bytes()).unwrap();
        self.avail += 1;
        self.view.map().write_obj(Gpa(AVAIL + 2), &self.avail.to_le_bytes()).unwrap();
    }

    fn used_idx(&self) -> u16 {
        u16::from_le_bytes(self.view.map().read_obj(Gpa(USED + 2)).unwrap())
    }
}

fn desc((at, len): (u64, u32), flags: u16, next: u16) -> Desc {
    Desc { addr: (IOVA + at).into(), len: len.into(), flags: flags.into(), next: next.into() }
}

fn is_over(done: &Receiver<Infallible>) -> bool {
    done.try_recv() == Err(TryRecvError::Disconnected)
}

#[test]
fn a_ring_asks_for_its_areas_and_works_once_they_are_translated() {
    let mut setup = Setup::new();
    assert!(setup.sent().is_empty(), "not before it is looked at");
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(DESC, Access::READ), (AVAIL, Access::READ), (USED, Access::BOTH)]);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(!setup.vring.has_work() && !setup.vring.arm() && setup.vring.pending() == 0, "it stands");
    assert!(!setup.pop() && setup.sent().is_empty());
    assert!(setup.tell(DESC, 1, Access::BOTH).is_empty());
    assert!(setup.tell(USED, 1, Access::BOTH).is_empty());
    assert_eq!(setup.tell(AVAIL, 1, Access::READ), [3], "the last one wakes it");
    // Now the chain's own.
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(BUFFERS, Access::READ), (BUFFERS + PAGE, Access::WRITE)]);
    assert_eq!(setup.tell(BUFFERS, 2, Access::BOTH), [3]);
    let mut chain = Chain::default();
    assert!(setup.vring.pop(&mut chain));
    assert_eq!((chain.readable()[0].addr, chain.writable()[0].addr), (Gpa(BUFFERS), Gpa(BUFFERS + PAGE)));
    assert!(!setup.pop() && setup.sent().is_empty(), "empty, and nothing missing");
    setup.vring.push(chain.id, 1);
    setup.vring.publish();
    assert_eq!(setup.used_idx(), 1);
}

#[test]
fn buffers_are_split_at_gaps_between_pages() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::BOTH);
    // The page after it is at another place, and the one after that follows it there.
    setup.answer_at(BUFFERS + PAGE, 2, 20 * PAGE, Access::BOTH);
    setup.offer(0, (BUFFERS + 4000, 16 + 2 * PAGE as u32), (BUFFERS, 1));
    let mut chain = Chain::default();
    assert!(setup.vring.pop(&mut chain));
    let pieces: Vec<_> = chain.readable().iter().map(|b| (b.addr.0, b.len)).collect();
    assert_eq!(pieces, [(BUFFERS + 4000, 96), (20 * PAGE, 4096 + 4016)]);
    assert_eq!(chain.readable_len(), 16 + 2 * PAGE);
}

#[test]
fn an_indirect_table_is_asked_for_first() {
    let mut setup = Setup::with_ring();
    // Across the boundary of two pages.
    let table = BUFFERS + 2 * PAGE - 16;
    setup.view.map().write_obj(Gpa(table), &desc((0, 8), DESC_F_NEXT, 1)).unwrap();
    setup.view.map().write_obj(Gpa(30 * PAGE), &desc((PAGE / 2, 8), DESC_F_WRITE, 0)).unwrap();
    setup.view.map().write_obj(Gpa(DESC), &desc((table, 32), DESC_F_INDIRECT, 0)).unwrap();
    setup.make_available(0);
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(BUFFERS + PAGE, Access::READ), (BUFFERS + 2 * PAGE, Access::READ)]);
    assert!(setup.tell(BUFFERS + PAGE, 1, Access::READ).is_empty());
    assert_eq!(setup.answer_at(BUFFERS + 2 * PAGE, 1, 30 * PAGE, Access::READ), [3]);
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(0, Access::READ), (0, Access::WRITE)]);
    setup.tell(0, 1, Access::BOTH);
    let mut chain = Chain::default();
    assert!(setup.vring.pop(&mut chain));
    assert_eq!((chain.readable().len(), chain.writable().len()), (1, 1));
}

/// No two pages of the table are contiguous, each descriptor is on another page than the one before, and some
/// lie on two pages. Each page is looked up once.
#[test]
fn an_indirect_table_is_translated_once() {
    const ENTRIES: u16 = 1024;
    let mut setup = Setup::with_ring();
    let entry = |index: u16| {
        let (len, flags) = if index == ENTRIES - 1 { (1, DESC_F_WRITE) } else { (0, DESC_F_NEXT) };
        let next = if index + 256 < ENTRIES { index + 256 } else { index % 256 + 1 };
        [IOVA + BUFFERS, len | u64::from(flags) << 32 | u64::from(next) << 48]
    };
    let table: Vec<u8> = (0..ENTRIES).flat_map(entry).flat_map(u64::to_le_bytes).collect();
    let start = 1 << 32;
    // The first page has 8 bytes less of it than the others, so that the last page has 8.
    for (page, bytes) in [&[0; 8], &table[..]].concat().chunks(PAGE as usize).enumerate() {
        let to = BUFFERS + (2 + 2 * page as u64) * PAGE;
        setup.view.map().write(Gpa(to), bytes).unwrap();
        setup.answer_at(start + page as u64 * PAGE, 1, to, Access::READ);
    }
    setup.tell(BUFFERS, 1, Access::WRITE);
    setup
        .view
        .map()
        .write_obj(Gpa(DESC), &desc((start + 8, table.len() as u32), DESC_F_INDIRECT, 0))
        .unwrap();
    setup.make_available(0);
    setup.vring.take_cost();
    let mut chain = Chain::default();
    assert!(setup.vring.pop(&mut chain));
    assert_eq!((chain.descriptors(), chain.writable()[0].addr), (ENTRIES, Gpa(BUFFERS)));
    // Five pages and a buffer. 16 of them cost 1.
    assert_eq!(setup.vring.take_cost(), 0);
}

#[test]
fn an_invalidation_waits_for_what_is_in_flight_and_for_nothing_else() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 8, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    setup.offer(2, (BUFFERS + 2 * PAGE, 16), (BUFFERS + 3 * PAGE, 100));
    assert!(setup.pop() && setup.pop());
    assert!(is_over(&setup.invalidate(BUFFERS + 5 * PAGE, PAGE)), "it is not in use");
    let first = setup.invalidate(BUFFERS + PAGE + 99, 1);
    let both = setup.invalidate(BUFFERS, 8 * PAGE);
    assert!(!is_over(&first) && !is_over(&both));
    // A request that comes now asks again, and the invalidation does not wait for it.
    setup.offer(4, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(!setup.pop());
    assert_eq!(setup.sent().len(), 2);
    setup.tell(BUFFERS, 2, Access::BOTH);
    assert!(setup.pop());
    setup.push(2, 1);
    assert!(!is_over(&first) && !is_over(&both));
    setup.push(0, 1);
    assert!(is_over(&first) && is_over(&both));
    assert!(!is_over(&setup.invalidate(BUFFERS, PAGE)), "the third");
}

#[test]
fn a_ring_rests_while_its_translation_is_missing() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 8, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(setup.pop());
    assert!(is_over(&setup.invalidate(USED, PAGE)), "a ring holds up nothing");
    // Completions are held meanwhile.
    setup.push(0, 1);
    setup.vring.publish();
    assert_eq!(setup.used_idx(), 0);
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(USED, Access::BOTH)]);
    assert_eq!(setup.tell(USED, 1, Access::BOTH), [3]);
    assert!(!setup.pop());
    setup.vring.publish();
    assert_eq!(setup.used_idx(), 1);
}

/// The used ring begins at the end of a page, and the next page is at another place.
#[test]
fn a_ring_in_pieces_works_like_any_other() {
    let mut setup = Setup::new();
    let used = USED + PAGE - 8;
    setup.vring.apply(Update::Addresses(Areas::Iova(IovaAddresses {
        desc: Iova(IOVA + DESC),
        avail: Iova(IOVA + AVAIL),
        used: Iova(IOVA + used),
        log: None,
    })));
    setup.tell(DESC, 1, Access::READ);
    setup.tell(AVAIL, 1, Access::READ);
    setup.tell(USED, 1, Access::BOTH);
    assert_eq!(setup.answer_at(USED + PAGE, 1, 40 * PAGE, Access::BOTH), [3]);
    setup.tell(BUFFERS, 2, Access::BOTH);
    setup.offer(2, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(setup.pop());
    setup.push(2, 77);
    setup.vring.publish();
    let map = setup.view.map();
    // The index, then the element: its head before the boundary, its length after it.
    assert_eq!(map.read_obj::<[u8; 2]>(Gpa(used + 2)), Ok([1, 0]));
    assert_eq!(map.read_obj::<[u8; 4]>(Gpa(used + 4)), Ok([2, 0, 0, 0]));
    assert_eq!(map.read_obj::<[u8; 4]>(Gpa(40 * PAGE)), Ok([77, 0, 0, 0]));
}

#[test]
fn a_refused_translation_is_no_guest_memory() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::READ);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(!setup.pop());
    let unsent = setup.misses.take_unsent();
    let [(number, miss)] = unsent[..] else { panic!("{unsent:?}") };
    assert_eq!(miss, Miss { page: Iova(IOVA + BUFFERS + PAGE), access: Access::WRITE });
    let refusal = setup.misses.replied(number, &miss).unwrap();
    assert_eq!(refusal.queues, [3]);
    setup.vring.apply(Update::TranslationRefused(refusal.miss));
    let mut chain = Chain::default();
    assert!(setup.vring.pop(&mut chain), "it is the request that fails");
    assert!(setup.view.contains(chain.readable()[0].addr, 16));
    assert!(!setup.view.contains(chain.writable()[0].addr, 1));
    // The next request asks again.
    setup.offer(2, (BUFFERS, 16), (BUFFERS + PAGE, 100));
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(BUFFERS + PAGE, Access::WRITE)]);
}

#[test]
fn a_ring_without_memory_rests_until_a_translation_comes() {
    let mut setup = Setup::new();
    assert!(!setup.pop());
    setup.refuse_the_avail_ring();
    assert!(!setup.pop() && setup.sent().is_empty(), "the front-end has refused it");
    assert_eq!(setup.tell(AVAIL, 1, Access::READ), [3], "but if it comes");
    setup.offer(0, (BUFFERS, 16), (BUFFERS, 1));
    assert!(!setup.pop());
    assert_eq!(setup.sent().len(), 2, "the buffers: the ring is there");
}

#[test]
fn a_ring_that_stops_while_it_waits_goes_on_at_that_head() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS, 1));
    setup.offer(2, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(setup.pop() && !setup.pop());
    setup.push(0, 1);
    setup.vring.publish();
    assert_eq!(
        setup.vring.stop(),
        Stopped { next_avail: 1, has_work: false, left: 0, unpublished: Vec::new() }
    );
    setup.misses.forget(3);
    assert!(setup.sent().is_empty(), "no queue waits for it");
    assert!(setup.tell(BUFFERS + PAGE, 1, Access::BOTH).is_empty(), "late");
}

#[test]
fn another_view_leaves_translations_as_they_are() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 2, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(setup.pop());
    setup.push(0, 0);
    // All of guest memory is at another place now. The front-end's addresses stay.
    let other = guest_memory(LEN, USER);
    let mut page = [0; PAGE as usize];
    for at in [DESC, AVAIL, USED] {
        setup.view.map().read(Gpa(at), &mut page).unwrap();
        other.map().write(Gpa(at), &page).unwrap();
    }
    setup.view = other.clone();
    setup.vring.apply(Update::Memory(other));
    setup.offer(2, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(setup.pop());
    assert!(setup.sent().is_empty());
    setup.vring.apply(Update::Memory(Arc::new(View::default())));
    assert!(!setup.pop() && setup.sent().is_empty(), "no memory, but nothing to ask for");
}

/// The chain has as many descriptors as the ring, and each buffer goes past the end of all addresses.
#[test]
fn a_chain_that_is_too_long_takes_no_memory() {
    let mut setup = Setup::with_ring();
    for index in 0..16u16 {
        let at = Gpa(DESC + 16 * u64::from(index));
        let entry = Desc {
            addr: 0xffff_ffff_ffff_f000.into(),
            len: u32::MAX.into(),
            flags: DESC_F_NEXT.into(),
            next: (index + 1).into(),
        };
        setup.view.map().write_obj(at, &entry).unwrap();
    }
    setup.make_available(0);
    let mut chain = Chain::default();
    assert!(!setup.vring.pop(&mut chain));
    for (number, miss) in setup.misses.take_unsent() {
        setup.misses.replied(number, &miss).unwrap();
        setup.vring.apply(Update::TranslationRefused(miss));
    }
    assert!(!setup.vring.pop(&mut chain) && setup.vring.is_broken());
}

/// The chain has more pages than a chain can have pieces. No two of the pages are contiguous.
#[test]
fn a_chain_in_too_many_pieces_fails() {
    const PIECES: u64 = 1 << 16;
    let mut setup = Setup::with_ring();
    let (far, pages) = (1 << 32, PIECES + 100);
    for page in 0..pages {
        let user = UserAddr(USER + BUFFERS + page % 2 * 2 * PAGE);
        setup.iotlb.update(Iova(IOVA + far + page * PAGE), PAGE, user, Access::READ).unwrap();
    }
    setup.tell(BUFFERS, 1, Access::BOTH);
    setup.offer(0, (far, (pages * PAGE) as u32), (BUFFERS, 1));
    let mut chain = Chain::default();
    assert!(setup.pop_whole(&mut chain));
    let [told @ .., last] = chain.readable() else { panic!("no pieces") };
    assert_eq!(told.len() as u64, PIECES);
    assert!(told.iter().all(|piece| u64::from(piece.len) == PAGE && setup.view.contains(piece.addr, PAGE)));
    assert_eq!(u64::from(last.len), (pages - PIECES) * PAGE);
    assert!(!setup.view.contains(last.addr, 1), "it is outside memory, and the request fails");
    assert_eq!((chain.readable_len(), chain.writable().len()), (pages * PAGE, 1));
    assert!(!setup.view.contains(chain.writable()[0].addr, 1));
}

/// A request of more pages than are asked for at a time. The front-end has none of them.
#[test]
fn a_request_that_is_refused_page_by_page_ends() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::BOTH);
    let far = 1 << 32;
    setup.offer(0, (far, 2000 * PAGE as u32), (BUFFERS, 1));
    let mut chain = Chain::default();
    let mut asked = 0;
    while !setup.pop_whole(&mut chain) {
        let unsent = setup.misses.take_unsent();
        assert!(!unsent.is_empty() && asked < 2000);
        asked += unsent.len();
        for (number, miss) in unsent {
            setup.misses.replied(number, &miss).unwrap();
            setup.vring.apply(Update::TranslationRefused(miss));
        }
    }
    assert_eq!(chain.readable().len(), 1, "a range outside memory is one piece");
    assert!(!setup.view.contains(chain.readable()[0].addr, 1));
    // The next request is asked for anew.
    setup.offer(2, (BUFFERS + PAGE, 16), (BUFFERS, 1));
    assert!(!setup.pop());
    assert_eq!(setup.sent(), [(BUFFERS + PAGE, Access::READ)]);
}

/// The chain has more pages than are asked for at a time. No two of them are contiguous, and the front-end
/// has sent none of them yet. Each page is looked up twice, however often the chain is popped again.
#[test]
fn a_chain_whose_pages_are_all_missing_is_translated_once() {
    const PAGES: u64 = 8192;
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::BOTH);
    let far = 1 << 32;
    setup.offer(0, (far, (PAGES * PAGE) as u32), (BUFFERS, 1));
    let mut chain = Chain::default();
    setup.vring.take_cost();
    let (mut cost, mut rounds) = (0, 0);
    while !setup.pop_whole(&mut chain) {
        cost += setup.vring.take_cost();
        rounds += 1;
        let unsent = setup.misses.take_unsent();
        assert!(!unsent.is_empty());
        for (_, miss) in unsent {
            let page = (miss.page.0 - IOVA - far) / PAGE;
            setup.answer_at(miss.page.0 - IOVA, 1, BUFFERS + page % 2 * 2 * PAGE, Access::READ);
        }
    }
    cost += setup.vring.take_cost();
    assert_eq!(rounds, PAGES / 256);
    assert_eq!(chain.readable().len() as u64, PAGES);
    // Each page is looked up once when it is missing and once when it is there. 16 lookups cost 1.
    assert!(u64::from(cost) <= 2 * PAGES / 16 + 1, "{cost}");
    assert!(u64::from(cost) >= 2 * PAGES / 16 - 1, "{cost} is too little for this work");
}

/// An invalidation drops the translated part of a chain that is not popped yet, even if the ring is unmapped
/// and mapped again meanwhile.
#[test]
fn an_invalidation_reaches_a_chain_that_is_translated_in_part() {
    const PAGES: u64 = 1500;
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 1, Access::BOTH);
    let far = 1 << 32;
    let tell = |setup: &mut Setup, page: u64, to: u64| {
        setup.answer_at(far + page * PAGE, 1, BUFFERS + to * PAGE, Access::READ);
    };
    (0..PAGES).for_each(|page| tell(&mut setup, page, 1 + page % 2 * 2));
    setup.offer(0, (far, (PAGES * PAGE) as u32), (BUFFERS, 1));
    let mut chain = Chain::default();
    assert!(!setup.vring.pop(&mut chain) && setup.vring.take_unfinished());
    // The ring is unmapped and mapped again, and looks up its own areas in between.
    assert!(is_over(&setup.invalidate(USED, PAGE)));
    assert!(!setup.vring.pop(&mut chain) && !setup.vring.take_unfinished());
    assert!(is_over(&setup.invalidate(far + 7 * PAGE, PAGE)), "nothing is in flight");
    tell(&mut setup, 7, 9);
    setup.tell(USED, 1, Access::BOTH);
    assert!(setup.pop_whole(&mut chain));
    assert_eq!(chain.readable()[7].addr, Gpa(BUFFERS + 9 * PAGE));
    assert_eq!(chain.readable().len() as u64, PAGES);
    assert!(!is_over(&setup.invalidate(far, PAGE)), "now it is");
}

/// A driver changes a chain's descriptors while they are translated. The last version counts.
#[test]
fn a_chain_that_changes_while_it_is_translated_begins_anew() {
    let (mut setup, mut chain, _) = Setup::with_unfinished_chain();
    setup.avail -= 1;
    setup.offer(0, (BUFFERS + PAGE, 16), (BUFFERS, 1));
    assert!(setup.vring.pop(&mut chain));
    assert_eq!(chain.readable(), [Buffer { addr: Gpa(BUFFERS + PAGE), len: 16 }]);
    assert_eq!(chain.readable_len(), 16);
}

/// Between two pops, the driver replaces the descriptors, and the next pop ends before the buffers are
/// translated. The new chain must not use the earlier translations.
#[test]
fn a_chain_does_not_use_translations_of_the_one_before() {
    let (mut setup, mut chain, far) = Setup::with_unfinished_chain();
    // One buffer, and a table that is missing.
    let table = BUFFERS + 20 * PAGE;
    let descriptor = |index: u64, gpa: u64, len: u32, flags: u16| {
        let (addr, next) = ((IOVA + gpa).into(), (index as u16 + 1).into());
        let entry = Desc { addr, len: len.into(), flags: flags.into(), next };
        setup.view.map().write_obj(Gpa(DESC + 16 * index), &entry).unwrap();
    };
    descriptor(0, BUFFERS + PAGE, 16, DESC_F_NEXT);
    descriptor(1, table, 16, DESC_F_INDIRECT);
    assert!(!setup.vring.pop(&mut chain) && !setup.vring.take_unfinished());
    // The same buffer, and no table.
    descriptor(0, BUFFERS + PAGE, 16, 0);
    setup.tell(table, 1, Access::READ);
    assert!(setup.vring.pop(&mut chain));
    assert_eq!(chain.readable().len(), 1);
    assert_eq!(chain.readable(), [Buffer { addr: Gpa(BUFFERS + PAGE), len: 16 }]);
    assert!(is_over(&setup.invalidate(far, PAGE)), "it does not use that");
}

/// A driver can make a head available again and again while it is in flight, so that one chain with it is
/// always there.
#[test]
fn a_head_that_is_available_again_does_not_hold_an_invalidation_up() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 2, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(setup.pop());
    let first = setup.ids[&0];
    setup.make_available(0);
    assert!(setup.pop(), "nothing waits for it");
    let done = setup.invalidate(BUFFERS, PAGE);
    setup.tell(BUFFERS, 1, Access::BOTH);
    setup.push(0, 0);
    assert!(!is_over(&done));
    // Chains with other heads are popped.
    setup.offer(2, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(setup.pop() && !setup.vring.is_broken());
    setup.make_available(0);
    assert!(!setup.pop() && setup.vring.is_broken());
    setup.vring.push(first, 0);
    assert!(is_over(&done));
}

/// A chain is longer than a request can be. Only the address of its status is looked up.
#[test]
fn a_chain_that_is_too_long_is_refused_before_it_is_translated() {
    let mut setup = Setup::with_ring();
    let far = 1 << 32;
    setup.offer(0, (far, 1 << 31), (BUFFERS, 1 << 12));
    setup.vring.take_cost();
    let mut chain = Chain::default();
    assert!(!setup.vring.pop(&mut chain) && !setup.vring.take_unfinished());
    assert_eq!(setup.sent(), [(BUFFERS, Access::WRITE)]);
    setup.tell(BUFFERS, 1, Access::BOTH);
    assert!(setup.vring.pop(&mut chain));
    assert_eq!(setup.vring.take_cost(), 0);
    assert_eq!((chain.readable_len(), chain.writable_len()), (1 << 31, 1 << 12));
    assert!(chain.readable().iter().all(|piece| !setup.view.contains(piece.addr, 1)));
    let [body, status] = chain.writable() else { panic!("{:?}", chain.writable()) };
    assert!(!setup.view.contains(body.addr, 1));
    assert_eq!((status.addr, status.len), (Gpa(BUFFERS + PAGE - 1), 1));
    // At the largest request's size, it is served.
    setup.iotlb.update(Iova(IOVA + far), 1 << 30, UserAddr(USER), Access::READ).unwrap();
    setup.offer(2, (far, 1 << 30), (BUFFERS, 1));
    assert!(setup.pop_whole(&mut chain));
}

#[test]
fn a_waiting_ring_checks_only_after_an_update() {
    let mut setup = Setup::with_ring();
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(!setup.pop());
    assert_eq!(setup.sent().len(), 2);
    setup.iotlb.update(Iova(IOVA + BUFFERS), 2 * PAGE, UserAddr(USER), Access::BOTH).unwrap();
    setup.vring.apply(Update::Call(None));
    setup.vring.apply(Update::Forget(range(BUFFERS + 9 * PAGE, PAGE)));
    assert!(is_over(&{
        let (done, all_done) = channel();
        setup.vring.apply(Update::Invalidate(range(BUFFERS + 9 * PAGE, PAGE), done));
        all_done
    }));
    assert!(!setup.pop(), "it stands");
    assert_eq!(setup.misses.answered(range(BUFFERS, 2 * PAGE), Access::BOTH), [3]);
    setup.vring.apply(Update::Poll);
    assert!(setup.pop());
}

/// Runs a function when this thread logs a line.
struct AtALine<F>(Mutex<Option<F>>);

impl<F: FnOnce() + Send + 'static> Subscriber for AtALine<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        let act = self.0.lock().unwrap().take();
        if let Some(act) = act {
            act();
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A ring's translation is refused, and the ring logs this. At this moment the front-end sends the
/// translation unasked. The ring is woken.
#[test]
fn an_unasked_translation_during_a_lookup_is_not_missed() {
    let mut setup = Setup::new();
    setup.tell(BUFFERS, 2, Access::BOTH);
    setup.offer(0, (BUFFERS, 16), (BUFFERS + PAGE, 1));
    assert!(!setup.pop());
    setup.refuse_the_avail_ring();
    let Setup { mut vring, mut iotlb, misses, .. } = setup;
    let (tell, woken) = channel();
    let line = AtALine(Mutex::new(Some(move || {
        iotlb.update(Iova(IOVA + AVAIL), PAGE, UserAddr(USER + AVAIL), Access::READ).unwrap();
        tell.send(misses.answered(range(AVAIL, PAGE), Access::READ)).unwrap();
    })));
    assert!(!with_subscriber(line, || vring.pop(&mut Chain::default())));
    assert_eq!(woken.try_recv(), Ok(vec![3]), "it stands for ever");
    vring.apply(Update::Poll);
    assert!(vring.pop(&mut Chain::default()));
}

/// Credit returns to the ring before an invalidation, new memory or new addresses take effect, so nothing
/// waits for it. Chains in use are waited for.
#[test]
fn nothing_waits_for_credit() {
    let mut setup = Setup::with_ring();
    setup.tell(BUFFERS, 8, Access::BOTH);
    for head in [0, 2, 4] {
        setup.offer(head, (BUFFERS, 16), (BUFFERS + PAGE * u64::from(head), 100));
    }
    let mut chain = Chain::default();
    let mut pop = |vring: &mut Vring| vring.pop_credit(&mut chain).then_some(chain.id);
    let ids: Vec<ChainId> = (0..3).filter_map(|_| pop(&mut setup.vring)).collect();
    assert_eq!(ids.iter().map(|id| id.head()).collect::<Vec<_>>(), [0, 2, 4]);
    assert!(is_over(&setup.invalidate(BUFFERS, LEN - BUFFERS)));
    assert_eq!((setup.vring.credit(), setup.vring.use_credit(1)), (0, false));
    // It needs new translations.
    assert_eq!(pop(&mut setup.vring), None);
    setup.sent();
    setup.tell(BUFFERS, 8, Access::BOTH);
    let again: Vec<ChainId> = (0..3).filter_map(|_| pop(&mut setup.vring)).collect();
    assert_eq!(again, ids);
    setup.vring.unpop(1);
    assert!(!setup.vring.use_credit(3) && setup.vring.use_credit(1));
    let waits = setup.invalidate(BUFFERS, LEN - BUFFERS);
    assert!(!is_over(&waits));
    assert_eq!(setup.vring.credit(), 0);
    setup.vring.push_group(&[(ids[0], 1)]);
    assert!(is_over(&waits));
    setup.vring.publish();
    assert_eq!(setup.used_idx(), 1);
    assert_eq!(
        setup.vring.stop(),
        Stopped { next_avail: 1, has_work: true, left: 0, unpublished: Vec::new() }
    );
}
