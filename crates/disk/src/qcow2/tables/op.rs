//! The operations that the tables need, for any executor.

use kickless_io::AlignedBuf;

/// The number of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OpId(pub(super) u32);

/// An operation on the image file. Its completion goes to `Tables::complete`, once.
#[derive(Debug)]
pub(crate) struct TableOp {
    /// The number for the completion.
    pub(crate) id: OpId,
    /// The work to do.
    pub(crate) kind: TableOpKind,
}

/// The kinds of operations.
#[derive(Debug)]
pub(crate) enum TableOpKind {
    /// Reads into the buffer's window. Bytes beyond the end of the file are zeroes.
    Read {
        /// The offset in the file.
        at: u64,
        /// The buffer, which comes back.
        buffer: AlignedBuf,
    },
    /// Writes the buffer's window.
    Write {
        /// The offset in the file.
        at: u64,
        /// The buffer, which comes back.
        buffer: AlignedBuf,
    },
    /// Moves all writes that have completed before to stable storage.
    Sync,
    /// Makes the range read as zeroes, and extends the file to its end if needed.
    Zero {
        /// The offset in the file.
        at: u64,
        /// The number of bytes.
        len: u64,
        /// Give the space back to the host if possible. Otherwise it stays allocated.
        gives_back: bool,
    },
}
