//! The network of a user without rights: a `passt` process behind a stream socket.
//!
//! passt makes the connections of the guest with ordinary sockets of the host. It has an end of a socket pair
//! as its standard input. It ends when the other end closes, also when this program is killed.

mod errors;
mod options;
mod passt;

pub(crate) use errors::{is_pipe, log_errors};
pub use options::{InvalidUserOption, UserOptions};
pub use passt::{Passt, PasstError};
