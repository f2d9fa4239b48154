//! Numbers that are small in a model, so that it has little to go through.

/// Bits of an address that choose an entry of a table.
pub(crate) const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Places in a block of the reverse map: with the link, one cache line.
pub(crate) const PLACES: usize = if cfg!(loom) { 2 } else { 7 };
/// Slots that there can be at once.
pub(crate) const SLOTS: usize = if cfg!(loom) { 2 } else { 512 };
/// Words of a piece of a dirty bitmap.
pub(crate) const WORDS: usize = if cfg!(loom) { 1 } else { 64 };
