//! Worker threads: the loop that serves virtqueues, and decides when to look at them without being kicked.
//!
//! A [`Pool`] has a number of workers and gives each device a [`Executor`](kickless_device::Executor) on them
//! ([`Pool::executor`]). Each worker is one thread with one I/O engine, and serves any number of tasks of any number of devices.
//! It sleeps in one wait for all that can happen: kicks, completions of the engine, its mailbox, and the end of a nap.
//!
//! # A task's states
//! * *polled*: on the poll list (`scheduler`), kicks disabled, visited in turn with a bounded budget. A ring that is found empty stays
//!   on the list as long as its policy says ([`policy`]).
//! * *napping*: kicks disabled, and not looked at until a time that its policy named.
//! * *armed*: its ring is empty and kicks are enabled; a kick or a work item puts it on the list. If a request of its waits for
//!   something that others hold, so does all that makes a blocked one polled.
//! * *quiet*: kicks are disabled, and the event of its far side is watched: the task needs nothing of its ring. The event
//!   or a work item puts it on the list.
//! * *blocked*: there may be work, but no room for it. It leaves the list, kicks stay disabled. Any completion, or the waker,
//!   puts it back.
//! * *leaving*: asked to stop or to move; nothing is popped, and it is visited until nothing is in flight (*draining*). From then
//!   on this worker knows nothing of it, so it cannot begin to poll again.
//! * *resting*: broken or out of memory; only a work item puts it on the list.
//!
//! # Why no kick is lost
//! From polled to armed: kicks are enabled, a full fence, then the avail index is read again
//! ([`Vring::arm`](kickless_device::Vring::arm)); work found there keeps the task polled. A kick descriptor is waited for
//! edge-triggered and never read: each kick is an event of its own, one that came while the task was polled is
//! counted and nothing more, and adding a descriptor that has been kicked before gives an event at once. A kick for which there
//! is nothing in the ring leaves the task armed. A work item is put into the mailbox before its eventfd is written, and the
//! mailbox is emptied after the wait returned. `model` has all this in every order that the memory model allows.
//!
//! # Why no event of a far side is lost
//! The argument is in `far_side`. `model` has it too, for a receive task that sleeps on its event, on kicks, and is
//! stopped meanwhile.
//!
//! # Who has which part of a worker
//! Tasks of one affinity group are on one worker (`affinity`).
//! `scheduler` shares it out between devices by deficit round robin. A worker that has too much to do gives a task to another
//! (`balance`): it stops popping, waits until nothing is in flight, lets go of it and puts it into the other's mailbox, with
//! everything that the task has been asked and not been told yet. Whoever asks something of a task holds a lock that says
//! where it is, and the move is made under it; so the order of what was asked is kept, and nothing is asked of a worker
//! that does not have the task. The new worker waits for the same kick descriptor, and looks at the ring once.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod affinity;
mod balance;
mod clock;
mod control;
mod entry;
mod event_loop;
mod far_side;
mod host_probe;
mod looks;
mod mailbox;
#[cfg(all(test, loom))]
mod model;
mod peers;
pub mod policy;
mod poll;
mod pool;
mod scheduler;
mod visit;
mod waiter;

pub use poll::Poll;
pub use pool::{Options, Pool};
