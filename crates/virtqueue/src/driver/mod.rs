//! The driver's end of a virtqueue, over memory that the driver owns and a hostile device can write at any time.
//!
//! # Two halves
//! A [`Submitter`] makes chains available, a [`Completer`] takes them back; each is used by one thread at a time, and
//! neither ever waits for the other, so a program that shares a queue can guard them by two locks.
//!
//! ```text
//! submitter.add(buffers) ...                 any number of chains, invisible yet
//! if submitter.publish() { kick }            one store of the index, one fence, at most one kick; the kick itself
//!                                            is the caller's, outside of any lock
//! while completer.pop()? { ... give_back }   take what is used
//! if !completer.enable_calls() { sleep until called }
//! ```
//!
//! What one half has to tell the other goes through [`shared::Shared`], which has an argument of its own: what is in
//! flight under which id, and which ids are free again.
//!
//! # Ids
//! A chain is known by a number from 0 to the size - 1, from [`Submitter::add`] to [`Completer::give_back`]. Memory that
//! belongs to a request (header, status, indirect table) can be laid out by it: [`Submitter::next_id`] tells it beforehand.
//!
//! # What the device says is not believed
//! The rings are written and hardly read: the only words read back are the device's own (used index and elements, or used
//! descriptors, and the event words). An id has to be in flight, an index within reach, a length no longer than what
//! the device may write. Anything else is a [`Lie`], after which the completer says nothing but that.

mod areas;
mod chain;
mod free;
mod glimpse;
mod lie;
mod packed;
mod queue;
pub mod shared;
mod split;
pub mod suppress;

pub use crate::device::{InvalidSize, Options};
pub use areas::Areas;
pub use chain::{Buffer, Completed, NoRoom, Table};
pub use glimpse::{Glimpse, Position};
pub use lie::Lie;
pub use queue::{Completer, Submitter, queue};
