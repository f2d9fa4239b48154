//! The virtio-net device (virtio 1.3, section 5.1).
//!
//! [`Net`] is the [`Device`](kickless_device::Device). It has features ([`features`]), a configuration space
//! ([`config`]), and a task for each running ring. There are three kinds of tasks, one for each [`Role`]:
//! - `ring/transmit_task.rs` takes frames from the driver and checks them ([`Frame`]);
//! - `ring/receive_task.rs` pops chains ahead, as credit, and delivers frames into them;
//! - `card/control_ring.rs` executes commands of the driver ([`Command`]).
//!
//! The other side of a card is its port. A [`PortName`] is the name of one, as an operator writes it, and an
//! [`OpenPort`] the port itself. `ports` has a folder for each, with everything that concerns it: its name,
//! its help, how it is opened and closed, and the parts that receive and transmit for one ring. The tasks of
//! the rings are the same for all ports.
//!
//! A frame whose offloads the driver does not accept is undone in software ([`offload`]).
//!
//! Each ring completes chains in the order in which the driver made them available. A front-end without an
//! in-flight buffer therefore learns from the used index where a ring continues after the back-end was
//! killed.
//!
//! ```
//! use kickless_device::Device;
//! use kickless_net::{Net, NullPort, Options};
//!
//! let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
//! let port = NullPort::default().into();
//! let (pairs_max, queue_size_max) = (2, 1024);
//! let (offload, ring_reset) = (true, false);
//! let options =
//!     Options { mac: Some(mac), mtu: None, pairs_max, queue_size_max, offload, ring_reset, port };
//! let card = Net::new(options);
//! // Two pairs of rings, and the control ring.
//! assert_eq!(card.queues_max(), 5);
//! // The configuration space begins with the address.
//! let mut read = [0; 6];
//! card.read_config(0, &mut read);
//! assert_eq!(read, mac);
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod card;
mod frame;
pub mod offload;
mod ports;
mod ring;

pub use card::control::{Command, CommandError};
pub use card::device::{Net, Options};
pub use card::filter::{Address, Filter, Modes};
pub use card::hand_over::HandedCard;
pub use card::{config, features};
pub use frame::header::{Checksum, Frame, InvalidFrame, Protocol, Segmentation};
#[cfg(fuzzing)]
pub use ports::switch::fuzzing as switch_fuzzing;
pub use ports::{NullPort, OpenPort, Opening, PortError, PortName};
pub use ring::roles::{Role, rings_max, role};
