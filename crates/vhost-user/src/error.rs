//! What can go wrong, and whether the stream is still in step afterwards.

use std::io;

use kickless_spec::vhost_user::{FDS_MAX, VERSION};

use crate::header::{Header, PAYLOAD_MAX};

/// Why a message could not be received or sent.
///
/// [`is_fatal`](Self::is_fatal) tells the errors after which the connection must be dropped from those after which it can
/// go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A whole message arrived, but not one that the protocol allows. The next one can be received.
    #[error("{cause}")]
    Rejected {
        /// Its head: what a negative acknowledgement needs.
        header: Header,
        /// What is wrong with it.
        cause: MessageError,
    },
    /// The wait was given up before anything was lost: the same call can be made again.
    #[error("interrupted while waiting for the peer")]
    Interrupted,
    /// The wait was given up when part of a message had been sent.
    #[error("interrupted after {sent} of {len} bytes of a message were sent")]
    SendInterrupted {
        /// Bytes that are gone.
        sent: usize,
        /// Bytes of the message.
        len: usize,
    },
    /// The peer has closed the connection; no part of a message is lost.
    #[error("the peer has closed the connection")]
    Closed,
    /// The peer has closed the connection in the middle of a message.
    #[error("the peer has closed the connection after {received} bytes of a message")]
    ClosedMidMessage {
        /// Bytes that had arrived.
        received: usize,
    },
    /// Not the version of the protocol that this crate speaks.
    #[error("request {request}: protocol version {version}, expected {VERSION}")]
    Version {
        /// The request's number.
        request: u32,
        /// The version in its flags.
        version: u32,
    },
    /// A payload longer than any message's.
    #[error("request {request}: payload of {size} bytes announced, at most {PAYLOAD_MAX} allowed")]
    PayloadTooLarge {
        /// The request's number.
        request: u32,
        /// The size in its header.
        size: u32,
    },
    /// More file descriptors with one message than the protocol allows, or than this process can have open. They are
    /// closed.
    #[error("more than {FDS_MAX} file descriptors with one message, or none left in this process")]
    TooManyFds,
    /// A request where a reply was due, or the other way round.
    #[error("{request}: flags are {flags:#x}, {problem}")]
    Flags {
        /// The request's name, or a word for an unknown one.
        request: &'static str,
        /// The flags of the message.
        flags: u32,
        /// What is wrong with them.
        problem: &'static str,
    },
    /// The reply to another request than the one that was sent.
    #[error("{expected}: the reply is to request {received}")]
    WrongReply {
        /// The request that was sent.
        expected: &'static str,
        /// The number in the reply.
        received: u32,
    },
    /// The reply that was to be sent is of a kind that this request does not have. Nothing was sent.
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

    /// Whether the stream is out of step, or gone: the connection must be dropped. Otherwise it can be used on; after
    /// [`Rejected`](Self::Rejected) the peer may wait for an answer, which
    /// [`Responder::refuse`](crate::Responder::refuse) gives.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Rejected { .. } | Self::Interrupted | Self::NoSuchReply { .. })
    }
}

/// What is wrong with a message that arrived whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// No such request.
    #[error("unknown request {number}")]
    UnknownRequest {
        /// Its number.
        number: u32,
    },
    /// The payload is of another length than the request's.
    #[error("{request}: payload is {len} bytes, expected {expected}")]
    PayloadSize {
        /// The request.
        request: &'static str,
        /// Bytes of payload.
        len: usize,
        /// Bytes that there should be.
        expected: usize,
    },
    /// The payload is shorter than its own fields say.
    #[error("{request}: payload is {len} bytes, expected at least {least}")]
    PayloadShort {
        /// The request.
        request: &'static str,
        /// Bytes of payload.
        len: usize,
        /// Bytes that there should be at least.
        least: usize,
    },
    /// More or fewer file descriptors than the request has.
    #[error("{request}: {fds} file descriptors, expected {expected}")]
    FdCount {
        /// The request.
        request: &'static str,
        /// File descriptors that came.
        fds: usize,
        /// File descriptors that should have come.
        expected: usize,
    },
    /// A memory table whose regions do not each have their file descriptor.
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
        /// What it should be.
        rule: &'static str,
    },
}
