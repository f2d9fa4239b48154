//! The device end of a split ring in hostile memory.
//!
//! The input is the shape of the queue, an image of what is in memory to begin with, and then a sequence of
//! operations: the device's, and writes by the driver between them. Nothing in it may panic, take long, or
//! hand out what breaks the promises of `pop`.
#![no_main]

use std::sync::{Arc, LazyLock};

use kickless_memory::{Gpa, Map, Slot, UserAddr};
use kickless_virtqueue::device::{Addresses, Metadata, Options, Queue};
use kickless_virtqueue::{Chain, INDIRECT_CHAIN_MAX};
use libfuzzer_sys::fuzz_target;

/// Two slots with a seam between them; the descriptor table of 256 entries is the first page, then come the
/// rings and what indirect tables may lie in.
const SEAM: u64 = 0x3000;
const END: u64 = 0x4000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
const ADDRESSES: Addresses = Addresses { desc: UserAddr(DESC), avail: UserAddr(AVAIL), used: UserAddr(USED) };

static MEMORY: LazyLock<Arc<Map>> = LazyLock::new(|| {
    let slot = |gpa: u64, len: u64| {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&file, len).expect("room");
        Slot::map(&file, 0, Gpa(gpa), UserAddr(gpa), len).expect("a mapping")
    };
    Arc::new(Map::new(vec![slot(0, SEAM), slot(SEAM, END - SEAM)]).expect("no overlap"))
});

fuzz_target!(|data: &[u8]| {
    let [log_size, flags, start_low, start_high, image_low, image_high, rest @ ..] = data else { return };
    let size = 1u16 << (log_size % 9);
    let Ok(options) = Options::new(size, flags & 1 != 0, flags & 2 != 0) else { return };
    let image = usize::from(u16::from_le_bytes([*image_low, *image_high])).min(rest.len()).min(END as usize);
    let (image, ops) = rest.split_at(image);
    let mut memory = [0; END as usize];
    memory[..image.len()].copy_from_slice(image);
    MEMORY.write(Gpa(0), &memory).expect("inside");
    run(options, u16::from_le_bytes([*start_low, *start_high]), ops);
});

fn metadata(options: &Options) -> Metadata {
    Metadata::map(&MEMORY, &ADDRESSES, options).expect("inside and aligned")
}

fn run(options: Options, start: u16, mut ops: &[u8]) {
    let mut queue = Queue::new(options, metadata(&options), start);
    let mut chain = Chain::default();
    let mut held = Vec::new();
    while let [op, rest @ ..] = ops {
        ops = rest;
        match op % 16 {
            0..6 => pop(&mut queue, &mut chain, &mut held),
            6 => write(&mut ops),
            7 => {
                // An index that is nearly right.
                let idx = queue.next_avail().wrapping_add(u16::from(op >> 4));
                MEMORY.write_obj(Gpa(AVAIL + 2), &idx.to_le_bytes()).expect("inside");
            }
            8 => {
                if !held.is_empty() {
                    queue.push(held.swap_remove(usize::from(op >> 4) % held.len()), u32::from(*op));
                }
            }
            9 => drop(queue.publish()),
            10 => drop(queue.arm()),
            11 => queue.disarm(),
            12 => queue.unmap(),
            13 => queue.remap(metadata(&options)),
            14 => {
                let before = queue.in_flight();
                queue.unpop();
                if queue.in_flight() != before {
                    held.pop();
                }
            }
            _ => {
                assert!(queue.pending() <= queue.size());
                assert!(queue.broken().is_none() || !queue.has_work());
            }
        }
        assert_eq!(usize::from(queue.in_flight()), held.len());
        assert!(held.len() <= usize::from(queue.size()));
    }
}

fn pop(queue: &mut Queue, chain: &mut Chain, held: &mut Vec<u16>) {
    let (next, broken) = (queue.next_avail(), queue.broken());
    match queue.pop(&MEMORY, chain) {
        Ok(true) => {
            assert!(broken.is_none() && queue.is_mapped());
            assert!(chain.head < queue.size());
            let buffers = chain.readable().len() + chain.writable().len();
            assert!(buffers <= usize::from(queue.size().max(INDIRECT_CHAIN_MAX)));
            assert!(chain.readable().iter().chain(chain.writable()).all(|b| b.len != 0));
            let len = |buffers: &[kickless_virtqueue::Buffer]| {
                buffers.iter().map(|b| u64::from(b.len)).sum::<u64>()
            };
            assert_eq!(chain.readable_len(), len(chain.readable()));
            assert_eq!(chain.writable_len(), len(chain.writable()));
            assert!(chain.readable_len() + chain.writable_len() <= 1 << 32);
            assert_eq!(queue.next_avail(), next.wrapping_add(1));
            // The heads are as the driver says, twice the same among them.
            held.push(chain.head);
        }
        Ok(false) => assert!(broken.is_none() && queue.next_avail() == next),
        Err(error) => {
            assert!(broken.is_none_or(|broken| broken == error), "an error is for good");
            assert_eq!(queue.broken(), Some(error));
            assert_eq!(queue.next_avail(), next);
        }
    }
}

/// The driver writes eight bytes anywhere.
fn write(ops: &mut &[u8]) {
    let [low, high, a, b, c, d, e, f, g, h, rest @ ..] = ops else { return };
    let at = u64::from(u16::from_le_bytes([*low, *high])) % (END - 8);
    MEMORY.write(Gpa(at), &[*a, *b, *c, *d, *e, *f, *g, *h]).expect("inside");
    *ops = rest;
}
