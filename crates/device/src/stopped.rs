//! The state that a stopped task leaves.

use kickless_virtqueue::device::Held;

/// What is left of a task that has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Index of the next available ring entry that nobody has taken.
    pub next_avail: u16,
    /// Whether the driver had offered more than was taken.
    pub has_work: bool,
    /// What was completed and could not be shown to the driver, because the ring was not in guest memory: to be handed to
    /// whoever runs this ring next. Nearly always empty.
    pub held: Vec<Held>,
}
