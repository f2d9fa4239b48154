//! The position of a ring whose task is parked.

use kickless_virtqueue::device::UnpublishedUsed;

/// The position of a ring whose task is parked. Another process can continue the ring from here, as long as
/// the task does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// Index of the first available ring entry that the task has not taken, or has returned. If the in-flight
    /// buffer has chains that the task keeps, it is the used index instead, as in
    /// [`Stopped::next_avail`](crate::Stopped::next_avail).
    pub next_avail: u16,
    /// The number of chains that the task has taken and not completed: those of requests that it keeps
    /// ([`QueueTask::kept`](crate::QueueTask::kept)), and those of an earlier process that it could not take
    /// yet. Only an in-flight buffer tells another process of them.
    pub in_flight: u16,
    /// Completions that could not be shown to the driver, because the ring was not in guest memory. Nearly
    /// always empty.
    pub unpublished: Vec<UnpublishedUsed>,
    /// The ring is broken: by its driver, or because its memory was taken away.
    pub is_broken: bool,
}
