//! The counts of a walk.

/// The length of a walk. It ends when it has reached all of these.
#[derive(Clone, Copy, Debug)]
pub struct Goals {
    /// Requests that disks have taken.
    pub requests: u64,
    /// Frames that cards have taken.
    pub frames: u64,
    /// Messages that were sent.
    pub messages: u64,
}

/// Counts what a walk has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Requests that disks have returned.
    pub requests: u64,
    /// Frames that cards have returned to their senders.
    pub frames: u64,
    /// Messages.
    pub messages: u64,
    /// Messages that were refused.
    pub refused: u64,
    /// Sessions with all their rings.
    pub sessions: u64,
    /// Rings whose device has reported an error.
    pub broken: u64,
    /// Frames that were received.
    pub received: u64,
    /// Commands of control queues.
    pub commands: u64,
    /// Pauses because a ring stood still.
    pub pauses: u64,
    /// Checks of honest devices.
    pub checks: u64,
}

impl Totals {
    /// Returns whether a walk has done enough.
    pub fn reach(&self, goals: &Goals) -> bool {
        self.requests >= goals.requests && self.frames >= goals.frames && self.messages >= goals.messages
    }
}
