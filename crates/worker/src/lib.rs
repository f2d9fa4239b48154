//! Worker threads: the loop that serves virtqueues.
//!
//! A [`Pool`] is a [`Place`](kickless_device::Place): sources are put on its workers in turn. Each worker is one thread with
//! one I/O engine, and serves any number of sources of any number of devices. It sleeps in one wait for all that can
//! happen: kicks, completions of the engine, and its mailbox.
//!
//! # A source's states
//! * *armed*: its ring is empty and kicks are enabled; a kick or a work item makes it ready. If a request of its waits for
//!   something that others hold, so does all that makes a blocked one ready.
//! * *ready*: on the ready list, kicks disabled, visited round robin with a bounded budget. A ring found empty stays
//!   ready for a short while (see [`policy`]), because arming it, being kicked and waking up cost more than a few looks.
//! * *blocked*: there may be work, but no room for it; kicks stay disabled. Any completion, or the waker, makes it ready.
//! * *stopping*: asked to stop; nothing is popped, and it is visited until nothing is in flight.
//! * *resting*: broken or out of memory; only a work item makes it ready.
//!
//! # Why no kick is lost
//! From ready to armed: kicks are enabled, a full fence, then the avail index is read again
//! ([`Vring::arm`](kickless_device::Vring::arm)); work found there keeps the source ready. A kick descriptor is waited for
//! edge-triggered and never read: each kick is an event of its own, one that came while the source was ready is
//! a look too many, and adding a descriptor that has been kicked before gives an event at once. A work item is put into
//! the mailbox before its eventfd is written, and the mailbox is emptied after the wait returned.

mod event_loop;
mod mailbox;
pub mod policy;
mod poll;
mod pool;
mod waiter;

pub use poll::Poll;
pub use pool::{Options, Pool};
