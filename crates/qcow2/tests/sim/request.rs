//! Requests in flight.

use super::runtime::SimRuntime;
use crate::Errno;
use crate::format::geometry::HostOffset;
use crate::images::cut_file::SECTOR;
use crate::images::stamps::stamp_of;
use crate::pins::Pin;
use crate::tables::plan::{Clear, CopyPlan, SyncMark, Ticket};
use kickless_testing::Stamp;

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
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
pub(super) struct SimRequest {
    pub(super) kind: RequestKind,
    pub(super) queue: usize,
    /// The sectors, by their numbers in the model. Contiguous on the disk.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) started: u64,
    pub(super) done: usize,
    pub(super) phase: RequestPhase,
    pub(super) pin: Option<Pin<SimRuntime>>,
    pub(super) ticket: Ticket,
    /// The transfers of the run in flight.
    pub(super) transfers: usize,
    pub(super) failed: Option<Errno>,
    /// Bytes of a clearing that are written as data.
    pub(super) as_data: u64,
    pub(super) needs_sync: bool,
}

/// The next action of a request.
#[derive(Debug)]
pub(super) enum RequestPhase {
    Next,
    /// Waits for a waker.
    Waiting,
    /// The transfers of a run of so many sectors.
    Transfer {
        sectors: usize,
    },
    /// The old bytes of a copy are about to be read.
    Old(Box<CopyPlan<SimRuntime>>),
    /// The new bytes of a copy are written.
    Copy(Box<CopyPlan<SimRuntime>>),
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

impl SimRequest {
    pub(super) fn new((kind, queue): (RequestKind, usize), first: usize, len: usize, started: u64) -> Self {
        Self {
            kind,
            queue,
            first,
            len,
            started,
            done: 0,
            phase: RequestPhase::Next,
            pin: None,
            ticket: Ticket::default(),
            transfers: 0,
            failed: None,
            as_data: 0,
            needs_sync: false,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, RequestPhase::Done)
    }

    pub(super) fn can_go_on(&self) -> bool {
        match &self.phase {
            RequestPhase::Waiting | RequestPhase::Done | RequestPhase::Syncing(..) => false,
            RequestPhase::Transfer { .. } | RequestPhase::Copy(_) => self.transfers == 0,
            RequestPhase::Ticket { may_ask, .. } => *may_ask,
            _ => true,
        }
    }

    /// Goes on after the waker was signalled.
    pub(super) fn woken(&mut self) {
        match &mut self.phase {
            RequestPhase::Waiting => self.phase = RequestPhase::Next,
            RequestPhase::Ticket { may_ask, .. } => *may_ask = true,
            _ => {}
        }
    }

    /// Returns the contents that the request leaves in a sector, as an offset on the disk.
    pub(super) fn stamp(&self, offset: u64) -> Stamp {
        match self.kind {
            RequestKind::Write { number, .. } if number > 0 => stamp_of(offset, number),
            _ => 0,
        }
    }

    pub(super) fn is_sure(&self) -> bool {
        self.failed.is_none() && self.kind != RequestKind::Clear(Clear::Discard)
    }

    pub(super) fn is_durable(&self) -> bool {
        matches!(self.kind, RequestKind::Write { durable: true, .. })
    }

    pub(super) fn changes(&self) -> bool {
        matches!(self.kind, RequestKind::Write { .. } | RequestKind::Clear(_))
    }

    pub(super) fn fail(&mut self, errno: Errno) {
        self.failed = Some(errno);
        self.phase = RequestPhase::Done;
        self.pin = None;
    }

    pub(super) fn run_ends(&mut self, sectors: usize) {
        self.done += sectors;
        self.as_data = self.as_data.saturating_sub((sectors * SECTOR) as u64);
        self.pin = None;
        self.ticket = Ticket::default();
        self.phase = RequestPhase::Next;
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
        let RequestPhase::Syncing(mark, began) = std::mem::replace(&mut self.phase, RequestPhase::Done)
        else {
            unreachable!()
        };
        self.failed = result.err();
        (mark, began)
    }
}
