//! Requests and their completions, in C.
#![expect(unsafe_code, reason = "C's pointers")]

use driver::{Data, Kind};

use crate::buffer::Buffer;
use crate::error::{Fault, failure_errno};
use crate::pointer;

/// Read `length` bytes of the disk from `offset` on.
pub const KL_READ: u32 = 1;
/// Write `length` bytes to the disk from `offset` on.
pub const KL_WRITE: u32 = 2;
/// Make completed writes durable. It has no offset, no length and no memory.
pub const KL_FLUSH: u32 = 3;
/// Discard `length` bytes from `offset` on. Later reads of them return unknown data. It has no memory.
pub const KL_DISCARD: u32 = 4;
/// Make `length` bytes from `offset` on read as zeroes. It has no memory.
pub const KL_WRITE_ZEROES: u32 = 5;
/// Read the identity string: `length` is 20, and a shorter string ends with a zero.
pub const KL_GET_ID: u32 = 6;

/// For KL_WRITE_ZEROES: the disk may free the space of these bytes.
pub const KL_UNMAP: u32 = 1;

/// A limit on pieces that no valid request reaches.
const PIECES_MAX: usize = 1024;

/// One piece of a request's memory.
#[repr(C)]
pub struct Piece {
    /// The buffer that contains it.
    pub buffer: *mut Buffer,
    /// The offset in the buffer.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

/// A request to the disk. Members that are not needed are 0.
///
/// The structure and its pieces need to exist only during the call that submits it. Several requests may use
/// the same memory at once. The memory belongs to the back-end until they have completed.
#[repr(C)]
pub struct Request {
    /// One of KL_READ to KL_GET_ID.
    pub kind: u32,
    /// 0 or KL_UNMAP.
    pub flags: u32,
    /// The offset on the disk in bytes.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
    /// The memory, if it is one piece: `length` bytes of this buffer.
    pub buffer: *mut Buffer,
    /// The offset of the piece in the buffer.
    pub buffer_offset: u64,
    /// The memory, if it is several pieces. They have `length` bytes together, and `buffer` is null.
    pub pieces: *const Piece,
    /// The number of pieces, or 0.
    pub piece_count: usize,
    /// A number that the completion returns.
    pub cookie: u64,
}

/// The completion of a request.
#[repr(C)]
pub struct Completion {
    /// The cookie of the request.
    pub cookie: u64,
    /// 0 for success, or the error. -EIO: the device reported an error. -EOPNOTSUPP: it does not support this
    /// kind of request. -EPROTO: it returned no status or an undefined one. -ENODEV: the disk died, and the
    /// request may have run or not.
    pub result: i32,
    /// Is 0.
    pub reserved: u32,
}

impl Completion {
    #[inline]
    pub(crate) fn new(completion: &driver::Completion) -> Self {
        let result = match completion.result {
            Ok(()) => 0,
            Err(failure) => -failure_errno(failure).raw_os_error(),
        };
        Self { cookie: completion.token, result, reserved: 0 }
    }
}

/// Converts the number of a kind.
pub(crate) fn kind(kind: u32) -> Result<Kind, Fault> {
    Ok(match kind {
        KL_READ => Kind::Read,
        KL_WRITE => Kind::Write,
        KL_FLUSH => Kind::Flush,
        KL_DISCARD => Kind::Discard,
        KL_WRITE_ZEROES => Kind::WriteZeroes,
        KL_GET_ID => Kind::GetId,
        _ => return Err(Fault::Argument("the kind of a request is not KL_READ to KL_GET_ID")),
    })
}

impl Request {
    /// Converts the request for the driver. `vector` returns an empty vector for pieces.
    ///
    /// # Safety
    /// The pointers are null or point to objects of their types, with as many pieces as the request says.
    #[inline]
    pub(crate) unsafe fn convert(
        &self,
        vector: impl FnOnce() -> Vec<driver::Buffer>,
    ) -> Result<driver::Request, Fault> {
        let &Self { kind, flags, offset, length, cookie, .. } = self;
        let kind = self::kind(kind)?;
        let unmap = flags == KL_UNMAP;
        if flags != 0 && !(unmap && kind == Kind::WriteZeroes) {
            return Err(Fault::Argument("a request has flags that its kind does not allow"));
        }
        let request = match kind {
            // SAFETY: the caller's promise.
            Kind::Read => driver::Request::read(offset, unsafe { self.data(vector)? }),
            // SAFETY: the caller's promise.
            Kind::Write => driver::Request::write(offset, unsafe { self.data(vector)? }),
            // SAFETY: the caller's promise.
            Kind::GetId => driver::Request::get_id(unsafe { self.data(vector)? }),
            _ if !self.buffer.is_null() || self.piece_count > 0 => {
                return Err(Fault::Argument("a request has memory that its kind does not allow"));
            }
            Kind::Flush if (offset | length) != 0 => {
                return Err(Fault::Argument("a flush has an offset or a length"));
            }
            Kind::Flush => driver::Request::flush(),
            Kind::Discard => driver::Request::discard(offset, length),
            Kind::WriteZeroes => driver::Request::write_zeroes(offset, length, unmap),
        };
        Ok(request.token(cookie))
    }

    /// Returns the memory of the request.
    ///
    /// # Safety
    /// As [`Request::convert`].
    #[inline]
    unsafe fn data(&self, vector: impl FnOnce() -> Vec<driver::Buffer>) -> Result<Data, Fault> {
        if self.piece_count == 0 {
            // SAFETY: the caller's promise.
            let buffer = unsafe { pointer::reference(self.buffer, "a request's buffer")? };
            return Ok(Data::One(buffer.piece(self.buffer_offset, self.length)?));
        }
        if !self.buffer.is_null() {
            return Err(Fault::Argument("a request has both a buffer and pieces"));
        }
        if self.piece_count > PIECES_MAX {
            return Err(Fault::Argument("a request has too many pieces"));
        }
        // SAFETY: the caller's promise.
        let pieces = unsafe { pointer::array(self.pieces, self.piece_count, "a request's pieces")? };
        let mut buffers = vector();
        for piece in pieces {
            // SAFETY: the caller's promise.
            let buffer = unsafe { pointer::reference(piece.buffer, "the buffer of a piece")? };
            buffers.push(buffer.piece(piece.offset, piece.length)?);
        }
        let data = Data::Many(buffers);
        if data.len() != self.length {
            return Err(Fault::Argument("the pieces of a request do not add up to its length"));
        }
        Ok(data)
    }
}
