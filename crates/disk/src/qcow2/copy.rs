//! Fills a part of a cluster, with old bytes and the guest's, before it is mapped (R3).

use super::layer::{Chain, Image};
use super::local_buffers::LocalBuffers;
use super::read::ReadState;
use super::runtime::{CopyPlan, Copying};
use super::sender::top;
use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::buffers::TransferBuffers;
use crate::file::{FileState, Unchecked};
use crate::op_sender::OpSender;
use crate::{IoError, Step};
use kickless_io::Completion;
use kickless_qcow2::{CopyFrom, Ticket};
use std::ops::Range;
use std::sync::Arc;

/// The progress of a copy.
#[derive(Debug)]
pub(super) struct CopyState {
    copy: Option<Copying>,
    phase: CopyPhase,
    /// The offset of the guest's cluster on the virtual disk, and of the new cluster in the file.
    guest: u64,
    host: u64,
    /// The part to fill, and the guest's bytes, relative to the cluster.
    fill: Range<u64>,
    new: Range<u64>,
    /// All old bytes are zeroes.
    is_zero: bool,
    /// The guest's bytes are in `front`, because they are not the whole rest of the request.
    is_split: bool,
    /// The changes of tables after the copy.
    ticket: Ticket,
    /// The piece in the buffer, relative to the cluster.
    piece: Range<u64>,
    wait: Option<BufferWait>,
    permit: Option<BufferPermit>,
    local: LocalBuffers,
    front: LocalBuffers,
    read: ReadState,
    file: FileState,
}

/// The next action of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyPhase {
    /// Write the guest's bytes from where they are. There are no others.
    Whole,
    /// Get a buffer for the next piece.
    Buffer,
    /// Read the old bytes of the piece.
    Old,
    /// Write the piece.
    Store,
    /// Write all pieces to stable storage.
    Sync,
}

impl CopyState {
    pub(super) fn new(plan: CopyPlan, at: u64, image: &Image) -> Self {
        let CopyPlan { copy, host, fill, from, len } = plan;
        let skip = at % image.geometry.cluster();
        let new = skip..skip + len;
        Self {
            copy: Some(copy),
            phase: if new == fill { CopyPhase::Whole } else { CopyPhase::Buffer },
            guest: at - skip,
            host: host.0,
            piece: fill.start..fill.start,
            fill,
            new,
            is_zero: from == CopyFrom::Zero,
            is_split: false,
            ticket: Ticket::default(),
            wait: None,
            permit: None,
            local: LocalBuffers::default(),
            front: LocalBuffers::default(),
            read: ReadState::default(),
            file: FileState::default(),
        }
    }

    /// Returns the bytes of the file that a transfer in flight may change.
    pub(super) fn sent(&self) -> Option<Range<u64>> {
        self.file.is_sent().then(|| self.host + self.fill.start..self.host + self.fill.end)
    }

    /// Makes the operation in flight, if there is one, the last.
    pub(super) fn cancel(&mut self) {
        self.file.cancel();
        self.read.cancel();
    }

    /// Returns the changes of tables that the mapping of the copy needs.
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns whether the current piece is the only one.
    fn is_single(&self) -> bool {
        self.piece == self.fill
    }
}

impl Drop for CopyState {
    fn drop(&mut self) {
        // The transfer may land later.
        if self.file.is_sent()
            && let Some(copy) = self.copy.take()
        {
            copy.leak();
        }
    }
}

impl Chain {
    /// Continues the copy of a write.
    #[cold]
    pub(super) fn drive_copy<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        (image, shard): (&Arc<Image>, u32),
        (main, front): (&mut B, &mut B),
        copy: &mut CopyState,
    ) -> Step {
        loop {
            let layers = (0, shard);
            let step = match copy.phase {
                CopyPhase::Whole if copy.file.is_active() => {
                    let buffers = if copy.is_split { &mut *front } else { &mut *main };
                    image.file.retry(&mut top(sender), buffers, &mut copy.file)
                }
                CopyPhase::Whole => {
                    let len = copy.new.end - copy.new.start;
                    copy.is_split = len < main.left();
                    if copy.is_split {
                        main.split_to(len, front, sender.marks());
                    }
                    let buffers = if copy.is_split { &mut *front } else { &mut *main };
                    let wanted = Unchecked::Write { at: copy.host + copy.fill.start, durable: true };
                    image.file.start_unchecked(&mut top(sender), buffers, &mut copy.file, wanted)
                }
                CopyPhase::Buffer => match copy.next_piece(image, sender) {
                    Ok(()) => continue,
                    Err(step) => step,
                },
                CopyPhase::Old => {
                    self.drive_read(sender, layers, (&mut copy.local, &mut copy.front), &mut copy.read)
                }
                CopyPhase::Store | CopyPhase::Sync => {
                    image.file.retry(&mut top(sender), &mut copy.local, &mut copy.file)
                }
            };
            match self.end_copy_step(sender, image, (&mut *main, &mut *front), copy, step) {
                None => {}
                Some(step) => return step,
            }
        }
    }

    /// Continues the copy of a write after the completion of an operation.
    #[cold]
    pub(super) fn resume_copy<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        (image, shard): (&Arc<Image>, u32),
        (main, front): (&mut B, &mut B),
        copy: &mut CopyState,
        completion: Completion,
    ) -> Step {
        let step = match copy.phase {
            CopyPhase::Old => {
                let buffers = (&mut copy.local, &mut copy.front);
                self.resume_read(sender, (0, shard), buffers, &mut copy.read, completion)
            }
            CopyPhase::Whole => {
                let buffers = if copy.is_split { &mut *front } else { &mut *main };
                image.file.resume(&mut top(sender), buffers, &mut copy.file, completion)
            }
            _ => image.file.resume(&mut top(sender), &mut copy.local, &mut copy.file, completion),
        };
        match self.end_copy_step(sender, image, (&mut *main, &mut *front), copy, step) {
            None => self.drive_copy(sender, (image, shard), (main, front), copy),
            Some(step) => step,
        }
    }

    /// Goes on after a step of the current phase. `None`: there is a next phase.
    fn end_copy_step<B: TransferBuffers, S: OpSender>(
        &self,
        sender: &mut S,
        image: &Arc<Image>,
        (main, front): (&mut B, &mut B),
        copy: &mut CopyState,
        step: Step,
    ) -> Option<Step> {
        if copy.is_split && matches!(step, Step::Done(_)) {
            main.join(front, sender.marks());
            copy.is_split = false;
        }
        if step != Step::Done(Ok(())) {
            // An error drops the copy, which gives it up.
            return Some(step);
        }
        let step = match copy.phase {
            CopyPhase::Buffer => return None,
            CopyPhase::Old => {
                if let Err(error) = copy.insert_new(main, sender) {
                    return Some(Step::Done(Err(error)));
                }
                copy.phase = CopyPhase::Store;
                let at = copy.host + copy.piece.start;
                let wanted = Unchecked::Write { at, durable: copy.is_single() };
                image.file.start_unchecked(&mut top(sender), &mut copy.local, &mut copy.file, wanted)
            }
            CopyPhase::Store if copy.piece.end < copy.fill.end => {
                copy.permit_back();
                copy.phase = CopyPhase::Buffer;
                return None;
            }
            CopyPhase::Store if !copy.is_single() => {
                copy.phase = CopyPhase::Sync;
                copy.permit_back();
                image.file.start_unchecked(
                    &mut top(sender),
                    &mut copy.local,
                    &mut copy.file,
                    Unchecked::Flush,
                )
            }
            CopyPhase::Store | CopyPhase::Sync | CopyPhase::Whole => {
                copy.permit_back();
                if let Some(copying) = copy.copy.take() {
                    copy.ticket = image.with_tables(|tables| tables.copied(copying));
                }
                return Some(Step::Done(Ok(())));
            }
        };
        match step {
            // A transfer never ends at once.
            Step::Done(Ok(())) => self.end_copy_step(sender, image, (main, front), copy, step),
            step => Some(step),
        }
    }
}

impl CopyState {
    /// Gets a buffer for the next piece, and begins to read its old bytes.
    fn next_piece(&mut self, image: &Image, sender: &mut impl OpSender) -> Result<(), Step> {
        let permit = self.permit.insert(image.pools.copies.take(&mut self.wait, sender.waker())?);
        let start = self.piece.end;
        self.piece = start..(start + image.pools.copies.bytes() as u64).min(self.fill.end);
        let len = (self.piece.end - self.piece.start) as usize;
        let Some(mut buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
        self.read.begin(self.guest + start);
        let is_new = self.new.start <= self.piece.start && self.piece.end <= self.new.end;
        let left = match self.is_zero || is_new {
            true => {
                buffer[..len].fill(0);
                len..len
            }
            false => 0..len,
        };
        self.local = LocalBuffers::of_range(buffer, left);
        self.phase = CopyPhase::Old;
        Ok(())
    }

    /// Puts the guest's bytes into the piece.
    fn insert_new<B: TransferBuffers>(
        &mut self,
        main: &mut B,
        sender: &mut impl OpSender,
    ) -> Result<(), IoError> {
        let Some(mut buffer) = self.local.take() else { return Err(IoError::Stuck) };
        let start = self.piece.start;
        let (from, to) = (self.new.start.max(start), self.new.end.min(self.piece.end));
        if from < to {
            main.read(&mut buffer[(from - start) as usize..(to - start) as usize]);
            // A damaged page reads as zeroes, which must not be stored.
            if main.is_damaged() {
                return Err(IoError::Damaged);
            }
            main.advance(to - from, sender.marks());
        }
        let len = (self.piece.end - start) as usize;
        self.local = LocalBuffers::of_range(buffer, 0..len);
        Ok(())
    }

    /// Returns the buffer of a piece that is done.
    fn permit_back(&mut self) {
        if let Some(permit) = &mut self.permit {
            permit.buffer = self.local.take();
        }
        self.permit = None;
    }
}
