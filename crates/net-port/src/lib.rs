//! Names what lies behind a network card, and makes the frames that come from there.
//!
//! The only [`Port`] is null, an instrument: it discards what is sent, and delivers test frames ([`TestFrame`]) at a steady
//! rate. This crate knows nothing about rings; `net` moves the frames.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod port;
mod test_frame;

pub use port::{InvalidPort, NullPort, Port};
pub use test_frame::{NotATestFrame, TestFrame};
