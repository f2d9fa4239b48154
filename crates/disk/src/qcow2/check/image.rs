//! Access to an image by absolute offsets.

use std::io;

/// Reads an image by absolute offsets.
pub(crate) trait ReadImage {
    /// Reads at any offset. Bytes beyond the end of the image are zeroes.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Returns the length of the image in bytes.
    fn bytes(&self) -> u64;
}

/// Writes an image too.
pub(crate) trait WriteImage: ReadImage {
    /// Writes at any offset, also beyond the end.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;

    /// Moves all writes to stable storage.
    fn sync(&self) -> io::Result<()>;
}
