//! The driver's end of a virtqueue. The driver owns its memory, and a hostile device can write there at any
//! time.
//!
//! # Two halves
//! A [`Submitter`] makes chains available, and a [`Completer`] takes them back. One thread at a time uses
//! each half. Neither half waits for the other, so a program that shares a queue can guard them by two locks.
//!
//! ```text
//! submitter.add(buffers) ...             any number of chains, invisible yet
//! if submitter.publish() { kick }        one store of the index, one fence, at most one kick; the caller
//!                                        kicks, outside of any lock
//! while completer.pop()? { .. give_back }  pop the used chains
//! if !completer.enable_calls() { sleep until called }
//! ```
//!
//! The halves communicate through [`chain_tables::ChainTables`]: it says what is in flight under which id,
//! and which ids are free again. Its module has the argument.
//!
//! # Ids
//! A chain has an id from 0 to the size - 1, from [`Submitter::add`] to [`Completer::give_back`]. The memory
//! of a request (header, status, indirect table) can be laid out by id, because [`Submitter::next_id`]
//! returns the id beforehand.
//!
//! # The device is not trusted
//! The driver writes the rings and reads only the device's own words: used index and elements, or used
//! descriptors, and the event words. An id must be in flight, an index must be within reach, and a length
//! must fit the chain's writable buffers. Anything else is a [`UsedError`]. Every later pop of the completer
//! returns the same error.

mod areas;
mod chain;
pub mod chain_tables;
mod free;
mod hint;
mod packed;
mod queue;
mod split;
pub mod suppress;
mod used_error;

pub use crate::device::{InvalidSize, Options};
pub use areas::Areas;
pub use chain::{Buffer, Completed, NoRoom, Table};
pub use hint::{CompletionHint, Position};
pub use queue::{Completer, Submitter, queue};
pub use used_error::UsedError;
