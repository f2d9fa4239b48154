//! The jobs that a caller gives to the thread of the connection (`hand_over.rs`).

use crate::offload::AnswerSlot;
use std::sync::Arc;
use std::time::Instant;

/// A job for the thread that a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Flush everything, and end the connection.
    GiveUp,
    /// Make a new connection.
    TakeOver,
}

/// A job that has begun.
#[derive(Debug)]
pub(super) struct ActiveJob {
    pub(super) job: Job,
    pub(super) number: u64,
    /// The job fails at this time.
    pub(super) deadline: Instant,
    /// The place for the answer to its flush.
    pub(super) flush: Option<Arc<AnswerSlot>>,
}

impl ActiveJob {
    pub(super) fn new(job: Job, number: u64, deadline: Instant) -> Self {
        Self { job, number, deadline, flush: None }
    }
}
