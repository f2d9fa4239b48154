//! The things that network cards are connected to: TAPs, queues of interfaces, and stream sockets.
//!
//! A [`Tap`] is an interface of the host, and an [`XdpPort`] has queues of one. A [`StreamPort`] reaches
//! another program over a socket, such as `passt`. A [`Capture`] writes the frames of a card to a file, and a
//! [`TestFrame`] shows whether it arrives whole. This crate knows nothing about rings and cards: the ports of
//! `net` move the frames.
//!
//! ```
//! use kickless_net_port::{TestFrame, is_interface_name};
//!
//! let mut frame = [0; 60];
//! TestFrame { pair: 0, number: 7 }.write(None, &mut frame);
//! assert_eq!(frame[20..28], 7u64.to_le_bytes());
//! assert!(is_interface_name("vm1") && !is_interface_name("a/b"));
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod capture;
mod stream;
mod tap;
mod test_frame;
mod user;
mod xdp;

pub use capture::{Capture, CaptureError, Direction};
pub use stream::{
    Deframer, Incoming, InvalidLength, Outgoing, Received, StreamError, StreamPort, StreamReceiver,
    StreamSender,
};
pub use tap::{
    INTERFACE_NAME_MAX, Offloads, ReceiveError, SendError, Tap, TapError, TapQueue, is_interface_name,
};
pub use test_frame::TestFrame;
pub use user::{InvalidUserOption, Passt, PasstError, UserOptions};
pub use xdp::{
    InvalidXdp, LinkChanges, XDP_FRAME_LEN_MAX, XDP_MTU_MAX, XdpError, XdpFlushed, XdpLink, XdpName, XdpPort,
    XdpQueue, XdpTurn,
};
