//! Translations of a vIOMMU.
//!
//! Behind a vIOMMU the front-end decides what the addresses in descriptors ([`Iova`]) mean. It sends a
//! translation when it is asked (a *miss* and its answer), or unasked. It takes a translation back when the
//! guest does (*invalidation*). Each session has one [`Table`] of the translations, and each queue has a
//! cache of it ([`Tlb`]).
//!
//! # The table
//! The table is a radix tree. Each level uses nine bits of the address. Leaves have 4 KiB, 2 MiB and 1 GiB,
//! and an entry is one atomic word. A leaf holds the *front-end's* address ([`UserAddr`]) and the allowed
//! access. So a change of guest memory does not change the meaning of a leaf. A queue looks the front-end's
//! address up in the [`Map`](crate::Map) when it takes a translation into its cache. A queue that takes
//! another view empties its cache.
//!
//! # Concurrency
//! Only the session changes the table ([`Iotlb`], by `&mut`). Queues read it on their workers' threads while
//! it changes. They take no lock and store nothing to shared memory. Two errors must be impossible:
//!
//! * *A reader sees half of a change.* An entry is one word. A new node is filled before it is linked: the
//!   link is stored with release, and loaded with acquire. So a reader that finds a node finds the contents
//!   of the time when it was linked, or newer ones.
//! * *A reader is in a node that is unlinked and reused for other addresses.* The reader would take their
//!   translations for its own. So an unlinked node goes to limbo, and does not change until every queue has
//!   passed a *quiescent point*, at which the queue is not in the table. A queue reads the table only within
//!   a pop, and handles work items between two pops. So the session sends each queue a work item, waits for
//!   the answers, and calls [`Iotlb::quiesced`]. An invalidation does this in any case. An update does it
//!   only when nodes are short and some are in limbo.
//!
//! # Invalidation
//! The order is:
//! 1. The session removes the range from the table.
//! 2. The session sends each queue a work item.
//! 3. The queue drops the range from its cache, and its ring areas if they lie in the range. It answers at
//!    once, or after its requests in flight that use the range.
//! 4. The session waits for all answers.
//! 5. The session acknowledges the invalidation.
//!
//! The work item makes the queue drop every earlier lookup. A later lookup uses the new table, because the
//! mailbox's lock orders the removal before the item. So no queue uses the range after the acknowledgement.
//! No step waits for the front-end, which may hold its own big lock until the acknowledgement.
//!
//! An update that contradicts an earlier translation is an invalidation too. If an update or an invalidation
//! meets a part of a larger leaf, the whole leaf goes. A queue that needs the rest asks again and gets the
//! right answer, and the table needs no room for a split leaf. [`Iotlb::take_stale`] returns the range that
//! was dropped.
//!
//! # Bounds
//! A table has a largest number of nodes of 4 KiB. When there are no more, [`Iotlb::evict`] drops the
//! translations of one node at a time, in the order of addresses. It spares ranges that a waiting request
//! needs (they are *pinned*). Otherwise two requests, or two pages of one request, could evict one another
//! for ever.
//!
//! A queue that needs an evicted translation asks for it again. Queues drop it from their caches too, because
//! the table cannot tell any more whether a new translation differs from it. Requests in flight may go on to
//! use it, because it is still valid. When it becomes invalid, the invalidation reaches every queue, whether
//! or not the translation is in the table.

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
pub use tlb::{Miss, Tlb, TranslateError, Translated};
pub use writer::{Iotlb, TABLES_MAX};

#[cfg(doc)]
use crate::{Iova, UserAddr};
