//! What can go wrong, and whose doing it is.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kickless_virtqueue::driver::Lie;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens on the socket, or whoever does takes no connection.
    #[error("cannot connect to {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something that the driver needs.
    #[error("{what}")]
    Os {
        /// What was to be done.
        what: &'static str,
        /// Why it was not.
        #[source]
        source: io::Error,
    },
    /// Memory could not be mapped.
    #[error("memory to share")]
    Memory(#[source] kickless_memory::Error),
    /// The conversation with the back-end broke.
    #[error("{request}")]
    Protocol {
        /// During which request.
        request: &'static str,
        /// How.
        #[source]
        source: kickless_vhost_user::Error,
    },
    /// The back-end did not answer in time.
    #[error("{request} is not answered within {limit:?}")]
    NoAnswer {
        /// The request.
        request: &'static str,
        /// [`Options::reply_timeout`](crate::Options::reply_timeout).
        limit: Duration,
    },
    /// The back-end says no.
    #[error("the back-end refuses {request}")]
    Refused {
        /// To what.
        request: &'static str,
    },
    /// The back-end's answer is none to what it was asked.
    #[error("the back-end answers {request} with something else")]
    WrongAnswer {
        /// What it was asked.
        request: &'static str,
    },
    /// The back-end has closed the connection, and [`Options::reconnect_limit`](crate::Options::reconnect_limit) is zero.
    #[error("the back-end has closed the connection")]
    Closed,
    /// A feature that the driver cannot do without, or was told to insist on.
    #[error("the back-end does not offer {what}")]
    NotOffered {
        /// The feature.
        what: &'static str,
    },
    /// The configuration space ends before the fields that the features promise.
    #[error("the configuration space has {len} bytes, {needs} are needed")]
    ConfigTooShort {
        /// Bytes that came.
        len: usize,
        /// Bytes that were asked for.
        needs: usize,
    },
    /// A field of the configuration space that cannot be.
    #[error("{field} is {value} in the configuration space")]
    ConfigField {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The back-end broke the rules of a ring. The disk is not used any more.
    #[error("queue {queue}")]
    Lie {
        /// The queue.
        queue: usize,
        /// What it did.
        #[source]
        source: Lie,
    },
    /// The back-end completed a request that it cannot have seen yet. The disk is not used any more.
    #[error("queue {queue}: the back-end completed request {id} before it was made available")]
    Unpublished {
        /// The queue.
        queue: usize,
        /// The id.
        id: u16,
    },
    /// The back-end says that it can no longer read a ring. The disk is not used any more.
    #[error("the back-end reports a broken ring")]
    RingError,
    /// There is no queue of this size.
    #[error("queue size {size} is not a power of two from 1 to 32768")]
    QueueSize {
        /// [`Options::queue_size`](crate::Options::queue_size).
        size: u16,
    },
    /// What came back after the connection was lost is not the disk that was there before.
    #[error("the back-end came back with {what}")]
    Incompatible {
        /// What has changed.
        what: &'static str,
    },
    /// The connection was lost and could not be had again in time.
    #[error("the back-end is gone and did not come back within {limit:?}")]
    Gone {
        /// [`Options::reconnect_limit`](crate::Options::reconnect_limit).
        limit: Duration,
        /// What the last attempt met with.
        #[source]
        source: Box<Error>,
    },
    /// [`Disk::close`](crate::Disk::close) was called.
    #[error("the disk was closed")]
    Unplugged,
    /// The disk died of this earlier.
    #[error("the disk is dead")]
    Dead(#[source] Arc<Error>),
    /// The request is wrong.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The ring has no room for the request now.
    #[error("the ring is full")]
    Full,
    /// A handler of completions wanted to wait, or to talk to the back-end, or a listener to changes to wait: it could wait for
    /// itself.
    #[error("a handler must not wait")]
    InHandler,
    /// No buffer of this size is left in the shared memory, whose size is
    /// [`Options::buffer_memory`](crate::Options::buffer_memory).
    #[error("no {len} bytes of shared memory are left")]
    NoMemory {
        /// Bytes asked for.
        len: usize,
    },
    /// The back-end takes no more regions of memory.
    #[error("the back-end takes {max} regions of memory at most")]
    TooManyRegions {
        /// How many.
        max: usize,
    },
    /// The memory cannot be unregistered: something still refers to it.
    #[error("the memory is still in use")]
    Busy,
    /// The request was carried out and failed.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Os { what, source: errno.into() }
    }

    /// Whether the back-end may simply have been restarted: trying again makes sense.
    pub(crate) fn is_loss(&self) -> bool {
        use kickless_vhost_user::Error as Wire;
        match self {
            Self::Connect { .. } | Self::Closed | Self::NoAnswer { .. } => true,
            Self::Protocol { source, .. } => {
                matches!(source, Wire::Closed | Wire::ClosedMidMessage { .. } | Wire::Io { .. })
            }
            _ => false,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Invalid(_) => io::ErrorKind::InvalidInput,
            Error::Full => io::ErrorKind::WouldBlock,
            Error::NoMemory { .. } => io::ErrorKind::OutOfMemory,
            Error::Failed(Failure::Unsupported) => io::ErrorKind::Unsupported,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The device reports an I/O error.
    #[error("I/O error")]
    Io,
    /// The device does not know this type of request.
    #[error("request not supported")]
    Unsupported,
    /// The device gave the request back without a status.
    #[error("the back-end completed a request without a status")]
    NoStatus,
    /// The device gave a status that there is none of.
    #[error("the back-end completed a request with status {0}")]
    Status(u8),
    /// The disk died with the request in flight: it may have been carried out or not.
    /// [`Disk::failure`](crate::Disk::failure) tells what it died of.
    #[error("the disk died with the request in flight")]
    Dead,
}

/// What is wrong with a request that was never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Offset or length is no multiple of 512.
    #[error("offset {offset} or length {len} is no multiple of 512")]
    Unaligned {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The end of the disk comes first.
    #[error("{len} bytes at {offset} are not all on a disk of {size} bytes")]
    OutOfRange {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the disk.
        size: u64,
    },
    /// No bytes at all.
    #[error("a request of no bytes")]
    Empty,
    /// More bytes than one request may have.
    #[error("{len} bytes in one request, {max} are possible")]
    TooLong {
        /// Bytes.
        len: u64,
        /// The most.
        max: u64,
    },
    /// More pieces of memory than one request may have.
    #[error("{pieces} pieces of memory in one request, {max} are possible")]
    TooManyPieces {
        /// Pieces, of the length that the device takes.
        pieces: usize,
        /// The most.
        max: usize,
    },
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The back-end does not offer requests of this type.
    #[error("the back-end does not offer {what}")]
    NotOffered {
        /// The type.
        what: &'static str,
    },
    /// The memory belongs to another disk, or was unregistered.
    #[error("the buffer is not memory of this disk")]
    ForeignBuffer,
}
