//! Requests, and what becomes of them.

use std::fmt;
use std::sync::Arc;

use kickless_spec::blk;

use crate::buffer::Data;
use crate::error::Failure;
use crate::waiter::Waiter;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make completed writes durable.
    Flush,
    /// The identity string.
    GetId,
    /// How worn the disk is.
    GetLifetime,
    /// Forget a range.
    Discard,
    /// Make a range read as zeroes.
    WriteZeroes,
}

impl Kind {
    #[inline]
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Read => blk::T_IN,
            Self::Write => blk::T_OUT,
            Self::Flush => blk::T_FLUSH,
            Self::GetId => blk::T_GET_ID,
            Self::GetLifetime => blk::T_GET_LIFETIME,
            Self::Discard => blk::T_DISCARD,
            Self::WriteZeroes => blk::T_WRITE_ZEROES,
        }
    }

    /// Whether the device writes the request's data.
    #[inline]
    pub(crate) fn device_writes(self) -> bool {
        matches!(self, Self::Read | Self::GetId | Self::GetLifetime)
    }
}

/// A range of the disk in a request's data (`struct virtio_blk_discard_write_zeroes`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Range {
    pub(crate) len: u64,
    pub(crate) unmap: bool,
}

/// What one request is to do. It owns its memory until the device is done.
#[derive(Debug)]
pub struct Request {
    pub(crate) kind: Kind,
    /// Bytes from the start of the disk.
    pub(crate) offset: u64,
    pub(crate) range: Range,
    pub(crate) data: Data,
    pub(crate) notify: Notify,
}

impl Request {
    fn new(kind: Kind, offset: u64, data: Data) -> Self {
        Self { kind, offset, range: Range::default(), data, notify: Notify::Poller(0) }
    }

    /// Reads as many bytes as `into` has, from the disk's byte `offset` on.
    #[inline]
    pub fn read(offset: u64, into: impl Into<Data>) -> Self {
        Self::new(Kind::Read, offset, into.into())
    }

    /// Writes as many bytes as `from` has, from the disk's byte `offset` on.
    #[inline]
    pub fn write(offset: u64, from: impl Into<Data>) -> Self {
        Self::new(Kind::Write, offset, from.into())
    }

    /// Makes durable what was written by requests that have completed.
    pub fn flush() -> Self {
        Self::new(Kind::Flush, 0, Data::None)
    }

    /// Lets the disk forget `len` bytes at `offset`; what they read as afterwards is not known.
    pub fn discard(offset: u64, len: u64) -> Self {
        Self { range: Range { len, unmap: false }, ..Self::new(Kind::Discard, offset, Data::None) }
    }

    /// Makes `len` bytes at `offset` read as zeroes; with `unmap`, the disk may give their place up.
    pub fn write_zeroes(offset: u64, len: u64, unmap: bool) -> Self {
        Self { range: Range { len, unmap }, ..Self::new(Kind::WriteZeroes, offset, Data::None) }
    }

    /// Asks for the identity string, at most 20 bytes without a terminating zero; `into` has to have 20.
    pub fn get_id(into: impl Into<Data>) -> Self {
        Self::new(Kind::GetId, 0, into.into())
    }

    /// Asks how worn the disk is: three 16-bit numbers (virtio 1.3, section 5.2.6); `into` has to have six bytes.
    pub fn get_lifetime(into: impl Into<Data>) -> Self {
        Self::new(Kind::GetLifetime, 0, into.into())
    }

    /// What it asks for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its memory back.
    pub fn into_data(self) -> Data {
        self.data
    }

    /// Whoever polls the queue finds it under this number. The number is 0 otherwise.
    #[inline]
    #[must_use]
    pub fn token(mut self, token: u64) -> Self {
        self.notify = Notify::Poller(token);
        self
    }

    /// Hands the completion to `handler`, with this number, on whichever thread finds it, instead of to a poller.
    #[must_use]
    pub fn on_complete(mut self, handler: Arc<dyn OnComplete>, token: u64) -> Self {
        self.notify = Notify::Handler(handler, token);
        self
    }
}

/// What came of a request.
#[derive(Debug)]
pub struct Completion {
    /// The number that the request was given.
    pub token: u64,
    /// Whether it was done.
    pub result: Result<(), Failure>,
    /// Its memory back.
    pub data: Data,
}

/// Takes completions. Runs on whichever thread finds them, while that holds the completion lock of the queue: it may submit
/// requests, and ask for the disk's size and the like, but whatever would wait, or talk to the back-end, is
/// [`Error::InHandler`](crate::Error::InHandler). A panic ends the handler and nothing else.
pub trait OnComplete: Send + Sync {
    /// A request is done.
    fn complete(&self, completion: Completion);
}

impl<F: Fn(Completion) + Send + Sync> OnComplete for F {
    fn complete(&self, completion: Completion) {
        self(completion);
    }
}

/// Who is to be told.
pub(crate) enum Notify {
    /// Whoever polls, with this number.
    Poller(u64),
    /// A handler, with this number.
    Handler(Arc<dyn OnComplete>, u64),
    /// Who waits in this seat.
    Waiter(Arc<Waiter>),
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poller(token) => write!(f, "Poller({token})"),
            Self::Handler(_, token) => write!(f, "Handler({token})"),
            Self::Waiter(_) => f.write_str("Waiter"),
        }
    }
}
