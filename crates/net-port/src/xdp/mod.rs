//! Ports on an interface of the host through AF_XDP: `xdp:IFNAME[,queue=N]`.
//!
//! The kernel passes the frames that a queue of the interface receives to this process, before its
//! network stack sees them, and sends frames from here without queueing disciplines. Both go through
//! memory that the process shares with the kernel (UMEM), and through four rings of addresses in it. The
//! crate `xdp` has the memory and the rings, and `rings` uses it. No library loads a program into
//! the kernel that is not a file, so `program` makes those calls itself, for a program of six
//! instructions.
//!
//! A pair of rings of the card has one queue, and a queue has one socket with its own memory. The memory has
//! two halves, so that neither direction takes the frames of the other one:
//!
//! - The kernel has half of the frames to receive into. A frame that the card has delivered goes back at
//!   once. A card that takes none leaves its frames with the kernel, which then drops further ones and
//!   counts them.
//! - The other half is for frames to send. Each is the kernel's until it has sent the frame. When none is
//!   left, the sender waits.
//!
//! - **Calls.** Received frames cost none. The kernel sends in the call that tells it of frames, 32 at a
//!   time, and says if frames are left. So a turn makes a call for each 32 frames. The library does not
//!   read the marks by which a driver that needs no call says so, and the port does not ask for them.
//! - **Which way.** The kernel moves frames without a copy where the driver of the interface can, and
//!   otherwise copies them. It runs the program in the driver, or else in the network stack.
//! - **Privilege.** It is needed once, when the port is opened.
//! - **The end.** The program leaves the interface with its last descriptor, after SIGKILL too.
//! - **An interface that is down** takes no frames, and the port drops what the card sends. It tries again at
//!   each turn. One that is deleted never comes back to this socket. A call that sends finds that out, and
//!   for a card that only receives a thread does, which waits for [`LinkChanges`].

mod error;
mod link_changes;
mod name;
mod port;
mod privileges;
mod program;
mod rings;

pub use error::XdpError;
pub use link_changes::LinkChanges;
pub use name::{InvalidXdp, XdpName};
pub use port::{XdpFlushed, XdpPort, XdpQueue, XdpTurn};
pub use rings::{FRAME_LEN_MAX as XDP_FRAME_LEN_MAX, MTU_MAX as XDP_MTU_MAX, XdpLink};
