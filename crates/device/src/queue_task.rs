//! The contract of a task that a worker runs.

use crate::{Clock, Event, Leave, Neighbours, Parcel, TaskLocation, Traffic, Vring};
use kickless_io::{Completion, Engine, Waker};
use std::io;
use std::time::Duration;

/// The parts of a worker that a task can use during one call.
pub struct Context<'a> {
    /// The worker's engine. The worker submits what is queued there, once for all tasks.
    pub engine: &'a mut Engine,
    /// The number of this task, for the tokens of its operations.
    pub task: u32,
    /// Wakes this task: its worker polls it again, if it waits ([`Next::Blocked`], [`Next::Waiting`]). A
    /// resource that a request waits for keeps a clone.
    pub waker: &'a Waker,
    /// The poll must check the far side: see [`QueueTask::far_side_interval`]. It must also try the requests
    /// that wait ([`Context::tries_waiting`]).
    pub far_side_due: bool,
    /// The clock of the pool.
    pub clock: Clock,
    /// The time on this clock, as the worker or a task of this turn has read it last.
    pub now_ns: u64,
    /// In a poll, the number of requests of other tasks that this worker has served since the task's last
    /// poll that served any, modulo 2^32.
    pub served_others: u32,
    /// The other tasks of the worker, in a poll of a task that offers parcels
    /// ([`QueueTask::offers_parcels`]). An executor need not pass parcels on, so it can be `None` there too.
    pub neighbours: Option<&'a mut dyn Neighbours>,
}

impl<'a> Context<'a> {
    /// Makes a context whose far side is due, with the present time.
    pub fn new(engine: &'a mut Engine, task: u32, waker: &'a Waker, clock: Clock) -> Self {
        Self {
            engine,
            task,
            waker,
            far_side_due: true,
            clock,
            now_ns: clock.now(),
            served_others: 0,
            neighbours: None,
        }
    }

    /// Returns whether the poll must try the requests that wait: see [`Next::Waiting`].
    pub fn tries_waiting(&self) -> bool {
        self.far_side_due || self.waker.is_marked()
    }

    /// Reads the clock. A task reads it at most once for each call.
    pub fn read_clock(&mut self) -> u64 {
        self.now_ns = self.clock.now();
        self.now_ns
    }
}

/// The budget of a poll of a task that is leaving. It is as large as that of a device that is alone on its
/// worker, because such polls are rare. Other devices wait meanwhile, so it has a limit.
pub const LEAVING_COST: u32 = 64;

/// The event that a task waits for after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A kick: the ring is empty, or has less than the task needs. The task also waits for its event, if it
    /// asks for one.
    Idle,
    /// Its event alone, so kicks stay off. A receive task returns this when it has nothing to receive, with
    /// any amount of credit. A transmit task returns it while it holds a frame that the far side refused. On
    /// a broken ring this is the same as [`Next::Idle`].
    Quiet,
    /// As [`Next::Idle`], and a request that was popped waits for something. The worker also polls again
    /// after the events of [`Next::Blocked`]. While it spins, only polls after such an event have to try the
    /// requests that wait ([`Context::tries_waiting`]).
    Waiting,
    /// Its next turn: the budget is used up, and there may be more.
    More,
    /// Tokens of a [`Limiter`](crate::Limiter), for this number of nanoseconds. The ring has requests, and
    /// nothing else can be done. Kicks stay off. The worker does not poll before that, unless something else
    /// than a kick wakes the task.
    Throttled {
        /// The nanoseconds until the task may pop a request.
        wait_ns: u64,
    },
    /// Room for further requests, which the ring may have. Kicks stay off. The worker polls again after one
    /// of these, and nothing else ends the wait:
    /// * a completion of the task's own operations;
    /// * a wake of its waker ([`Context::waker`]);
    /// * room in the engine, if the task found none there ([`Engine::queue`], [`Engine::wait_for_room`]).
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
/// * All calls come from one thread at a time. `attach` comes first and `detach` last. A task that moves to
///   another worker, or is parked and goes on, is detached and attached again.
/// * Nothing but kept requests is in flight at `detach`. The worker passes each completion of the task's
///   operations to `complete`, once.
/// * After [`Next::Idle`] the worker arms the task, and after [`Next::Quiet`] it does not. Then it watches
///   the event. It does not wait between the poll and that.
///
/// An implementer must do this:
/// * It pushes or returns each popped head exactly once, even after an error.
/// * A call never waits.
/// * A call that pushes completions publishes them before it returns, except [`QueueTask::take_parcel`].
///
/// # Credit
/// A receive task pops chains before it has data for them. These chains are its *credit*
/// ([`Vring::pop_credit`]). A transmit task can keep a chain as credit whose frame the far side refused. Such
/// chains are not in flight, because no operation uses them. The worker calls [`QueueTask::return_credit`]
/// before the task stops or is parked, and before new memory, new addresses or an invalidation take effect.
/// So none of these ever waits for credit. A task that moves keeps its credit.
pub trait QueueTask: Send {
    /// Returns the task's ring. The worker updates and reads it through this.
    fn vring(&mut self) -> &mut Vring;

    /// Registers the task's files with the worker's engine. The default needs nothing there.
    ///
    /// # Errors
    /// The engine cannot take its file.
    fn attach(&mut self, _engine: &mut Engine) -> io::Result<()> {
        Ok(())
    }

    /// Releases the resources that [`QueueTask::attach`] took.
    fn detach(&mut self, _engine: &mut Engine) {}

    /// Continues requests that had to wait, then pops heads and submits them until they cost `budget`. A
    /// request or packet costs 1, and 1 more for each whole 4 KiB of its data, so that both many and
    /// large requests cost something. Packets that a card carries in one batch cost less, as far as they
    /// are short. Reading long chains and translating addresses costs too ([`Vring::take_cost`]), even if
    /// nothing is popped or the request is refused. The last request may cost more than is left of the
    /// budget. A poll that costs nothing is charged for itself.
    ///
    /// A budget of 0 means that the task is leaving. It then pops only chains that an earlier process had
    /// popped ([`Vring::resubmissions`]), and takes no credit. Such chains can be part of its credit, which
    /// it then returns first. It returns [`Next::More`] when they have cost [`LEAVING_COST`].
    ///
    /// While its device has limits ([`QueueTask::traffic`]), the budget is no larger than there are tokens.
    /// Each request or packet costs 1 at least then, those of a batch too ([`Vring::is_limited`]).
    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled;

    /// Returns the traffic that the limits of the device count and hold. `None` if they do not concern the
    /// task, or not while its ring is drained ([`QueueTask::set_enabled`]). The default is for a task without
    /// traffic, such as that of a control ring.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Handles completions of the task's operations, and empties `completions`. Returns whether a request
    /// waits for something. The worker then polls the task, which checks whether the request can go on. The
    /// default is for a task that queues no operations.
    fn complete(&mut self, _context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        completions.clear();
        false
    }

    /// Returns the number of heads that are popped and not pushed yet, without credit, plus
    /// [`Vring::resubmissions`], plus operations of the task's own. Heads that the task leaves
    /// ([`QueueTask::stopping`]) do not count. A task stops when this is 0.
    fn in_flight(&self) -> usize;

    /// Returns how many of the heads in flight belong to requests that the task keeps until an operator acts:
    /// they have failed, and nothing but the task's own memory has them. A task that moves or is parked takes
    /// them along. One that stops does not wait for an operator.
    fn kept(&self) -> usize {
        0
    }

    /// Enables kicks, then checks the ring once more. Returns whether there is work already, because the
    /// driver may send no kick for this work.
    fn arm(&mut self) -> bool {
        self.vring().arm()
    }

    /// Disables kicks.
    fn disarm(&mut self) {
        self.vring().disarm();
    }

    /// Returns the descriptor of the task's far side, and its present interest. `None` if it has no far side.
    ///
    /// The descriptor is the same from `attach` to `detach`. No other task has the same one: a task that
    /// shares a far side duplicates its descriptor. Interests can change in `poll` and `complete`. The worker
    /// asks for them before it stops polling the task, and watches the descriptor edge-triggered. So a poll
    /// that returns [`Next::Quiet`], or [`Next::Idle`] with an interest, must have found the far side unready
    /// (`EAGAIN`).
    fn event(&self) -> Option<Event<'_>> {
        None
    }

    /// Returns how long the worker spins on the ring alone after a check of the far side that found nothing.
    /// A check of a ring takes nanoseconds. A check of the far side can be a system call, and one every one
    /// or two microseconds is enough. The worker asks once, after `attach`.
    ///
    /// A poll whose context says [`Context::far_side_due`] must check the far side. Other polls need not. The
    /// worker lets a task sleep only after a poll that had to.
    fn far_side_interval(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns the affinity group of the task, a number within its device. `None` if it has none. Tasks of
    /// one group, such as the two rings of a pair, run on one worker and move together.
    fn affinity(&self) -> Option<u32> {
        None
    }

    /// Takes the location of the task: after `attach` the present one, and `None` before `detach`. A task
    /// that takes parcels shows it to their senders.
    fn set_location(&mut self, _location: Option<TaskLocation>) {}

    /// Returns whether polls of the task may offer parcels to other tasks of its worker, which are in
    /// [`Context::neighbours`] then. The worker asks once, after `attach`.
    fn offers_parcels(&self) -> bool {
        false
    }

    /// Takes frames of a parcel that another task of the worker offers during its poll, and completes a chain
    /// of its own ring with each. Returns their number, from the first frame on. The default takes none.
    ///
    /// The worker calls this only between two polls of a task that is on its poll list and not leaving, so
    /// kicks are off. After the other task's poll it publishes the completions and counts the frames as if
    /// the task had been polled. The sender is charged for them.
    ///
    /// A task takes nothing while earlier frames wait for it, so that frames stay in order. It completes a
    /// chain only if its frame was written whole.
    fn take_parcel(&mut self, _parcel: &Parcel<'_>) -> u32 {
        0
    }

    /// Returns all credit to the ring ([`Vring::unpop`]) and forgets its chains. The ring itself returns any
    /// credit that is left after this.
    fn return_credit(&mut self) {}

    /// Chooses between serving the ring (`true`, the initial state) and draining it. A drained ring's
    /// requests are taken and discarded ([`Disabled::Drained`](crate::Disabled::Drained)). Not called for a
    /// ring that is left alone while disabled.
    fn set_enabled(&mut self, _enabled: bool) {}

    /// Prepares the task to stop for good. Ends requests that wait for a remote server within a bounded time,
    /// because the caller is blocked on this. Called once. The polls that follow have a budget of 0.
    ///
    /// The task may leave requests in the in-flight buffer, as `leave` says: it neither pushes nor returns
    /// their heads, and no longer counts them in [`QueueTask::in_flight`]. The default leaves none.
    fn stopping(&mut self, _leave: Leave) {}

    /// Called after the view of memory was replaced. Drops references to the old view that no request in
    /// flight needs. The default is for a task that keeps none between two calls.
    fn memory_changed(&mut self) {}
}
