//! The ports of cards, a folder for each.
//!
//! [`PORTS`] lists them, and nothing else names a port. A port that is not in the list does not compile.
#![deny(dead_code, reason = "a port that the list lacks is never used")]

pub(crate) mod hand_over;
mod inbox;
mod loop_port;
mod name;
mod null;
pub(crate) mod port;
mod port_thread;
pub(crate) mod receive;
mod stream;
pub(crate) mod switch;
mod tap;
mod timer;
pub(crate) mod transmit;
mod user;
mod xdp;

pub use name::PortName;
pub use null::NullPort;
pub use port::{OpenPort, Opening, PortError};

use port::PortKind;

/// All kinds of ports, in the order in which the help has them.
const PORTS: &[&PortKind] = &[
    &tap::TAP,
    &tap::TAP_FD,
    &switch::SWITCH,
    &user::USER,
    &stream::STREAM,
    &xdp::XDP,
    &loop_port::LOOP,
    &null::NULL,
];
