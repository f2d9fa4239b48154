//! Behaviours of a front-end with its memory.

use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_memory::Gpa;
use kickless_spec::features::Features;
use kickless_vhost_user::{FrontendMessage as Message, Inflight, LogBase, MemoryRegion};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use crate::driver::Buffer;
use crate::driver::memory::Ram;
use crate::driver::request::{Layout, Request};
use crate::frontend::inflight::InflightBuffer;
use crate::frontend::machine::{Machine, RAM_BASE, Shape};
use crate::frontend::{Answer, LIMIT};
use crate::meter::behaviour::{Behaviour, Bound, Deed, Stage, Step, memory_disk};

const KERNEL: Bound = Bound::Kernel("a page fault in a file waits until a hole is punched");

/// The behaviours.
pub const TABLE: &[Behaviour] = &[
    Behaviour {
        name: "a region of 1 GiB that is removed",
        devices: memory_disk,
        start: |stage| removed_region(stage, stage.scale.pick(16 << 20, 1 << 30)),
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a table with 4 GiB that is replaced",
        devices: memory_disk,
        start: |stage| replaced_table(stage, stage.scale.pick(16 << 20, 4 << 30)),
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a session with 1 GiB that ends",
        devices: memory_disk,
        start: |stage| ended_session(stage, stage.scale.pick(16 << 20, 1 << 30)),
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a log of 2 GiB that is replaced",
        devices: memory_disk,
        start: |stage| replaced_log(stage, stage.scale.pick(16 << 20, 2 << 30)),
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "an in-flight buffer of 1 GiB that is replaced",
        devices: memory_disk,
        start: |stage| replaced_buffer(stage, stage.scale.pick(16 << 20, 1 << 30)),
        pause: Duration::from_millis(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a hole of 1 GiB under requests",
        devices: memory_disk,
        start: |stage| punched_hole(stage, stage.scale.pick(16 << 20, 1 << 30)),
        pause: Duration::from_millis(200),
        bound: KERNEL,
    },
    Behaviour {
        name: "memory that is truncated under requests",
        devices: memory_disk,
        start: truncated,
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "memory tables without end",
        devices: memory_disk,
        start: tables,
        pause: Duration::from_millis(2),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "as much address space as one gets",
        devices: memory_disk,
        start: greedy,
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
];

/// The address of the attacker's second region.
const HIGH: u64 = 1 << 40;
const PAGE: u64 = 4096;

/// Creates a file with all its pages.
fn populated(len: u64) -> Result<OwnedFd> {
    let file = memfd_create("populated", MemfdFlags::CLOEXEC)?;
    fallocate(&file, FallocateFlags::empty(), 0, len)?;
    Ok(file)
}

/// A file with all its pages, which is made before the attack. It takes long, so each round has one.
struct Populated(Option<OwnedFd>);

impl Populated {
    fn new(len: u64) -> Result<Populated> {
        Ok(Populated(Some(populated(len)?)))
    }

    /// Does a deed with the file, which the deed drops.
    fn once(&mut self, deed: impl FnOnce(OwnedFd) -> Result<()>) -> Result<Deed> {
        let Some(file) = self.0.take() else { return Ok(Deed::default()) };
        deed(file)?;
        Ok(Deed::of(1))
    }
}

fn region(len: u64) -> MemoryRegion {
    MemoryRegion { guest_addr: HIGH, size: len, user_addr: HIGH, mmap_offset: 0 }
}

/// Reads a block, so that the worker takes up the present memory.
fn touch(machine: &mut Machine) -> Result<()> {
    machine.read(0, 0, 512)?;
    Ok(())
}

fn removed_region(stage: &Stage<'_>, len: u64) -> Result<Step> {
    let (mut machine, mut file) = (stage.machine("attacker", &Shape::LINUX)?, Populated::new(len)?);
    Ok(Box::new(move || {
        file.once(|file| {
            machine.frontend.order(&Message::AddMemReg(region(len), file))?;
            touch(&mut machine)?;
            machine.frontend.remove(region(len))?;
            touch(&mut machine)
        })
    }))
}

fn replaced_table(stage: &Stage<'_>, len: u64) -> Result<Step> {
    let (mut machine, mut file) = (stage.machine("attacker", &Shape::LINUX)?, Populated::new(len)?);
    Ok(Box::new(move || {
        file.once(|file| {
            let both = vec![machine.ram.region_and_file()?, (region(len), file)];
            machine.frontend.order(&Message::SetMemTable(both))?;
            touch(&mut machine)?;
            machine.frontend.share(&[&machine.ram])?;
            touch(&mut machine)
        })
    }))
}

fn ended_session(stage: &Stage<'_>, len: u64) -> Result<Step> {
    let (socket, mut file) = (stage.socket("attacker"), Populated::new(len)?);
    Ok(Box::new(move || {
        file.once(|file| {
            let mut machine = Machine::start(&socket, &Shape::LINUX)?;
            machine.frontend.order(&Message::AddMemReg(region(len), file))?;
            touch(&mut machine)
        })
    }))
}

fn log(len: u64, file: OwnedFd) -> Message {
    Message::SetLogBase(LogBase::Shared { mmap_size: len, mmap_offset: 0, fd: Some(file) })
}

fn replaced_log(stage: &Stage<'_>, len: u64) -> Result<Step> {
    const SMALL: u64 = 1 << 20;
    let mut machine = stage.machine("attacker", &Shape::LINUX)?;
    machine.frontend.order(&log(SMALL, populated(SMALL)?))?;
    let features = machine.frontend.features() | Features::LOG_ALL;
    machine.frontend.set_features(features)?;
    let mut file = Populated::new(len)?;
    Ok(Box::new(move || {
        file.once(|file| {
            machine.frontend.order(&log(len, file))?;
            touch(&mut machine)?;
            machine.frontend.order(&log(SMALL, populated(SMALL)?))?;
            touch(&mut machine)
        })
    }))
}

fn replaced_buffer(stage: &Stage<'_>, len: u64) -> Result<Step> {
    let mut machine = Machine::prepare(&stage.socket("attacker"), &Shape::LINUX)?;
    let (small, mut file) = (machine.get_and_set_inflight()?, Populated::new(len)?);
    Ok(Box::new(move || {
        file.once(|file| {
            let described = Inflight { mmap_size: len, ..small.described };
            machine.frontend.set_inflight(&InflightBuffer { described, file })?;
            machine.resume()?;
            touch(&mut machine)?;
            machine.stop()?;
            machine.frontend.set_inflight(&small)
        })
    }))
}

/// Punches a hole while requests have their data in it.
fn punched_hole(stage: &Stage<'_>, len: u64) -> Result<Step> {
    let mut machine = stage.machine("attacker", &Shape::LINUX)?;
    let file = populated(len)?;
    machine.frontend.order(&Message::AddMemReg(region(len), file.try_clone()?))?;
    Ok(Box::new(move || {
        fallocate(&file, FallocateFlags::empty(), 0, len)?;
        let file = file.as_fd();
        let done = thread::scope(|scope| {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punch = scope.spawn(move || fallocate(file, flags, 0, len));
            let (mut done, mut page) = (0, 0);
            while !punch.is_finished() || done == 0 {
                page = (page + 997) % (len / PAGE);
                read_into(&mut machine, HIGH + page * PAGE)?;
                done += 1;
            }
            punch.join().ok().context("the thread panicked")??;
            anyhow::Ok(done)
        })?;
        Ok(Deed::of(done))
    }))
}

/// Reads a block into memory that this process has not mapped.
fn read_into(machine: &mut Machine, addr: u64) -> Result<()> {
    let request = Request::read(0, PAGE as usize);
    let mut buffers = machine.request_memory[0].lay_out(&machine.ram, &request, Layout::Usual)?;
    let data = buffers.get_mut(1).context("no data")?;
    *data = Buffer { addr: Gpa(addr), ..*data };
    machine.queues[0].submit(&machine.ram, &buffers, None)?;
    machine.queues[0].flush();
    machine.queues[0].wait_used(Instant::now() + LIMIT)?;
    Ok(())
}

fn truncated(stage: &Stage<'_>) -> Result<Step> {
    let socket = stage.socket("attacker");
    kickless_memory::fault::guard()?;
    Ok(Box::new(move || {
        let mut machine = Machine::start(&socket, &Shape { memory: 4 << 20, ..Shape::LINUX })?;
        touch(&mut machine)?;
        machine.ram.truncate(Gpa(RAM_BASE))?;
        let queue = &mut machine.queues[0];
        let start = Instant::now();
        while queue.err().take() == 0 {
            queue.kick();
            ensure!(start.elapsed() < LIMIT, "the queue does not break");
            thread::sleep(Duration::from_micros(200));
        }
        Ok(Deed::of(1))
    }))
}

fn tables(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &Shape { memory: 4 << 20, ..Shape::LINUX })?;
    let others: Vec<Ram> = (1..8).map(|number| Ram::new(HIGH * number, 1 << 20)).collect::<Result<_>>()?;
    Ok(Box::new(move || {
        let all: Vec<&Ram> = std::iter::once(&machine.ram).chain(&others).collect();
        machine.frontend.share(&all)?;
        machine.frontend.share(&[&machine.ram])?;
        touch(&mut machine)?;
        Ok(Deed::of(2))
    }))
}

/// Adds regions until one is refused, and ends the session.
fn greedy(stage: &Stage<'_>) -> Result<Step> {
    const LEN: u64 = 1 << 40;
    let socket = stage.socket("attacker");
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, LEN)?;
    Ok(Box::new(move || {
        let mut machine = Machine::start(&socket, &Shape { memory: 4 << 20, ..Shape::LINUX })?;
        let mut done = 0;
        for number in 1..256 {
            let at = number * LEN;
            let region = MemoryRegion { guest_addr: at, user_addr: at, ..region(LEN) };
            match machine.frontend.attempt(&Message::AddMemReg(region, file.try_clone()?))? {
                Answer::Done => done += 1,
                Answer::Refused => break,
                Answer::Dropped => anyhow::bail!("the connection is closed"),
            }
        }
        Ok(Deed::of(done))
    }))
}
