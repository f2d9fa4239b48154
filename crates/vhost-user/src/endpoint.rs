//! The two ends of a conversation: one asks, the other answers.

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::channel::{Channel, Wait};
use crate::error::Error;
use crate::header::Header;
use crate::message::{Expects, Received, Refusal, ReplyTo, Request};

/// The end that asks: the front-end on its socket ([`Frontend`](crate::Frontend)), the back-end on that for its own
/// requests ([`BackendRequester`](crate::BackendRequester)).
#[derive(Debug)]
pub struct Requester<M> {
    channel: Channel,
    asks: PhantomData<fn(M)>,
}

impl<M: Request> Requester<M> {
    /// Takes over a connected stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { channel: Channel::new(socket), asks: PhantomData }
    }

    /// Sends a request and returns what to wait for. `need_reply` asks for an acknowledgement, which needs REPLY_ACK and
    /// changes nothing for a request with a reply of its own.
    pub fn send(&mut self, message: &M, need_reply: bool, wait: &Wait<'_>) -> Result<Expects, Error> {
        let encoded = message.encode();
        let header = Header::request(M::number(message.code()), need_reply, encoded.payload.len());
        self.channel.send(&header, &encoded.payload, &encoded.fds, wait)?;
        Ok(message.expects(need_reply))
    }

    /// Receives the reply to a request. Replies come in the order of the requests.
    ///
    /// [`Error::Closed`] if the peer is gone; on [`Error::Interrupted`] the call can be made again.
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

    /// [`send`](Self::send), and [`recv_reply`](Self::recv_reply) if there is something to wait for.
    ///
    /// On [`Error::Interrupted`] the request may have been sent; the two calls tell one from the other.
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

/// The end that answers: the back-end on its socket ([`Backend`](crate::Backend)), the front-end on that for the back-end's
/// requests ([`FrontendResponder`](crate::FrontendResponder)).
#[derive(Debug)]
pub struct Responder<M> {
    channel: Channel,
    answers: PhantomData<fn() -> M>,
}

/// What became of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The peer knows, or does not care: go on.
    GoOn,
    /// The peer waits, or may do, for an answer that cannot say no: drop the connection.
    Drop,
}

impl<M: Request> Responder<M> {
    /// Takes over a connected stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { channel: Channel::new(socket), answers: PhantomData }
    }

    /// Receives a request; `None` if the peer closed the connection between two messages.
    ///
    /// After an error that is not [fatal](Error::is_fatal) call again. A message that is [rejected](Error::Rejected) may
    /// still want an answer: [`refuse`](Self::refuse) it.
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

    /// Answers a request. A reply that does not belong to it is [`Error::NoSuchReply`].
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

    /// Acknowledges a request that has no reply of its own. Does nothing if it does not want that.
    pub fn ack(&mut self, to: &Header, success: bool, wait: &Wait<'_>) -> Result<(), Error> {
        if to.needs_reply() { self.reply(to, &M::Reply::ack(u64::from(!success)), wait) } else { Ok(()) }
    }

    /// Says no to a request, also one that was [rejected](Error::Rejected), in the way that it provides for.
    pub fn refuse(&mut self, to: &Header, wait: &Wait<'_>) -> Result<Refused, Error> {
        match M::refusal(M::code_from(to.request), to.needs_reply()) {
            Refusal::Reply(reply) => self.reply(to, &reply, wait).map(|()| Refused::GoOn),
            Refusal::NotExpected => Ok(Refused::GoOn),
            Refusal::Impossible => Ok(Refused::Drop),
        }
    }
}

fn name<M: Request>(header: &Header) -> &'static str {
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
