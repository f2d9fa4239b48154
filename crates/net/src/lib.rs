//! The virtio-net device (virtio 1.3, section 5.1).
//!
//! The pure parts: features and what they require ([`features`]), the configuration space ([`config`]), the roles of
//! rings ([`Role`]), the header and the length of a transmitted frame ([`Frame`]), commands of the control queue
//! ([`Command`]), and the test frames that a null port delivers ([`TestFrame`]).
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
mod control;
pub mod features;
mod frame;
mod port;
mod rings;
mod test_frame;

pub use control::{Command, Refusal};
pub use frame::{Checksum, Frame, Invalid, Protocol, Segmentation};
pub use port::{InvalidPort, NullPort, Port};
pub use rings::{Role, rings_max, role};
pub use test_frame::{NotATestFrame, TestFrame};
