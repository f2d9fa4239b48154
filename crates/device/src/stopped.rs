//! The state that a stopped task leaves.

use kickless_virtqueue::device::UnpublishedUsed;

/// The state of a ring whose task has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Index of the first available ring entry that the task has not taken, or has returned. If the in-flight
    /// buffer has chains that the task has left, it is the used index instead: see
    /// [`Queue::resume_at`](kickless_virtqueue::device::Queue::resume_at).
    pub next_avail: u16,
    /// Whether the driver had offered more than was taken.
    pub has_work: bool,
    /// The number of chains that the task has left in the in-flight buffer.
    pub left: u16,
    /// Completions that could not be shown to the driver, because the ring was not in guest memory. The next
    /// task of this ring shows them. Nearly always empty.
    pub unpublished: Vec<UnpublishedUsed>,
}
