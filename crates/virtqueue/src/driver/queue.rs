//! The two halves of a queue of either ring format.

use super::areas::Areas;
use super::chain::{Buffer, Completed, NoRoom, Table};
use super::glimpse::{Glimpse, Position};
use super::lie::Lie;
use super::shared::Shared;
use super::{packed, split};
use crate::device::Options;
use std::sync::Arc;

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
