//! What the requests of both sides have in common.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use crate::body::Encoded;
use crate::error::MessageError;
use crate::header::Header;

/// The requests of one side: [`FrontendMessage`](crate::FrontendMessage) or [`BackendMessage`](crate::BackendMessage).
pub trait Request: Debug + Sized {
    /// The numbers of the requests.
    type Code: Copy + Debug + PartialEq;
    /// The replies to them.
    type Reply: ReplyTo<Self::Code>;

    /// Which request this is.
    fn code(&self) -> Self::Code;

    /// The request with this number, if there is one.
    fn code_from(number: u32) -> Option<Self::Code>;

    /// The number on the wire.
    fn number(code: Self::Code) -> u32;

    /// The specification's name for it.
    fn name(code: Self::Code) -> &'static str;

    /// Reads a message. What is wrong with it leaves the stream in step; `fds` are closed then.
    fn decode(number: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError>;

    /// The bytes and file descriptors to send.
    fn encode(&self) -> Encoded<'_>;

    /// What the sender waits for after this message, sent with or without NEED_REPLY. In postcopy mode a memory table and
    /// an added region have replies of their own too; the message does not show it.
    fn expects(&self, needs_reply: bool) -> Expects;

    /// How to say no to a request; `None` is one with an unknown number.
    fn refusal(code: Option<Self::Code>, needs_reply: bool) -> Refusal<Self::Reply>;
}

/// The replies to the requests that `C` numbers.
pub trait ReplyTo<C>: Debug + Sized {
    /// Reads the reply to `code`.
    fn decode(code: C, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError>;

    /// The bytes and file descriptors to send.
    fn encode(&self) -> Encoded<'_>;

    /// Whether `code` can be answered with this reply.
    fn answers(&self, code: C) -> bool;

    /// The acknowledgement of a request without a reply of its own: zero for success.
    fn ack(status: u64) -> Self;
}

/// What the sender of a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expects {
    /// Nothing.
    Nothing,
    /// An acknowledgement, if REPLY_ACK was negotiated: zero for success.
    Ack,
    /// The reply that belongs to the request. NEED_REPLY changes nothing about it.
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

/// How to say no to a request.
#[derive(Debug)]
pub enum Refusal<R> {
    /// With this reply.
    Reply(R),
    /// Not at all, and nobody waits for it.
    NotExpected,
    /// Not at all, and the peer waits or may do: the connection must be dropped.
    Impossible,
}

/// A message as it arrived.
#[derive(Debug)]
pub struct Received<M> {
    /// Its head, which goes into the answer.
    pub header: Header,
    /// What it says.
    pub message: M,
}

impl<M: Request> Received<M> {
    /// Whether the sender set NEED_REPLY.
    pub fn needs_reply(&self) -> bool {
        self.header.needs_reply()
    }

    /// What the sender waits for.
    pub fn expects(&self) -> Expects {
        self.message.expects(self.needs_reply())
    }
}
