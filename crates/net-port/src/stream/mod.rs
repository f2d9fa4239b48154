//! Ports over a stream socket: `stream:PATH`, and the network of a `passt` process (`user`).
//!
//! The two rings of a card share one connection ([`StreamReceiver`], [`StreamSender`]). A thread of the port
//! makes it, and makes it again when it is lost ([`StreamPort::start`]). No task waits for that: without a
//! connection there are no frames to receive, and sent ones are dropped.
//!
//! A task watches one descriptor for as long as it runs, but the sockets come and go. So the port has an
//! epoll instance for each direction, which contains the present socket. It is readable when the socket is
//! ready, and when it was replaced.

mod connection;
mod framing;
mod hand_over;
mod port;

pub use connection::{Incoming, Outgoing, Received, StreamReceiver, StreamSender};
pub use framing::{Deframer, InvalidLength};
pub use hand_over::StreamError;
pub use port::StreamPort;
