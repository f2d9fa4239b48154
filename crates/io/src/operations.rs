//! Operations in flight, and those that are one for the kernel.

pub(crate) mod merge;
pub(crate) mod slots;
