//! Measures both ends of a virtqueue in one thread, without any device behind it.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context, Result};
use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
use kickless_spec::ring::{EVENT_WRAP, avail_len, desc_len, used_len};
use kickless_virtqueue::driver::{Areas, Buffer, Completer, Submitter, queue};
use kickless_virtqueue::{Chain, ChainId, device};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::operation::Operation;

const SIZE: u16 = 256;
/// The addresses of the rings and of the buffers, all in one slot.
const DESC: u64 = 0;
const DRIVER: u64 = 0x4000;
const DEVICE: u64 = 0x8000;
const BUFFERS: u64 = 0x10000;
const LEN: u64 = 0x40000;

/// Returns an operation for each format, with and without IN_ORDER, with single requests and with batches.
pub(super) fn operations() -> Result<Vec<Operation>> {
    let mut all = Vec::new();
    for packed in [false, true] {
        for in_order in [false, true] {
            for batch in [1, 32] {
                let format = if packed { "packed" } else { "split" };
                let order = if in_order { ", in order" } else { "" };
                let name = format!("request through both ends, {format}{order}, {batch} at a time");
                let mut ends = Ends::new(packed, in_order)?;
                all.push(Operation::new(name, move || ends.round(batch)));
            }
        }
    }
    Ok(all)
}

/// The two ends of a queue.
struct Ends {
    view: Arc<View>,
    submitter: Submitter,
    completer: Completer,
    device: device::Queue,
    chain: Chain,
    ids: Vec<ChainId>,
}

impl Ends {
    fn new(packed: bool, in_order: bool) -> Result<Ends> {
        let file = memfd_create("kickless-bench", MemfdFlags::CLOEXEC).context("no memory")?;
        ftruncate(&file, LEN).context("no memory")?;
        let slot = Slot::map(&file, 0, Gpa(0), UserAddr(0), LEN)?;
        let view = Arc::new(View::new(Map::new(vec![slot])?));
        let options = if packed {
            device::Options::packed(SIZE, true, false)
        } else {
            device::Options::new(SIZE, true, false)
        };
        let options = options?.with_in_order(in_order);
        let area = |at: u64, len: usize| view.map().area(UserAddr(at), len, 16);
        let areas = Areas {
            desc: area(DESC, desc_len(SIZE))?,
            driver: area(DRIVER, avail_len(SIZE, true))?,
            device: area(DEVICE, used_len(SIZE, true))?,
        };
        let addresses = device::Addresses {
            desc: UserAddr(DESC),
            avail: UserAddr(DRIVER),
            used: UserAddr(DEVICE),
            log: None,
        };
        let metadata = device::Metadata::map(&view, &addresses, &options)?;
        let (submitter, mut completer) = queue(options, areas);
        let mut device = device::Queue::new(options, metadata, if packed { EVENT_WRAP } else { 0 });
        // Both ends poll.
        device.disarm();
        completer.disable_calls();
        Ok(Ends { view, submitter, completer, device, chain: Chain::default(), ids: Vec::new() })
    }

    /// Sends `batch` requests and completes them. Each has a header, a page and a status byte.
    fn round(&mut self, batch: u32) -> Result<u32> {
        for _ in 0..batch {
            let buffer = |at: u64, len: u32, writable: bool| Buffer { addr: BUFFERS + at, len, writable };
            let buffers = [buffer(0, 16, false), buffer(4096, 4096, true), buffer(16, 1, true)];
            self.submitter.add(black_box(&buffers), None).ok().context("a ring with room is full")?;
        }
        black_box(self.submitter.publish());
        while self.device.pop(&self.view, &mut self.chain)? {
            black_box((self.chain.readable(), self.chain.writable()));
            self.ids.push(self.chain.id);
        }
        for id in self.ids.drain(..) {
            self.device.push(id, 4097);
        }
        black_box(self.device.publish());
        let mut done = 0;
        while let Some(completed) = self.completer.pop()? {
            self.completer.give_back(completed.id);
            done += 1;
        }
        Ok(done)
    }
}
