//! The virtio-net device (virtio 1.3, section 5.1).
//!
//! [`Net`] is the [`Device`](kickless_device::Device). It has features ([`features`]), a configuration space
//! ([`config`]), and a task for each running ring. There are three kinds of tasks, one for each [`Role`]:
//! - `transmit.rs` takes frames from the driver and checks them ([`Frame`]);
//! - `receive.rs` pops chains ahead, as credit, and delivers frames into them;
//! - `control_ring.rs` executes commands of the driver ([`Command`]).
//!
//! The other side of a card is its [`Port`](kickless_net_port::Port). The only one is the null port, for
//! tests and measurements. It discards the frames of the driver and delivers test frames, paced by a timer.
//!
//! Each ring completes chains in the order in which the driver made them available. A front-end without an
//! in-flight buffer therefore learns from the used index where a ring continues after the back-end was
//! killed.
//!
//! ```
//! use kickless_device::Device;
//! use kickless_net::{Net, Options};
//!
//! let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
//! let port = "null".parse()?;
//! let card = Net::new(Options { mac: Some(mac), mtu: None, pairs_max: 2, queue_size_max: 1024, port });
//! // Two pairs of rings, and the control ring.
//! assert_eq!(card.queues_max(), 5);
//! // The configuration space begins with the address.
//! let mut read = [0; 6];
//! card.read_config(0, &mut read);
//! assert_eq!(read, mac);
//! # Ok::<(), kickless_net_port::InvalidPort>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod buffers;
mod card_state;
pub mod config;
mod control;
mod control_ring;
mod cost;
mod counters;
mod credit;
mod device;
pub mod features;
mod frame;
mod immediate_ring;
mod receive;
mod rings;
mod timer;
mod transmit;

pub use control::{Command, CommandError};
pub use device::{Net, Options};
pub use frame::{Checksum, Frame, InvalidFrame, Protocol, Segmentation};
pub use rings::{Role, rings_max, role};
