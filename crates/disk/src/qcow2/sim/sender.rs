//! Requests, as a disk carries them out.

use super::builder::{Shape, below};
use super::engine::Target;
use super::image::SECTOR;
use super::judge::{is_of, stamp_of};
use super::life::Life;
use crate::qcow2::format::geometry::{GuestOffset, HostOffset};
use crate::qcow2::pins::Pin;
use crate::qcow2::slices::Look;
use crate::qcow2::tables::plan::{
    Clear, ClearPlan, CopyFrom, CopyPlan, SyncMark, Ticket, Under, WritePlan, Written,
};
use crate::qcow2::tables::rule::Rule;
use kickless_io::Errno;
use kickless_testing::Stamp;

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Writes the sectors with this number. 0 writes zeroes.
    Write {
        number: u64,
        durable: bool,
    },
    Clear(Clear),
    Read,
    Flush,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) queue: usize,
    /// The sectors, by their numbers in the model. Contiguous on the disk.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) started: u64,
    done: usize,
    phase: Phase,
    pin: Option<Pin>,
    ticket: Ticket,
    /// The transfers of the run in flight.
    pub(super) transfers: usize,
    pub(super) failed: Option<Errno>,
    /// Bytes of a clearing that are written as data.
    as_data: u64,
    needs_sync: bool,
}

#[derive(Debug)]
enum Phase {
    Next,
    /// Waits for a waker.
    Waiting,
    /// The transfers of a run of so many sectors.
    Transfer {
        sectors: usize,
    },
    /// The old bytes of a copy are about to be read.
    Old(Box<CopyPlan>),
    /// The new bytes of a copy are written.
    Copy(Box<CopyPlan>),
    /// The answer waits for the ticket.
    Ticket {
        sectors: usize,
        may_ask: bool,
    },
    /// Reads from the file are about to end.
    Reading {
        host: HostOffset,
        sectors: usize,
    },
    Syncing(SyncMark, u64),
    /// The request is answered.
    Done,
}

impl Request {
    pub(super) fn new((kind, queue): (Kind, usize), first: usize, len: usize, started: u64) -> Self {
        Self {
            kind,
            queue,
            first,
            len,
            started,
            done: 0,
            phase: Phase::Next,
            pin: None,
            ticket: Ticket::default(),
            transfers: 0,
            failed: None,
            as_data: 0,
            needs_sync: false,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    pub(super) fn can_go_on(&self) -> bool {
        match &self.phase {
            Phase::Waiting | Phase::Done | Phase::Syncing(..) => false,
            Phase::Transfer { .. } | Phase::Copy(_) => self.transfers == 0,
            Phase::Ticket { may_ask, .. } => *may_ask,
            _ => true,
        }
    }

    /// Goes on after the waker was signalled.
    pub(super) fn woken(&mut self) {
        match &mut self.phase {
            Phase::Waiting => self.phase = Phase::Next,
            Phase::Ticket { may_ask, .. } => *may_ask = true,
            _ => {}
        }
    }

    /// Returns the contents that the request leaves in a sector, as an offset on the disk.
    pub(super) fn stamp(&self, offset: u64) -> Stamp {
        match self.kind {
            Kind::Write { number, .. } if number > 0 => stamp_of(offset, number),
            _ => 0,
        }
    }

    pub(super) fn is_sure(&self) -> bool {
        self.failed.is_none() && self.kind != Kind::Clear(Clear::Discard)
    }

    pub(super) fn is_durable(&self) -> bool {
        matches!(self.kind, Kind::Write { durable: true, .. })
    }

    pub(super) fn changes(&self) -> bool {
        matches!(self.kind, Kind::Write { .. } | Kind::Clear(_))
    }

    fn fail(&mut self, errno: Errno) {
        self.failed = Some(errno);
        self.phase = Phase::Done;
        self.pin = None;
    }

    fn run_ends(&mut self, sectors: usize) {
        self.done += sectors;
        self.as_data = self.as_data.saturating_sub((sectors * SECTOR) as u64);
        self.pin = None;
        self.ticket = Ticket::default();
        self.phase = Phase::Next;
    }

    /// Takes the result of a transfer.
    pub(super) fn transferred(&mut self, result: Result<(), Errno>) {
        self.transfers -= 1;
        if let Err(errno) = result {
            self.failed = Some(errno);
        }
    }

    /// Takes the result of a sync, and returns when it began.
    pub(super) fn synced(&mut self, result: Result<(), Errno>) -> (SyncMark, u64) {
        let Phase::Syncing(mark, began) = std::mem::replace(&mut self.phase, Phase::Done) else {
            unreachable!()
        };
        self.failed = result.err();
        (mark, began)
    }
}

impl Life {
    /// Moves a request on by one step.
    pub(super) fn step(&mut self, id: usize) {
        let mut request = self.requests.remove(&id).unwrap();
        self.step_request(id, &mut request);
        if request.is_done() {
            self.end(&request);
        } else {
            self.requests.insert(id, request);
        }
    }

    fn step_request(&mut self, id: usize, request: &mut Request) {
        match std::mem::replace(&mut request.phase, Phase::Next) {
            Phase::Next if request.kind == Kind::Flush => self.sync(id, request),
            Phase::Next if request.done == request.len => {
                if request.is_durable() && request.needs_sync {
                    self.sync(id, request);
                } else {
                    request.phase = Phase::Done;
                }
            }
            Phase::Next => match request.kind {
                Kind::Clear(how) if request.as_data == 0 => self.clear(request, how),
                Kind::Read => self.read(request),
                _ => self.write(id, request),
            },
            Phase::Transfer { sectors } => match request.failed {
                Some(errno) => request.fail(errno),
                None => request.phase = Phase::Ticket { sectors, may_ask: true },
            },
            Phase::Old(plan) => self.copy(id, request, plan),
            Phase::Copy(plan) => self.copied(request, *plan),
            Phase::Ticket { sectors, .. } => {
                match self.tables.written(request.ticket, &self.wakers[request.queue]) {
                    Written::Yes => request.run_ends(sectors),
                    Written::NotYet => request.phase = Phase::Ticket { sectors, may_ask: false },
                    Written::Failed(errno) => request.fail(errno),
                }
            }
            Phase::Reading { host, sectors } => {
                self.check_read(request, host, sectors);
                request.run_ends(sectors);
            }
            phase @ (Phase::Waiting | Phase::Syncing(..) | Phase::Done) => request.phase = phase,
        }
    }

    fn sync(&mut self, id: usize, request: &mut Request) {
        request.phase = Phase::Syncing(self.tables.sync_begins(), self.now);
        let mark = self.image.sync_begins();
        self.submit_sync(Target::Request(id), mark);
    }

    fn place(&self, request: &Request) -> (GuestOffset, u64) {
        let at = self.shape.offset(request.first + request.done);
        (GuestOffset(at), ((request.len - request.done) * SECTOR) as u64)
    }

    fn wait(request: &mut Request) {
        request.pin = None;
        request.phase = Phase::Waiting;
    }

    fn read(&mut self, request: &mut Request) {
        let (at, len) = self.place(request);
        request.pin = Some(self.pins.enter(request.queue as u32));
        match self.slices.look(at, len) {
            Look::Data { host, len, .. } => {
                request.phase = Phase::Reading { host, sectors: len as usize / SECTOR };
            }
            Look::Zero { len } | Look::Below { len } | Look::Compressed { len, .. } => {
                request.run_ends(len as usize / SECTOR);
            }
            Look::Miss(slice) => self.want(request, slice),
            Look::Bad => panic!("bad entry at {at:?}"),
        }
    }

    fn want(&mut self, request: &mut Request, slice: crate::qcow2::format::geometry::SliceIndex) {
        match self.tables.want(slice, &self.wakers[request.queue]) {
            Ok(()) => Self::wait(request),
            Err(errno) => request.fail(errno),
        }
    }

    /// Checks that the contents belong to the sectors that are read (G4).
    fn check_read(&mut self, request: &Request, host: HostOffset, sectors: usize) {
        for sector in 0..sectors {
            let mut bytes = [0; SECTOR];
            self.image.read(host.0 as usize + sector * SECTOR, &mut bytes);
            let stamp = u64::from_be_bytes(bytes[..8].try_into().unwrap());
            let number = request.first + request.done + sector;
            if !is_of(stamp, self.shape.offset(number)) {
                self.found(format!("a read of sector {number} returns {stamp:x}"));
            }
        }
    }

    fn write(&mut self, id: usize, request: &mut Request) {
        let (at, mut len) = self.place(request);
        if request.as_data > 0 {
            len = len.min(request.as_data);
        }
        request.pin = Some(self.pins.enter(request.queue as u32));
        match self.slices.look(at, len) {
            Look::Data { host, len, in_place: true } => {
                let durable = request.is_durable() && self.tables.is_synced();
                request.needs_sync |= !durable;
                return self.transfer(id, request, host, len, durable);
            }
            Look::Miss(slice) => return self.want(request, slice),
            Look::Bad => panic!("bad entry at {at:?}"),
            _ => {}
        }
        request.needs_sync = true;
        let under = if self.shape.has_backing { Under::Data } else { Under::Zero };
        match self.tables.plan_write(at, len, under, &self.wakers[request.queue]) {
            WritePlan::InPlace { host, len } => self.transfer(id, request, host, len, false),
            WritePlan::Fresh { host, len, ticket } => {
                request.ticket = ticket;
                self.transfer(id, request, host, len, false);
            }
            WritePlan::Copy(plan) => request.phase = Phase::Old(Box::new(plan)),
            WritePlan::Wait => Self::wait(request),
            WritePlan::Fail(errno) => request.fail(errno),
        }
    }

    fn transfer(&mut self, id: usize, request: &mut Request, host: HostOffset, len: u64, durable: bool) {
        assert!(len > 0 && len.is_multiple_of(SECTOR as u64), "a run of {len} bytes");
        let (at, _) = self.place(request);
        let bytes = sectors(at.0, len, |offset| request.stamp(offset));
        // Two transfers now and then.
        let half = if self.rng.u8(..4) == 0 { bytes.len() / SECTOR / 2 * SECTOR } else { 0 };
        for (from, to) in [(0, half), (half, bytes.len())] {
            if from < to {
                self.submit_write(
                    Target::Request(id),
                    host.0 as usize + from,
                    bytes[from..to].to_vec(),
                    durable,
                );
                request.transfers += 1;
            }
        }
        request.phase = Phase::Transfer { sectors: len as usize / SECTOR };
    }

    /// Reads the old bytes of a copy, and writes the cluster durably.
    fn copy(&mut self, id: usize, request: &mut Request, plan: Box<CopyPlan>) {
        let (at, _) = self.place(request);
        let base = at.0 - at.0 % self.shape.geometry.cluster();
        let within = at.0 - base;
        let guest = within..within + plan.len;
        let old = |offset: u64| old_stamp(self, plan.from, offset - base, offset);
        let new = |offset: u64| {
            if guest.contains(&(offset - base)) { request.stamp(offset) } else { old(offset) }
        };
        let fill = plan.fill.clone();
        let bytes = sectors(base + fill.start, fill.end - fill.start, new);
        let durable = self.rule != Some(Rule::R3);
        let half = if self.rng.bool() { bytes.len() / SECTOR / 2 * SECTOR } else { 0 };
        for (from, to) in [(0, half), (half, bytes.len())] {
            if from < to {
                let at = (plan.host.0 + fill.start) as usize + from;
                self.submit_write(Target::Request(id), at, bytes[from..to].to_vec(), durable);
                request.transfers += 1;
            }
        }
        request.phase = Phase::Copy(plan);
    }

    fn copied(&mut self, request: &mut Request, plan: CopyPlan) {
        if let Some(errno) = request.failed {
            drop(plan.copy);
            return request.fail(errno);
        }
        request.ticket = self.tables.copied(plan.copy);
        request.phase = Phase::Ticket { sectors: plan.len as usize / SECTOR, may_ask: true };
    }

    fn clear(&mut self, request: &mut Request, how: Clear) {
        let (at, len) = self.place(request);
        request.pin = Some(self.pins.enter(request.queue as u32));
        match self.tables.clear(at, len, how, &self.wakers[request.queue]) {
            ClearPlan::Done { len, ticket } => {
                assert!(len > 0 && len.is_multiple_of(SECTOR as u64), "cleared {len} bytes");
                request.ticket = ticket;
                request.phase = Phase::Ticket { sectors: len as usize / SECTOR, may_ask: true };
            }
            ClearPlan::Data { len } if how == Clear::Discard => request.run_ends(len as usize / SECTOR),
            ClearPlan::Data { len } => request.as_data = len,
            ClearPlan::Wait => Self::wait(request),
            ClearPlan::Fail(errno) => request.fail(errno),
        }
    }
}

/// Returns the old contents of a sector at `within` of a cluster.
fn old_stamp(life: &Life, from: CopyFrom, within: u64, offset: u64) -> Stamp {
    let read = |host: HostOffset, within: u64| {
        let mut bytes = [0; 8];
        life.image.read((host.0 + within) as usize, &mut bytes);
        u64::from_be_bytes(bytes)
    };
    let shape: Shape = life.shape;
    match from {
        CopyFrom::Zero => 0,
        CopyFrom::Host(host) => read(host, within),
        CopyFrom::Below => below(shape, offset),
        CopyFrom::Compressed { at, .. } => super::judge::inflated(read(at, 0), within),
        CopyFrom::Parts { host, allocated, zero } => {
            let bit = 1u32 << (within / shape.geometry.subcluster());
            match () {
                () if allocated & bit != 0 => read(host, within),
                () if zero & bit != 0 => 0,
                () => below(shape, offset),
            }
        }
    }
}

/// Returns the bytes of sectors with the stamps of their offsets.
fn sectors(at: u64, len: u64, stamp: impl Fn(u64) -> Stamp) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for (index, sector) in bytes.as_chunks_mut::<SECTOR>().0.iter_mut().enumerate() {
        sector[..8].copy_from_slice(&stamp(at + (index * SECTOR) as u64).to_be_bytes());
    }
    bytes
}
