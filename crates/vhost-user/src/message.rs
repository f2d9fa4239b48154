//! The common parts of the requests of both sides.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use crate::body::Encoded;
use crate::error::MessageError;
use crate::header::Header;

/// The requests of one side: [`FrontendMessage`](crate::FrontendMessage) or
/// [`BackendMessage`](crate::BackendMessage).
pub trait RequestMessage: Debug + Sized {
    /// The kind of a request.
    type Code: Copy + Debug + PartialEq;
    /// The replies to the requests.
    type Reply: ReplyTo<Self::Code>;

    /// Returns the kind of this request.
    fn code(&self) -> Self::Code;

    /// Returns the kind of request with this number on the wire, if there is one.
    fn code_from(number: u32) -> Option<Self::Code>;

    /// Returns the number of a kind of request on the wire.
    fn number(code: Self::Code) -> u32;

    /// Returns the specification's name of a request.
    fn name(code: Self::Code) -> &'static str;

    /// Decodes a message. An error closes `fds` and leaves the stream in step.
    fn decode(number: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError>;

    /// Encodes the message.
    fn encode(&self) -> Encoded<'_>;

    /// Returns the reply that the sender expects to this message, sent with or without NEED_REPLY.
    fn expects(&self, needs_reply: bool) -> Expects;

    /// Returns the way to refuse a request. `code` is `None` for a request with an unknown number.
    fn refusal(code: Option<Self::Code>, needs_reply: bool) -> Refusal<Self::Reply>;
}

/// The replies to the requests of one side, whose kinds are `C`.
pub trait ReplyTo<C>: Debug + Sized {
    /// Decodes the reply to `code`.
    fn decode(code: C, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError>;

    /// Encodes the reply.
    fn encode(&self) -> Encoded<'_>;

    /// Returns whether this is a reply to `code`.
    fn answers(&self, code: C) -> bool;

    /// Makes the acknowledgement of a request without a reply of its own. A `status` of zero means success.
    fn ack(status: u64) -> Self;
}

/// The reply that the sender of a request expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expects {
    /// No reply.
    Nothing,
    /// An acknowledgement, if REPLY_ACK was negotiated: zero for success.
    Ack,
    /// The request's own reply. NEED_REPLY does not change that.
    Reply,
}

impl Expects {
    pub(crate) fn new(own_reply: bool, needs_reply: bool) -> Self {
        match (own_reply, needs_reply) {
            (true, _) => Self::Reply,
            (false, true) => Self::Ack,
            (false, false) => Self::Nothing,
        }
    }
}

/// The way to refuse a request.
#[derive(Debug)]
pub enum Refusal<R> {
    /// Send this reply.
    Reply(R),
    /// Send nothing: the peer expects no reply.
    NotExpected,
    /// Drop the connection: the peer waits, or may wait, and no reply expresses a refusal.
    Impossible,
}

/// A received message.
#[derive(Debug)]
pub struct Received<M> {
    /// The head of the message. The reply needs it.
    pub header: Header,
    /// The decoded message.
    pub message: M,
}

impl<M: RequestMessage> Received<M> {
    /// Returns whether the sender set NEED_REPLY.
    pub fn needs_reply(&self) -> bool {
        self.header.needs_reply()
    }

    /// Returns the reply that the sender expects.
    pub fn expects(&self) -> Expects {
        self.message.expects(self.needs_reply())
    }
}
