//! Errors, and whether the stream can be used afterwards.

use std::io;

use kickless_spec::vhost_user::{FDS_MAX, VERSION};

use crate::header::{Header, PAYLOAD_MAX};

/// The error of a message that could not be received or sent.
///
/// [`is_fatal`](Self::is_fatal) tells whether the connection must be dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A complete message arrived that the protocol does not allow. The next message can be received.
    #[error("{cause}")]
    Rejected {
        /// The head of the message, for a negative acknowledgement.
        header: Header,
        /// The reason.
        cause: MessageError,
    },
    /// The wait ended before anything was lost. The same call can be made again.
    #[error("interrupted while waiting for the peer")]
    Interrupted,
    /// The wait ended after a part of the message was sent.
    #[error("interrupted after {sent} of {len} bytes of a message were sent")]
    SendInterrupted {
        /// Bytes that were sent.
        sent: usize,
        /// Bytes of the message.
        len: usize,
    },
    /// The peer has closed the connection between two messages.
    #[error("the peer has closed the connection")]
    Closed,
    /// The peer has closed the connection in the middle of a message.
    #[error("the peer has closed the connection after {received} bytes of a message")]
    ClosedMidMessage {
        /// Bytes that had arrived.
        received: usize,
    },
    /// Another process says that it has received this part of a message, and it is a whole one.
    #[error("it is no part of a message")]
    NotHalf,
    /// The peer uses another version of the protocol.
    #[error("request {request}: protocol version {version}, expected {VERSION}")]
    Version {
        /// The request's number.
        request: u32,
        /// The version in its flags.
        version: u32,
    },
    /// A payload that is longer than that of any message.
    #[error("request {request}: payload of {size} bytes announced, at most {PAYLOAD_MAX} allowed")]
    PayloadTooLarge {
        /// The request's number.
        request: u32,
        /// The size in its header.
        size: u32,
    },
    /// There are more file descriptors with one message than the protocol allows, or than this process can
    /// open. They are closed.
    #[error("more than {FDS_MAX} file descriptors with one message, or none left in this process")]
    TooManyFds,
    /// A request instead of a reply, or a reply instead of a request.
    #[error("{request}: flags are {flags:#x}, {problem}")]
    Flags {
        /// The request's name, or a word for an unknown one.
        request: &'static str,
        /// The flags of the message.
        flags: u32,
        /// The problem with the flags.
        problem: &'static str,
    },
    /// A reply that does not belong to the request that was sent.
    #[error("{expected}: the reply is to request {received}")]
    WrongReply {
        /// The request that was sent.
        expected: &'static str,
        /// The number in the reply.
        received: u32,
    },
    /// The reply that the caller wanted to send is not one to this request. Nothing was sent.
    #[error("{request}: no such reply")]
    NoSuchReply {
        /// The request's name, or a word for an unknown one.
        request: &'static str,
    },
    /// The socket failed.
    #[error("{call}: {source}")]
    Io {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(call: &'static str, errno: rustix::io::Errno) -> Self {
        Self::Io { call, source: errno.into() }
    }

    /// Returns whether the stream is out of step or gone, so that the connection must be dropped.
    ///
    /// Otherwise it can be used further. After [`Rejected`](Self::Rejected) the peer may wait for a reply,
    /// which [`Responder::refuse`](crate::Responder::refuse) sends.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Rejected { .. } | Self::Interrupted | Self::NoSuchReply { .. })
    }
}

/// The error of a message that arrived completely.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// There is no request with this number.
    #[error("unknown request {number}")]
    UnknownRequest {
        /// Its number.
        number: u32,
    },
    /// A request that this crate does not decode.
    #[error("{request}: not supported")]
    Unsupported {
        /// The request.
        request: &'static str,
    },
    /// The payload does not have the request's length.
    #[error("{request}: payload is {len} bytes, expected {expected}")]
    PayloadSize {
        /// The request.
        request: &'static str,
        /// Bytes of payload.
        len: usize,
        /// Expected bytes.
        expected: usize,
    },
    /// The payload is shorter than its own fields say.
    #[error("{request}: payload is {len} bytes, expected at least {least}")]
    PayloadShort {
        /// The request.
        request: &'static str,
        /// Bytes of payload.
        len: usize,
        /// Least number of expected bytes.
        least: usize,
    },
    /// More or fewer file descriptors than the request has.
    #[error("{request}: {fds} file descriptors, expected {expected}")]
    FdCount {
        /// The request.
        request: &'static str,
        /// File descriptors that came.
        fds: usize,
        /// Expected number of file descriptors.
        expected: usize,
    },
    /// A memory table without exactly one file descriptor for each region.
    #[error("{request}: {regions} regions but {fds} file descriptors")]
    RegionFds {
        /// The request.
        request: &'static str,
        /// Regions in the table.
        regions: usize,
        /// File descriptors that came.
        fds: usize,
    },
    /// A field with a value that the protocol does not allow.
    #[error("{request}: {field} is {value:#x}, {rule}")]
    Field {
        /// The request.
        request: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The rule for the value.
        rule: &'static str,
    },
}
