//! The state that a stopped task leaves.

use kickless_virtqueue::device::UnpublishedUsed;

/// The state of a ring whose task has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Index of the first available ring entry that the task has not taken, or has returned.
    pub next_avail: u16,
    /// Whether the driver had offered more than was taken.
    pub has_work: bool,
    /// Completions that could not be shown to the driver, because the ring was not in guest memory. The next
    /// task of this ring shows them. Nearly always empty.
    pub unpublished: Vec<UnpublishedUsed>,
}
