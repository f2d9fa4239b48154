//! Access to an image by absolute offsets.

use std::io;

/// Reads an image by absolute offsets.
pub trait ReadImage {
    /// Reads at any offset, in bytes. Bytes beyond the end of the image are zeroes.
    ///
    /// # Errors
    /// The image cannot be read.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Returns the length of the image in bytes.
    fn bytes(&self) -> u64;
}

/// Writes an image too.
pub trait WriteImage: ReadImage {
    /// Writes at any offset, in bytes, also beyond the end.
    ///
    /// # Errors
    /// The image cannot be written.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;

    /// Moves all writes to stable storage.
    ///
    /// # Errors
    /// A write may be lost.
    fn sync(&self) -> io::Result<()>;
}

/// An image in memory.
impl ReadImage for &[u8] {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let rest = self.get(usize::try_from(at).unwrap_or(usize::MAX)..).unwrap_or_default();
        let here = rest.len().min(into.len());
        into[..here].copy_from_slice(&rest[..here]);
        into[here..].fill(0);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.len() as u64
    }
}
