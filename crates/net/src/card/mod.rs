//! The card as its front-end and its driver see it: the device, its state, and its commands.

pub(crate) mod announcement;
pub mod config;
pub(crate) mod control;
pub(crate) mod control_ring;
pub(crate) mod counters;
pub(crate) mod device;
pub mod features;
pub(crate) mod filter;
pub(crate) mod hand_over;
pub(crate) mod saved_state;
pub(crate) mod state;
