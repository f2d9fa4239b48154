//! The order of completed operations and syncs.

/// The order of completed operations and syncs. An operation is durable if a sync that began after its
/// completion has succeeded.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// The number of completed writes and zeroings of tables.
    completed: u64,
    /// The operations up to this one are durable.
    durable: u64,
    /// Something waits until the operations up to this one are durable.
    wanted: u64,
    /// A sync of our own is running.
    is_running: bool,
}

impl Syncs {
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    pub(super) fn count(&mut self) {
        self.completed += 1;
    }

    pub(super) fn is_durable(&self, stamp: u64) -> bool {
        self.durable >= stamp
    }

    pub(super) fn want(&mut self, stamp: u64) {
        self.wanted = self.wanted.max(stamp);
    }

    pub(super) fn is_due(&self) -> bool {
        self.wanted > self.durable && !self.is_running
    }

    /// Begins a sync of our own.
    pub(super) fn begin(&mut self) -> u64 {
        self.is_running = true;
        self.completed
    }

    /// Ends a sync of our own. If it failed, all that wanted it have to ask again.
    pub(super) fn end(&mut self, mark: u64, is_ok: bool) {
        self.is_running = false;
        if is_ok {
            self.succeed(mark);
        } else {
            self.wanted = 0;
        }
    }

    /// Notes that a sync with this mark has succeeded.
    pub(super) fn succeed(&mut self, mark: u64) {
        self.durable = self.durable.max(mark);
    }
}
