//! The rings of a card whose port is a TAP.

pub(crate) mod follower;
pub(crate) mod receive;
pub(crate) mod transmit;
