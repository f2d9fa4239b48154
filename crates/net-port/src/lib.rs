//! The ports of network cards: TAPs, and the null port with its test frames.
//!
//! A [`Port`] is the side of a card that the guest does not see, such as a network. The null port is for
//! tests and measurements. It discards the guest's frames and delivers test frames ([`TestFrame`]) at a
//! steady rate. A [`Tap`] is an interface of the host; no [`Port`] has one yet. This crate knows nothing
//! about rings; `net` moves the frames.
//!
//! ```
//! use kickless_net_port::Port;
//!
//! let port: Port = "null,rate=7,length=60-99".parse()?;
//! assert_eq!(port.to_string(), "null,rate=7,length=60-99");
//! # Ok::<(), kickless_net_port::InvalidPort>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod port;
mod tap;
mod test_frame;

pub use port::{InvalidPort, NullPort, Port};
pub use tap::{Offloads, ReceiveError, SendError, Tap, TapError, TapQueue};
pub use test_frame::{InvalidTestFrame, TestFrame};
