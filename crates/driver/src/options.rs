//! The options of a disk.

use std::path::PathBuf;
use std::time::Duration;

use kickless_spec::blk::BlkFeatures;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures as Protocol;

use crate::choice::Choice;
use crate::connection::Wishes;
use crate::device_kind::refuse_card;

/// The features of a disk that the driver uses if they are offered.
const BLK: BlkFeatures = BlkFeatures::SIZE_MAX
    .union(BlkFeatures::SEG_MAX)
    .union(BlkFeatures::RO)
    .union(BlkFeatures::BLK_SIZE)
    .union(BlkFeatures::FLUSH)
    .union(BlkFeatures::TOPOLOGY)
    .union(BlkFeatures::CONFIG_WCE)
    .union(BlkFeatures::MQ)
    .union(BlkFeatures::DISCARD)
    .union(BlkFeatures::WRITE_ZEROES);

/// The way in which a thread waits for a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// Poll the ring for a few microseconds, then ask for a call and sleep. The polling is skipped while the
    /// device is mostly slower than that.
    #[default]
    Auto,
    /// Ask for a call and sleep at once.
    Sleep,
    /// Poll the ring for this long before sleeping. [`Duration::MAX`] means never to sleep.
    Spin(Duration),
}

/// The options for the connection to a disk and its use.
#[derive(Clone, Debug)]
pub struct Options {
    /// The unix socket of the back-end.
    pub socket: PathBuf,
    /// The number of queues; 0 means one for each CPU of this process. At most as many as the back-end
    /// offers. Default 0.
    pub queues: u16,
    /// The number of descriptors in each queue, a power of two. It usually is the largest number of requests
    /// in flight. Default 256.
    pub queue_size: u16,
    /// Use the packed ring instead of the split one. Default: [`Choice::Auto`].
    pub packed: Choice,
    /// Use event indices. Default: [`Choice::Auto`].
    pub event_idx: Choice,
    /// Use indirect descriptors, so that each request takes one descriptor of the ring.
    ///
    /// A device is faster without them. So the driver uses them only when requests would take more than half
    /// of the ring otherwise. Default: [`Choice::Auto`].
    pub indirect: Choice,
    /// Complete requests in the order of their submission. Default: [`Choice::Off`], because fast requests
    /// would wait for slow ones.
    pub in_order: Choice,
    /// Use huge pages of 2 MiB, which must be reserved on the host. Default: no.
    pub huge_pages: bool,
    /// The bytes of shared memory for [`Disk::buffer`](crate::Disk::buffer) and for copies, rounded up to 2
    /// MiB.
    ///
    /// It costs nothing before its first use, except with huge pages. Default 64 MiB.
    pub buffer_memory: u64,
    /// The time to try to reconnect after the back-end has closed the connection. Zero means not at all, and
    /// [`Duration::MAX`] for ever. Default 30 s.
    pub reconnect_limit: Duration,
    /// The time to wait for a listener on the socket, at the first connection. Default: do not wait.
    pub connect_timeout: Duration,
    /// The time to wait for the reply to a message, and for the next completion when the disk is closed.
    /// Default 10 s.
    pub reply_timeout: Duration,
    /// The way in which a thread waits for a completion. Default: [`Waiting::Auto`].
    pub waiting: Waiting,
    /// Start a thread that completes futures.
    ///
    /// Without it, they complete when a thread calls [`Queue::poll`](crate::Queue::poll) or blocks on the
    /// same queue. The thread starts with the first request that needs it. Default: yes.
    pub reactor: bool,
}

impl Options {
    /// Returns what the driver asks of a back-end.
    pub(crate) fn wishes(&self) -> Wishes<'_> {
        Wishes {
            socket: &self.socket,
            reply_timeout: self.reply_timeout,
            packed: self.packed,
            event_idx: self.event_idx,
            indirect: self.indirect,
            in_order: self.in_order,
            protocol: Protocol::empty(),
            needs_config: true,
            of_config: Features::empty(),
            device_features: &|offered| {
                refuse_card(offered)?;
                Ok(offered & Features::from_bits_retain(BLK.bits()))
            },
        }
    }

    /// Returns the default options, for the back-end that listens on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 0,
            queue_size: 256,
            packed: Choice::Auto,
            event_idx: Choice::Auto,
            indirect: Choice::Auto,
            in_order: Choice::Off,
            huge_pages: false,
            buffer_memory: 64 << 20,
            reconnect_limit: Duration::from_secs(30),
            connect_timeout: Duration::ZERO,
            reply_timeout: Duration::from_secs(10),
            waiting: Waiting::Auto,
            reactor: true,
        }
    }
}
