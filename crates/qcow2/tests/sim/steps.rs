//! Moves requests on, as a disk carries them out.

use super::life::Life;
use super::ops::OpTarget;
use super::request::{RequestKind, RequestPhase, SimRequest};
use super::runtime::SimRuntime;
use crate::format::geometry::{GuestOffset, HostOffset, SliceIndex};
use crate::images::builder::{Shape, below};
use crate::images::cut_file::SECTOR;
use crate::images::stamps::{inflated, is_of};
use crate::slices::Look;
use crate::tables::plan::{Clear, ClearPlan, CopyFrom, CopyPlan, Under, WritePlan, Written};
use crate::tables::rule::Rule;
use kickless_testing::Stamp;

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

    fn step_request(&mut self, id: usize, request: &mut SimRequest) {
        match std::mem::replace(&mut request.phase, RequestPhase::Next) {
            RequestPhase::Next if request.kind == RequestKind::Flush => self.sync(id, request),
            RequestPhase::Next if request.done == request.len => {
                if request.is_durable() && request.needs_sync {
                    self.sync(id, request);
                } else {
                    request.phase = RequestPhase::Done;
                }
            }
            RequestPhase::Next => match request.kind {
                RequestKind::Clear(how) if request.as_data == 0 => self.clear(request, how),
                RequestKind::Read => self.read(request),
                _ => self.write(id, request),
            },
            RequestPhase::Transfer { sectors } => match request.failed {
                Some(errno) => request.fail(errno),
                None => request.phase = RequestPhase::Ticket { sectors, may_ask: true },
            },
            RequestPhase::Old(plan) => self.copy(id, request, plan),
            RequestPhase::Copy(plan) => self.copied(request, *plan),
            RequestPhase::Ticket { sectors, .. } => {
                match self.tables.written(request.ticket, &self.wakers[request.queue]) {
                    Written::Yes => request.run_ends(sectors),
                    Written::NotYet => request.phase = RequestPhase::Ticket { sectors, may_ask: false },
                    Written::Failed(errno) => request.fail(errno),
                }
            }
            RequestPhase::Reading { host, sectors } => {
                self.check_read(request, host, sectors);
                request.run_ends(sectors);
            }
            phase @ (RequestPhase::Waiting | RequestPhase::Syncing(..) | RequestPhase::Done) => {
                request.phase = phase
            }
        }
    }

    fn sync(&mut self, id: usize, request: &mut SimRequest) {
        request.phase = RequestPhase::Syncing(self.tables.sync_begins(), self.now);
        let mark = self.image.sync_begins();
        self.submit_sync(OpTarget::Request(id), mark);
    }

    fn place(&self, request: &SimRequest) -> (GuestOffset, u64) {
        let at = self.shape.offset(request.first + request.done);
        (GuestOffset(at), ((request.len - request.done) * SECTOR) as u64)
    }

    fn wait(request: &mut SimRequest) {
        request.pin = None;
        request.phase = RequestPhase::Waiting;
    }

    fn read(&mut self, request: &mut SimRequest) {
        let (at, len) = self.place(request);
        request.pin = Some(self.pins.enter(request.queue as u32));
        match self.slices.look(at, len) {
            Look::Data { host, len, .. } => {
                request.phase = RequestPhase::Reading { host, sectors: len as usize / SECTOR };
            }
            Look::Zero { len } | Look::Below { len } | Look::Compressed { len, .. } => {
                request.run_ends(len as usize / SECTOR);
            }
            Look::Miss(slice) => self.want(request, slice),
            Look::Bad => panic!("bad entry at {at:?}"),
        }
    }

    fn want(&mut self, request: &mut SimRequest, slice: SliceIndex) {
        match self.tables.want(slice, &self.wakers[request.queue]) {
            Ok(()) => Self::wait(request),
            Err(errno) => request.fail(errno),
        }
    }

    /// Checks that the contents belong to the sectors that are read (G4).
    fn check_read(&mut self, request: &SimRequest, host: HostOffset, sectors: usize) {
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

    fn write(&mut self, id: usize, request: &mut SimRequest) {
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
            WritePlan::Copy(plan) => request.phase = RequestPhase::Old(Box::new(plan)),
            WritePlan::Wait => Self::wait(request),
            WritePlan::Fail(errno) => request.fail(errno),
        }
    }

    fn transfer(&mut self, id: usize, request: &mut SimRequest, host: HostOffset, len: u64, durable: bool) {
        assert!(len > 0 && len.is_multiple_of(SECTOR as u64), "a run of {len} bytes");
        let (at, _) = self.place(request);
        let bytes = sectors(at.0, len, |offset| request.stamp(offset));
        // Two transfers now and then.
        let half = if self.rng.u8(..4) == 0 { bytes.len() / SECTOR / 2 * SECTOR } else { 0 };
        for (from, to) in [(0, half), (half, bytes.len())] {
            if from < to {
                self.submit_write(
                    OpTarget::Request(id),
                    host.0 as usize + from,
                    bytes[from..to].to_vec(),
                    durable,
                );
                request.transfers += 1;
            }
        }
        request.phase = RequestPhase::Transfer { sectors: len as usize / SECTOR };
    }

    /// Reads the old bytes of a copy, and writes the cluster durably.
    fn copy(&mut self, id: usize, request: &mut SimRequest, plan: Box<CopyPlan<SimRuntime>>) {
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
                self.submit_write(OpTarget::Request(id), at, bytes[from..to].to_vec(), durable);
                request.transfers += 1;
            }
        }
        request.phase = RequestPhase::Copy(plan);
    }

    fn copied(&mut self, request: &mut SimRequest, plan: CopyPlan<SimRuntime>) {
        if let Some(errno) = request.failed {
            drop(plan.copy);
            return request.fail(errno);
        }
        request.ticket = self.tables.copied(plan.copy);
        request.phase = RequestPhase::Ticket { sectors: plan.len as usize / SECTOR, may_ask: true };
    }

    fn clear(&mut self, request: &mut SimRequest, how: Clear) {
        let (at, len) = self.place(request);
        request.pin = Some(self.pins.enter(request.queue as u32));
        match self.tables.clear(at, len, how, &self.wakers[request.queue]) {
            ClearPlan::Done { len, ticket } => {
                assert!(len > 0 && len.is_multiple_of(SECTOR as u64), "cleared {len} bytes");
                request.ticket = ticket;
                request.phase = RequestPhase::Ticket { sectors: len as usize / SECTOR, may_ask: true };
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
        CopyFrom::Compressed { at, .. } => inflated(read(at, 0), within),
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
