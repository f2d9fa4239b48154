//! The requests of an image's queue, of any kind.

use super::attached::AttachedImages;
use super::extents::ExtentState;
use super::read::ReadState;
use super::sender::CancelledSender;
use super::write::WriteState;
use crate::buffers::IoBuffers;
use crate::op_sender::OpSender;
use crate::{Request, Step};
use kickless_io::Completion;

/// The state of a request.
#[derive(Debug, Default)]
pub(crate) struct Qcow2State {
    request: Option<Request>,
    /// The request starts no further operation.
    is_cancelled: bool,
    /// The bytes of a run that is not the whole rest of the request.
    front: IoBuffers,
    read: ReadState,
    write: WriteState,
    extents: Option<Box<ExtentState>>,
}

impl Qcow2State {
    pub(crate) fn is_active(&self) -> bool {
        self.request.is_some()
    }

    /// Cancels the request, if there is one: it starts no further operation, and then ends with an error.
    pub(crate) fn cancel(&mut self) {
        self.is_cancelled = self.is_active();
        self.read.cancel();
        self.write.cancel();
    }

    /// Starts a request at `at`, which was checked.
    #[inline]
    pub(super) fn start<S: OpSender>(
        &mut self,
        (images, size): (&mut AttachedImages, u64),
        sender: &mut S,
        buffers: &mut IoBuffers,
        (request, at): (Request, u64),
    ) -> Step {
        match request {
            Request::Read { .. } => self.read.begin(at),
            Request::Write { durable, .. } => self.write.begin(at, durable),
            Request::Flush => self.write.begin_sync(),
            Request::Discard { durable } => self.extents.get_or_insert_default().begin(false, durable),
            Request::WriteZeroes { durable } => self.extents.get_or_insert_default().begin(true, durable),
        }
        self.request = Some(request);
        images.requests += 1;
        images.is_cancelled = false;
        self.step((images, size), sender, buffers, None)
    }

    /// Continues the request as far as possible, after a completion if there is one.
    #[inline]
    pub(crate) fn step<S: OpSender>(
        &mut self,
        (images, size): (&mut AttachedImages, u64),
        sender: &mut S,
        buffers: &mut IoBuffers,
        completion: Option<Completion>,
    ) -> Step {
        let step = match self.is_cancelled {
            false => self.step_with((images, size), sender, buffers, completion),
            true => self.step_cancelled((images, size), sender, buffers, completion),
        };
        if let Step::Done(_) = step {
            self.request = None;
            self.is_cancelled = false;
            images.requests = images.requests.saturating_sub(1);
        }
        step
    }

    #[inline]
    fn step_with<S: OpSender>(
        &mut self,
        (images, size): (&mut AttachedImages, u64),
        sender: &mut S,
        buffers: &mut IoBuffers,
        completion: Option<Completion>,
    ) -> Step {
        let (chain, shard) = (&images.chain, images.shard);
        let Self { request, front, read, write, extents, .. } = self;
        match (request, extents, completion) {
            (Some(Request::Read { .. }), _, None) => {
                chain.drive_read(sender, (0, shard), (buffers, front), read)
            }
            (Some(Request::Read { .. }), _, Some(completion)) => {
                chain.resume_read(sender, (0, shard), (buffers, front), read, completion)
            }
            (Some(Request::Write { .. } | Request::Flush), _, None) => {
                chain.drive_write(sender, shard, (buffers, front), write)
            }
            (Some(Request::Write { .. } | Request::Flush), _, Some(completion)) => {
                chain.resume_write(sender, shard, (buffers, front), write, completion)
            }
            (Some(_), Some(extents), None) => {
                chain.drive_extents(sender, (shard, size), buffers, extents, write)
            }
            (Some(_), Some(extents), Some(completion)) => {
                chain.resume_extents(sender, (shard, size), buffers, extents, write, completion)
            }
            // No request was started.
            (_, _, None) => Step::Busy,
            (_, _, Some(_)) => Step::Pending,
        }
    }

    /// Ends a cancelled request, when it has no operation in flight.
    #[cold]
    fn step_cancelled<S: OpSender>(
        &mut self,
        (images, size): (&mut AttachedImages, u64),
        sender: &mut S,
        buffers: &mut IoBuffers,
        completion: Option<Completion>,
    ) -> Step {
        let sender = &mut CancelledSender(sender);
        let mut step = self.step_with((images, size), sender, buffers, completion);
        if matches!(step, Step::Busy | Step::More) {
            // It may wait for memory or a range within the file, which gives them up.
            self.cancel();
            step = self.step_with((images, size), sender, buffers, None);
        }
        if !matches!(step, Step::Busy | Step::More) {
            return step;
        }
        // It waits for the tables, for a buffer or for the contents of a compressed cluster.
        match (self.request, &mut self.extents) {
            (Some(Request::Read { .. }), _) => self.read.give_up(),
            (Some(Request::Write { .. } | Request::Flush), _) | (_, None) => self.write.give_up(),
            (_, Some(extents)) => {
                let _ = self.write.give_up();
                extents.give_up(buffers)
            }
        }
    }
}
