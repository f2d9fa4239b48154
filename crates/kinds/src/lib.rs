//! The kinds of devices that kickless serves.
//!
//! Each kind has a file, which is the only one that names it: its options, its checks, how a device is made,
//! and everything else that [`Kind`](kickless_daemon::Kind) asks for. [`kinds`] lists them. The command line,
//! the configuration file, the calls and the metrics follow this list.
#![forbid(unsafe_code)]
// A kind that the table does not have.
#![deny(dead_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod blk;
mod net;

use kickless_daemon::Kinds;

pub use blk::{BlkConfig, BlkKind, OnError, Requests};
pub use net::{Frames, NetConfig, NetKind};

/// Returns the table of all kinds.
pub fn kinds() -> Kinds {
    Kinds::new(BlkKind::default()).with(NetKind)
}
