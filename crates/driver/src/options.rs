//! What a disk is opened with.

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Whether to use a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Where it is offered.
    #[default]
    Auto,
    /// Yes; a back-end that does not offer it is an error.
    On,
    /// No.
    Off,
}

/// What a thread does that waits for a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// It asks for a call and sleeps; before that it looks at the ring for a few microseconds, as long as that pays: while the
    /// device mostly answers within them.
    #[default]
    Auto,
    /// It asks for a call and sleeps, at once.
    Sleep,
    /// It looks at the ring for so long before it sleeps. [`Duration::MAX`]: it never sleeps.
    Spin(Duration),
}

/// How to reach a disk, and how to use it.
#[derive(Clone, Debug)]
pub struct Options {
    /// The back-end's unix socket.
    pub socket: PathBuf,
    /// Queues; 0 for as many as this process has CPUs. Never more than the back-end offers. Default 0.
    pub queues: u16,
    /// Descriptors in each queue, a power of two; the most requests in flight, for the most part. Default 256.
    pub queue_size: u16,
    /// The packed ring instead of the split one. Default: [`Choice::Auto`].
    pub packed: Choice,
    /// Event indices. Default: [`Choice::Auto`].
    pub event_idx: Choice,
    /// Indirect descriptors, so that each request takes one descriptor of the ring. Used where more than half of the ring would
    /// be taken otherwise, for a device is faster without. Default: [`Choice::Auto`].
    pub indirect: Choice,
    /// Requests complete in the order of their submission. Default: [`Choice::Off`], for it makes the fast wait for the slow.
    pub in_order: Choice,
    /// Share huge pages (2 MiB, which the system must have set aside). Default: no.
    pub huge_pages: bool,
    /// Bytes of shared memory for [`Disk::buffer`](crate::Disk::buffer) and for copies; rounded up to 2 MiB. It costs
    /// nothing before it is used, except as huge pages. Default 64 MiB.
    pub buffer_memory: u64,
    /// For how long to go on trying when the back-end has closed the connection; zero for not at all, [`Duration::MAX`] for
    /// ever. Default 30 s.
    pub reconnect_limit: Duration,
    /// For how long to wait for somebody to listen on the socket, at first. Default: not at all.
    pub connect_timeout: Duration,
    /// For how long to wait for the answer to a message, and, when the disk is closed, for the next completion. Default 10 s.
    pub reply_timeout: Duration,
    /// What a thread does that waits for a completion. Default: [`Waiting::Auto`].
    pub waiting: Waiting,
    /// Whether a thread of the disk completes futures and callbacks. Without it, they complete when somebody calls
    /// [`Queue::poll`](crate::Queue::poll) or blocks on the same queue. The thread starts with the first request that
    /// needs it. Default: yes.
    pub reactor: bool,
    /// Kick while holding the submission lock, to see what that costs.
    #[cfg(feature = "locked-kick")]
    pub locked_kick: bool,
}

/// Longer times than this are as good as this, and clocks can add it up.
const TIME_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// When so much time will have passed.
pub(crate) fn deadline_after(time: Duration) -> Instant {
    Instant::now() + time.min(TIME_MAX)
}

impl Options {
    /// The defaults, for the back-end that listens on `socket`.
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
            #[cfg(feature = "locked-kick")]
            locked_kick: false,
        }
    }
}
