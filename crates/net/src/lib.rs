//! The virtio-net device (virtio 1.3, section 5.1).
//!
//! [`Net`] is the [`Device`](kickless_device::Device): features ([`features`]), configuration space ([`config`]), and a task for
//! each ring that runs. There are three kinds ([`Role`]): `transmit.rs` takes frames ([`Frame`], pure), `receive.rs` delivers
//! frames into chains that it pops ahead, and `control_ring.rs` answers commands ([`Command`], pure).
//!
//! What lies behind a card is its [`Port`](kickless_net_port::Port). The only one is null, an instrument: it discards what
//! is sent, and delivers test frames from a timer.
//!
//! All rings complete in the order in which their chains were made available, so that a front-end without an in-flight
//! buffer can tell from the used index where a ring goes on.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod buffers;
pub mod config;
mod control;
mod control_ring;
mod cost;
mod counters;
mod credit;
mod device;
pub mod features;
mod frame;
mod receive;
mod requests;
mod rings;
mod shared;
mod timer;
mod transmit;

pub use control::{Command, Refusal};
pub use device::{Net, Options};
pub use frame::{Checksum, Frame, Invalid, Protocol, Segmentation};
pub use rings::{Role, rings_max, role};
