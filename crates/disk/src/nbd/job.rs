//! The jobs that a caller gives to the thread of the connection (`hand_over.rs`, `suspend.rs`).

use super::handshake::Export;
use crate::offload::AnswerSlot;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

/// A job for the thread that a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Flush everything, and end the connection.
    GiveUp,
    /// Make a new connection.
    TakeOver,
    /// Describe the connection, for another process.
    Describe,
    /// Suspend the thread.
    Suspend,
}

/// The result of a job.
#[derive(Debug)]
pub(super) enum Answer {
    /// The disk was given up or taken over.
    Done,
    /// The export, and a duplicate of the socket of its connection, if there is one.
    Connection(Export, Option<OwnedFd>),
    /// The thread is suspended.
    Suspended(Counts),
}

/// The counts of a connection on which nothing is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The number of times when acknowledged writes may have been lost.
    pub(super) lost_writes: u64,
    /// The server may lose writes that it has acknowledged.
    pub(super) is_dirty: bool,
}

/// The caller of a job. It gets the result, after `None` if the job can only succeed from there on.
///
/// The channel has no room, so the thread learns whether the caller has given up. After `None`, the caller
/// waits without a limit.
pub(super) type Caller = SyncSender<Option<io::Result<Answer>>>;

/// A job that has begun.
#[derive(Debug)]
pub(super) struct ActiveJob {
    pub(super) job: Job,
    pub(super) caller: Caller,
    /// The job fails at this time.
    pub(super) deadline: Instant,
    /// The place for the answer to its flush.
    pub(super) flush: Option<Arc<AnswerSlot>>,
}

impl ActiveJob {
    pub(super) fn new(job: Job, caller: Caller, deadline: Instant) -> Self {
        Self { job, caller, deadline, flush: None }
    }
}
