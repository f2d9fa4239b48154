//! Model of groups of used elements, in every order that the memory model allows. The real queues of both
//! formats show two groups in memory that loom watches. A driver that looks at any time sees each group whole
//! or not at all.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --lib model::`
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests; a trait has unsafe functions")]

use super::credit::Credit;
use super::inflight::Region;
use super::metadata::{Areas, Options};
use super::single::{Direction, SingleChain};
use super::{PopOutcome, packed, split};
use crate::Chain;
use crate::access::Access;
use crate::packed::{RingPosition, Words};
use kickless_memory::{Gpa, Marks, View};
use kickless_spec::ring::{DESC_F_NEXT, DESC_F_WRITE, RING_ENTRIES, RING_IDX};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU16, fence};
use loom::thread;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An area, word by word.
#[derive(Clone, Debug)]
struct Memory {
    words: Arc<Vec<AtomicU16>>,
    /// Whether groups are shown with release.
    releases: bool,
}

impl Memory {
    fn new(len: usize, releases: bool) -> Self {
        Self { words: Arc::new((0..len.div_ceil(2)).map(|_| AtomicU16::new(0)).collect()), releases }
    }

    fn set<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        for (nth, bytes) in value.as_bytes().chunks_exact(2).enumerate() {
            let word = u16::from_ne_bytes(bytes.try_into().unwrap());
            self.words[offset / 2 + nth].store(word, Ordering::Relaxed);
        }
    }

    fn get<T: FromBytes>(&self, offset: usize) -> T {
        let words = &self.words[offset / 2..][..size_of::<T>() / 2];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_ne_bytes()).collect();
        T::read_from_bytes(&bytes).unwrap()
    }
}

impl Words for Memory {
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.words[at / 2].load(order)
    }

    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.words[at / 2].store(value, if self.releases { order } else { Ordering::Relaxed });
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl Access for Memory {
    type Region = Nothing;

    fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        self.get(offset)
    }

    unsafe fn load_unchecked(&self, offset: usize) -> u16 {
        self.get(offset)
    }

    unsafe fn load_words_unchecked(&self, offset: usize) -> [u64; 2] {
        self.get(offset)
    }

    unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.set(offset, value);
    }

    fn mark(&self, _: Gpa, _: usize, _: usize, _: &mut Marks) {}
}

/// There is no in-flight buffer.
#[derive(Debug)]
struct Nothing;

impl Region for Nothing {
    fn len(&self) -> usize {
        0
    }

    fn load(&self, _: usize) -> u64 {
        0
    }

    fn store(&self, _: usize, _: u64) {}
}

/// The chains of two groups, by the number of their descriptors. The first group has two chains.
const CHAINS: [u16; 4] = [1, 2, 1, 1];
const GROUP: usize = 2;

/// Returns the id of a chain, and its length.
fn of(nth: usize) -> (u16, u32) {
    (nth as u16 + 3, 0x1_0001 * (nth as u32 + 1))
}

/// Number of looks of the driver.
const LOOKS: usize = 2;

/// Runs a device, which gets the chains' ids, beside a driver that looks for the next chains. `look` returns
/// the chain that follows a number of others.
fn run(device: impl FnOnce() + Send + 'static, look: impl Fn(usize) -> Option<(u16, u32)>) {
    let device = thread::spawn(device);
    let mut taken = 0;
    for _ in 0..LOOKS {
        while taken < CHAINS.len() {
            let Some(chain) = look(taken) else { break };
            assert_eq!(chain, of(taken), "half a group");
            taken += 1;
        }
        assert!(taken.is_multiple_of(GROUP), "half a group");
    }
    device.join().unwrap();
}

/// Pushes both groups, with the methods to which `Queue::push_group`, `show` and `publish` forward. The first
/// chains are shown early.
macro_rules! serve {
    ($queue:ident, $credit:ident, $shown_after:expr) => {
        move || {
            let mut marks = Marks::off();
            for nth in 0..CHAINS.len() {
                assert!($queue.use_credit(&mut $credit));
                let (id, len) = of(nth);
                $queue.push(id, len);
                if nth + 1 == $shown_after {
                    $queue.show(&mut marks);
                }
            }
            let _ = $queue.publish(&mut marks);
        }
    };
}

/// Pops all chains as credit, twice.
macro_rules! pop {
    ($queue:ident, $credit:ident) => {
        let (view, mut chain, mut marks) = (View::default(), Chain::default(), Marks::off());
        for _ in 0..2 {
            while $queue.unpop(&mut $credit).is_some() {}
            for nth in 0..CHAINS.len() {
                let popped = $queue.pop_credit(&mut &view, &mut chain, &mut marks, &mut $credit);
                assert_eq!((popped, chain.id.head()), (Ok(PopOutcome::Chain), of(nth).0));
            }
        }
    };
}

fn split_ring(shown_after: usize, releases: bool) {
    loom::model(move || {
        const START: u16 = u16::MAX;
        let options = Options::new(8, false, false).unwrap();
        let [desc, avail, used] = options.area_lens().map(|len| Memory::new(len, releases));
        for nth in 0..CHAINS.len() {
            let at = usize::from(START.wrapping_add(nth as u16) % 8);
            avail.set(RING_ENTRIES + 2 * at, &of(nth).0);
            desc.set(16 * usize::from(of(nth).0), &[0, 8 | u64::from(DESC_F_WRITE) << 32]);
        }
        avail.set(RING_IDX, &START.wrapping_add(CHAINS.len() as u16));
        used.set(RING_IDX, &START);
        let mut queue = split::SplitQueue::new(options, START);
        queue.remap(Areas::of([desc, avail, used.clone()], options), &mut Marks::off());
        let mut credit = Credit::default();
        pop!(queue, credit);
        let look = |taken: usize| {
            let next = START.wrapping_add(taken as u16);
            (used.load(RING_IDX, Ordering::Acquire) != next).then(|| {
                let [id, len] = used.get::<[u32; 2]>(RING_ENTRIES + 8 * usize::from(next % 8));
                (id as u16, len)
            })
        };
        run(serve!(queue, credit, shown_after), look);
    });
}

/// Returns the queue of a packed ring that wraps within the first group, and a look at that ring. Each chain
/// has this number of descriptors.
fn packed_queue(
    chains: [u16; CHAINS.len()],
    releases: bool,
) -> (packed::PackedQueue<Memory>, impl Fn(usize) -> Option<(u16, u32)>) {
    const SIZE: u16 = 5;
    const START: RingPosition = RingPosition { index: SIZE - 1, wrap: true };
    let options = Options::packed(SIZE, false, false).unwrap();
    let [desc, driver, device] = options.area_lens().map(|len| Memory::new(len, releases));
    let place_of = move |nth: usize| START.after(chains[..nth].iter().sum(), SIZE);
    for (nth, count) in chains.into_iter().enumerate() {
        for part in 0..count {
            let place = place_of(nth).after(part, SIZE);
            let more = if part + 1 < count { DESC_F_NEXT } else { 0 };
            let flags = place.available() | DESC_F_WRITE | more;
            let rest = 8 | u64::from(of(nth).0) << 32 | u64::from(flags) << 48;
            desc.set(place.at(), &[0, rest]);
        }
    }
    let mut queue = packed::PackedQueue::new(options, START.bits());
    queue.remap(Areas::of([desc.clone(), driver, device], options), &mut Marks::off());
    let look = move |taken: usize| {
        let place = place_of(taken);
        place.is_used(desc.load(place.flags_at(), Ordering::Acquire)).then(|| {
            let [len, rest] = desc.get::<[u32; 2]>(place.at() + 8);
            (rest as u16, len)
        })
    };
    (queue, look)
}

fn packed_ring(shown_after: usize, releases: bool) {
    loom::model(move || {
        let (mut queue, look) = packed_queue(CHAINS, releases);
        let mut credit = Credit::default();
        pop!(queue, credit);
        run(serve!(queue, credit, shown_after), look);
    });
}

/// The chains of each group are completed together, as [`super::Queue::complete_peeked`] does.
fn packed_ring_of_singles(shown_after: usize, releases: bool) {
    loom::model(move || {
        let (mut queue, look) = packed_queue([1; CHAINS.len()], releases);
        let mut chains = [SingleChain::default(); CHAINS.len()];
        assert_eq!(queue.peek(&View::default(), Direction::Writable, &mut chains), CHAINS.len());
        for (nth, chain) in chains.iter_mut().enumerate() {
            chain.written = of(nth).1;
        }
        let device = move || {
            let mut marks = Marks::off();
            let (shown, others) = chains.split_at(shown_after);
            queue.complete_peeked(shown);
            queue.show(&mut marks);
            queue.complete_peeked(others);
            let _ = queue.publish(&mut marks);
        };
        run(device, look);
    });
}

#[test]
fn a_split_ring_shows_groups_whole() {
    split_ring(GROUP, true);
}

#[test]
fn a_packed_ring_shows_groups_whole() {
    packed_ring(GROUP, true);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_split_ring_needs_the_release() {
    split_ring(GROUP, false);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_packed_ring_needs_the_release() {
    packed_ring(GROUP, false);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_split_ring_shows_nothing_in_between() {
    split_ring(1, true);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_packed_ring_shows_nothing_in_between() {
    packed_ring(1, true);
}

#[test]
fn a_packed_ring_shows_groups_of_singles_whole() {
    packed_ring_of_singles(GROUP, true);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_packed_ring_of_singles_needs_the_release() {
    packed_ring_of_singles(GROUP, false);
}

#[test]
#[should_panic(expected = "half a group")]
fn a_packed_ring_of_singles_shows_nothing_in_between() {
    packed_ring_of_singles(1, true);
}
