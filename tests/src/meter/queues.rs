//! Behaviours of a guest with the queues of a disk.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use kickless_spec::blk::{self, Segment};
use kickless_spec::ring::DESC_F_INDIRECT;
use kickless_testing::hostile_nbd::{EXPORT_FLAGS, HostileNbd, hello_of, read_request, try_greet};
use kickless_vhost_user::FrontendMessage as Message;
use rustix::fs::{OFlags, fcntl_setfl};
use zerocopy::IntoBytes;

use crate::driver::request::{Layout, Request};
use crate::driver::{Eventfd, Queue, desc};
use crate::frontend::machine::{Machine, Shape};
use crate::frontend::{LIMIT, descriptor};
use crate::meter::behaviour::{
    Behaviour, Bound, Deed, Devices, Site, Stage, Step, device, memory_disk, text,
};

/// The behaviours.
pub const TABLE: &[Behaviour] = &[
    Behaviour {
        name: "64 queues of a remote disk that hangs",
        devices: hanging_disk,
        start: |stage| hanging(stage, stage.scale.pick(4, 64)),
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "250 queues of a remote disk that hangs",
        devices: hanging_disk,
        start: |stage| hanging(stage, stage.scale.pick(8, 250)),
        pause: Duration::from_millis(10),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "requests that take 50 ms",
        devices: |site| file_disk(site, "fault:delay=50ms:"),
        start: |stage| many(stage, SHAPE, 64, |number| Request::read(number % 64, 512), Layout::Usual),
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "kicks of a queue without requests",
        devices: memory_disk,
        start: kicks,
        pause: Duration::from_micros(200),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "a call eventfd that is full and blocks",
        devices: memory_disk,
        start: full_call,
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "chains of as many descriptors as the ring has",
        devices: memory_disk,
        start: |stage| many(stage, DIRECT, 1, |_| Request::read(0, 1000 * 512), Layout::Pieces(512)),
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "indirect tables of the greatest size",
        devices: memory_disk,
        start: |stage| many(stage, INDIRECT, 1, |_| Request::read(0, 14 * 512), Layout::Pieces(8)),
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "discards of the most segments",
        devices: |site| file_disk(site, ""),
        start: |stage| ranges(stage, blk::T_DISCARD),
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "write-zeroes of the most segments",
        devices: |site| file_disk(site, ""),
        start: |stage| ranges(stage, blk::T_WRITE_ZEROES),
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "write-zeroes of the whole disk in memory",
        devices: memory_disk,
        start: |stage| ranges(stage, blk::T_WRITE_ZEROES),
        pause: Duration::from_millis(20),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "rings that break",
        devices: memory_disk,
        start: broken_rings,
        pause: Duration::from_millis(5),
        bound: Bound::Strict,
    },
    Behaviour {
        name: "requests that are wrong",
        devices: memory_disk,
        start: |stage| {
            let wrong = |number| match number % 3 {
                0 => Request { kind: 99, ..Request::read(0, 512) },
                1 => Request::read(u64::MAX / 512, 512),
                _ => Request::write(0, &[1; 511]),
            };
            many(stage, SHAPE, 32, wrong, Layout::Usual)
        },
        pause: Duration::from_millis(1),
        bound: Bound::Strict,
    },
];

const SHAPE: Shape = Shape { memory: 32 << 20, ..Shape::LINUX };
const DIRECT: Shape = Shape { size: 1024, memory: 8 << 20, ..Shape::LINUX };
const INDIRECT: Shape = Shape { indirect: true, ..DIRECT };

/// Starts a server that takes requests and answers none, and connects a disk to it.
fn hanging_disk(site: &mut Site) -> Result<Devices> {
    let server = HostileNbd::start(usize::MAX, |_, stream| {
        if try_greet(stream, &hello_of(false, 1 << 30, EXPORT_FLAGS)).is_ok() {
            while read_request(stream).is_some() {}
        }
    });
    let uri = server.export("", 1);
    site.keep(server);
    Ok(device("attacker", format!("blk-file = '{uri}'\nnum-queues = 250")))
}

fn file_disk(site: &mut Site, rules: &str) -> Result<Devices> {
    let path = site.dir.path().join("attacker.img");
    File::create_new(&path)?.set_len(256 << 20)?;
    Ok(device("attacker", format!("blk-file = '{rules}{}'", text(&path))))
}

/// Fills all queues with requests that are never answered.
fn hanging(stage: &Stage<'_>, queues: u16) -> Result<Step> {
    // More than the disk has in flight, so that queues wait.
    const REQUESTS: u64 = 16;
    let shape = Shape { queues, size: 64, memory: 256 << 20, ..Shape::LINUX };
    let mut machine = stage.machine("attacker", &shape)?;
    let mut is_first = true;
    Ok(Box::new(move || {
        for queue in 0..queues {
            ensure!(machine.queues[usize::from(queue)].used_ready() == 0, "a request is answered");
            for request in (0..REQUESTS).filter(|_| is_first) {
                machine.submit(queue, &Request::read(8 * request, 4096))?;
            }
        }
        let done = if is_first { u64::from(queues) * REQUESTS } else { 0 };
        is_first = false;
        Ok(Deed::of(done))
    }))
}

/// Submits this number of requests together in each step, and waits until all are done. They share their
/// memory.
fn many(
    stage: &Stage<'_>,
    shape: Shape,
    count: u64,
    request: fn(u64) -> Request,
    layout: Layout,
) -> Result<Step> {
    let shape = Shape { memory: shape.memory.max(16 << 20), ..shape };
    let mut machine = stage.machine("attacker", &shape)?;
    let memory: Vec<_> = (0..count.min(32))
        .map(|_| crate::driver::request::RequestMemory::new(&mut machine.ram, 512 << 10))
        .collect::<Result<_>>()?;
    Ok(Box::new(move || {
        // The closure owns the connection as well.
        let machine = &mut machine;
        let deadline = Instant::now() + LIMIT;
        let queue = &mut machine.queues[0];
        for number in 0..count {
            let place = &memory[number as usize % memory.len()];
            let buffers = place.lay_out(&machine.ram, &request(number), layout)?;
            let table = shape.indirect.then(|| place.table());
            queue.submit(&machine.ram, &buffers, table)?;
        }
        queue.flush();
        for _ in 0..count {
            queue.wait_used(deadline)?;
        }
        Ok(Deed::of(count))
    }))
}

fn kicks(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &SHAPE)?;
    Ok(Box::new(move || {
        // The closure owns the connection as well.
        let machine = &mut machine;
        (0..64).for_each(|_| machine.queues[0].kick());
        Ok(Deed::of(64))
    }))
}

fn full_call(stage: &Stage<'_>) -> Result<Step> {
    let shape = Shape { event_idx: false, ..SHAPE };
    let mut machine = stage.machine("attacker", &shape)?;
    let full = Eventfd::new()?;
    rustix::io::write(full.as_fd(), &(u64::MAX - 1).to_ne_bytes())?;
    machine.frontend.order(&Message::SetVringCall(descriptor(&machine.queues[0], full.as_fd())?))?;
    Ok(Box::new(move || {
        // The daemon may have set O_NONBLOCK.
        fcntl_setfl(full.as_fd(), OFlags::empty())?;
        for sector in 0..16 {
            machine.submit(0, &Request::read(sector, 512))?;
            let deadline = Instant::now() + LIMIT;
            while machine.queues[0].take_used()?.is_none() {
                ensure!(Instant::now() < deadline, "a request is not answered");
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(Deed::of(16))
    }))
}

/// Sends requests with as many ranges as the device takes. Together they have as many sectors as it takes.
fn ranges(stage: &Stage<'_>, kind: u32) -> Result<Step> {
    let mut machine = stage.machine("attacker", &Shape { discard: true, ..SHAPE })?;
    let config = machine.frontend.config()?;
    let (segments, sectors) = match kind {
        blk::T_DISCARD => (config.max_discard_seg.get(), config.max_discard_sectors.get()),
        _ => (config.max_write_zeroes_seg.get(), config.max_write_zeroes_sectors.get()),
    };
    ensure!(segments > 0 && sectors > 0, "the disk does not take such requests");
    let each = u64::from(sectors).min(config.capacity.get() / u64::from(segments)) / 8 * 8;
    let all: Vec<Segment> = (0..u64::from(segments))
        .map(|number| Segment {
            sector: (number * each).into(),
            num_sectors: (each as u32).into(),
            flags: 0.into(),
        })
        .collect();
    let request = Request { kind, ..Request::write(0, all.as_bytes()) };
    Ok(Box::new(move || {
        machine.submit(0, &request)?;
        match machine.status(0, &request)? {
            blk::S_OK => Ok(Deed::of(1)),
            status => bail!("{segments} ranges of {each} sectors: status {status}"),
        }
    }))
}

/// Breaks a ring in each step, and sets up another.
fn broken_rings(stage: &Stage<'_>) -> Result<Step> {
    let mut machine = stage.machine("attacker", &Shape { size: 64, memory: 64 << 20, ..Shape::LINUX })?;
    let mut steps = 0u64;
    Ok(Box::new(move || {
        let Machine { queues, request_memory, ram, frontend, .. } = &mut machine;
        match steps % 3 {
            0 => queues[0].offer(u16::MAX),
            1 => {
                queues[0].write_desc(0, &desc(request_memory[0].table(), 16, DESC_F_INDIRECT, 0));
                queues[0].offer(0);
            }
            _ => queues[0].set_avail_idx(1000),
        }
        steps += 1;
        if !steps.is_multiple_of(3) {
            queues[0].flush();
        }
        queues[0].kick();
        ensure!(queues[0].err().wait(Instant::now() + LIMIT)?, "the ring does not break");
        frontend.stop(&mut queues[0])?;
        queues[0] = Queue::new(ram, 0, 64, frontend.features())?;
        frontend.start(&queues[0])?;
        Ok(Deed::of(1))
    }))
}
