//! The contract of a task that a worker runs.

use crate::{Event, Vring};
use kickless_io::{Completion, Engine, Waker};
use std::io;
use std::time::Duration;

/// The parts of a worker that a task can use during one call.
pub struct Context<'a> {
    /// The worker's engine. The worker submits what is queued there, once for all tasks.
    pub engine: &'a mut Engine,
    /// The number of this task, for the tokens of its operations.
    pub task: u32,
    /// Wakes this worker, which then polls all its blocked tasks again.
    pub waker: &'a Waker,
    /// The poll is to look at the far side: see [`QueueTask::far_side_interval`].
    pub far_side_due: bool,
}

/// The event that a task waits for after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A kick: the ring is empty, or has less than the task needs. The task also waits for its event, if it asks for one.
    Idle,
    /// Its event, and nothing in the ring: kicks stay off. A receive task has nothing to receive, however much credit; a
    /// transmit task holds a frame that the far side refused. On a broken ring this is the same as [`Next::Idle`].
    Quiet,
    /// As [`Next::Idle`], and a request that was popped waits for something. The worker also polls again after a
    /// completion, or when it is woken.
    Waiting,
    /// Its next turn: the budget is used up, and there may be more.
    More,
    /// Room: there may be more. The worker polls again after a completion, or when it is woken. Kicks stay off.
    Blocked,
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polled {
    /// Requests begun, or frames carried. Chains that were popped as credit do not count.
    pub served: u32,
    /// The part of the budget that was taken: see [`QueueTask::poll`].
    pub cost: u32,
    /// The event that the task waits for.
    pub next: Next,
}

/// One virtqueue of a device, running on a worker.
///
/// An implementer may rely on this:
/// * All calls come from one thread at a time. `attach` comes first and `detach` last. A task that moves to another worker
///   is detached and attached again.
/// * Nothing is in flight at `detach`. Every completion of an operation that it queued comes back through `complete`, once.
/// * After [`Next::Idle`] the worker arms the task, and after [`Next::Quiet`] it does not. Then it watches the event, and
///   waits for nothing between the poll and that.
///
/// It must see to this:
/// * Each head popped is pushed or returned exactly once, whatever fails.
/// * A call never waits.
/// * What was pushed is published before the call returns.
///
/// # Credit
/// A receive task pops chains before it has anything to put there: its *credit* ([`Vring::pop_credit`]). A transmit task can
/// hold a chain as credit that the far side refused. Such chains are not in flight, because nothing that the task waits for is under way. The
/// worker calls [`QueueTask::return_credit`] before the task stops, and before new memory, new addresses or an invalidation
/// take effect, so none of these ever waits for credit. A task that moves keeps its credit.
pub trait QueueTask: Send {
    /// Returns the ring under it. The worker updates and reads it through this.
    fn vring(&mut self) -> &mut Vring;

    /// Makes what it needs of the worker's engine. The default needs nothing.
    ///
    /// # Errors
    /// The engine cannot take its file.
    fn attach(&mut self, _engine: &mut Engine) -> io::Result<()> {
        Ok(())
    }

    /// Gives back what [`QueueTask::attach`] made.
    fn detach(&mut self, _engine: &mut Engine) {}

    /// Goes on with requests that had to wait, then pops heads and submits them until they cost `budget`: 1 for each request
    /// or packet, and 1 for each whole 4 KiB of its data, so that neither many nor large ones are free. Reading long chains
    /// and translating addresses costs too ([`Vring::take_cost`]), also where nothing is popped or the request is refused.
    /// The last request may cost more than was left.
    ///
    /// With a budget of 0 the task is leaving. It pops only what an earlier process has popped before ([`Vring::resubmissions`]), and
    /// takes no credit. Such chains can be part of its credit, which it then returns first.
    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled;

    /// Takes completions of its own operations; empties `completions`. Returns whether a request waits for something, so
    /// that the worker polls the task: the next poll finds out whether that is there by now. The default is for a task that
    /// queues no operations.
    fn complete(&mut self, _context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        completions.clear();
        false
    }

    /// Returns the number of heads popped and not pushed yet, without credit, and of those that are to be popped again
    /// ([`Vring::resubmissions`]).
    fn in_flight(&self) -> usize;

    /// Enables kicks, then looks once more. Returns whether there is work already: the kick for it may never come.
    fn arm(&mut self) -> bool {
        self.vring().arm()
    }

    /// Disables kicks.
    fn disarm(&mut self) {
        self.vring().disarm();
    }

    /// Returns the descriptor of its far side, and what it waits for there now; `None`: it has no far side.
    ///
    /// The descriptor is the same from `attach` to `detach`, and no other task has the same one: a task that shares a far
    /// side duplicates its descriptor. Interests can change in `poll` and `complete`. The worker asks for them before it
    /// stops looking at the task, and watches the descriptor edge-triggered. So the far side must have been found unready
    /// (`EAGAIN`) by the poll that returned [`Next::Quiet`] or [`Next::Idle`] with an interest.
    fn event(&self) -> Option<Event<'_>> {
        None
    }

    /// Returns how long the worker spins on the ring between two looks at the far side that find nothing. A look at a ring
    /// takes nanoseconds; a look that is a system call had better come every one or two microseconds. Asked once, after
    /// `attach`.
    ///
    /// A poll whose context says [`Context::far_side_due`] looks at the far side, and another poll need not. The worker never
    /// lets a task sleep after a poll that need not look.
    fn far_side_interval(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns the affinity group of the task, a number within its device; `None`: it has none. Tasks of one group, such as
    /// the two rings of a pair, run on one worker and move together.
    fn affinity(&self) -> Option<u32> {
        None
    }

    /// Returns all credit to the ring ([`Vring::unpop`]) and forgets its chains. The ring itself returns what is left of it.
    fn return_credit(&mut self) {}

    /// Carries requests out (`true`, as at the beginning), or drains the ring and discards what it takes
    /// ([`Disabled::Drained`](crate::Disabled::Drained)). Not called for a ring that is left alone while it is disabled.
    fn set_enabled(&mut self, _enabled: bool) {}

    /// Ends requests that wait for a remote server within a bounded time, because the task stops for good and the caller is
    /// blocked on this.
    fn limit_remote_waits(&mut self) {}

    /// Called when the view of memory was replaced. Lets go of references to the old one that no request in flight needs,
    /// those in the worker's engine too. The default is for a task that keeps none between two calls.
    fn memory_changed(&mut self, _engine: &mut Engine) {}
}
