//! Sizes of data structures. They are small in a model, so that it has few states.

/// Bits of an address that choose an entry of a table.
pub(crate) const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Addresses in a block of the reverse map. Together with the link, they fill one cache line.
pub(crate) const CELLS: usize = if cfg!(loom) { 2 } else { 7 };
/// Largest number of slots at the same time.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 512 };
/// Words of a piece of a dirty bitmap.
pub(crate) const WORDS: usize = if cfg!(loom) { 1 } else { 64 };
