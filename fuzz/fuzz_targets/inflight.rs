//! Continues another device's queue. The front-end's in-flight buffer has any content.
//!
//! The input has the queue's shape, an image of the ring, an image of the region, and a sequence of
//! operations. These are operations of the device, writes by the guest and the front-end, and the end of the
//! device, after which the next device continues. No input may cause a panic, a long run, or more chains in
//! flight than the ring has descriptors.
#![no_main]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use kickless_memory::{Gpa, Inflight, Map, Records, Slot, UserAddr, View};
use kickless_spec::vhost_user::{inflight_entry_len, inflight_head_len};
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use libfuzzer_sys::fuzz_target;
use rustix::fd::OwnedFd;

const SIZE_MAX: usize = 16;
const DESC: u64 = 0;
const AVAIL: u64 = 0x200;
const USED: u64 = 0x280;
const END: u64 = 0x400;
const REGION_MAX: usize = 32 * (SIZE_MAX + 4);
const ADDRESSES: Addresses =
    Addresses { desc: UserAddr(DESC), avail: UserAddr(AVAIL), used: UserAddr(USED), log: None };

fn file(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, len).expect("room");
    file
}

static MEMORY: LazyLock<Arc<View>> = LazyLock::new(|| {
    let slot = Slot::map(file(END), 0, Gpa(0), UserAddr(0), END).expect("a mapping");
    Arc::new(View::new(Map::new(vec![slot]).expect("no overlap")))
});
static BUFFER: LazyLock<Inflight> =
    LazyLock::new(|| Inflight::map(file(REGION_MAX as u64), 0, REGION_MAX as u64).expect("a mapping"));

fuzz_target!(|data: &[u8]| {
    let [shape, size, entries, ring_len, region_len, rest @ ..] = data else { return };
    let packed = shape & 1 != 0;
    let options = match packed {
        true => Options::packed(u16::from(size % SIZE_MAX as u8) + 1, shape & 2 != 0, shape & 4 != 0),
        false => Options::new(1 << (size % 5), shape & 2 != 0, shape & 4 != 0),
    };
    let options = options.expect("a size").with_in_order(shape & 8 != 0);
    // Some regions have fewer entries than the ring.
    let entries = usize::from(entries % (SIZE_MAX as u8 + 3));
    let len = inflight_head_len(packed) + inflight_entry_len(packed) * entries;

    let (ring, rest) = rest.split_at(rest.len().min(4 * usize::from(*ring_len)));
    let (image, ops) = rest.split_at(rest.len().min(4 * usize::from(*region_len)).min(len));
    let mut memory = [0; END as usize];
    memory[..ring.len()].copy_from_slice(ring);
    MEMORY.map().write(Gpa(0), &memory).expect("inside");
    let whole = BUFFER.records(0, REGION_MAX).expect("inside");
    let mut words = [0; REGION_MAX];
    words[..image.len()].copy_from_slice(image);
    // Most inputs look as if a device had used the region before.
    if shape & 16 == 0 && len >= 12 {
        words[8..10].copy_from_slice(&1u16.to_le_bytes());
        words[10..12].copy_from_slice(&(entries as u16).to_le_bytes());
    }
    for (at, word) in words.chunks_exact(8).enumerate() {
        whole.store(8 * at, u64::from_le_bytes(word.try_into().expect("eight")));
    }
    run(&options, len, ops);
});

fn next(options: &Options, len: usize) -> Queue {
    let mut queue = Queue::unmapped(*options, if options.is_packed() { 0x8000 } else { 0 }, &MEMORY);
    queue.track(records(len));
    queue.remap(Metadata::map(&MEMORY, &ADDRESSES, options).expect("inside and aligned"));
    assert!(queue.resubmissions() <= options.size() && queue.resubmissions() <= queue.in_flight());
    queue
}

fn records(len: usize) -> Records {
    BUFFER.records(0, len).expect("inside")
}

fn run(options: &Options, len: usize, mut ops: &[u8]) {
    let mut queue = next(options, len);
    let (mut chain, mut taken, mut credit) = (Chain::default(), Vec::new(), VecDeque::new());
    while let [op, rest @ ..] = ops {
        ops = rest;
        let detail = op >> 4;
        match op % 16 {
            0..6 => {
                let (resubmissions, broken) = (queue.resubmissions(), queue.broken());
                // A queue with credit only pops credit.
                let as_credit = detail >= 8 || !credit.is_empty();
                let popped = match as_credit {
                    true => queue.pop_credit(&MEMORY, &mut chain),
                    false => queue.pop(&MEMORY, &mut chain),
                };
                match popped {
                    Ok(true) => {
                        assert!(broken.is_none());
                        assert_eq!(queue.resubmissions(), resubmissions.saturating_sub(1));
                        if as_credit {
                            credit.push_back(chain.id)
                        } else {
                            taken.push(chain.id)
                        }
                        assert!(taken.len() + credit.len() <= usize::from(options.size()));
                    }
                    Ok(false) => assert_eq!(resubmissions, 0),
                    Err(error) => assert_eq!(queue.broken(), Some(error)),
                }
            }
            6..9 if !taken.is_empty() => {
                let id = taken.remove(usize::from(detail) % taken.len());
                queue.push(id, u32::from(detail));
            }
            9 => drop(queue.publish()),
            10 if detail < 4 => queue.show(),
            10 => {
                assert_eq!(queue.use_credit(), !credit.is_empty());
                taken.extend(credit.pop_front());
            }
            11 if detail < 4 => drop(queue.arm()),
            11 => {
                assert_eq!(queue.unpop(), credit.pop_back().map(|id| id.head()));
                assert_eq!(usize::from(queue.credit()), credit.len());
            }
            12 => {
                queue.unmap();
                assert_eq!(queue.resubmissions(), 0);
                queue.remap(Metadata::map(&MEMORY, &ADDRESSES, options).expect("inside and aligned"));
            }
            // The driver and the front-end write.
            13 => {
                let [at, value, more @ ..] = ops else { return };
                ops = more;
                let at = u64::from(*at) * 4 + u64::from(detail % 4);
                MEMORY.map().write(Gpa(at % END), &[*value]).expect("inside");
            }
            14 => {
                let [at, value, more @ ..] = ops else { return };
                ops = more;
                let whole = records(REGION_MAX);
                let (at, byte) = (usize::from(*at) * 8 % REGION_MAX, u32::from(detail % 8));
                let word = whole.load(at) & !(0xff << (8 * byte)) | u64::from(*value) << (8 * byte);
                whole.store(at, word);
            }
            15 => {
                queue = next(options, len);
                taken.clear();
                credit.clear();
            }
            _ => assert!(queue.pending() <= options.size()),
        }
    }
}
