//! Operations, what they carry, and how they end.

use crate::AlignedBuf;
use kickless_memory::Iov;
use rustix::io::Errno;

/// Whose operation it is: chosen by whoever queues it, returned with its completion, and not looked at in
/// between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token {
    /// The queue that it belongs to.
    pub source: u32,
    /// The request within that queue.
    pub slot: u32,
}

/// A file registered with one engine. Means nothing to another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    pub(crate) index: u32,
    /// Tells a file from the one that had its place before.
    pub(crate) generation: u32,
}

/// One operation.
#[derive(Debug)]
pub struct Op {
    /// Which file. An operation on one that was unregistered completes with `EBADF`.
    pub file: FileId,
    /// What to do.
    pub kind: OpKind,
    /// Where in the file, in bytes. Means nothing for a flush.
    pub offset: u64,
    /// From where, or to where.
    pub buffers: Buffers,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// File to buffers.
    Read,
    /// Buffers to file.
    Write {
        /// Complete only when the bytes are on stable storage.
        durable: bool,
    },
    /// Everything that completed before this was submitted goes to stable storage.
    Flush,
    /// Does something to so many bytes of the file that transfers none. No buffers.
    Range {
        /// What.
        call: RangeCall,
        /// How many bytes; not 0.
        len: u64,
    },
}

impl OpKind {
    /// Whether bytes go between buffers and the file.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }
}

/// What can be done to a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeCall {
    /// `fallocate` with `FALLOC_FL_PUNCH_HOLE`: it reads as zeroes, and its space is given back. On a block device only where the
    /// device itself can do that.
    PunchHole,
    /// `fallocate` with `FALLOC_FL_ZERO_RANGE`: it reads as zeroes, and has its space.
    ZeroRange,
    /// `BLKDISCARD`, of a block device: what it reads as afterwards is not known.
    DeviceDiscard,
    /// `BLKZEROOUT`, of a block device: it reads as zeroes, and has its space.
    DeviceZeroes,
}

impl RangeCall {
    /// The mode of `fallocate`; `None`: it is another call.
    pub(crate) fn mode(self) -> Option<i32> {
        match self {
            Self::PunchHole => Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            Self::ZeroRange => Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
            Self::DeviceDiscard | Self::DeviceZeroes => None,
        }
    }
}

/// What the kernel transfers at most in one call (`MAX_RW_COUNT`).
pub(crate) const BYTES_MAX: usize = 0x7fff_f000;

/// The memory of an operation. An engine owns it until the kernel has finished with it.
#[derive(Debug, Default)]
pub enum Buffers {
    /// None: a flush, a range.
    #[default]
    None,
    /// Guest memory. What is left in it is transferred; of more than 1024 segments only the first 1024.
    Guest(Iov),
    /// Memory of our own. Its window is transferred.
    Owned(AlignedBuf),
}

/// What the kernel takes for `Buffers`.
pub(crate) enum View {
    /// An address and a length.
    One(*mut u8, usize),
    /// An array of segments, and how many.
    Many(*const libc::iovec, usize),
}

/// `IOV_MAX`: more segments in one call are an error.
const SEGMENTS_MAX: usize = 1024;

impl Buffers {
    /// Bytes of a transfer.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Guest(iov) => iov.len(),
            Self::Owned(buf) => buf.window().len() as u64,
        }
    }

    /// What the kernel takes. The addresses are valid until the buffers are changed or dropped; moving them
    /// is no change, for what they point to is not in here.
    pub(crate) fn view(&mut self, kind: OpKind) -> View {
        match self {
            Self::None => View::One(std::ptr::null_mut(), 0),
            Self::Owned(buf) => {
                let (at, len) = buf.raw_window();
                View::One(at, len)
            }
            Self::Guest(iov) => {
                let segments = if kind == OpKind::Read { iov.segments_to_fill() } else { iov.segments() };
                match segments {
                    [] => View::One(std::ptr::null_mut(), 0),
                    [one] => View::One(one.iov_base.cast(), one.iov_len),
                    many => View::Many(many.as_ptr(), many.len().min(SEGMENTS_MAX)),
                }
            }
        }
    }
}

/// How an operation ended.
#[derive(Debug)]
pub struct Completion {
    /// What it was queued with.
    pub token: Token,
    /// Bytes transferred, which may be fewer than there were in the buffers (0 where a read began at the end
    /// of the file). 0 of a flush or a range.
    pub result: Result<u32, Errno>,
    /// The buffers, as they were handed in: a transfer takes nothing off them.
    pub buffers: Buffers,
}
