//! The two ends of a conversation: one sends requests, the other replies.

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::assembly::HalfMessage;
use crate::channel::{Channel, Wait};
use crate::error::Error;
use crate::header::Header;
use crate::message::{Expects, Received, Refusal, ReplyTo, RequestMessage};

/// The end that sends requests: the front-end on the main socket ([`Frontend`](crate::Frontend)), or the
/// back-end on the socket for its own requests ([`BackendRequester`](crate::BackendRequester)).
#[derive(Debug)]
pub struct Requester<M> {
    channel: Channel,
    asks: PhantomData<fn(M)>,
}

impl<M: RequestMessage> Requester<M> {
    /// Takes over a connected stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { channel: Channel::new(socket), asks: PhantomData }
    }

    /// Returns the part of a message that has arrived, if it is not complete.
    pub fn half_message(&self) -> Option<HalfMessage<'_>> {
        self.channel.half_message()
    }

    /// Returns the number of bytes of a message that have arrived, if it is not complete.
    pub fn received(&self) -> usize {
        self.channel.received()
    }

    /// Begins with the part of a message that another process has received from this socket.
    ///
    /// # Errors
    /// It is no part of a message.
    pub fn with_half_message(self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Self, Error> {
        Ok(Self { channel: self.channel.with_half_message(bytes, fds)?, ..self })
    }

    /// Sends a request. Returns which reply to expect. `need_reply` requests an acknowledgement, which needs
    /// REPLY_ACK. It changes nothing for a request with a reply of its own.
    pub fn send(&mut self, message: &M, need_reply: bool, wait: &Wait<'_>) -> Result<Expects, Error> {
        let encoded = message.encode();
        let header = Header::request(M::number(message.code()), need_reply, encoded.payload.len());
        self.channel.send(&header, &encoded.payload, &encoded.fds, wait)?;
        Ok(message.expects(need_reply))
    }

    /// Receives the reply to a request. Replies come in the order of the requests.
    ///
    /// Returns [`Error::Closed`] if the peer is gone. After [`Error::Interrupted`] the caller can call again.
    pub fn recv_reply(&mut self, code: M::Code, wait: &Wait<'_>) -> Result<M::Reply, Error> {
        let request = M::name(code);
        let frame = self.channel.recv(wait)?.ok_or(Error::Closed)?;
        let header = frame.header;
        if !header.is_reply() {
            let problem = "expected a reply";
            return Err(Error::Flags { request, flags: header.flags, problem });
        }
        if header.request != M::number(code) {
            return Err(Error::WrongReply { expected: request, received: header.request });
        }
        M::Reply::decode(code, &frame.payload, frame.fds).map_err(|cause| Error::Rejected { header, cause })
    }

    /// Does a [`send`](Self::send), and a [`recv_reply`](Self::recv_reply) if a reply is expected.
    ///
    /// After [`Error::Interrupted`] the request may have been sent or not. To know, use the two calls
    /// instead.
    pub fn call(
        &mut self,
        message: &M,
        need_reply: bool,
        wait: &Wait<'_>,
    ) -> Result<Option<M::Reply>, Error> {
        match self.send(message, need_reply, wait)? {
            Expects::Nothing => Ok(None),
            Expects::Ack | Expects::Reply => self.recv_reply(message.code(), wait).map(Some),
        }
    }
}

/// The end that replies: the back-end on the main socket ([`Backend`](crate::Backend)), or the front-end on
/// the socket for the back-end's requests ([`FrontendResponder`](crate::FrontendResponder)).
#[derive(Debug)]
pub struct Responder<M> {
    channel: Channel,
    answers: PhantomData<fn() -> M>,
}

/// The step that must follow [`Responder::refuse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRefusal {
    /// The peer was told, or expects no reply. Receive the next request.
    Continue,
    /// The peer waits, or may wait, for a reply that cannot express a refusal. Close the connection.
    Disconnect,
}

impl<M: RequestMessage> Responder<M> {
    /// Takes over a connected stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { channel: Channel::new(socket), answers: PhantomData }
    }

    /// Returns the part of a message that has arrived, if it is not complete.
    pub fn half_message(&self) -> Option<HalfMessage<'_>> {
        self.channel.half_message()
    }

    /// Returns the number of bytes of a message that have arrived, if it is not complete.
    pub fn received(&self) -> usize {
        self.channel.received()
    }

    /// Begins with the part of a message that another process has received from this socket.
    ///
    /// # Errors
    /// It is no part of a message.
    pub fn with_half_message(self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Self, Error> {
        Ok(Self { channel: self.channel.with_half_message(bytes, fds)?, ..self })
    }

    /// Receives a request. Returns `None` if the peer closed the connection between two messages.
    ///
    /// After an error that is not [fatal](Error::is_fatal), call again. The sender of a
    /// [rejected](Error::Rejected) message may wait for a reply: [`refuse`](Self::refuse) the message.
    pub fn recv(&mut self, wait: &Wait<'_>) -> Result<Option<Received<M>>, Error> {
        let Some(frame) = self.channel.recv(wait)? else { return Ok(None) };
        let header = frame.header;
        if header.is_reply() {
            let request = name::<M>(&header);
            let problem = "expected a request";
            return Err(Error::Flags { request, flags: header.flags, problem });
        }
        match M::decode(header.request, &frame.payload, frame.fds) {
            Ok(message) => Ok(Some(Received { header, message })),
            Err(cause) => Err(Error::Rejected { header, cause }),
        }
    }

    /// Replies to a request. Returns [`Error::NoSuchReply`] if this is not a reply to this request.
    pub fn reply(&mut self, to: &Header, reply: &M::Reply, wait: &Wait<'_>) -> Result<(), Error> {
        if M::code_from(to.request).is_some_and(|code| !reply.answers(code)) {
            return Err(Error::NoSuchReply { request: name::<M>(to) });
        }
        let encoded = reply.encode();
        self.channel.send(
            &Header::reply(to.request, encoded.payload.len()),
            &encoded.payload,
            &encoded.fds,
            wait,
        )
    }

    /// Acknowledges a request that has no reply of its own. Does nothing if the peer did not request an
    /// acknowledgement.
    pub fn ack(&mut self, to: &Header, success: bool, wait: &Wait<'_>) -> Result<(), Error> {
        if to.needs_reply() { self.reply(to, &M::Reply::ack(u64::from(!success)), wait) } else { Ok(()) }
    }

    /// Refuses a request, also a [rejected](Error::Rejected) one, in the way that the protocol provides for
    /// it.
    pub fn refuse(&mut self, to: &Header, wait: &Wait<'_>) -> Result<AfterRefusal, Error> {
        match M::refusal(M::code_from(to.request), to.needs_reply()) {
            Refusal::Reply(reply) => self.reply(to, &reply, wait).map(|()| AfterRefusal::Continue),
            Refusal::NotExpected => Ok(AfterRefusal::Continue),
            Refusal::Impossible => Ok(AfterRefusal::Disconnect),
        }
    }
}

fn name<M: RequestMessage>(header: &Header) -> &'static str {
    M::code_from(header.request).map_or("unknown request", M::name)
}

impl<M> AsFd for Requester<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl<M> AsFd for Responder<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
