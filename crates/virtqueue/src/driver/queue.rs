//! The two halves of a queue of either ring format.

use super::areas::Areas;
use super::chain::{Buffer, Completed, NoRoom, Table};
use super::chain_tables::ChainTables;
use super::hint::{CompletionHint, Position};
use super::used_error::UsedError;
use super::{packed, split};
use crate::device::Options;
use std::sync::Arc;

/// Makes the two halves of a new queue.
///
/// # Panics
/// Panics if an area is too small or misaligned.
pub fn queue(options: Options, areas: Areas) -> (Submitter, Completer) {
    areas.check_lens(&options);
    let tables = Arc::new(ChainTables::new(options.size(), options.in_order()));
    let areas = Arc::new(areas);
    if options.is_packed() {
        let submitter = packed::Submitter::new(options, areas.clone(), tables.clone());
        (Submitter::Packed(submitter), Completer::Packed(packed::Completer::new(options, areas, tables)))
    } else {
        let submitter = split::Submitter::new(options, areas.clone(), tables.clone());
        (Submitter::Split(submitter), Completer::Split(split::Completer::new(options, areas, tables)))
    }
}

/// The half that makes chains available.
#[derive(Debug)]
pub enum Submitter {
    /// Of a split ring.
    Split(split::Submitter),
    /// Of a packed ring.
    Packed(packed::Submitter),
}

/// The half that takes chains back.
#[derive(Debug)]
pub enum Completer {
    /// Of a split ring.
    Split(split::Completer),
    /// Of a packed ring.
    Packed(packed::Completer),
}

/// Calls a method of the ring's format.
macro_rules! forward {
    ($half:expr, $kind:ident, $method:ident $(, $arg:expr)*) => {
        match $half {
            $kind::Split(half) => half.$method($($arg),*),
            $kind::Packed(half) => half.$method($($arg),*),
        }
    };
}

impl Submitter {
    /// Returns how many chains of one descriptor can be added now. Takes ids back, so the next id can change.
    #[inline]
    pub fn room(&mut self) -> usize {
        forward!(self, Submitter, room)
    }

    /// Returns the id of the next chain, or `None` if there is no room for one.
    #[inline]
    pub fn next_id(&mut self) -> Option<u16> {
        forward!(self, Submitter, next_id)
    }

    /// Adds a chain of these buffers under the id [`Submitter::next_id`]. The device does not see it before
    /// [`Submitter::publish`].
    ///
    /// With a table, which needs INDIRECT_DESC, the chain takes one descriptor. Otherwise it takes one for
    /// each buffer.
    ///
    /// # Errors
    /// There is no room, the chain has no buffers, or it has more buffers than the queue has descriptors.
    /// Then nothing has changed.
    // Always inlined: then the code of a caller with a constant number of buffers has no loops.
    #[inline(always)]
    pub fn add(&mut self, buffers: &[Buffer], table: Option<Table<'_>>) -> Result<u16, NoRoom> {
        forward!(self, Submitter, add, buffers, table)
    }

    /// Shows all added chains to the device. Returns whether the device wants a kick. The caller must make
    /// that kick; it may do so later and in another thread.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        forward!(self, Submitter, publish)
    }
}

impl Completer {
    /// Pops the next chain that the device has used.
    ///
    /// # Errors
    /// The device wrote an impossible used index or used element. Later calls return the same error.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Completed>, UsedError> {
        forward!(self, Completer, pop)
    }

    /// Returns the id, unchecked, of the chain that is popped after so many `pops`, itself included, if the
    /// device has shown it already. Its memory can be prefetched.
    #[inline]
    pub fn later_id(&self, pops: u16) -> Option<u16> {
        match self {
            Self::Split(half) => half.later_id(pops),
            Self::Packed(_) => None,
        }
    }

    /// Returns whether there is something to pop: a chain or an error.
    #[inline]
    pub fn is_due(&self) -> bool {
        forward!(self, Completer, is_due)
    }

    /// Returns a hint for threads without the completer's lock. It is valid from its first
    /// [`CompletionHint::set`] on.
    pub fn hint(&self) -> CompletionHint {
        CompletionHint::new(forward!(self, Completer, areas).clone())
    }

    /// Returns the position for [`CompletionHint::set`].
    #[inline]
    pub fn position(&self) -> Position {
        forward!(self, Completer, position)
    }

    /// Makes a popped id free again. Its memory must not be needed any more. Call it once for each id.
    #[inline]
    pub fn give_back(&mut self, id: u16) {
        forward!(self, Completer, give_back, id);
    }

    /// Asks the device for a call when it uses the next chain. Returns whether it has used one already. In
    /// that case the call may never come.
    #[inline]
    #[must_use]
    pub fn enable_calls(&mut self) -> bool {
        forward!(self, Completer, enable_calls)
    }

    /// Asks the device for no calls. A call may still be on its way.
    #[inline]
    pub fn disable_calls(&mut self) {
        forward!(self, Completer, disable_calls);
    }
}
