//! The rings of a card and their tasks.
//!
//! `receive_task.rs` and `transmit_task.rs` are the tasks. Below them are the rings, with what does not
//! depend on the port.

pub(crate) mod buffers;
pub(crate) mod cost;
pub(crate) mod credit;
pub(crate) mod immediate;
pub(crate) mod receive_ring;
pub(crate) mod receive_task;
pub(crate) mod roles;
pub(crate) mod transmit_ring;
pub(crate) mod transmit_task;
