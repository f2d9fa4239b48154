//! The ports of network cards, and the test frames of the null port.
//!
//! A [`Port`] is the side of a card that the guest does not see, such as a network. The only one is the null
//! port, for tests and measurements. It discards the guest's frames and delivers test frames ([`TestFrame`])
//! at a steady rate. This crate knows nothing about rings; `net` moves the frames.
//!
//! ```
//! use kickless_net_port::Port;
//!
//! let port: Port = "null,rate=7,length=60-99".parse()?;
//! assert_eq!(port.to_string(), "null,rate=7,length=60-99");
//! # Ok::<(), kickless_net_port::InvalidPort>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod port;
mod test_frame;

pub use port::{InvalidPort, NullPort, Port};
pub use test_frame::{InvalidTestFrame, TestFrame};
