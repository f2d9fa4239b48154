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
/// Make durable what was written by requests that have completed. It has neither offset nor length nor memory.
pub const KL_FLUSH: u32 = 3;
/// Forget `length` bytes from `offset` on; what they read as afterwards is not known. No memory.
pub const KL_DISCARD: u32 = 4;
/// Make `length` bytes from `offset` on read as zeroes. No memory.
pub const KL_WRITE_ZEROES: u32 = 5;
/// Read the identity string: `length` is 20, and a shorter string ends with a zero.
pub const KL_GET_ID: u32 = 6;
/// Read how worn the disk is: `length` is 6, for three little-endian numbers (virtio 1.3, section 5.2.6).
pub const KL_GET_LIFETIME: u32 = 7;

/// For KL_WRITE_ZEROES: the disk may give up the place of these bytes.
pub const KL_UNMAP: u32 = 1;

/// More pieces than any request can have.
const PIECES_MAX: usize = 1024;

/// One piece of a request's memory.
#[repr(C)]
pub struct Piece {
    /// The buffer that it is in.
    pub buffer: *mut Buffer,
    /// Where in the buffer it begins.
    pub offset: u64,
    /// How many bytes it has.
    pub length: u64,
}

/// What a request is to do. It needs to last only for the call that submits it, and so do its pieces. Its memory may be
/// used by several requests at once, and belongs to the back-end until they have completed. Members that are not needed
/// are 0.
#[repr(C)]
pub struct Request {
    /// KL_READ to KL_GET_LIFETIME.
    pub kind: u32,
    /// 0 or KL_UNMAP.
    pub flags: u32,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// How many bytes are meant.
    pub length: u64,
    /// Its memory, if that is in one piece: `length` bytes of this buffer.
    pub buffer: *mut Buffer,
    /// Where in the buffer they begin.
    pub buffer_offset: u64,
    /// Its memory, if that is in several pieces, which have `length` bytes together; `buffer` is null then.
    pub pieces: *const Piece,
    /// How many pieces, or 0.
    pub piece_count: usize,
    /// Comes back in the completion.
    pub cookie: u64,
}

/// What came of a request.
#[repr(C)]
pub struct Completion {
    /// The request's cookie.
    pub cookie: u64,
    /// 0, or -EIO: the device reports an error; -EOPNOTSUPP: it does not know this kind of request; -EPROTO: it gave no
    /// status that there is; -ENODEV: the disk died, and the request may have been carried out or not.
    pub result: i32,
    /// 0.
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

/// The kind that C means.
pub(crate) fn kind(kind: u32) -> Result<Kind, Fault> {
    Ok(match kind {
        KL_READ => Kind::Read,
        KL_WRITE => Kind::Write,
        KL_FLUSH => Kind::Flush,
        KL_DISCARD => Kind::Discard,
        KL_WRITE_ZEROES => Kind::WriteZeroes,
        KL_GET_ID => Kind::GetId,
        KL_GET_LIFETIME => Kind::GetLifetime,
        _ => return Err(Fault::Argument("there are no requests of this kind")),
    })
}

impl Request {
    /// The same for the driver. `vector` makes an empty vector for pieces.
    ///
    /// # Safety
    /// Its pointers are null or point to what they say, as many pieces as it says.
    #[inline]
    pub(crate) unsafe fn convert(
        &self,
        vector: impl FnOnce() -> Vec<driver::Buffer>,
    ) -> Result<driver::Request, Fault> {
        let &Self { kind, flags, offset, length, cookie, .. } = self;
        let kind = self::kind(kind)?;
        let unmap = flags == KL_UNMAP;
        if flags != 0 && !(unmap && kind == Kind::WriteZeroes) {
            return Err(Fault::Argument("a request has flags that requests of its kind cannot have"));
        }
        let request = match kind {
            // SAFETY: the caller's promise.
            Kind::Read => driver::Request::read(offset, unsafe { self.data(vector)? }),
            // SAFETY: the caller's promise.
            Kind::Write => driver::Request::write(offset, unsafe { self.data(vector)? }),
            // SAFETY: the caller's promise.
            Kind::GetId => driver::Request::get_id(unsafe { self.data(vector)? }),
            // SAFETY: the caller's promise.
            Kind::GetLifetime => driver::Request::get_lifetime(unsafe { self.data(vector)? }),
            _ if !self.buffer.is_null() || self.piece_count > 0 => {
                return Err(Fault::Argument("a request has memory that requests of its kind cannot have"));
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
            return Err(Fault::Argument("a request's pieces do not have its length"));
        }
        Ok(data)
    }
}
