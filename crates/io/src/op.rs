//! Operations, their buffers and their results.

use crate::AlignedBuf;
use kickless_memory::Iov;
use rustix::io::Errno;

/// The caller's name for an operation. The engine returns it with the completion, and does not interpret it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token {
    /// The queue of the operation.
    pub source: u32,
    /// The request within that queue.
    pub slot: u32,
}

/// A file registered with one engine. Invalid in another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    pub(crate) index: u32,
    /// Distinguishes a file from an earlier one with the same index.
    pub(crate) generation: u32,
}

/// One operation.
#[derive(Debug)]
pub struct Op {
    /// The file. An operation on an unregistered file completes with `EBADF`.
    pub file: FileId,
    /// The kind of the operation.
    pub kind: OpKind,
    /// The offset in the file, in bytes. Ignored for a flush.
    pub offset: u64,
    /// The memory of the transfer.
    pub buffers: Buffers,
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Transfers bytes from the file to the buffers.
    Read,
    /// Transfers bytes from the buffers to the file.
    Write {
        /// The operation completes only when the bytes are on stable storage.
        durable: bool,
    },
    /// Moves everything that completed before this was submitted to stable storage.
    Flush,
    /// Changes a range of the file without a transfer. No buffers.
    Range {
        /// The system call that does it.
        syscall: RangeSyscall,
        /// The number of bytes, not 0.
        len: u64,
    },
}

impl OpKind {
    /// Returns whether bytes go between buffers and the file.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }
}

/// A system call that changes a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeSyscall {
    /// `fallocate` with `FALLOC_FL_PUNCH_HOLE`: the range reads as zeroes, and its space is freed. On a block
    /// device only if the device itself can do that.
    PunchHole,
    /// `fallocate` with `FALLOC_FL_ZERO_RANGE`: the range reads as zeroes, and keeps its space.
    ZeroRange,
    /// `BLKDISCARD`, of a block device: the contents are unknown afterwards.
    DeviceDiscard,
    /// `BLKZEROOUT`, of a block device: the range reads as zeroes, and keeps its space.
    DeviceZeroes,
}

impl RangeSyscall {
    /// Returns the mode of `fallocate`. `None` if this is another call.
    pub(crate) fn mode(self) -> Option<i32> {
        match self {
            Self::PunchHole => Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            Self::ZeroRange => Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
            Self::DeviceDiscard | Self::DeviceZeroes => None,
        }
    }
}

/// The most bytes that the kernel transfers in one call (`MAX_RW_COUNT`).
pub(crate) const BYTES_MAX: usize = 0x7fff_f000;

/// The memory of an operation. An engine owns it until the kernel has finished with it.
#[derive(Debug, Default)]
pub enum Buffers {
    /// No memory, for a flush or a range.
    #[default]
    None,
    /// Guest memory. The remaining part of it is transferred; of more than 1024 segments only the first 1024.
    Guest(Iov),
    /// Memory of this process. Its window is transferred.
    Owned(AlignedBuf),
}

/// The form in which `Buffers` are passed to the kernel.
pub(crate) enum KernelBuffers {
    /// An address and a length.
    One(*mut u8, usize),
    /// An array of segments, and its length.
    Many(*const libc::iovec, usize),
}

/// `IOV_MAX`: more segments in one call are an error.
const SEGMENTS_MAX: usize = 1024;

impl Buffers {
    /// Returns the bytes of the transfer.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Guest(iov) => iov.len(),
            Self::Owned(buf) => buf.window().len() as u64,
        }
    }

    /// Returns the memory for the kernel. The addresses are valid until the buffers are changed, moved or
    /// dropped, because the array of segments may be inside them. Operations of an engine stay in their slot.
    pub(crate) fn view(&mut self, kind: OpKind) -> KernelBuffers {
        match self {
            Self::None => KernelBuffers::One(std::ptr::null_mut(), 0),
            Self::Owned(buf) => {
                let (at, len) = buf.raw_window();
                KernelBuffers::One(at, len)
            }
            Self::Guest(iov) => {
                let segments = if kind == OpKind::Read { iov.segments_to_fill() } else { iov.segments() };
                match segments {
                    [] => KernelBuffers::One(std::ptr::null_mut(), 0),
                    [one] => KernelBuffers::One(one.iov_base.cast(), one.iov_len),
                    many => KernelBuffers::Many(many.as_ptr(), many.len().min(SEGMENTS_MAX)),
                }
            }
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The token of the operation.
    pub token: Token,
    /// The bytes transferred. There may be fewer than in the buffers, and 0 if a read began at the end of the
    /// file. 0 for a flush or a range.
    pub result: Result<u32, Errno>,
    /// The buffers, as they were passed in: a transfer does not consume them.
    pub buffers: Buffers,
}
