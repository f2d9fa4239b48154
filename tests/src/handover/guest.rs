//! The guest that uses the disk, with one request in flight on each of its rings.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use kickless_spec::blk::{self, Segment};
use kickless_testing::Stamp;
use zerocopy::IntoBytes;

use crate::driver::request::{Outcome, Request};
use crate::frontend::inflight::InflightBuffer;
use crate::frontend::machine::{Machine, Shape};
use crate::handover::host::QUEUES;
use crate::handover::oracle::{Change, Oracle, SECTOR};

/// A machine with one request in flight on each ring.
pub struct Guest {
    /// The machine.
    pub machine: Machine,
    /// The in-flight buffer, if its front-end keeps one.
    pub inflight: Option<InflightBuffer>,
    keeps_inflight: bool,
    /// It has turned its write cache off, so each write is durable.
    pub is_durable: bool,
    pending: [Option<Pending>; QUEUES as usize],
}

struct Pending {
    request: Request,
    effect: Effect,
    may_fail: bool,
    is_handed_on: bool,
}

enum Effect {
    Change(Change),
    /// A change that the disk may leave undone.
    Hint(Change),
    Read(Range<usize>, Vec<Vec<Stamp>>),
    Flush(u64),
}

/// A request to make.
#[derive(Clone, Debug)]
pub enum Ask {
    /// Writes new values.
    Write(Range<usize>),
    /// Reads and compares.
    Read(Range<usize>),
    /// Writes zeroes, perhaps with a hole.
    Zeroes(Range<usize>, bool),
    /// Discards.
    Discard(Range<usize>),
    /// Flushes.
    Flush,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The ring.
    pub queue: u16,
    /// The request was a flush.
    pub is_flush: bool,
    /// It has succeeded.
    pub is_ok: bool,
    /// It may have failed for a known reason.
    pub may_fail: bool,
    /// It was in flight when its daemon ended. That daemon or the next one has answered.
    pub is_handed_on: bool,
}

impl Guest {
    /// Connects a new guest, and starts its rings.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn start(socket: &Path, keeps_inflight: bool) -> Result<Guest> {
        let shape = Shape { queues: QUEUES, size: 16, discard: true, memory: 2 << 20, ..Shape::default() };
        let mut machine = Machine::prepare(socket, &shape)?;
        let inflight = if keeps_inflight { Some(machine.get_and_set_inflight()?) } else { None };
        machine.resume()?;
        Ok(Guest { machine, inflight, keeps_inflight, is_durable: false, pending: [None, None] })
    }

    /// Connects to the successor of its daemon, and starts the rings again.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn reconnect(&mut self, socket: &Path) -> Result<()> {
        self.machine.reconnect(socket, self.inflight.as_ref())?;
        self.machine.resume()
    }

    /// Starts the rings, which have stopped in order, at a new connection.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn resume_moved(&mut self) -> Result<()> {
        self.inflight = if self.keeps_inflight { Some(self.machine.get_and_set_inflight()?) } else { None };
        self.machine.resume()
    }

    /// Returns the size of the disk in sectors, as the configuration space has it.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn capacity(&mut self) -> Result<usize> {
        Ok(self.machine.frontend.config()?.capacity.get() as usize)
    }

    /// Returns whether the daemon has answered the request in flight on this ring.
    pub fn is_answered(&self, queue: u16) -> bool {
        self.machine.queues[usize::from(queue)].used_ready() > 0
    }

    /// Submits a request on a ring with none in flight.
    ///
    /// # Errors
    /// The ring has no room.
    pub fn submit(&mut self, queue: u16, ask: &Ask, oracle: &mut Oracle) -> Result<()> {
        let segment = |kind, sectors: &Range<usize>, flags: u32| Request {
            kind,
            sector: 0,
            write: Segment {
                sector: (sectors.start as u64).into(),
                num_sectors: (sectors.len() as u32).into(),
                flags: flags.into(),
            }
            .as_bytes()
            .to_vec(),
            read_len: 0,
        };
        let (request, effect) = match ask.clone() {
            Ask::Write(sectors) => {
                let first = sectors.start as u64;
                let (change, data) = oracle.write(sectors);
                (Request::write(first, &data), Effect::Change(change))
            }
            Ask::Zeroes(sectors, unmap) => {
                let request = segment(blk::T_WRITE_ZEROES, &sectors, u32::from(unmap));
                (request, Effect::Change(oracle.zero(sectors)))
            }
            Ask::Discard(sectors) => {
                (segment(blk::T_DISCARD, &sectors, 0), Effect::Hint(oracle.zero(sectors)))
            }
            Ask::Read(sectors) => {
                let request = Request::read(sectors.start as u64, sectors.len() * SECTOR);
                (request, Effect::Read(sectors.clone(), oracle.readable(sectors)))
            }
            Ask::Flush => (Request::flush(), Effect::Flush(oracle.now())),
        };
        self.machine.submit(queue, &request)?;
        self.pending[usize::from(queue)] =
            Some(Pending { request, effect, may_fail: false, is_handed_on: false });
        Ok(())
    }

    /// Waits for the request in flight on a ring.
    ///
    /// # Errors
    /// It is not answered, or reads a value that the disk cannot have.
    pub fn wait(&mut self, queue: u16, oracle: &mut Oracle) -> Result<Option<Answered>> {
        let Some(pending) = self.pending[usize::from(queue)].take() else { return Ok(None) };
        let outcome = self.machine.outcome(queue, &pending.request)?;
        self.note(queue, &pending, &outcome, oracle).map(Some)
    }

    fn note(
        &self,
        queue: u16,
        pending: &Pending,
        outcome: &Outcome,
        oracle: &mut Oracle,
    ) -> Result<Answered> {
        let is_ok = outcome.status == blk::S_OK;
        let is_flush = matches!(pending.effect, Effect::Flush(_));
        match &pending.effect {
            Effect::Change(change) => oracle.end(change, is_ok, self.is_durable),
            Effect::Hint(change) => oracle.end(change, false, false),
            Effect::Read(sectors, readable) if is_ok => {
                // Something may have been lost meanwhile. Older values are possible again then.
                let now = oracle.readable(sectors.clone());
                let mut readable = readable.clone();
                for (before, now) in readable.iter_mut().zip(now) {
                    before.extend(now);
                    before.sort_unstable();
                    before.dedup();
                }
                oracle.compare(sectors.start, &readable, &outcome.data)?;
            }
            Effect::Read(..) => {}
            Effect::Flush(began) if is_ok => oracle.flushed(*began),
            Effect::Flush(_) => oracle.lost(),
        }
        ensure!(
            outcome.status != blk::S_UNSUPP || matches!(pending.effect, Effect::Hint(_) | Effect::Change(_)),
            "{} is unsupported",
            pending.request
        );
        let is_ok = is_ok || outcome.status == blk::S_UNSUPP;
        let Pending { may_fail, is_handed_on, .. } = *pending;
        Ok(Answered { queue, is_flush, is_ok, may_fail, is_handed_on })
    }

    /// Lets the requests in flight fail.
    pub fn excuse_pending(&mut self) {
        self.pending.iter_mut().flatten().for_each(|pending| pending.may_fail = true);
    }

    /// Notes that the daemon has ended.
    pub fn hand_on_pending(&mut self) {
        self.pending.iter_mut().flatten().for_each(|pending| pending.is_handed_on = true);
    }

    /// Gives up the requests in flight, because the guest ends.
    pub fn abandon(&mut self, oracle: &mut Oracle) {
        for pending in self.pending.iter_mut().filter_map(Option::take) {
            if let Effect::Change(change) | Effect::Hint(change) = pending.effect {
                oracle.end(&change, false, false);
            }
        }
    }

    /// Turns the guest's write cache on or off.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn set_durable(&mut self, is_durable: bool) -> Result<()> {
        if self.pending.iter().any(Option::is_some) {
            bail!("a request is in flight");
        }
        self.machine.frontend.set_writeback(!is_durable)?;
        self.is_durable = is_durable;
        Ok(())
    }
}
