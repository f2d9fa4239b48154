//! Operations in flight, and those that are one for the kernel.

pub(crate) mod in_flight;
pub(crate) mod merge;
pub(crate) mod slots;
