//! Requests and their completions.

use std::sync::Arc;

use kickless_spec::blk;

use crate::buffer::Data;
use crate::error::Failure;
use crate::waiter::Waiter;

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make completed writes durable.
    Flush,
    /// Read the identity string.
    GetId,
    /// Discard a range.
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
            Self::Discard => blk::T_DISCARD,
            Self::WriteZeroes => blk::T_WRITE_ZEROES,
        }
    }

    /// Returns whether the device writes the data of the request.
    #[inline]
    pub(crate) fn device_writes(self) -> bool {
        matches!(self, Self::Read | Self::GetId)
    }
}

/// The range of a discard or write-zeroes request (`struct virtio_blk_discard_write_zeroes`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Range {
    pub(crate) len: u64,
    pub(crate) unmap: bool,
}

/// A request to the disk. It owns its memory until the device is done.
#[derive(Debug)]
pub struct Request {
    pub(crate) kind: Kind,
    /// The offset on the disk in bytes.
    pub(crate) offset: u64,
    pub(crate) range: Range,
    pub(crate) data: Data,
    pub(crate) notify: Notify,
}

impl Request {
    fn new(kind: Kind, offset: u64, data: Data) -> Self {
        Self { kind, offset, range: Range::default(), data, notify: Notify::Poller(0) }
    }

    /// Makes a read of as many bytes as `into` has, from `offset` on.
    #[inline]
    pub fn read(offset: u64, into: impl Into<Data>) -> Self {
        Self::new(Kind::Read, offset, into.into())
    }

    /// Makes a write of as many bytes as `from` has, at `offset`.
    #[inline]
    pub fn write(offset: u64, from: impl Into<Data>) -> Self {
        Self::new(Kind::Write, offset, from.into())
    }

    /// Makes a request that makes all completed writes durable.
    pub fn flush() -> Self {
        Self::new(Kind::Flush, 0, Data::None)
    }

    /// Makes a discard of `len` bytes at `offset`. Later reads of them return unknown data.
    pub fn discard(offset: u64, len: u64) -> Self {
        Self { range: Range { len, unmap: false }, ..Self::new(Kind::Discard, offset, Data::None) }
    }

    /// Makes a request that zeroes `len` bytes at `offset`. With `unmap`, the disk may free their space.
    pub fn write_zeroes(offset: u64, len: u64, unmap: bool) -> Self {
        Self { range: Range { len, unmap }, ..Self::new(Kind::WriteZeroes, offset, Data::None) }
    }

    /// Makes a request for the identity string, at most 20 bytes without a terminating zero. `into` must have
    /// 20 bytes.
    pub fn get_id(into: impl Into<Data>) -> Self {
        Self::new(Kind::GetId, 0, into.into())
    }

    /// Returns the kind of the request.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the memory of the request.
    pub fn into_data(self) -> Data {
        self.data
    }

    /// Sets the number by which a poller recognises the completion. The default is 0.
    #[inline(always)]
    #[must_use]
    pub fn token(mut self, token: u64) -> Self {
        self.notify = Notify::Poller(token);
        self
    }
}

/// The completion of a request.
#[derive(Debug)]
pub struct Completion {
    /// The number that the request was given.
    pub token: u64,
    /// Success, or the way in which it failed.
    pub result: Result<(), Failure>,
    /// The memory of the request.
    pub data: Data,
}

/// The receiver of a completion.
#[derive(Debug)]
pub(crate) enum Notify {
    /// The next poller, with this number.
    Poller(u64),
    /// The thread or the future that waits with this.
    Waiter(Arc<Waiter>),
}
