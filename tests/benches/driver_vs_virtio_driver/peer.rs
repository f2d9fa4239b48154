//! Runs the `virtio-driver` crate under the same load.

#![expect(unsafe_code, reason = "island: the crate takes buffers as pointers")]

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kickless_memory::{Gpa, Map, Slot, UserAddr};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use crate::{Load, Offsets, QUEUE_SIZE, Results};

const BLOCK: usize = crate::BLOCK as usize;

/// A queue of the crate, with memory for its requests.
pub(crate) struct Peer {
    queue: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    /// Start of the memory.
    memory: *mut u8,
    /// Keeps it mapped.
    _map: Map,
    /// Keeps the ring's memory mapped and the connection open. It is the last field, so that it is dropped
    /// last.
    _transport: Box<VirtioBlkTransport>,
}

impl Peer {
    pub(crate) fn connect(socket: &Path) -> Result<Peer> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let path = socket.to_str().context("the socket's path is no text")?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features.bits())?);
        let got = VirtioFeatureFlags::from_bits_truncate(transport.get_features());
        ensure!(got.contains(features), "the back-end offers only {got:?}");
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE_SIZE)?;
        let file = memfd_create("peer", MemfdFlags::CLOEXEC)?;
        let len = (usize::from(QUEUE_SIZE) * BLOCK) as u64;
        ftruncate(&file, len)?;
        let map = Map::new(vec![Slot::map(&file, 0, Gpa(0), UserAddr(0), len)?])?;
        let memory = map.contiguous(Gpa(0), len).context("no memory")?.as_ptr();
        transport.map_mem_region(memory as usize, len as usize, file.as_raw_fd(), 0)?;
        let queue = queues.pop().context("no queue")?;
        let kick = transport.get_submission_notifier(0);
        let call = transport.get_completion_fd(0);
        Ok(Peer { queue, kick, call, memory, _map: map, _transport: transport })
    }

    /// Reads until the time is over, then takes the requests in flight back.
    pub(crate) fn run(&mut self, load: &Load) -> Result<Results> {
        let mut ran = Results::default();
        let mut offsets = Offsets::default();
        let mut idle: Vec<usize> = (0..usize::from(load.depth)).collect();
        self.queue.set_used_notif_enabled(false);
        let start = Instant::now();
        let mut over = false;
        loop {
            if !over && !idle.is_empty() {
                for slot in idle.drain(..) {
                    // SAFETY: each slot is a block of its own in the memory and has one request at a time.
                    // The memory stays mapped as long as the queue exists.
                    unsafe {
                        self.queue.read_raw(offsets.next(), self.memory.add(slot * BLOCK), BLOCK, slot)?;
                    }
                }
                if self.queue.avail_notif_needed() {
                    self.kick.notify()?;
                    ran.kicks += 1;
                }
            }
            for completion in self.queue.completions() {
                ensure!(completion.ret == 0, "a read failed: {}", completion.ret);
                idle.push(completion.context);
                ran.requests += 1;
            }
            if idle.is_empty() {
                self.pause(load.sleep)?;
            } else if !over {
                over = start.elapsed() >= load.time;
            } else if idle.len() == usize::from(load.depth) {
                ran.time = start.elapsed();
                return Ok(ran);
            }
        }
    }

    /// Waits after an empty look at the ring. Enables calls only before a sleep, which is the least that
    /// this crate needs.
    fn pause(&mut self, sleep: bool) -> Result<()> {
        if !sleep {
            std::hint::spin_loop();
            return Ok(());
        }
        self.queue.set_used_notif_enabled(true);
        if !self.queue.completions().has_next() {
            // Uses poll, because a back-end may have set O_NONBLOCK on the eventfd for both ends.
            poll(&mut [PollFd::new(&*self.call, PollFlags::IN)], None)?;
            self.call.read()?;
        }
        self.queue.set_used_notif_enabled(false);
        Ok(())
    }
}
