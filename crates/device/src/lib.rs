//! The contract between devices, workers and transports.
//!
//! A *transport* (a vhost-user session) learns from the front-end where a virtqueue lies and makes a
//! [`Vring`] of it. A [`Device`] (a disk or a network card) makes a [`QueueTask`] of the vring. The task
//! takes requests out and completes them. An [`Executor`] (a pool of workers) runs tasks. The crates of the
//! three do not depend on one another, only on this one.
//!
//! [`Device`] is the transport's view of a device. [`Operate`] is the operator's: limits, pauses, sizes,
//! captures, counters. A daemon serves devices that have both.
//!
//! # Ownership and threads
//! * The transport owns the [`Device`] (shared, `Sync`) and calls it from its own thread: negotiation,
//!   configuration space, [`Device::start_queue`].
//! * A [`QueueTask`] belongs to one worker from [`Executor::spawn`] until it has stopped. Only that worker
//!   calls it, so it needs no lock. The transport changes and stops a running task through its
//!   [`TaskHandle`]: each [`Update`] and the stop are work items that the worker runs itself, between two
//!   rounds, in the order of the calls.
//! * The worker owns the I/O engine and lends it for the length of a call ([`Context`]).
//! * The worker keeps the limits of a device ([`Limiter`]). It asks before it polls a task, and charges the
//!   requests that the task has told its ring afterwards. A device knows no limits.
//! * A task can offer frames to another task of its worker during its poll ([`Parcel`]). The worker passes
//!   them on, so that no task keeps a reference to another.
//! * Behind a vIOMMU, a queue that lacks a translation asks for it in the session's [`IotlbMisses`] and
//!   pauses. The transport sends an update when the queue should check again. No thread blocks on this.
//!
//! # Life of a queue
//! 1. `start_queue`, `spawn`, `attach`.
//! 2. Any number of `poll`, `complete`, `arm`, `disarm` and updates.
//! 3. `stop`: the task pops nothing more. Its requests in flight complete and are pushed. Its credit returns
//!    to the ring.
//! 4. `detach`, then [`Stopped`], with the index from which another back-end could go on.
//!
//! Between 2 and 3, `park` takes the task from its worker: requests in flight complete, credit returns to the
//! ring, and after `detach` the [`TaskHandle`] has the task. Its [`Position`] is all that another process
//! needs to go on with the ring. `unpark` gives the task back to a worker, which attaches it again.
//!
//! The other process has made its task before, over a vring without areas ([`Vring::unmapped`]). The vring
//! learns its position later ([`Vring::begin_at`]). So a new task reads nothing of its ring before `attach`.
//! Once the ring has no other user, its areas are mapped ([`Vring::begin`]). Then 1 follows from `spawn` on.
//!
//! # Example
//! A task that fills the first writable buffer of each chain with zeros:
//!
//! ```
//! use kickless_device::{Context, Next, Polled, QueueTask, Vring};
//! use kickless_virtqueue::Chain;
//!
//! struct ZeroTask {
//!     vring: Vring,
//!     chain: Chain,
//! }
//!
//! impl QueueTask for ZeroTask {
//!     fn vring(&mut self) -> &mut Vring {
//!         &mut self.vring
//!     }
//!
//!     fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
//!         let (mut served, mut cost) = (0, 0);
//!         let next = loop {
//!             // A leaving task pops only the chains that an earlier process left.
//!             if budget == 0 && self.vring.resubmissions() == 0 {
//!                 break Next::Idle;
//!             }
//!             if budget > 0 && cost >= budget {
//!                 break Next::More;
//!             }
//!             let popped = self.vring.pop(&mut self.chain);
//!             cost += self.vring.take_cost();
//!             if !popped {
//!                 break if self.vring.take_unfinished() { Next::More } else { Next::Idle };
//!             }
//!             let buffer = self.chain.writable().first().copied();
//!             let zeros = [0; 4096];
//!             let (view, marks) = self.vring.memory();
//!             let written = buffer.map_or(0, |buffer| {
//!                 let len = buffer.len.min(4096);
//!                 view.write(buffer.addr, &zeros[..len as usize], marks).map_or(0, |()| len)
//!             });
//!             self.vring.push(self.chain.id, written);
//!             (served, cost) = (served + 1, cost + 1);
//!         };
//!         self.vring.publish();
//!         Polled { served, cost, next }
//!     }
//!
//!     fn in_flight(&self) -> usize {
//!         self.vring.resubmissions().into()
//!     }
//! }
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod areas;
mod clock;
mod counters;
mod device;
mod event;
mod executor;
mod hand_over;
mod leave;
mod limits;
mod log_scale;
mod metrics;
mod notify;
mod operate;
mod operation;
mod parcel;
mod position;
mod queue_task;
mod stopped;
mod task_handle;
mod update;
mod vring;

pub use areas::{Areas, IovaAddresses};
pub use clock::Clock;
pub use counters::{Count, Counters};
pub use device::{
    CloseError, ConfigError, Device, DeviceMessage, Disabled, Driver, InvalidState, MessageError,
    OwnProtocolFeatures, RING_FEATURES, StartError, Words,
};
pub use event::{Event, Interest};
pub use executor::Executor;
pub use hand_over::{GiveError, HandOver, Handed};
pub use kickless_io::Waker;
pub use leave::Leave;
pub use limits::{Direction, Limit, Limiter, Limits, Rate, Traffic};
pub use log_scale::LogScale;
pub use metrics::{
    BUCKETS, DeviceMetrics, Histogram, Latencies, OperationCounts, OperationTotals, QueueMetrics,
    bucket_end_ns,
};
pub use notify::{Call, Kick};
pub use operate::Operate;
pub use operation::{CaptureTo, StoppedOnError, Unsupported};
pub use parcel::{Neighbours, Offered, PARCEL_HEAD_LEN, Parcel, TaskLocation};
pub use position::Position;
pub use queue_task::{Context, LEAVING_COST, Next, Polled, QueueTask};
pub use stopped::Stopped;
pub use task_handle::TaskHandle;
pub use update::Update;
pub use vring::{Iommu, IotlbMisses, RefusedMiss, ShowAfter, Vring, VringParts};
