//! Frames that pass from one task of a worker to another with a single copy.
//!
//! A transmit task that finds frames for a receive task of the same worker can offer them while they are
//! still in its ring. The other task copies them from the memory of one guest to that of the other. All of it
//! happens within a poll of the transmit task, on the thread that owns both tasks. So no change and no stop
//! of either task comes in between, and a refusal needs no undo: a chain that was not taken is still in its
//! ring.

use kickless_memory::View;
use kickless_virtqueue::Buffer;
use kickless_virtqueue::device::SingleChain;

/// The length of the part of a frame, header included, that its sender copies before it judges the frame.
pub const PARCEL_HEAD_LEN: usize = 128;

/// The worker that has a task, and the task's number there.
///
/// Another task can have the same location later, but none at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLocation {
    /// The number of the worker among those of all pools of the process.
    pub worker_id: u32,
    /// The number of the task on this worker: [`Context::task`](crate::Context::task).
    pub task: u32,
}

/// The memory that holds the frames of a parcel, headers included. [`Parcel::view`] may lack a part of it.
#[derive(Clone, Copy, Debug)]
pub enum Offered<'a> {
    /// Each frame is in the one buffer of its chain, which holds nothing else.
    Singles(&'a [SingleChain]),
    /// One frame is in several buffers.
    Pieces {
        /// The buffers of its chain, in their order. They may hold more bytes than the frame has.
        buffers: &'a [Buffer],
        /// The length of the frame, header included.
        len: u32,
    },
}

/// Frames that are still in the ring of their sender, for one receiver.
#[derive(Clone, Copy, Debug)]
pub struct Parcel<'a> {
    /// The address of the receiver's inbox, as the name of the receiver. A task takes only parcels with the
    /// address of its own inbox, because a [`TaskLocation`] can belong to another task by now.
    pub to: usize,
    /// The memory of the sender's guest.
    pub view: &'a View,
    /// The first bytes of each frame, which the sender has judged. The receiver uses these, because the guest
    /// can change the frame at any time. Bytes behind the end of a shorter frame have no meaning.
    ///
    /// The header is valid for the frame and for the sender's features, and its number of buffers is 1. The
    /// receiver checks its own features.
    pub heads: &'a [[u8; PARCEL_HEAD_LEN]],
    /// The memory of the frames, one for each head.
    pub frames: Offered<'a>,
}

/// The other tasks of a worker, during the poll of one.
pub trait Neighbours {
    /// Offers a parcel to the task with this number. Returns the number of frames that it took, from the
    /// first one on. The caller completes the chains of these in the same poll. The other chains stay as they
    /// were.
    ///
    /// Returns 0 without asking the task unless it is on the worker's poll list: a task that sleeps or leaves
    /// gets frames in the usual way. A task never gets a parcel of its own.
    fn offer(&mut self, task: u32, parcel: &Parcel<'_>) -> u32;

    /// Does what the event of the task with this number would do, without system calls. A task that sleeps,
    /// and whose event the worker watches, is polled soon. Any other task has its event asked for
    /// ([`QueueTask::event`](crate::QueueTask::event)) before it sleeps, and finds out then.
    ///
    /// The caller has found the task on this worker during the present poll.
    fn wake(&mut self, task: u32);
}
