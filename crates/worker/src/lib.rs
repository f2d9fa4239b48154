//! Worker threads: the loop that serves virtqueues, and decides when to poll them without being kicked.
//!
//! A [`WorkerPool`] has a number of workers and gives each device an [`Executor`](kickless_device::Executor)
//! on them ([`WorkerPool::executor`]). Each worker is one thread with one I/O engine. It serves any number of
//! tasks of any number of devices. It sleeps in a single wait for kicks, completions of the engine, its
//! mailbox, and the end of a nap.
//!
//! # A task's states
//! * *polled*: on the poll list (`scheduler`), with kicks disabled. The worker visits it in turn with a
//!   bounded budget. An empty ring stays on the list as long as its policy says ([`policy`]).
//! * *napping*: kicks are disabled, and the worker does not visit the task before a time that its policy
//!   named.
//! * *armed*: its ring is empty and kicks are enabled. A kick or a work item puts it on the list. If one of
//!   its requests waits for a resource, the events of a blocked task do so too.
//! * *quiet*: kicks are disabled, and the worker watches the event of the task's far side, because the task
//!   needs nothing of its ring. The event, a task of the same worker or a work item puts it on the list.
//! * *blocked*: there may be work, but no room for it. The task is not on the list, and kicks stay disabled.
//!   A completion of its own, its waker, or room in the engine puts it back.
//! * *throttled*: it has work, and the limits of its device hold it. Kicks stay disabled. The worker visits
//!   the task again when there are tokens.
//! * *leaving*: the task was asked to stop, to move or to be parked. It pops nothing, and the worker visits
//!   it until nothing is in flight (*draining*). Then the worker forgets it, so it cannot poll it again.
//! * *resting*: broken or out of memory. Only a work item puts it on the list.
//!
//! # Why no kick is lost
//! To arm a polled task, the worker enables kicks, passes a full fence, and reads the avail index again
//! ([`Vring::arm`](kickless_device::Vring::arm)). Work found there keeps the task polled.
//!
//! The worker watches a kick descriptor edge-triggered and never reads it. Each kick is an event of its own.
//! A kick for a polled task is only counted. Adding a descriptor that was kicked before gives an event at
//! once. A kick for an empty ring leaves the task armed.
//!
//! A work item is put into the mailbox before its eventfd is written. The worker clears the eventfd after the
//! wait has returned, and then takes items until there are none, with pauses (`item_slices`). `model`
//! checks all this in every order that the memory model allows, without the pauses.
//!
//! # Why no blocked task is forgotten
//! A request waits for one of these:
//! * *An operation of its own queue*, or a request of it: it has all slots, or all of the queue's part of a
//!   budget. A completion of the task ends this wait. If a library has the request, its waker does.
//! * *Something that queues share*: a range or a buffer of the disk, a table of its image, an answer of a
//!   library. The queues of a device can be on several workers. So whatever they share keeps a clone of the
//!   task's waker, and signals it. The worker finds out which tasks were woken ([`kickless_io::Waker`]).
//! * *Room in the worker's engine*. This is all that devices of a worker share. The engine notes who found no
//!   room. When there is some, it names as many tasks as it has room for, and devices take turns.
//!
//! So what one device does wakes tasks of another only when it leaves room in the engine, and then one task
//! for each place.
//!
//! A task that spins beside its waiting requests learns of the same events, and tries the requests only then
//! ([`Context::tries_waiting`](kickless_device::Context::tries_waiting)). Before it sleeps, it tries all of
//! them once more.
//!
//! # Why no event of a far side is lost
//! The argument is in `far_side`. `model` checks it too, for a receive task that sleeps on its event, sleeps
//! on kicks, and is stopped meanwhile.
//!
//! # How a task passes frames to another
//! A task can offer frames to another task of its worker during its own poll. `neighbours` says why no other
//! thread, stop or move can interfere. A task that sleeps takes no frames in this way, but a sender can wake
//! it.
//!
//! # How limits are kept
//! Before a visit, the worker looks whether the device has limits. Then the visit's budget is no larger than
//! there are tokens, and the limiter is charged for the visit afterwards
//! ([`Limiter::poll`](kickless_device::Limiter::poll)). All other visits cost only the look at a flag.
//!
//! # Work that no request pays for
//! * *A visit that finds nothing* is paid for by its device (`scheduler`).
//! * *Kicks, events of far sides and wakes*: a wait reports each descriptor once, and at most 64 in all. A
//!   busy worker waits every 20 us at most. A device that kicks without work is not listened to for a while
//!   (`kicks`).
//! * *Wakes by a task of the same worker*: at most one for each sleep of the woken task. The sender pays for
//!   it, as for a copy.
//! * *Work items* take at most a quarter of a busy worker's time (`item_slices`).
//! * *Calls* that the kernel refuses are tried every millisecond, one for each queue.
//! * *Naps and pending calls* are lists of at most one entry for each task. They are searched when the first
//!   entry is due. Naps that end at about the same time end together.
//!
//! # How tasks share workers
//! Tasks of one affinity group are on one worker (`affinity`). `scheduler` divides a worker's time between
//! devices by deficit round robin.
//!
//! A worker that has too much to do moves a task to another (`balance`). The task stops popping. When nothing
//! is in flight, the worker puts the task into the other's mailbox, with all work items for it that are not
//! done yet. A lock has the holder of the task, which is a worker's number. Each sender of a work item holds
//! this lock, and so does the move. So work items keep their order, and none goes to a worker that does not
//! have the task. The new worker watches the same kick descriptor, and polls the ring once.
//!
//! A task can also leave its worker for its handle, and go on later (`parking`).
//!
//! # Ownership and locks
//! A worker owns its engine and its tasks, and serves them without a lock. It locks its mailbox to take the
//! work items.
//!
//! Lock order: the lock of a task's holder, then that of one mailbox. No other lock is taken under
//! that of a mailbox, or under that of a device's affinity groups.
//!
//! ```
//! use kickless_io::{EngineKind, EngineOptions};
//! use kickless_worker::{Options, Poll, WorkerPool};
//! use std::sync::Arc;
//!
//! let engine = EngineOptions::new(EngineKind::Auto, 256);
//! let (cpus, poll) = (Vec::new(), Poll::default());
//! let pool = Arc::new(WorkerPool::start(&Options { workers: 2, engine, cpus, poll })?);
//! // A device with this executor runs its queues on both workers, with twice the weight of others.
//! let executor = pool.executor(2);
//! # Ok::<(), std::io::Error>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod affinity;
mod balance;
mod clock;
mod control;
mod empty_turns;
mod entry;
mod event_loop;
mod far_side;
mod host_probe;
mod item_slices;
mod items;
mod kicks;
mod kicks_in_vain;
mod mailbox;
#[cfg(all(test, loom))]
mod model;
mod neighbours;
mod parking;
mod peers;
pub mod policy;
mod poll;
mod pool;
mod scheduler;
mod stall;
mod times;
mod visit;
mod visit_watched;
mod waiter;

pub use poll::Poll;
pub use pool::{Options, WorkerPool};
pub use times::WorkerTimes;
