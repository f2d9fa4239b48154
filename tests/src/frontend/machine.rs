//! A machine without a guest: a front-end, its memory and the driver's ends of its queues.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;

use crate::driver::Queue;
use crate::driver::memory::Ram;
use crate::driver::request::{LAYOUTS, Layout, Outcome, Place, Request, pattern};
use crate::frontend::{Frontend, LIMIT};

/// Where its memory begins, as the guest would see it.
pub const RAM_BASE: u64 = 0x4000_0000;
/// The largest request that [`Machine::perform`] has room for.
pub const DATA_LEN_MAX: usize = 256 << 10;

/// How a machine is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many queues.
    pub queues: u16,
    /// The size of each.
    pub size: u16,
    /// EVENT_IDX is negotiated.
    pub event_idx: bool,
    /// INDIRECT_DESC is negotiated, and requests are made so.
    pub indirect: bool,
    /// RING_PACKED is negotiated.
    pub packed: bool,
    /// DISCARD is negotiated.
    pub discard: bool,
    /// Bytes of memory.
    pub memory: u64,
    /// Its driver has been using the device already, and the front-end comes back to it: as QEMU, it does not read the
    /// configuration space then.
    pub returns: bool,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape::LINUX
    }
}

impl Shape {
    /// What a Linux guest negotiates, but for indirect descriptors; one queue.
    pub const LINUX: Shape = Shape {
        queues: 1,
        size: 256,
        event_idx: true,
        indirect: false,
        packed: false,
        discard: false,
        memory: 64 << 20,
        returns: false,
    };

    /// The features that such a machine wants.
    pub fn features(&self) -> Features {
        let mut features = Features::VERSION_1
            | Features::from_bits_retain(
                (BlkFeatures::FLUSH | BlkFeatures::MQ | BlkFeatures::CONFIG_WCE).bits(),
            );
        features.set(Features::from_bits_retain(BlkFeatures::DISCARD.bits()), self.discard);
        features.set(Features::EVENT_IDX, self.event_idx);
        features.set(Features::INDIRECT_DESC, self.indirect);
        features.set(Features::RING_PACKED, self.packed);
        features
    }
}

/// A machine.
pub struct Machine {
    /// The connection.
    pub frontend: Frontend,
    /// The memory, where the rings and requests are.
    pub ram: Ram,
    /// The queues.
    pub queues: Vec<Queue>,
    /// Memory for one request on each queue.
    pub places: Vec<Place>,
    shape: Shape,
}

impl Machine {
    /// Connects, and starts all queues.
    ///
    /// # Errors
    /// The back-end refuses something that it must not.
    pub fn start(socket: &Path, shape: &Shape) -> Result<Machine> {
        let mut machine = Machine::prepare(socket, shape)?;
        for queue in &machine.queues {
            machine.frontend.start(queue)?;
        }
        Ok(machine)
    }

    /// Connects, negotiates and shares memory, and makes queues that the back-end does not know of yet.
    ///
    /// # Errors
    /// The back-end refuses something that it must not.
    pub fn prepare(socket: &Path, shape: &Shape) -> Result<Machine> {
        let mut frontend = Frontend::connect(socket)?;
        frontend.negotiate(shape.features())?;
        if !shape.returns {
            frontend.config()?;
        }
        let features = frontend.features();
        let mut ram = Ram::new(RAM_BASE, shape.memory)?;
        frontend.share(&[&ram])?;
        let queues = (0..shape.queues).map(|index| Queue::new(&mut ram, index, shape.size, features));
        let queues = queues.collect::<Result<Vec<_>>>()?;
        let places = queues.iter().map(|_| Place::new(&mut ram, DATA_LEN_MAX)).collect::<Result<_>>()?;
        Ok(Machine { frontend, ram, queues, places, shape: *shape })
    }

    /// Moves to another back-end, as a virtual machine that is migrated there: the same memory and rings, and a front-end that
    /// has yet to start them. Returns the one that it had.
    ///
    /// # Errors
    /// The back-end refuses something that it must not.
    pub fn move_to(&mut self, socket: &Path) -> Result<Frontend> {
        let mut frontend = Frontend::connect(socket)?;
        frontend.negotiate(self.shape.features())?;
        frontend.config()?;
        frontend.share(&[&self.ram])?;
        Ok(std::mem::replace(&mut self.frontend, frontend))
    }

    /// Starts all queues where they stopped.
    ///
    /// # Errors
    /// The back-end refuses.
    pub fn resume(&mut self) -> Result<()> {
        self.queues.iter().try_for_each(|queue| self.frontend.start(queue))
    }

    /// How it was made.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Performs one request on a queue, in a layout, sleeping until the device calls.
    ///
    /// # Errors
    /// It does not come back.
    pub fn perform(&mut self, queue: u16, request: &Request, layout: Layout) -> Result<Outcome> {
        let (ram, indirect) = (&self.ram, self.shape.indirect);
        let place = &self.places[usize::from(queue)];
        perform(ram, &mut self.queues[usize::from(queue)], place, indirect, request, layout)
    }

    /// Puts a request into a queue, in the usual layout, and does not wait for it.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn submit(&mut self, queue: u16, request: &Request) -> Result<()> {
        let index = usize::from(queue);
        let place = &self.places[index];
        let buffers = place.lay_out(&self.ram, request, Layout::Usual)?;
        self.queues[index].submit(&self.ram, &buffers, self.shape.indirect.then(|| place.table()))?;
        self.queues[index].flush();
        Ok(())
    }

    /// Waits for the one request of a queue, sleeping until the device calls; its status.
    ///
    /// # Errors
    /// It does not come back.
    pub fn status(&mut self, queue: u16, request: &Request) -> Result<u8> {
        let index = usize::from(queue);
        let used = self.queues[index].wait_used(Instant::now() + LIMIT)?;
        Ok(self.places[index].outcome(&self.ram, request, used.len)?.status)
    }

    /// Writes to the disk.
    ///
    /// # Errors
    /// It fails.
    pub fn write(&mut self, queue: u16, sector: u64, data: &[u8]) -> Result<()> {
        let outcome = self.perform(queue, &Request::write(sector, data), Layout::Usual)?;
        ensure!(outcome.status == blk::S_OK, "write of sector {sector}: status {}", outcome.status);
        Ok(())
    }

    /// Reads from the disk.
    ///
    /// # Errors
    /// It fails.
    pub fn read(&mut self, queue: u16, sector: u64, len: usize) -> Result<Vec<u8>> {
        let outcome = self.perform(queue, &Request::read(sector, len), Layout::Usual)?;
        ensure!(outcome.status == blk::S_OK, "read of sector {sector}: status {}", outcome.status);
        Ok(outcome.data)
    }

    /// Stops all queues.
    ///
    /// # Errors
    /// The back-end refuses.
    pub fn stop(&mut self) -> Result<()> {
        for queue in &mut self.queues {
            self.frontend.stop(queue)?;
        }
        Ok(())
    }
}

/// Performs one request on a queue, which has nothing else in flight, sleeping until the device calls.
///
/// # Errors
/// It does not come back.
pub fn perform(
    ram: &Ram,
    queue: &mut Queue,
    place: &Place,
    indirect: bool,
    request: &Request,
    layout: Layout,
) -> Result<Outcome> {
    let buffers = place.lay_out(ram, request, layout)?;
    let head = queue.submit(ram, &buffers, indirect.then(|| place.table()))?;
    queue.flush();
    let used = queue.wait_used(Instant::now() + LIMIT).with_context(|| request.to_string())?;
    ensure!(used.head == head, "chain {} comes back, {head} was submitted", used.head);
    Ok(place.outcome(ram, request, used.len)?)
}

/// Writes to the sectors from `sector` on, reads back and compares, again and again until `enough`, which is told how often
/// that was.
///
/// # Errors
/// A request fails, or what is read is not what was written.
pub fn hammer(
    ram: &Ram,
    queue: &mut Queue,
    place: &Place,
    indirect: bool,
    sector: u64,
    enough: impl Fn(u64) -> bool,
) -> Result<()> {
    let mut rounds = 0;
    // Most layouts of LAYOUTS take more descriptors than a small ring has.
    let layouts = LAYOUTS.iter().filter(|layout| indirect || !matches!(layout, Layout::Pieces(_)));
    for layout in layouts.cycle() {
        let data = pattern(sector << 32 | rounds, 4096);
        let wrote = perform(ram, queue, place, indirect, &Request::write(sector, &data), *layout)?;
        ensure!(wrote.status == blk::S_OK, "write {rounds}: status {}", wrote.status);
        let read = perform(ram, queue, place, indirect, &Request::read(sector, data.len()), *layout)?;
        ensure!(read.status == blk::S_OK, "read {rounds}: status {}", read.status);
        ensure!(read.data == data, "round {rounds}: what is read is not what was written");
        rounds += 1;
        if enough(rounds) {
            break;
        }
    }
    Ok(())
}
