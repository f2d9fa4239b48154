//! Access to an image by absolute offsets.

use kickless_io::AlignedBuf;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;

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

/// An image in a file, by blocking calls.
#[derive(Debug)]
pub(crate) struct FileImage<'a> {
    file: &'a File,
    /// The alignment of all transfers, a power of two.
    block: usize,
    bytes: Cell<u64>,
    /// The memory for aligned transfers, of [`BUFFER`] bytes at least.
    buffer: RefCell<AlignedBuf>,
}

/// The number of bytes of a transfer.
const BUFFER: usize = 64 << 10;

impl<'a> FileImage<'a> {
    /// Uses a file whose direct I/O needs an alignment of `block` bytes. Without direct I/O, `block` is 1.
    pub(crate) fn new(file: &'a File, block: usize) -> io::Result<Self> {
        let bytes = Cell::new((&*file).seek(SeekFrom::End(0))?);
        let buffer = RefCell::new(AlignedBuf::new(BUFFER.max(block), block)?);
        Ok(Self { file, block, bytes, buffer })
    }

    /// Divides a range into transfers.
    fn parts(&self, at: u64, len: usize) -> impl Iterator<Item = Part> {
        let (block, max) = (self.block as u64, BUFFER.max(self.block));
        let mut done = 0;
        std::iter::from_fn(move || {
            let start = at + done as u64;
            let first = start - start % block;
            let skip = (start - first) as usize;
            let here = (len - done).min(max - skip);
            let part = Part {
                first,
                len: (skip + here).next_multiple_of(block as usize),
                skip,
                range: done..done + here,
            };
            done += here;
            (here > 0).then_some(part)
        })
    }

    /// Reads into the whole buffer. Bytes beyond the end of the file are zeroes.
    fn fill(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], at + done as u64) {
                // Direct I/O ends in the middle of a block only at the end of the file.
                Ok(0) => break,
                Ok(read) if read % self.block != 0 => {
                    done += read;
                    break;
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }
}

/// One aligned transfer for a part of a range.
struct Part {
    /// The offset in the file.
    first: u64,
    /// The number of bytes of the transfer.
    len: usize,
    /// The offset of the part in the transfer.
    skip: usize,
    /// The part of the range.
    range: Range<usize>,
}

impl ReadImage for FileImage<'_> {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut buffer = self.buffer.borrow_mut();
        for part in self.parts(at, into.len()) {
            self.fill(part.first, &mut buffer[..part.len])?;
            let len = part.range.len();
            into[part.range].copy_from_slice(&buffer[part.skip..][..len]);
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}

impl WriteImage for FileImage<'_> {
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut buffer = self.buffer.borrow_mut();
        for part in self.parts(at, from.len()) {
            let buffer = &mut buffer[..part.len];
            if part.range.len() < part.len {
                self.fill(part.first, buffer)?;
            }
            buffer[part.skip..][..part.range.len()].copy_from_slice(&from[part.range]);
            self.file.write_all_at(buffer, part.first)?;
            self.bytes.set(self.bytes.get().max(part.first + part.len as u64));
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
