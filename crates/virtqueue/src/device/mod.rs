//! The device end of a virtqueue.
//!
//! # One round
//! ```text
//! loop {
//!     while queue.pop(..)? { submit }          take a batch; avail.idx is read once for it
//!     ... complete: queue.push(id, len) ...    invisible yet
//!     if queue.publish() { call }              one store of used.idx, one fence, at most one call
//!     if nothing came { if !queue.arm() { sleep until kicked }; queue.disarm() }
//! }
//! ```
//!
//! # Who waits for whom
//! Only the thread that holds the `Queue` touches it (`&mut self`); what runs beside it is the driver, in the
//! ring's memory. The driver's words (`avail`, the descriptors) are only read here, ours (`used`) are only
//! written, each with one writer. Two pairs of orders carry everything:
//!
//! * *Data.* The driver writes descriptors and ring entries, then `avail.idx` with release; a pop loads
//!   `avail.idx` with acquire and reads only entries before it. The other way round, used elements and the
//!   bytes of the buffers are written first, then `used.idx` with release, which the driver loads with
//!   acquire.
//! * *Sleep.* Nobody sleeps on news that nobody will tell: the argument, with its fences and their partners,
//!   is in [`suppress`]. `tests/loom.rs` runs those very functions against a driver in every order the memory
//!   model allows.
//!
//! # Memory that goes away
//! [`Queue::unmap`] drops the areas and keeps the indices. Meanwhile a pop yields nothing, and what is pushed
//! is held back (no more than the chains in flight, so never more than the queue size). [`Queue::remap`]
//! writes it to the new areas, and the next [`Queue::publish`] shows it. Elements that were pushed but not
//! yet published when the areas went are carried over too. So a completion is never lost to a change of
//! memory, nor shown where the driver does not look. After a `remap` the owner looks at the ring as if
//! kicked, and publishes. A queue that ends while its areas are away leaves what it held
//! ([`Queue::take_held`]) to the next one ([`Queue::push_held`]).
//!
//! # Groups
//! A frame in several buffers is several used elements, and a driver that sees the first takes for granted that the others are there.
//! [`Queue::push_group`] pushes them together. The driver never sees a part of a group:
//!
//! * What is pushed is shown by [`Queue::show`] and [`Queue::publish`] alone, and each shows all that was pushed, by a single store
//!   with release after all others: of `used.idx`, or in a packed ring of the flags of the first descriptor of all. The driver reads
//!   packed descriptors in the order of their places and stops there. That the ring wraps within a group changes nothing: the flags of
//!   each place tell of the round of that place.
//! * Neither is called between two chains of a group.
//! * With IN_ORDER, chains wait for older ones before they are pushed to the ring. The chains of a group have consecutive positions and
//!   are completed by one call. So they all wait while the first does, and go to the ring in the same call as the first.
//! * Chains that are held while the areas are away come back together, and are shown by the next `publish`.
//! * A device that is killed has shown all of a batch or nothing (the argument is in the source, `device/inflight`).
//!
//! `publish` decides about a call for all that was shown since the last decision, so an event index anywhere within a group counts.
//! `device/model.rs` runs the real queues against a driver in every order that the memory model allows.

mod credit;
mod elements;
mod inflight;
mod metadata;
#[cfg(all(test, loom))]
mod model;
mod order;
mod packed;
mod queue;
mod split;
pub mod suppress;

pub use elements::{Held, Popped};
pub(crate) use inflight::Region;
pub(crate) use metadata::Areas;
pub use metadata::{Addresses, InvalidSize, LoggedAt, Metadata, Options};
pub use queue::Queue;
