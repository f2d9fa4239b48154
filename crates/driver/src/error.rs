//! The errors of the driver.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kickless_virtqueue::driver::UsedError;

use crate::offload::InvalidOffload;

/// The error of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket has no listener, or the listener accepts no connection.
    #[error("cannot connect to {}", path.display())]
    Connect {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The kernel refused an operation.
    #[error("the kernel refuses {what}")]
    Os {
        /// The operation or its object.
        what: &'static str,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The memory could not be mapped.
    #[error("memory cannot be shared with the back-end")]
    Memory(#[source] kickless_memory::Error),
    /// The exchange of messages with the back-end failed.
    #[error("{request} failed")]
    Protocol {
        /// The message.
        request: &'static str,
        /// The error of the protocol.
        #[source]
        source: kickless_vhost_user::Error,
    },
    /// The back-end did not reply in time.
    #[error("{request} is not answered within {limit:?}")]
    NoAnswer {
        /// The message.
        request: &'static str,
        /// The limit, [`Options::reply_timeout`](crate::Options::reply_timeout) or less.
        limit: Duration,
    },
    /// The back-end refused a message.
    #[error("the back-end refuses {request}")]
    Refused {
        /// The message.
        request: &'static str,
    },
    /// The back-end replied with another kind of message.
    #[error("the back-end answers {request} with another kind of message")]
    WrongAnswer {
        /// The message.
        request: &'static str,
    },
    /// The back-end closed the connection, and [`Options::reconnect_limit`](crate::Options::reconnect_limit)
    /// is zero.
    #[error("the back-end has closed the connection")]
    Closed,
    /// The back-end lacks a feature that the driver or the options require.
    #[error("the back-end does not offer {what}")]
    NotOffered {
        /// The feature.
        what: &'static str,
    },
    /// The features of the back-end are those of another kind of device.
    #[error("the back-end serves {found}")]
    OtherDevice {
        /// The kind of device.
        found: &'static str,
    },
    /// The configuration space ends before fields that the features promise.
    #[error("the configuration space has {len} bytes and needs {needs}")]
    ConfigTooShort {
        /// The number of bytes received.
        len: usize,
        /// The number of bytes required.
        needs: usize,
    },
    /// A field of the configuration space has an invalid value.
    #[error("{field} is {value} in the configuration space")]
    ConfigField {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The back-end broke the rules of a ring. The device is dead.
    #[error("the back-end broke the rules of queue {queue}")]
    InvalidUsed {
        /// The queue.
        queue: usize,
        /// The violated rule.
        #[source]
        source: UsedError,
    },
    /// The back-end completed a request before it could have seen it. The device is dead.
    #[error("queue {queue}: the back-end completed request {id} before it was made available")]
    Unpublished {
        /// The queue.
        queue: usize,
        /// The id of the request.
        id: u16,
    },
    /// The back-end used a receive buffer for fewer bytes than a frame's header has. The device is dead.
    #[error(
        "queue {queue}: the back-end wrote {len} bytes into buffer {id}, and the header of a frame has {needs}"
    )]
    FrameTooShort {
        /// The queue.
        queue: usize,
        /// The id of the buffer.
        id: u16,
        /// The number of bytes.
        len: u32,
        /// The length of the header.
        needs: u32,
    },
    /// The back-end named an impossible number of receive buffers for one frame. The device is dead.
    #[error("queue {queue}: a frame in {count} buffers, and the back-end has {room}")]
    FrameBuffers {
        /// The queue.
        queue: usize,
        /// The number in the header of the frame.
        count: u16,
        /// The number of buffers that the back-end had, that of the header included.
        room: u32,
    },
    /// The back-end refused a command of the control queue.
    #[error("the back-end refuses the command to set the number of pairs")]
    CommandRefused,
    /// The back-end answered a command with an undefined value. The device is dead.
    #[error("the back-end answers a command with {answer}")]
    CommandAnswer {
        /// The value.
        answer: u8,
    },
    /// The back-end did not answer a command in time.
    #[error("the command to set the number of pairs is not answered within {limit:?}")]
    CommandTimeout {
        /// The limit, [`CardOptions::reply_timeout`](crate::CardOptions::reply_timeout).
        limit: Duration,
    },
    /// The back-end reported that it cannot read a ring any more. The device is dead.
    #[error("the back-end reports a broken ring")]
    RingError,
    /// The size of a queue is invalid.
    #[error("queue size {size} is not a power of two from 1 to 32768")]
    QueueSize {
        /// [`Options::queue_size`](crate::Options::queue_size).
        size: u16,
    },
    /// After a reconnection, the back-end serves a different disk.
    #[error("the back-end came back with {what}")]
    Incompatible {
        /// The difference.
        what: &'static str,
    },
    /// The connection was lost and could not be restored in time.
    #[error("the back-end closed the connection and did not come back within {limit:?}")]
    Gone {
        /// [`Options::reconnect_limit`](crate::Options::reconnect_limit).
        limit: Duration,
        /// The error of the last attempt.
        #[source]
        source: Box<Error>,
    },
    /// [`Disk::close`](crate::Disk::close) or [`Card::close`](crate::Card::close) was called.
    #[error("the device was closed")]
    Unplugged,
    /// The device died earlier.
    #[error("the device is dead")]
    Dead(#[source] Arc<Error>),
    /// The request is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The ring has no room for the request now.
    #[error("the ring is full")]
    Full,
    /// A callback (the function given to [`Queue::poll`](crate::Queue::poll), or the waker of a future) tried
    /// to wait or to send a message. It could wait for itself.
    #[error("a callback must not wait")]
    InCallback,
    /// The shared memory has no free piece of this length.
    /// [`Options::buffer_memory`](crate::Options::buffer_memory) sets its size.
    #[error("the shared memory has no {len} free bytes in one piece")]
    NoMemory {
        /// The number of bytes asked for.
        len: usize,
    },
    /// The back-end accepts no more memory regions.
    #[error("the back-end accepts at most {max} regions of memory")]
    TooManyRegions {
        /// The number that it accepts.
        max: usize,
    },
    /// The memory cannot be unregistered because it is still in use.
    #[error("the memory is still in use")]
    Busy,
    /// The request ran and failed.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Os { what, source: errno.into() }
    }

    /// Returns whether a restarted back-end may explain the error, so that another attempt makes sense.
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

/// The way in which a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The device reported an I/O error.
    #[error("I/O error")]
    Io,
    /// The device does not support this type of request.
    #[error("request not supported")]
    Unsupported,
    /// The device completed the request without writing a status.
    #[error("the back-end completed a request without a status")]
    NoStatus,
    /// The device wrote an undefined status.
    #[error("the back-end completed a request with status {0}")]
    Status(u8),
    /// The disk died with the request in flight. The request may have run or not.
    /// [`Disk::failure`](crate::Disk::failure) has the reason.
    #[error("the disk died with the request in flight")]
    Dead,
}

/// The defect of a request that was never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Offset or length is not a multiple of 512.
    #[error("offset {offset} or length {len} is not a multiple of 512")]
    Unaligned {
        /// The offset in bytes.
        offset: u64,
        /// The length in bytes.
        len: u64,
    },
    /// The range goes beyond the disk.
    #[error("{len} bytes at {offset} go beyond the disk of {size} bytes")]
    OutOfRange {
        /// The offset in bytes.
        offset: u64,
        /// The length in bytes.
        len: u64,
        /// The size of the disk in bytes.
        size: u64,
    },
    /// The request has no bytes.
    #[error("the request has no bytes")]
    Empty,
    /// The request has too many bytes.
    #[error("the request has {len} bytes, at most {max} are possible")]
    TooLong {
        /// The length in bytes.
        len: u64,
        /// The largest length.
        max: u64,
    },
    /// The frame is shorter than an Ethernet header, or too long for the card.
    #[error("the frame has {len} bytes, and {min} to {max} are possible")]
    FrameLength {
        /// The length in bytes.
        len: usize,
        /// The smallest length.
        min: usize,
        /// The largest length.
        max: usize,
    },
    /// The offload of the frame is impossible or not negotiated.
    #[error(transparent)]
    Offload(#[from] InvalidOffload),
    /// The request has too many pieces of memory.
    #[error("the request has {pieces} pieces of memory, at most {max} are possible")]
    TooManyPieces {
        /// The number of pieces, after splitting to the length that the device accepts.
        pieces: usize,
        /// The largest number.
        max: usize,
    },
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The back-end does not offer this type of request.
    #[error("the back-end does not offer {what}")]
    NotOffered {
        /// The type.
        what: &'static str,
    },
    /// The memory belongs to another disk, or was unregistered.
    #[error("the buffer is not memory of this disk")]
    ForeignBuffer,
}
