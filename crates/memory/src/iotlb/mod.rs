//! Translations of a vIOMMU.
//!
//! Behind a vIOMMU the addresses in descriptors ([`Iova`]) mean what the front-end says they mean. It says so when asked (a
//! *miss* and its answer), or unasked, and takes it back when the guest does (*invalidation*). What it has said is kept in
//! one [`Table`] for each session; each queue has a cache of its own over it ([`Tlb`]).
//!
//! # What is stored
//! The table is a radix tree: nine bits of the address at each level, leaves of 4 KiB, 2 MiB and 1 GiB, one atomic word an
//! entry. A leaf holds the *front-end's* address ([`UserAddr`]) and what may be done there. So a leaf means the same before
//! and after guest memory changed: which bytes these are is asked of the [`Map`](crate::Map) when a queue takes a translation
//! into its cache, and a queue that takes another view empties its cache.
//!
//! # Who may do what
//! The session alone changes the table ([`Iotlb`], by `&mut`). Queues read it, on their workers' threads, while it changes:
//! no lock, and no store to anything shared. Two things could go wrong, and do not:
//!
//! * *A reader sees half of a change.* An entry is one word. A new node is filled before it is linked: the link is stored
//!   with release, and loaded with acquire. So whoever finds a node finds what was in it when it was linked, or later.
//! * *A reader is in a node that is unlinked, and used for other addresses meanwhile.* It would take their translations for
//!   its own. So an unlinked node goes to limbo and stays as it was until every queue has passed a *quiescent point*, a
//!   moment at which it is not in the table: a queue reads the table only within a pop, and work items are handled between
//!   two of those. The session sends each queue a work item, waits for the answers, and says [`Iotlb::quiesced`]. That is
//!   what an invalidation does in any case; an update does it only when nodes are short and some are in limbo.
//!
//! # Invalidation
//! In this order: the session removes the range from the table; it sends each queue a work item; the queue drops the range
//! from its cache, lets go of its ring areas if they lie there, and answers, but if requests in flight use the range, only
//! when they are done; the session waits for all answers; it acknowledges. What a queue looked up before it handled the
//! item is dropped by it, and what it looks up afterwards is looked up in the new table (the mailbox's lock orders the
//! removal before the item). So after the acknowledgement nobody uses the range. Nobody waits for the front-end in any of
//! this: it may hold its own big lock until it is acknowledged.
//!
//! An update that contradicts what was said before is an invalidation too, and a larger leaf that is hit by either goes
//! whole, though only a part of it was meant: what is asked for again is right, and what is not split needs no room.
//! [`Iotlb::take_stale`] says how much that was.
//!
//! # Bounds
//! A table has at most a fixed number of nodes of 4 KiB. Where there are no more, translations are forgotten a whole node
//! at a time, round the address space ([`Iotlb::evict`]), but none in a range that a waiting request needs (it is *pinned*):
//! or two requests, or two pages of one, could chase one another out for ever. What was forgotten is asked for again. Queues
//! forget it too, for nobody could tell any more that what comes in its place is another translation. Requests in flight may
//! go on with it, for it is still true; and when it ends to be true, the invalidation reaches every queue, in the table or
//! not.

mod error;
#[cfg(all(test, loom))]
mod model;
mod range;
mod table;
mod tlb;
mod writer;

pub use error::UpdateError;
pub use range::{Access, IovaRange};
pub use table::Table;
pub use tlb::{Lack, Miss, Tlb, Translated};
pub use writer::{Iotlb, TABLES_MAX};

#[cfg(doc)]
use crate::{Iova, UserAddr};
