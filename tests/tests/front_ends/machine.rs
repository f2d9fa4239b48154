//! A machine without a guest, as both front-ends have one.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Instant;

use kickless_memory::{Gpa, UserAddr};
use kickless_spec::blk;
use kickless_spec::features::Features;
use kickless_testing::pattern;
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Outcome, Request, RequestMemory};
use kickless_tests::driver::{Eventfd, Queue};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::machine::{DATA_LEN_MAX, RAM_BASE};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use vhost::vhost_user::Frontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Entries of each ring. Cloud Hypervisor's default is 128, that of crosvm 256.
pub(super) const SIZE: u16 = 256;
/// Bytes of memory: rings, and a request for each.
const MEMORY: u64 = 16 << 20;

/// A connection, the memory, and the rings.
pub(super) struct Machine {
    pub(super) vu: Frontend,
    pub(super) ram: Ram,
    pub(super) queues: Vec<Queue>,
    pub(super) requests: Vec<RequestMemory>,
    /// Kick and call of each ring, as the front-end has them.
    events: Vec<[EventFd; 2]>,
}

impl Machine {
    /// Makes the memory and the rings. The back-end knows nothing of them yet.
    pub(super) fn new(vu: Frontend, queues: u16, features: u64) -> Machine {
        let mut ram = Ram::new(RAM_BASE, MEMORY).unwrap();
        let features = Features::from_bits_retain(features);
        let (mut events, mut made) = (Vec::new(), Vec::new());
        for index in 0..queues {
            let mut queue = Queue::new(&mut ram, index, SIZE, features).unwrap();
            let [(kick, driver_kick), (call, driver_call)] = [(); 2].map(|()| event());
            queue.replace_kick(driver_kick);
            queue.replace_call(driver_call);
            events.push([kick, call]);
            made.push(queue);
        }
        let requests = made.iter().map(|_| RequestMemory::new(&mut ram, DATA_LEN_MAX).unwrap()).collect();
        Machine { vu, ram, queues: made, requests, events }
    }

    /// Sends SET_MEM_TABLE.
    pub(super) fn share(&self) {
        self.vu.set_mem_table(&[region(&self.ram)]).unwrap();
    }

    /// Describes a ring. With `logs`, the back-end logs its used ring.
    pub(super) fn addresses(&self, index: usize, logs: bool) -> VringConfigData {
        let [desc_table_addr, avail_ring_addr, used_ring_addr] = self.queues[index].user_addresses();
        VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: logs.into(),
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: logs.then(|| self.ram.map().gpa_of(UserAddr(used_ring_addr)).unwrap().0),
        }
    }

    /// Sends the addresses, the base and the eventfds of a ring.
    pub(super) fn set_ring(&self, index: usize, base: u16) {
        self.vu.set_vring_addr(index, &self.addresses(index, false)).unwrap();
        self.vu.set_vring_base(index, base).unwrap();
        let [kick, call] = &self.events[index];
        self.vu.set_vring_call(index, call).unwrap();
        self.vu.set_vring_kick(index, kick).unwrap();
    }

    /// Makes a request available.
    pub(super) fn submit(&mut self, index: usize, request: &Request) {
        let buffers = self.requests[index].lay_out(&self.ram, request, Layout::Usual).unwrap();
        self.queues[index].submit(&self.ram, &buffers, None).unwrap();
        self.queues[index].flush();
    }

    /// Waits for the one request in flight on a ring.
    pub(super) fn outcome(&mut self, index: usize, request: &Request) -> Outcome {
        let used = self.queues[index].wait_used(Instant::now() + LIMIT).unwrap();
        self.requests[index].outcome(&self.ram, request, used.len).unwrap()
    }

    /// Performs a request.
    pub(super) fn perform(&mut self, index: usize, request: &Request) -> Outcome {
        self.submit(index, request);
        let outcome = self.outcome(index, request);
        assert_eq!(outcome.status, blk::S_OK, "{request}");
        outcome
    }

    /// Writes and reads through each ring, and compares.
    pub(super) fn check_all(&mut self, seed: u64) {
        for index in 0..self.queues.len() {
            let (sector, data) = (64 * index as u64, pattern(seed + index as u64, 8192));
            self.perform(index, &Request::write(sector, &data));
            assert!(self.perform(index, &Request::read(sector, data.len())).data == data, "ring {index}");
        }
    }

    /// Returns the page of the data of requests of a ring.
    pub(super) fn data(&self, index: usize) -> Gpa {
        self.requests[index].data()
    }
}

/// Describes memory for SET_MEM_TABLE and ADD_MEM_REG.
pub(super) fn region(ram: &Ram) -> VhostUserMemoryRegionInfo {
    let region = ram.region();
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest_addr,
        memory_size: region.size,
        userspace_addr: region.user_addr,
        mmap_offset: region.mmap_offset,
        mmap_handle: ram.as_fd().as_raw_fd(),
    }
}

/// Makes an eventfd for the front-end and for the driver.
fn event() -> (EventFd, Eventfd) {
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let again = pidfd_getfd(own, event.as_raw_fd(), PidfdGetfdFlags::empty()).unwrap();
    (event, again.into())
}

/// Connects, for this number of rings.
pub(super) fn connect(socket: &Path, queues: u16) -> Frontend {
    Frontend::connect(socket, queues.into()).unwrap()
}
