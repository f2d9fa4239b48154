//! A task on a worker.

use crate::clock::Nanos;
use crate::mailbox::{Key, Tenant};
use crate::policy::Policy;
use crate::scheduler::Flow;
use kickless_device::{Interest, QueueTask, Stopped};
use kickless_sync::mpsc::Sender;

/// The states of a task; see the crate's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Kicks are enabled.
    Armed,
    /// On the poll list.
    Polled,
    /// Kicks are disabled, and the event of its far side is watched.
    Quiet,
    /// Kicks are disabled, and it is not looked at before then; `deaf`: nor are its completions.
    Napping { until: Nanos, deaf: bool },
    /// There may be work, but no room for it.
    Blocked,
    /// Stopping or moving, with something in flight.
    Draining,
}

impl State {
    /// Whether the worker leaves the task alone until a kick or an event of its far side.
    fn is_notified(self) -> bool {
        matches!(self, Self::Armed | Self::Quiet)
    }
}

pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) tenant: Tenant,
    pub(crate) task: Box<dyn QueueTask>,
    pub(crate) flow: Flow,
    pub(crate) policy: Policy,
    pub(crate) state: State,
    /// Polled, and found empty: its policy is asked again then.
    pub(crate) spin_until: Option<Nanos>,
    /// Its last poll returned `Quiet`: the task waits for its far side alone, and a kick would not have woken it. What
    /// is in its ring is room for frames, not work.
    pub(crate) quiet: bool,
    /// Since when its time is not in the counters yet.
    pub(crate) counted: Nanos,
    /// How long it need not look at its far side after a look that found nothing, and until when.
    pub(crate) far_side_interval: Nanos,
    pub(crate) far_side_due: Nanos,
    /// The interest that its event is registered with, once it is.
    pub(crate) watched: Option<Interest>,
    /// It is among those that any completion, or the waker, puts on the list.
    pub(crate) waits: bool,
    /// It is among those that are to be woken, or have been woken by something else before.
    pub(crate) naps: bool,
    /// Calls that it owes its driver are due then.
    pub(crate) call_due: Option<Nanos>,
    /// What it has taken since loads were last looked at.
    pub(crate) cost: u64,
    /// When it came to this worker.
    pub(crate) came: Nanos,
    /// The worker that it is to go to.
    pub(crate) moving: Option<usize>,
    /// Who waits for it to stop.
    pub(crate) stopping: Vec<Sender<Stopped>>,
}

impl Entry {
    /// Whether nothing is to be popped any more.
    pub(crate) fn is_leaving(&self) -> bool {
        !self.stopping.is_empty() || self.moving.is_some()
    }

    /// Puts the time that has passed into the counters of the present mode.
    pub(crate) fn count_time(&mut self, now: Nanos) {
        let notified = self.state.is_notified();
        let passed = now.saturating_sub(self.counted);
        // A round has one time, which can be a little before that of a change that was made in it.
        self.counted = self.counted.max(now);
        let counters = self.task.vring().counters();
        if notified { counters.notified_ns.add(passed) } else { counters.polled_ns.add(passed) }
    }

    /// Changes its state; the time until now is the old one's.
    pub(crate) fn enter(&mut self, state: State, now: Nanos) {
        if self.state.is_notified() != state.is_notified() {
            self.count_time(now);
        }
        self.state = state;
        self.spin_until = None;
    }
}
