//! The contract between devices, workers and transports.
//!
//! A *transport* (a vhost-user session) learns from the front-end where a virtqueue lies and makes a [`Vring`] of it. A
//! [`Device`] (a disk, later a network card) turns the vring into a [`QueueTask`]: something that takes requests out and
//! completes them. An [`Executor`] (a pool of workers) runs tasks. The three never name one another; they meet here.
//!
//! # Ownership and threads
//! * The transport owns the [`Device`] (shared, `Sync`) and calls it from its own thread: negotiation, configuration
//!   space, [`Device::start_queue`].
//! * A [`QueueTask`] belongs to one worker from [`Executor::spawn`] until it has stopped. Only that worker calls it, so nothing in
//!   it needs a lock. What the transport wants of a running task it asks through its [`TaskHandle`]: each
//!   [`Update`] and the stop are work items that the worker runs itself, between two rounds, in the order they were asked
//!   for. Nothing is torn down under a worker's hands.
//! * The worker owns the I/O engine and lends it for the length of a call ([`Context`]).
//! * Behind a vIOMMU a queue that lacks a translation says so in the session's [`Misses`] and stands, and the transport tells
//!   it when to look again. Nobody on that way waits for anybody.
//!
//! # Life of a queue
//! `start_queue` -> `spawn` -> attach -> { poll, complete, arm, disarm, updates }... -> stop asked for: no head is popped
//! any more, what is in flight completes and is pushed -> detach -> [`Stopped`] with the index from which another
//! back-end could go on.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod areas;
mod counters;
mod device;
mod executor;
mod notify;
mod primitive;
mod queue_task;
mod stopped;
mod task_handle;
mod update;
mod vring;

pub use areas::{Areas, IovaAddresses};
pub use counters::{Count, Counters};
pub use device::{ConfigError, Device, InvalidState, StartError};
pub use executor::Executor;
pub use kickless_io::Waker;
pub use notify::{Call, Kick};
pub use queue_task::{Context, Next, Polled, QueueTask};
pub use stopped::Stopped;
pub use task_handle::TaskHandle;
pub use update::Update;
pub use vring::{Iommu, Misses, Parts, Refusal, Vring};
