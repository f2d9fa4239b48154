//! Changes of a disk's size.

/// A change of a disk's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resized {
    /// No change, or less than a block.
    Same,
    /// The disk has grown.
    Grown {
        /// The previous size in bytes.
        from: u64,
        /// The new size in bytes.
        to: u64,
    },
    /// The file has become shorter. The disk keeps its size, because a guest cannot be told of a smaller one.
    Shrunk {
        /// The size of the disk in bytes.
        from: u64,
        /// The size of the file in bytes.
        to: u64,
    },
}
