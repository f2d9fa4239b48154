//! What a worker runs.

use crate::Vring;
use kickless_io::{Completion, Engine, Waker};
use std::io;

/// What a worker lends a task for one call.
pub struct Context<'a> {
    /// The worker's engine. What is queued there is submitted by the worker, once for all tasks.
    pub engine: &'a mut Engine,
    /// This task's number, for the tokens of its operations.
    pub task: u32,
    /// Wakes this worker: all its blocked tasks are then polled again.
    pub waker: &'a Waker,
}

/// Where a task stands after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The ring is empty.
    Idle,
    /// The ring is empty, but a request that was popped waits for something: poll again after a kick, as when idle, and after
    /// a completion or when the worker is woken, as when blocked.
    Waiting,
    /// The budget is used up; there may be more.
    More,
    /// There may be more, but no room for it: poll again after a completion, or when the worker is woken. Kicks are not
    /// heard meanwhile.
    Blocked,
}

/// What a poll did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polled {
    /// Heads popped.
    pub served: u32,
    /// The part of the budget that was taken: see [`QueueTask::poll`].
    pub cost: u32,
    /// Where the task stands.
    pub next: Next,
}

/// One virtqueue of a device, running on a worker.
///
/// An implementer may rely on this: all calls come from one thread; `attach` comes first and `detach` last; nothing is
/// in flight at `detach`; every completion of an operation that it queued comes back through `complete`, once.
/// It must see to this: each head popped is pushed exactly once, whatever fails; a call never waits; what was pushed is
/// published before the call returns.
pub trait QueueTask: Send {
    /// The ring under it. The worker arms, disarms, updates and reads it through this.
    fn vring(&mut self) -> &mut Vring;

    /// Makes what it needs of the worker's engine.
    ///
    /// # Errors
    /// The engine cannot take its file.
    fn attach(&mut self, engine: &mut Engine) -> io::Result<()>;

    /// Gives it back.
    fn detach(&mut self, engine: &mut Engine);

    /// Goes on with requests that had to wait, then pops heads and submits them until what they cost comes to `budget`: 1 for
    /// each request or packet, and 1 for each whole 4 KiB of its data, so that neither many nor large ones are free. Reading
    /// long chains and translating addresses costs too ([`Vring::take_cost`]), also where nothing is popped or the request is
    /// refused. The last may cost more than was left. With a budget of 0 only those are popped that an earlier process has popped before
    /// ([`Vring::again`]): the task is stopping.
    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled;

    /// Takes completions of its own operations; empties `completions`. Whether a request waits for something, so that the
    /// task is to be polled: the next poll finds out whether that is there by now.
    fn complete(&mut self, context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool;

    /// Heads popped and not pushed yet, and those that are to be popped again ([`Vring::again`]).
    fn in_flight(&self) -> usize;

    /// Stops the task for good. Ends requests that wait for a remote server within a bounded time, because the caller is
    /// blocked on this.
    fn limit_remote_waits(&mut self) {}

    /// The view of memory was replaced: let go of references to the old one that no request in flight needs, those in the worker's
    /// engine too.
    fn memory_changed(&mut self, engine: &mut Engine);
}
