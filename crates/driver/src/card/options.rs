//! The options of a card.

use std::path::PathBuf;
use std::time::Duration;

use kickless_spec::net::MTU_DEFAULT;

use crate::choice::Choice;
use crate::options::Waiting;

/// The options for the connection to a card and its use.
#[derive(Clone, Debug)]
pub struct CardOptions {
    /// The unix socket of the back-end.
    pub socket: PathBuf,
    /// The number of queue pairs; 0 means one for each CPU of this process. At most as many as the back-end
    /// offers. Default 1.
    pub pairs: u16,
    /// The number of descriptors in each queue, a power of two. Default 256.
    pub queue_size: u16,
    /// The bytes of each buffer, at least 128. A frame with its header of 12 bytes takes one buffer or
    /// several. Without [`CardOptions::mergeable`], buffers are as long as the longest frame. Default 2048.
    pub buffer_len: u32,
    /// Use the packed ring instead of the split one. Default: [`Choice::Auto`].
    pub packed: Choice,
    /// Use event indices. Default: [`Choice::Auto`].
    pub event_idx: Choice,
    /// Use indirect descriptors for frames of several buffers, if the ring is more than half full. Default:
    /// [`Choice::Auto`].
    pub indirect: Choice,
    /// Use buffers in the order in which they were made available. Default: [`Choice::Off`].
    pub in_order: Choice,
    /// Receive frames in several buffers (`VIRTIO_NET_F_MRG_RXBUF`). Default: [`Choice::Auto`].
    pub mergeable: Choice,
    /// Leave checksums and segmentation of sent frames to the card. Each frame says what is left
    /// ([`Offload`](crate::Offload)). [`Choice::On`] requires checksums. Default: [`Choice::Auto`].
    pub transmit_offloads: Choice,
    /// Receive frames with partial checksums, and large packets. [`Choice::On`] requires checksums. Default:
    /// [`Choice::Off`], so that received frames are complete.
    pub receive_offloads: Choice,
    /// Use the control queue. Some back-ends offer it and never serve it. Default: [`Choice::Auto`], which
    /// uses it only if the back-end has a configuration space.
    pub control: Choice,
    /// The MTU to tell the back-end. Default: that of the back-end.
    pub mtu: Option<u16>,
    /// Use huge pages of 2 MiB, which must be reserved on the host. Default: no.
    pub huge_pages: bool,
    /// The time to try to reconnect after the back-end has closed the connection. Zero means not at all, and
    /// [`Duration::MAX`] for ever. Default 30 s.
    pub reconnect_limit: Duration,
    /// The time to wait for a listener on the socket, at the first connection. Default: do not wait.
    pub connect_timeout: Duration,
    /// The time to wait for the reply to a message or to a command of the control queue. Default 10 s.
    pub reply_timeout: Duration,
    /// The way in which [`QueuePair::wait`](crate::QueuePair::wait) waits. Default: [`Waiting::Auto`].
    pub waiting: Waiting,
}

impl CardOptions {
    /// Returns the default options, for the back-end that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            pairs: 1,
            queue_size: 256,
            buffer_len: 2048,
            packed: Choice::Auto,
            event_idx: Choice::Auto,
            indirect: Choice::Auto,
            in_order: Choice::Off,
            mergeable: Choice::Auto,
            transmit_offloads: Choice::Auto,
            receive_offloads: Choice::Off,
            control: Choice::Auto,
            mtu: None,
            huge_pages: false,
            reconnect_limit: Duration::from_secs(30),
            connect_timeout: Duration::ZERO,
            reply_timeout: Duration::from_secs(10),
            waiting: Waiting::Auto,
        }
    }

    /// Returns the MTU of a card whose configuration space has `offered`.
    pub(crate) fn mtu_of(&self, offered: Option<u16>) -> u16 {
        self.mtu.or(offered).unwrap_or(MTU_DEFAULT)
    }
}
