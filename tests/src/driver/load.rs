//! Generates load for benchmarks: a driver that polls and uses little CPU time.
//!
//! It writes the descriptors once. For a request it then writes the sector in the header and an entry of
//! the avail ring. A look at the ring takes all completions, and publishes all their next requests at once.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kickless_memory::{Area, Gpa};
use kickless_spec::blk::{self, Header};
use kickless_spec::ring::Desc;
use zerocopy::little_endian::U64;

use crate::driver::memory::Ram;
use crate::driver::request::UNANSWERED;
use crate::driver::{Buffer, Queue, chain};
use crate::frontend::LIMIT;
use kickless_testing::pattern;

/// Descriptors of a request: header, data, status.
const DESCRIPTORS: u16 = 3;
/// Looks at an empty ring between two looks at the clock.
const SPINS: u32 = 256;
/// Requests between two looks at the clock.
const REQUESTS: u32 = 256;

/// Keeps requests of one kind and size in flight on one queue.
pub struct Load<'q> {
    queue: &'q mut Queue,
    headers: Area,
    statuses: Area,
    depth: u16,
    in_flight: u16,
}

/// The kind of requests of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Requests in flight.
    pub depth: u16,
    /// Bytes of one request.
    pub block: u32,
    /// Whether the requests write. The data compresses to half its size and is the same in each request.
    pub write: bool,
}

/// Counts the requests of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    /// Requests that completed.
    pub requests: u64,
    /// Completed requests with another status than success.
    pub failed: u64,
    /// Kicks that the driver sent.
    pub kicks: u64,
    /// From the first submission to the last completion.
    pub time: Duration,
}

impl Run {
    /// Returns the completed requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.time.as_secs_f64()
    }

    /// Returns the number of kicks per completed request.
    pub fn kicks_per_request(&self) -> f64 {
        self.kicks as f64 / self.requests.max(1) as f64
    }
}

impl<'q> Load<'q> {
    /// Writes the descriptors of the requests. The queue must be idle, and must not be used otherwise
    /// afterwards.
    ///
    /// # Errors
    /// The queue or the memory is too small.
    pub fn prepare(queue: &'q mut Queue, ram: &mut Ram, kind: Kind) -> Result<Load<'q>> {
        let Kind { depth, block, write } = kind;
        ensure!(
            depth > 0 && u32::from(depth) * u32::from(DESCRIPTORS) <= queue.size().into(),
            "queue too small"
        );
        ensure!(queue.in_flight() == 0, "the queue is in use");
        let len = size_of::<Header>() * usize::from(depth);
        let headers_at = ram.take(len, 64)?;
        let headers = ram.area(headers_at, len, 16)?;
        let statuses_at = ram.take(depth.into(), 64)?;
        let statuses = ram.area(statuses_at, depth.into(), 1)?;
        let bytes = half_random(block);
        for slot in 0..depth {
            let data = ram.take(block as usize, 4096)?;
            if write {
                ram.map().write(data, &bytes)?;
            }
            let header_len = size_of::<Header>();
            let of = if write { blk::T_OUT } else { blk::T_IN };
            headers.write(header_len * usize::from(slot), &Header { kind: of.into(), ..Header::default() });
            let buffers = [
                Buffer {
                    addr: Gpa(headers_at.0 + header_len as u64 * u64::from(slot)),
                    len: header_len as u32,
                    writable: false,
                },
                Buffer { addr: data, len: block, writable: !write },
                Buffer { addr: Gpa(statuses_at.0 + u64::from(slot)), len: 1, writable: true },
            ];
            let head = DESCRIPTORS * slot;
            let descriptors: Vec<Desc> = chain(&buffers, (head + 1..).map(Some)).collect();
            for (index, desc) in (head..).zip(&descriptors) {
                queue.write_desc(index, desc);
            }
        }
        queue.disable_calls();
        Ok(Load { queue, headers, statuses, depth, in_flight: 0 })
    }

    /// Keeps all requests in flight for `time`, then waits until they complete. `sector` gives the sector
    /// of each.
    ///
    /// # Errors
    /// Requests stop completing.
    pub fn run(&mut self, time: Duration, sector: impl FnMut() -> u64) -> Result<Run> {
        run(std::slice::from_mut(self), time, sector)
    }

    /// Looks at the ring once and returns the number of completed requests. Submits new ones while `running`.
    #[inline]
    fn look(&mut self, run: &mut Run, running: bool, sector: &mut impl FnMut() -> u64) -> Result<u32> {
        let ready = self.queue.used_ready();
        if ready == 0 {
            return Ok(0);
        }
        for _ in 0..ready {
            let slot = self.take(run)?;
            if running {
                self.submit(slot, sector());
            } else {
                self.in_flight -= 1;
            }
        }
        self.queue.flush();
        self.queue.keep_calls_disabled();
        Ok(u32::from(ready))
    }

    /// Takes the next completed request, which must be there. Returns its slot.
    #[inline]
    fn take(&mut self, run: &mut Run) -> Result<u16> {
        let id = self.queue.used_elem().id.get();
        let slot = id as u16 / DESCRIPTORS;
        ensure!(
            id < (self.depth * DESCRIPTORS).into() && id.is_multiple_of(DESCRIPTORS.into()),
            "chain {id} is not in flight"
        );
        let status: u8 = self.statuses.read(slot.into());
        run.failed += u64::from(status != blk::S_OK);
        Ok(slot)
    }

    #[inline]
    fn submit(&mut self, slot: u16, sector: u64) {
        let at = size_of::<Header>() * usize::from(slot) + std::mem::offset_of!(Header, sector);
        self.headers.write(at, &U64::new(sector));
        self.statuses.write(slot.into(), &UNANSWERED);
        self.queue.offer(DESCRIPTORS * slot);
    }
}

/// Runs several loads with one queue each on this thread, which looks at each queue in turn.
///
/// # Errors
/// Requests stop completing.
pub fn run(loads: &mut [Load<'_>], time: Duration, mut sector: impl FnMut() -> u64) -> Result<Run> {
    let mut run = Run::default();
    let kicks_before = kicks(loads);
    let start = Instant::now();
    for load in &mut *loads {
        for slot in 0..load.depth {
            load.submit(slot, sector());
        }
        load.in_flight = load.depth;
        load.queue.flush();
    }
    let (mut running, mut spins, mut since_clock, mut last) = (true, 0, 0, start);
    while loads.iter().any(|load| load.in_flight > 0) {
        let mut ready = 0;
        for load in &mut *loads {
            ready += load.look(&mut run, running, &mut sector)?;
        }
        if ready == 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins & (SPINS - 1) == 0 {
                ensure!(last.elapsed() < LIMIT, "no request completes");
                running &= start.elapsed() < time;
            }
            continue;
        }
        run.requests += u64::from(ready);
        since_clock += ready;
        if since_clock >= REQUESTS {
            since_clock = 0;
            last = Instant::now();
            running &= last - start < time;
        }
    }
    run.time = start.elapsed();
    run.kicks = kicks(loads) - kicks_before;
    Ok(run)
}

/// Returns the number of kicks of all queues so far.
fn kicks(loads: &[Load<'_>]) -> u64 {
    loads.iter().map(|load| load.queue.kicks()).sum()
}

/// Sends requests at times of their own, to each load in turn. `gap` gives the time from one to the next. A
/// request that finds no free slot is sent when there is one. The device calls for completions, as for a
/// guest, but the driver does not sleep.
///
/// # Errors
/// Requests stop completing.
pub fn run_paced(
    loads: &mut [Load<'_>],
    time: Duration,
    mut gap: impl FnMut() -> Duration,
    mut sector: impl FnMut() -> u64,
) -> Result<Run> {
    let mut run = Run::default();
    let mut free: Vec<Vec<u16>> = loads.iter().map(|load| (0..load.depth).collect()).collect();
    loads.iter_mut().for_each(|load| load.queue.enable_calls());
    let kicks_before = kicks(loads);
    let start = Instant::now();
    let (mut due, mut last, mut next) = (start + gap(), start, 0);
    let mut in_flight = 0;
    loop {
        let now = Instant::now();
        if now - start >= time && in_flight == 0 {
            break;
        }
        while due <= now && due - start < time {
            let Some(slot) = free[next].pop() else { break };
            loads[next].submit(slot, sector());
            loads[next].queue.flush();
            last = if in_flight == 0 { now } else { last };
            in_flight += 1;
            due += gap();
            next = (next + 1) % loads.len();
        }
        for (load, free) in loads.iter_mut().zip(&mut free) {
            let ready = load.queue.used_ready();
            if ready == 0 {
                continue;
            }
            for _ in 0..ready {
                free.push(load.take(&mut run)?);
            }
            load.queue.enable_calls();
            in_flight -= u64::from(ready);
            run.requests += u64::from(ready);
            last = now;
        }
        ensure!(in_flight == 0 || now - last < LIMIT, "no request completes");
    }
    run.time = start.elapsed();
    run.kicks = kicks(loads) - kicks_before;
    loads.iter_mut().for_each(|load| load.queue.disable_calls());
    Ok(run)
}

/// Returns `len` bytes that compress to half: in each block of 4 KiB, one half is random and the other
/// zero.
pub fn half_random(len: u32) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for (number, block) in (0..).zip(bytes.chunks_mut(4096)) {
        let half = block.len() / 2;
        block[..half].copy_from_slice(&pattern(number, half));
    }
    bytes
}

/// Returns the sectors of a disk of `size` bytes in order, in steps of `block` bytes, and starts again at
/// the end.
pub fn next_sectors(size: u64, block: u32) -> impl FnMut() -> u64 {
    let (blocks, sectors) = (size / u64::from(block), u64::from(block) / blk::SECTOR_SIZE);
    let mut number = 0;
    move || {
        number = if number + 1 < blocks { number + 1 } else { 0 };
        number * sectors
    }
}

/// Returns random sectors of a disk of `size` bytes, which are multiples of `block` bytes.
pub fn random_sectors(size: u64, block: u32) -> impl FnMut() -> u64 {
    let (blocks, sectors) = (size / u64::from(block), u64::from(block) / blk::SECTOR_SIZE);
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // Scales by multiplication, because a remainder would cost a division.
        ((u128::from(state) * u128::from(blocks)) >> 64) as u64 * sectors
    }
}
