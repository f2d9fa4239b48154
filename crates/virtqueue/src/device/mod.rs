//! The device's end of a virtqueue.
//!
//! # One round
//! ```text
//! loop {
//!     while queue.pop(..)? { submit }          pop a batch; avail.idx is read once for it
//!     ... complete: queue.push(id, len) ...    invisible yet
//!     if queue.publish() { call }              one store of used.idx, one fence, at most one call
//!     if nothing came { if !queue.arm() { sleep until kicked }; queue.disarm() }
//! }
//! ```
//!
//! A device that completes each chain at once can do that in batches: see [`Queue::peek`].
//!
//! # Concurrency
//! Only the thread that holds the `Queue` touches it (`&mut self`). The driver runs at the same time and
//! accesses the ring's memory. This end only reads the driver's words (`avail`, the descriptors) and only
//! writes its own (`used`), so each word has one writer. Two arguments about order are needed:
//!
//! * *Data.* The driver writes descriptors and ring entries, then `avail.idx` with release. A pop loads
//!   `avail.idx` with acquire and reads only entries before it. In the other direction, used elements and the
//!   bytes of the buffers are written first, then `used.idx` with release. The driver loads it with acquire.
//! * *Sleep.* No side sleeps if the other side will not notify it. [`suppress`] has the argument, with the
//!   fences and their partners. `tests/loom.rs` runs the functions of that module against a driver in every
//!   order the memory model allows.
//!
//! # Memory that goes away
//! [`Queue::unmap`] drops the areas and keeps the indices. While there are no areas, a pop returns nothing,
//! and pushed chains are held back. They are at most the chains in flight, so never more than the queue size.
//! [`Queue::remap`] writes them to the new areas, and the next [`Queue::publish`] shows them. Elements that
//! were pushed but not published before `unmap` are carried over too. So a change of memory loses no
//! completion, and shows none where the driver does not look.
//!
//! After a `remap` the owner looks at the ring as if kicked, and publishes. A queue that ends while its areas
//! are away leaves the held chains to the next queue ([`Queue::take_unpublished`],
//! [`Queue::push_unpublished`]).
//!
//! # Groups
//! A frame in several buffers has several used elements. A driver that sees the first one expects that the
//! others are there. [`Queue::push_group`] pushes them together. The driver never sees a part of a group:
//!
//! * Only [`Queue::show`] and [`Queue::publish`] show pushed chains. Each shows all of them by a single store
//!   with release after all others: of `used.idx`, or in a packed ring of the flags of the very first
//!   descriptor. The driver reads packed descriptors in ring order, and stops at the first one that is not
//!   used. This also holds if the ring wraps within a group, because the flags of each descriptor belong to
//!   its round.
//! * Neither is called between two chains of a group.
//! * With IN_ORDER, chains wait for older ones before they are pushed to the ring. The chains of a group have
//!   consecutive positions, and one call completes them. So they all wait while the first one does, and go to
//!   the ring in the same call as the first.
//! * Chains that are held while the areas are away come back together, and the next `publish` shows them.
//! * A device that is killed has shown all of a batch or nothing (the argument is in the source,
//!   `device/inflight`).
//!
//! `publish` decides about a call for everything that was shown since the last decision, so an event index
//! anywhere within a group counts. `device/model.rs` runs the real queues against a driver in every order
//! that the memory model allows.

mod credit;
mod elements;
mod inflight;
mod metadata;
#[cfg(all(test, loom))]
mod model;
mod order;
mod packed;
mod queue;
mod single;
mod split;
pub mod suppress;

pub use elements::{PopOutcome, Popped, UnpublishedUsed};
pub(crate) use inflight::Region;
pub(crate) use metadata::Areas;
pub use metadata::{Addresses, InvalidSize, LoggedAt, Metadata, Options};
pub use queue::Queue;
pub use single::{Direction, SingleChain};
