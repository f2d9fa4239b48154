//! A machine without a guest: a front-end, guest memory and the driver's ends of the queues.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;

use crate::driver::Queue;
use crate::driver::memory::Ram;
use crate::driver::request::{LAYOUTS, Layout, Outcome, Request, RequestMemory};
use crate::frontend::{Frontend, LIMIT};
use kickless_testing::pattern;

/// Guest-physical address of the memory.
pub const RAM_BASE: u64 = 0x4000_0000;
/// Largest number of data bytes in a request for [`Machine::perform`].
pub const DATA_LEN_MAX: usize = 256 << 10;

/// Options of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of queues.
    pub queues: u16,
    /// Size of each queue.
    pub size: u16,
    /// Negotiates EVENT_IDX.
    pub event_idx: bool,
    /// Negotiates INDIRECT_DESC and uses indirect tables.
    pub indirect: bool,
    /// Negotiates RING_PACKED.
    pub packed: bool,
    /// Negotiates DISCARD and WRITE_ZEROES.
    pub discard: bool,
    /// Bytes of memory.
    pub memory: u64,
    /// The driver has initialised the device already, and its front-end reconnects. Like QEMU, the front-end
    /// does not read the configuration space again.
    pub returns: bool,
    /// Protocol features that the front-end negotiates beside the usual ones.
    pub protocol: ProtocolFeatures,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape::LINUX
    }
}

impl Shape {
    /// The features that a Linux guest negotiates, without indirect descriptors; one queue.
    pub const LINUX: Shape = Shape {
        queues: 1,
        size: 256,
        event_idx: true,
        indirect: false,
        packed: false,
        discard: false,
        memory: 64 << 20,
        returns: false,
        protocol: ProtocolFeatures::empty(),
    };

    /// Returns the features that such a machine wants.
    pub fn features(&self) -> Features {
        let mut features = Features::VERSION_1
            | Features::from_bits_retain(
                (BlkFeatures::FLUSH | BlkFeatures::MQ | BlkFeatures::CONFIG_WCE).bits(),
            );
        let discard = BlkFeatures::DISCARD | BlkFeatures::WRITE_ZEROES;
        features.set(Features::from_bits_retain(discard.bits()), self.discard);
        features.set(Features::EVENT_IDX, self.event_idx);
        features.set(Features::INDIRECT_DESC, self.indirect);
        features.set(Features::RING_PACKED, self.packed);
        features
    }
}

/// A front-end with memory and queues.
pub struct Machine {
    /// The connection.
    pub frontend: Frontend,
    /// The memory, with the rings and the requests.
    pub ram: Ram,
    /// The queues.
    pub queues: Vec<Queue>,
    /// Memory for one request per queue.
    pub request_memory: Vec<RequestMemory>,
    shape: Shape,
}

impl Machine {
    /// Connects and starts all queues.
    ///
    /// # Errors
    /// The back-end refuses a message that it must accept.
    pub fn start(socket: &Path, shape: &Shape) -> Result<Machine> {
        let mut machine = Machine::prepare(socket, shape)?;
        for queue in &machine.queues {
            machine.frontend.start(queue)?;
        }
        Ok(machine)
    }

    /// Connects, negotiates, shares memory and creates queues. The back-end does not know the queues yet.
    ///
    /// # Errors
    /// The back-end refuses a message that it must accept.
    pub fn prepare(socket: &Path, shape: &Shape) -> Result<Machine> {
        let mut frontend = Frontend::connect(socket)?;
        frontend.negotiate_with(shape.features(), shape.protocol)?;
        if !shape.returns {
            frontend.config()?;
        }
        let features = frontend.features();
        let mut ram = Ram::new(RAM_BASE, shape.memory)?;
        frontend.share(&[&ram])?;
        let queues = (0..shape.queues).map(|index| Queue::new(&mut ram, index, shape.size, features));
        let queues = queues.collect::<Result<Vec<_>>>()?;
        let request_memory =
            queues.iter().map(|_| RequestMemory::new(&mut ram, DATA_LEN_MAX)).collect::<Result<_>>()?;
        Ok(Machine { frontend, ram, queues, request_memory, shape: *shape })
    }

    /// Connects to another back-end with the same memory and rings, as a migrated virtual machine does.
    /// Does not start the rings. Returns the old front-end.
    ///
    /// # Errors
    /// The back-end refuses a message that it must accept.
    pub fn move_to(&mut self, socket: &Path) -> Result<Frontend> {
        let mut frontend = Frontend::connect(socket)?;
        frontend.negotiate_with(self.shape.features(), self.shape.protocol)?;
        frontend.config()?;
        frontend.share(&[&self.ram])?;
        Ok(std::mem::replace(&mut self.frontend, frontend))
    }

    /// Starts all queues where they stopped.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn resume(&mut self) -> Result<()> {
        self.queues.iter().try_for_each(|queue| self.frontend.start(queue))
    }

    /// Returns the options of this machine.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Performs one request in this layout. Sleeps until the device calls.
    ///
    /// # Errors
    /// The request does not complete.
    pub fn perform(&mut self, queue: u16, request: &Request, layout: Layout) -> Result<Outcome> {
        let (ram, indirect) = (&self.ram, self.shape.indirect);
        let memory = &self.request_memory[usize::from(queue)];
        perform(ram, &mut self.queues[usize::from(queue)], memory, indirect, request, layout)
    }

    /// Submits a request in the usual layout, without waiting for it.
    ///
    /// # Errors
    /// The queue has no room.
    pub fn submit(&mut self, queue: u16, request: &Request) -> Result<()> {
        let index = usize::from(queue);
        let memory = &self.request_memory[index];
        let buffers = memory.lay_out(&self.ram, request, Layout::Usual)?;
        self.queues[index].submit(&self.ram, &buffers, self.shape.indirect.then(|| memory.table()))?;
        self.queues[index].flush();
        Ok(())
    }

    /// Waits for the one request in flight on a queue and returns its status. Sleeps until the device
    /// calls.
    ///
    /// # Errors
    /// The request does not complete.
    pub fn status(&mut self, queue: u16, request: &Request) -> Result<u8> {
        Ok(self.outcome(queue, request)?.status)
    }

    /// Waits for the one request in flight on a queue and returns the answer. Sleeps until the device calls.
    ///
    /// # Errors
    /// The request does not complete.
    pub fn outcome(&mut self, queue: u16, request: &Request) -> Result<Outcome> {
        let index = usize::from(queue);
        let used =
            self.queues[index].wait_used(Instant::now() + LIMIT).with_context(|| request.to_string())?;
        Ok(self.request_memory[index].outcome(&self.ram, request, used.len)?)
    }

    /// Writes `data` to the disk.
    ///
    /// # Errors
    /// The write fails.
    pub fn write(&mut self, queue: u16, sector: u64, data: &[u8]) -> Result<()> {
        let outcome = self.perform(queue, &Request::write(sector, data), Layout::Usual)?;
        ensure!(outcome.status == blk::S_OK, "write of sector {sector}: status {}", outcome.status);
        Ok(())
    }

    /// Reads from the disk.
    ///
    /// # Errors
    /// The read fails.
    pub fn read(&mut self, queue: u16, sector: u64, len: usize) -> Result<Vec<u8>> {
        let outcome = self.perform(queue, &Request::read(sector, len), Layout::Usual)?;
        ensure!(outcome.status == blk::S_OK, "read of sector {sector}: status {}", outcome.status);
        Ok(outcome.data)
    }

    /// Stops all queues.
    ///
    /// # Errors
    /// The back-end refuses it.
    pub fn stop(&mut self) -> Result<()> {
        for queue in &mut self.queues {
            self.frontend.stop(queue)?;
        }
        Ok(())
    }
}

/// Performs one request on a queue with nothing else in flight. Sleeps until the device calls.
///
/// # Errors
/// The request does not complete.
pub fn perform(
    ram: &Ram,
    queue: &mut Queue,
    memory: &RequestMemory,
    indirect: bool,
    request: &Request,
    layout: Layout,
) -> Result<Outcome> {
    let buffers = memory.lay_out(ram, request, layout)?;
    let head = queue.submit(ram, &buffers, indirect.then(|| memory.table()))?;
    queue.flush();
    let used = queue.wait_used(Instant::now() + LIMIT).with_context(|| request.to_string())?;
    ensure!(used.head == head, "chain {} comes back, {head} was submitted", used.head);
    Ok(memory.outcome(ram, request, used.len)?)
}

/// Writes to the sectors from `sector` on, reads them back and compares. Repeats this until `enough`
/// returns true for the number of rounds.
///
/// # Errors
/// A request fails, or reads other data than was written.
pub fn write_and_verify(
    ram: &Ram,
    queue: &mut Queue,
    memory: &RequestMemory,
    indirect: bool,
    sector: u64,
    enough: impl Fn(u64) -> bool,
) -> Result<()> {
    let mut rounds = 0;
    // Most other layouts need more descriptors than a small ring has.
    let layouts = LAYOUTS.iter().filter(|layout| indirect || !matches!(layout, Layout::Pieces(_)));
    for layout in layouts.cycle() {
        let data = pattern(sector << 32 | rounds, 4096);
        let wrote = perform(ram, queue, memory, indirect, &Request::write(sector, &data), *layout)?;
        ensure!(wrote.status == blk::S_OK, "write {rounds}: status {}", wrote.status);
        let read = perform(ram, queue, memory, indirect, &Request::read(sector, data.len()), *layout)?;
        ensure!(read.status == blk::S_OK, "read {rounds}: status {}", read.status);
        ensure!(read.data == data, "round {rounds}: read other bytes than it wrote");
        rounds += 1;
        if enough(rounds) {
            break;
        }
    }
    Ok(())
}
