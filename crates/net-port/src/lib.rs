//! The ports of network cards: TAPs, queues of interfaces, stream sockets, switches by their names, and two
//! instruments.
//!
//! A [`Port`] is the side of a card that the guest does not see, such as a network. A [`Tap`] is an
//! interface of the host, and an [`XdpPort`] has queues of one. A [`StreamPort`] reaches another program
//! over a socket, such as `passt`. Two ports are for tests and measurements: the null port discards the
//! guest's frames and delivers test frames ([`TestFrame`]) at a steady rate, and the loop port returns
//! the guest's frames. This crate knows nothing about rings; `net` moves the frames. A [`Capture`] writes
//! the frames of a card to a file.
//!
//! ```
//! use kickless_net_port::Port;
//!
//! let port: Port = "null,rate=7,length=60-99".parse()?;
//! assert_eq!(port.to_string(), "null,rate=7,length=60-99");
//! # Ok::<(), kickless_net_port::InvalidPort>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod capture;
mod port;
mod stream;
mod switch_name;
mod tap;
mod test_frame;
mod user;
mod xdp;

pub use capture::{Capture, CaptureError, Direction};
pub use port::{InvalidPort, NullPort, OpenPort, Port, PortError};
pub use stream::{
    Deframer, Incoming, InvalidLength, Outgoing, Received, StreamPort, StreamReceiver, StreamSender,
};
pub use switch_name::{InvalidSwitch, SwitchName};
pub use tap::{Offloads, ReceiveError, SendError, Tap, TapError, TapQueue};
pub use test_frame::{InvalidTestFrame, TestFrame};
pub use user::{InvalidUserOption, PasstError, UserOptions};
pub use xdp::{
    InvalidXdp, LinkChanges, XDP_FRAME_LEN_MAX, XDP_MTU_MAX, XdpError, XdpFlushed, XdpLink, XdpName, XdpPort,
    XdpQueue, XdpTurn,
};
