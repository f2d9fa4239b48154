//! Writes to the image at the top of a chain: run by run, each to one place.

use super::copy::CopyState;
use super::layer::{Chain, Image, Place, errno_of};
use super::local_buffers::LocalBuffers;
use super::runtime::Pin;
use super::sender::top;
use crate::buffers::TransferBuffers;
use crate::file::{FileState, Unchecked};
use crate::op_sender::OpSender;
use crate::{IoError, Step};
use kickless_io::{Completion, Errno, Waker};
use kickless_qcow2::{GuestOffset, Look, SyncMark, Ticket, WritePlan, Written};
use std::sync::Arc;

/// The progress of a write, and of what its end needs.
#[derive(Debug, Default)]
pub(super) struct WriteState {
    /// The next byte on the virtual disk.
    pub(super) at: u64,
    pub(super) phase: WritePhase,
    /// The bytes of the current run.
    pub(super) len: u64,
    /// The current run has its bytes in `front`.
    pub(super) is_split: bool,
    /// The request ends when it is on stable storage.
    pub(super) durable: bool,
    /// Something of the request is not on stable storage, although it must be at the end.
    pub(super) must_sync: bool,
    pub(super) file: FileState,
    /// The changes of tables that the current run needs.
    pub(super) ticket: Ticket,
    pub(super) copy: Option<Box<CopyState>>,
    /// Held while the run may use the place that was found.
    pub(super) pin: Option<Pin>,
    /// The beginning of the sync in flight.
    mark: Option<SyncMark>,
}

/// The next action of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WritePhase {
    #[default]
    Idle,
    /// Find the place of the next run.
    Look,
    /// Transfer the run.
    Transfer,
    /// Fill a part of a cluster, with the run in it.
    Copy,
    /// Wait until the tables are written.
    Tables,
    /// Write everything to stable storage.
    Sync,
}

impl WriteState {
    /// Begins a write at `at`.
    #[inline]
    pub(super) fn begin(&mut self, at: u64, durable: bool) {
        (self.at, self.durable) = (at, durable);
        self.phase = WritePhase::Look;
    }

    /// Begins a sync.
    pub(super) fn begin_sync(&mut self) {
        self.phase = WritePhase::Sync;
        (self.durable, self.must_sync) = (false, true);
    }

    /// Makes the operation in flight, if there is one, the last.
    pub(super) fn cancel(&mut self) {
        self.file.cancel();
        if let Some(copy) = &mut self.copy {
            copy.cancel();
        }
    }

    /// Ends a cancelled write that waits. It has no operation in flight.
    pub(super) fn give_up(&mut self) -> Step {
        self.finish(Err(IoError::CANCELLED))
    }

    /// Ends the write.
    #[inline]
    pub(super) fn finish(&mut self, result: Result<(), IoError>) -> Step {
        self.phase = WritePhase::Idle;
        (self.pin, self.must_sync, self.is_split) = (None, false, false);
        if self.copy.is_some() {
            self.copy = None;
        }
        Step::Done(result)
    }
}

impl Drop for WriteState {
    fn drop(&mut self) {
        // A transfer in flight goes on without its request, so its clusters are never reused.
        let lost = match &self.copy {
            Some(copy) => copy.sent(),
            None => self.file.is_sent().then(|| self.file.at()..self.file.at() + self.len),
        };
        if let (Some(pin), Some(lost)) = (self.pin.take(), lost) {
            pin.lose(lost);
        }
    }
}

/// Waits until the changes of a ticket are written.
pub(super) fn written(image: &Image, ticket: Ticket, waker: &Waker) -> Result<(), Step> {
    if ticket == Ticket::default() {
        return Ok(());
    }
    match image.with_tables(|tables| tables.written(ticket, waker)) {
        Written::Yes => Ok(()),
        Written::NotYet => Err(Step::Busy),
        Written::Failed(errno) => Err(Step::Done(Err(IoError::Os(errno)))),
    }
}

impl Chain {
    /// Continues a write from `main`. `front` is empty between two calls, except while a run has its bytes
    /// there.
    pub(super) fn drive_write<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        shard: u32,
        (main, front): (&mut B, &mut B),
        state: &mut WriteState,
    ) -> Step {
        let Some(image) = self.top() else { return state.finish(Err(IoError::Os(Errno::IO))) };
        loop {
            let step = match state.phase {
                WritePhase::Idle => return Step::Busy,
                WritePhase::Look if main.left() == 0 => {
                    if !(state.durable && state.must_sync) {
                        return state.finish(Ok(()));
                    }
                    state.phase = WritePhase::Sync;
                    continue;
                }
                WritePhase::Look => match self.plan(sender, image, shard, (main, front), state) {
                    Ok(wanted) => {
                        state.phase = WritePhase::Transfer;
                        let buffers = if state.is_split { &mut *front } else { &mut *main };
                        image.file.start_unchecked(&mut top(sender), buffers, &mut state.file, wanted)
                    }
                    Err(Some(step)) => step,
                    Err(None) => continue,
                },
                WritePhase::Transfer => {
                    let buffers = if state.is_split { &mut *front } else { &mut *main };
                    image.file.retry(&mut top(sender), buffers, &mut state.file)
                }
                WritePhase::Copy => match &mut state.copy {
                    Some(copy) => self.drive_copy(sender, (image, shard), (main, front), copy),
                    None => Step::Done(Err(IoError::Stuck)),
                },
                WritePhase::Tables => match written(image, state.ticket, sender.waker()) {
                    Ok(()) => Step::Done(Ok(())),
                    Err(step) => step,
                },
                WritePhase::Sync => self.start_sync(sender, image, state),
            };
            match self.end_step(sender, image, (main, front), state, step) {
                None => {}
                Some(step) => return step,
            }
        }
    }

    /// Continues a write after the completion of an operation.
    pub(super) fn resume_write<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        shard: u32,
        (main, front): (&mut B, &mut B),
        state: &mut WriteState,
        completion: Completion,
    ) -> Step {
        let Some(image) = self.top() else { return state.finish(Err(IoError::Os(Errno::IO))) };
        let step = match state.phase {
            WritePhase::Copy => match &mut state.copy {
                Some(copy) => {
                    let memory = (&mut *main, &mut *front);
                    self.resume_copy(sender, (image, shard), memory, copy, completion)
                }
                None => Step::Done(Err(IoError::Stuck)),
            },
            WritePhase::Sync => {
                let none = &mut LocalBuffers::default();
                image.file.resume(&mut top(sender), none, &mut state.file, completion)
            }
            _ => {
                let buffers = if state.is_split { &mut *front } else { &mut *main };
                image.file.resume(&mut top(sender), buffers, &mut state.file, completion)
            }
        };
        match self.end_step(sender, image, (&mut *main, &mut *front), state, step) {
            None => self.drive_write(sender, shard, (main, front), state),
            Some(step) => step,
        }
    }

    /// Goes on after a step of the current phase. `None`: there is a next phase.
    fn end_step<B: TransferBuffers>(
        &self,
        sender: &mut impl OpSender,
        image: &Arc<Image>,
        (main, front): (&mut B, &mut B),
        state: &mut WriteState,
        step: Step,
    ) -> Option<Step> {
        let Step::Done(result) = step else { return Some(step) };
        if state.phase == WritePhase::Sync {
            if let Some(mark) = state.mark.take() {
                image.with_tables(|tables| tables.synced(mark, result.map_err(errno_of)));
            }
            return Some(state.finish(result));
        }
        if state.is_split {
            main.join(front, sender.marks());
            state.is_split = false;
        }
        if let Err(error) = result {
            return Some(state.finish(Err(error)));
        }
        if let Some(copy) = state.copy.take() {
            state.ticket = copy.ticket();
        }
        match state.phase {
            WritePhase::Transfer | WritePhase::Copy => {
                // No mapping that the run has seen is used any more.
                state.pin = None;
                state.phase = WritePhase::Tables;
            }
            _ => {
                state.at += state.len;
                state.phase = WritePhase::Look;
            }
        }
        None
    }

    /// Finds the place of the next run, and splits its bytes off. `Err(None)`: the phase has changed.
    fn plan<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        image: &Arc<Image>,
        shard: u32,
        (main, front): (&mut B, &mut B),
        state: &mut WriteState,
    ) -> Result<Unchecked, Option<Step>> {
        let (at, left) = (state.at, main.left());
        // A request that waits holds no pin. It may wait for the end of all others.
        let pin = image.pins.enter(shard);
        let (host, len, ticket) = match image.slices.look(GuestOffset(at), left) {
            Look::Data { host, len, in_place: true } => (host, len, Ticket::default()),
            Look::Miss(slice) => {
                let missing = Place::Miss { layer: 0, slice };
                return Err(Some(self.missing(missing, sender.waker())));
            }
            Look::Bad => {
                return Err(Some(self.missing(Place::Bad { layer: 0 }, sender.waker())));
            }
            _ => {
                let (under, len) = match self.under(image, at, left) {
                    Ok(under) => under,
                    Err(place) => return Err(Some(self.missing(place, sender.waker()))),
                };
                let waker = sender.waker();
                match image.with_tables(|tables| tables.plan_write(GuestOffset(at), len, under, waker)) {
                    WritePlan::InPlace { host, len } => (host, len, Ticket::default()),
                    WritePlan::Fresh { host, len, ticket } => (host, len, ticket),
                    WritePlan::Copy(plan) => {
                        state.len = plan.len;
                        state.copy = Some(Box::new(CopyState::new(plan, at, image)));
                        state.must_sync = true;
                        state.pin = Some(pin);
                        state.phase = WritePhase::Copy;
                        return Err(None);
                    }
                    WritePlan::Wait => return Err(Some(Step::Busy)),
                    WritePlan::Fail(errno) => return Err(Some(Step::Done(Err(IoError::Os(errno))))),
                }
            }
        };
        state.pin = Some(pin);
        (state.len, state.ticket, state.is_split) = (len, ticket, len < left);
        if state.is_split {
            main.split_to(len, front, sender.marks());
        }
        // R8. The transfer is durable by itself if the mapping is.
        let durable = state.durable
            && !state.must_sync
            && ticket == Ticket::default()
            && image.with_tables(|tables| tables.is_synced());
        state.must_sync |= !durable;
        Ok(Unchecked::Write { at: host.0, durable })
    }

    /// Starts the sync, or continues it.
    fn start_sync(&self, sender: &mut impl OpSender, image: &Arc<Image>, state: &mut WriteState) -> Step {
        let none = &mut LocalBuffers::default();
        if state.mark.is_some() {
            return image.file.retry(&mut top(sender), none, &mut state.file);
        }
        state.mark = Some(image.with_tables(|tables| tables.sync_begins()));
        image.file.start_unchecked(&mut top(sender), none, &mut state.file, Unchecked::Flush)
    }
}
