//! The state that a worker keeps of a task.

use crate::clock::Nanos;
use crate::mailbox::{Placement, TaskKey};
use crate::policy::Policy;
use crate::scheduler::Flow;
use kickless_device::{Interest, Position, QueueTask, Stopped};
use kickless_io::Waker;
use kickless_sync::mpsc::Sender;

/// The states of a task. See the crate's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskState {
    /// Kicks are enabled.
    Armed,
    /// On the poll list.
    Polled,
    /// Kicks are disabled, and the worker watches the event of the task's far side.
    Quiet,
    /// Kicks are disabled, and the worker does not visit the task before `until`. With `ignore_completions`,
    /// the task's completions do not end a sleep of the worker either.
    Napping { until: Nanos, ignore_completions: bool },
    /// There is work, but a limit keeps it in the ring. Kicks are disabled, and the worker does not visit the
    /// task before `until`. The policy does not learn of it: this time says nothing about the driver.
    Throttled { until: Nanos },
    /// There may be work, but no room for it.
    Blocked,
    /// Leaving, with requests in flight.
    Draining,
}

/// The counter of the time in a state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Notified,
    Polled,
    Throttled,
}

impl TaskState {
    fn mode(self) -> Mode {
        match self {
            Self::Throttled { .. } => Mode::Throttled,
            state if state.is_notified() => Mode::Notified,
            _ => Mode::Polled,
        }
    }

    /// Returns whether the worker leaves the task alone until a kick or an event of its far side.
    fn is_notified(self) -> bool {
        matches!(self, Self::Armed | Self::Quiet)
    }
}

/// The next holder of a task that leaves its worker without a stop.
pub(crate) enum NextHolder {
    /// The worker with this number.
    Worker(usize),
    /// The task's handle, whose owner waits for this answer.
    Handle(Sender<Position>),
}

pub(crate) struct Entry {
    pub(crate) key: TaskKey,
    pub(crate) placement: Placement,
    pub(crate) task: Box<dyn QueueTask>,
    pub(crate) flow: Flow,
    /// Polls of the task may offer parcels to other tasks.
    pub(crate) offers_parcels: bool,
    pub(crate) policy: Policy,
    pub(crate) state: TaskState,
    /// Set while the task is polled and was found empty: the time at which its policy is asked again.
    pub(crate) spin_until: Option<Nanos>,
    /// The last poll returned `Quiet`: the task waits for its far side alone, and a kick would not have woken
    /// it. Its ring holds room for frames, not work.
    pub(crate) quiet: bool,
    /// The time up to which the counters include the task's time.
    pub(crate) counted_until: Nanos,
    /// The time for which polls skip the far side after one that found nothing there, and the time when the
    /// next one is due.
    pub(crate) far_side_interval: Nanos,
    pub(crate) far_side_due: Nanos,
    /// The interest that its event is registered with, if it is registered.
    pub(crate) watched: Option<Interest>,
    /// Wakes this task.
    pub(crate) waker: Waker,
    /// The task waits for room or for a resource, and is not on the list for it. A completion of its own,
    /// its waker, or room in the engine puts it there.
    pub(crate) waits: bool,
    /// The task is in [`EventLoop::naps`](crate::event_loop::EventLoop::naps). Its nap may have ended early.
    pub(crate) in_naps: bool,
    /// The time until which the worker does not listen to its kicks ([`crate::kicks`]).
    pub(crate) deaf_until: Option<Nanos>,
    /// The time at which its pending call to the driver is due.
    pub(crate) call_due: Option<Nanos>,
    /// The value of [`EventLoop::served`](crate::event_loop::EventLoop::served) after its last visit that
    /// served requests.
    pub(crate) served_before: u32,
    /// The cost of its visits since loads were last compared.
    pub(crate) cost: u64,
    /// The time at which it came to this worker.
    pub(crate) arrived: Nanos,
    /// The next holder of a task that moves or is to be parked. If it also stops, it stops.
    pub(crate) next_holder: Option<NextHolder>,
    /// The receivers of its answer when it has stopped.
    pub(crate) stopping: Vec<Sender<Stopped>>,
}

impl Entry {
    /// Returns whether the task stops, moves or is to be parked, and so pops nothing more.
    pub(crate) fn is_leaving(&self) -> bool {
        !self.stopping.is_empty() || self.next_holder.is_some()
    }

    /// Returns whether a leaving task has to wait for requests in flight. It takes those along that it keeps,
    /// unless it stops.
    pub(crate) fn is_draining(&self) -> bool {
        let kept = if self.stopping.is_empty() { self.task.kept() } else { 0 };
        self.task.in_flight() > kept
    }

    /// Adds the time since the last call to the counter of the present mode.
    pub(crate) fn count_time(&mut self, now: Nanos) {
        let mode = self.state.mode();
        let passed = now.saturating_sub(self.counted_until);
        // All visits of a round use one time, which can be a little before that of a change in the round.
        self.counted_until = self.counted_until.max(now);
        let counters = self.task.vring().counters();
        match mode {
            Mode::Notified => counters.notified_ns.add(passed),
            Mode::Polled => counters.polled_ns.add(passed),
            Mode::Throttled => counters.throttled_ns.add(passed),
        }
    }

    /// Changes the task's state. The time until now counts for the old state.
    pub(crate) fn enter(&mut self, state: TaskState, now: Nanos) {
        if self.state.mode() != state.mode() {
            self.count_time(now);
        }
        self.state = state;
        self.spin_until = None;
    }
}
