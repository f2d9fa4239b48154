//! Frames: their headers, and their ways through memory of the card.

pub(crate) mod gathered;
pub(crate) mod header;
pub(crate) mod held;
pub(crate) mod loop_queue;
pub(crate) mod protocols;
pub(crate) mod taken;
pub(crate) mod whole;
