//! How a disk changes its size.

/// What has become of a disk's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resized {
    /// Nothing, or less than a block.
    Same,
    /// It has become larger, and is now this long.
    Grown {
        /// Bytes before.
        from: u64,
        /// Bytes now.
        to: u64,
    },
    /// The file has become shorter. The disk has not: a guest cannot be told of that.
    Shrunk {
        /// Bytes of the disk.
        from: u64,
        /// Bytes of the file.
        to: u64,
    },
}
