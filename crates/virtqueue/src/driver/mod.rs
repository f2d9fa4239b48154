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
//! What one half has to tell the other goes through [`Shared`], which has an argument of its own: what is in
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

mod free;
mod glimpse;
mod packed;
pub mod shared;
mod split;
pub mod suppress;

pub use crate::device::{InvalidSize, Options};
pub use glimpse::{Glimpse, Position};
use kickless_memory::Area;
use shared::Shared;
use std::sync::Arc;

/// A queue's memory, zeroed, at the addresses that the device was told.
#[derive(Debug)]
pub struct Areas {
    /// The descriptors; at a multiple of 16.
    pub desc: Area,
    /// What the driver writes: the avail ring, or the packed ring's driver event suppression. At a multiple of 4.
    pub driver: Area,
    /// What the device writes: the used ring, or the packed ring's device event suppression. At a multiple of 4.
    pub device: Area,
}

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is, as the device addresses memory.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it, instead of reading it. These come last in a chain.
    pub writable: bool,
}

/// Room for an indirect table, which nobody else uses while its chain is in flight.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// The memory that it is in.
    pub area: &'a Area,
    /// Where in there it begins; it is as long as the chain has buffers, 16 bytes for each.
    pub offset: usize,
    /// The same place as the device addresses memory.
    pub addr: u64,
}

/// A chain that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Which. It stays taken until [`Completer::give_back`].
    pub id: u16,
    /// How many bytes the device says it wrote into its writable buffers. With IN_ORDER it says so of the last chain of
    /// a batch only; of the others this is what it may have written.
    pub len: u32,
}

/// There are not enough descriptors, or ids, for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue is full")]
pub struct NoRoom;

/// What a device said that cannot be. Latched: the queue is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lie {
    /// The used index moved on by more than the queue's size.
    #[error("the used index went from {from} to {to} in a queue of {size}")]
    Index {
        /// Where it was.
        from: u16,
        /// Where it is said to be.
        to: u16,
        /// The queue's size.
        size: u16,
    },
    /// An id that is not in flight: never made available, or used twice.
    #[error("it used id {id}, which is not in flight")]
    Id {
        /// The id.
        id: u32,
    },
    /// More bytes than the chain's writable buffers have.
    #[error("it wrote {len} bytes into the {room} that id {id} has for it")]
    Length {
        /// The id.
        id: u16,
        /// What it says.
        len: u32,
        /// What there is.
        room: u32,
    },
}

/// The two ends of a queue, both in their first state.
///
/// # Panics
/// An area is too small or misaligned.
pub fn queue(options: Options, areas: Areas) -> (Submitter, Completer) {
    let shared = Arc::new(Shared::new(options.size(), options.in_order()));
    let areas = Arc::new(areas);
    if options.is_packed() {
        let submitter = packed::Submitter::new(options, areas.clone(), shared.clone());
        (Submitter::Packed(submitter), Completer::Packed(packed::Completer::new(options, areas, shared)))
    } else {
        let submitter = split::Submitter::new(options, areas.clone(), shared.clone());
        (Submitter::Split(submitter), Completer::Split(split::Completer::new(options, areas, shared)))
    }
}

/// Makes chains available.
#[derive(Debug)]
pub enum Submitter {
    /// Of a split ring.
    Split(split::Submitter),
    /// Of a packed ring.
    Packed(packed::Submitter),
}

/// Takes chains back.
#[derive(Debug)]
pub enum Completer {
    /// Of a split ring.
    Split(split::Completer),
    /// Of a packed ring.
    Packed(packed::Completer),
}

/// Runs a method of whichever ring it is.
macro_rules! forward {
    ($half:expr, $kind:ident, $method:ident $(, $arg:expr)*) => {
        match $half {
            $kind::Split(half) => half.$method($($arg),*),
            $kind::Packed(half) => half.$method($($arg),*),
        }
    };
}

impl Submitter {
    /// How many chains of one descriptor can be added now. Takes ids back, so that the next one can be another than before.
    #[inline]
    pub fn room(&mut self) -> usize {
        forward!(self, Submitter, room)
    }

    /// The id that the next chain will have; `None` if there is no room for any.
    #[inline]
    pub fn next_id(&mut self) -> Option<u16> {
        forward!(self, Submitter, next_id)
    }

    /// Makes a chain of these buffers available under [`Submitter::next_id`]; the device does not see it before
    /// [`Submitter::publish`]. With a table, for which INDIRECT_DESC has to have been negotiated, it takes one descriptor;
    /// otherwise one for each buffer.
    ///
    /// # Errors
    /// There is no room; nothing has changed. Also for a chain without buffers, or with more than the queue has
    /// descriptors.
    // Always: whoever knows how many buffers there are has no loops then.
    #[inline(always)]
    pub fn add(&mut self, buffers: &[Buffer], table: Option<Table<'_>>) -> Result<u16, NoRoom> {
        forward!(self, Submitter, add, buffers, table)
    }

    /// Shows the device everything that was added. Whether it wants a kick for it; a kick that this asks for must be made,
    /// and may be made later and by anybody.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        forward!(self, Submitter, publish)
    }
}

impl Completer {
    /// Takes the next chain that the device is done with.
    ///
    /// # Errors
    /// The device lied; it says the same from then on.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Completed>, Lie> {
        forward!(self, Completer, pop)
    }

    /// Whether there is something to pop: a chain, or a lie.
    #[inline]
    pub fn is_due(&self) -> bool {
        forward!(self, Completer, is_due)
    }

    /// Looks at the ring from outside, from the first [`Glimpse::set`] on.
    pub fn glimpse(&self) -> Glimpse {
        Glimpse::new(forward!(self, Completer, areas).clone())
    }

    /// For [`Glimpse::set`].
    #[inline]
    pub fn position(&self) -> Position {
        forward!(self, Completer, position)
    }

    /// Lets an id that was popped be used again: nothing of its memory is needed any more. Once for each.
    #[inline]
    pub fn give_back(&mut self, id: u16) {
        forward!(self, Completer, give_back, id);
    }

    /// Asks the device to call when it is done with the next chain. Whether it is done with one already: then the call for it
    /// may never come.
    #[inline]
    #[must_use]
    pub fn enable_calls(&mut self) -> bool {
        forward!(self, Completer, enable_calls)
    }

    /// Asks the device not to call. One that is under way can still come.
    #[inline]
    pub fn disable_calls(&mut self) {
        forward!(self, Completer, disable_calls);
    }
}
