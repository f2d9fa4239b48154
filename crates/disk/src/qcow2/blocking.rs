//! Blocking access to an image file, for the control path.

use super::layer::Image;
use super::runtime::{TableOp, TableOpKind, Tables};
use crate::FileDisk;
use crate::file::ZeroParts;
use kickless_io::{AlignedBuf, Errno};
use kickless_qcow2::{ReadImage, WriteImage};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::{pread, pwrite, retry_on_intr};
use std::io;
use std::ops::Range;
use std::thread::sleep;
use std::time::Duration;

/// The largest number of bytes to transfer in one call.
const PIECE_BYTES: u64 = 1 << 20;
/// The time between two looks at operations that queues carry out, and the largest number of looks without
/// one of our own. Together a minute, which is longer than any device takes.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
const WAITS_MAX: u32 = 60_000;

/// An image file, at any alignment.
pub(super) struct BlockingFile<'a>(pub(super) &'a FileDisk);

impl BlockingFile<'_> {
    /// Returns the blocks that a range touches, at most a piece of them.
    fn blocks(&self, at: u64, len: u64) -> Range<u64> {
        let block = self.0.unit().max(4096);
        let start = at - at % block;
        start..(at + len).next_multiple_of(block).min(start + PIECE_BYTES)
    }

    /// Reads the buffer's window. Bytes beyond the end are zeroes.
    fn read_window(&self, at: u64, buffer: &mut AlignedBuf) -> io::Result<()> {
        let window = buffer.window();
        let mut done = window.start;
        while done < window.end {
            let from = at + (done - window.start) as u64;
            match retry_on_intr(|| pread(self.0.os_file(), &mut buffer[done..window.end], from))? {
                0 => break,
                bytes => done += bytes,
            }
            // Direct I/O ends within a block at the end of the file only.
            if !(done - window.start).is_multiple_of(self.0.unit() as usize) {
                break;
            }
        }
        buffer[done..window.end].fill(0);
        Ok(())
    }

    /// Writes the buffer's window.
    fn write_window(&self, at: u64, buffer: &AlignedBuf) -> io::Result<()> {
        let window = buffer.window();
        let mut done = window.start;
        while done < window.end {
            let to = at + (done - window.start) as u64;
            match retry_on_intr(|| pwrite(self.0.os_file(), &buffer[done..window.end], to))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                bytes => done += bytes,
            }
        }
        Ok(())
    }

    /// Makes a range read as zeroes, and the file reach its end. Gives the space back if `gives_back`.
    fn zero(&self, at: u64, len: u64, gives_back: bool) -> io::Result<()> {
        let ZeroParts { inside, last } = self.0.split_zeroes(at, len)?;
        let how = if gives_back { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        let flags = how | FallocateFlags::KEEP_SIZE;
        if inside > 0 && fallocate(self.0.os_file(), flags, at, inside).is_err() {
            self.write_zeroes(at, inside)?;
        }
        if let Some((at, len)) = last {
            self.write_zeroes(at, len)?;
        }
        self.0.reached(at + len);
        Ok(())
    }

    fn write_zeroes(&self, mut at: u64, mut len: u64) -> io::Result<()> {
        let zeroes = vec![0; len.min(PIECE_BYTES) as usize];
        while len > 0 {
            let here = len.min(PIECE_BYTES);
            self.write(at, &zeroes[..here as usize])?;
            (at, len) = (at + here, len - here);
        }
        Ok(())
    }

    /// Refuses to access a part that the file has lost.
    fn check_length(&self, at: u64, buffer: &AlignedBuf) -> io::Result<()> {
        let end = at + buffer.window().len() as u64;
        if self.0.bytes()? < end && self.0.is_cut() {
            return Err(Errno::IO.into());
        }
        Ok(())
    }

    /// Carries out an operation of the tables.
    fn perform(&self, kind: TableOpKind) -> (Option<AlignedBuf>, Result<u32, Errno>) {
        let done = |result: io::Result<()>, bytes: usize| {
            let errno = |error: io::Error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
            result.map(|()| bytes as u32).map_err(errno)
        };
        match kind {
            TableOpKind::Read { at, mut buffer } => {
                let read = self.check_length(at, &buffer).and_then(|()| self.read_window(at, &mut buffer));
                let result = done(read, buffer.window().len());
                (Some(buffer), result)
            }
            TableOpKind::Write { at, buffer } => {
                let written = self.check_length(at, &buffer).and_then(|()| self.write_window(at, &buffer));
                let result = done(written, buffer.window().len());
                (Some(buffer), result)
            }
            TableOpKind::Sync => (None, done(self.sync(), 0)),
            TableOpKind::Zero { at, len, gives_back } => (None, done(self.zero(at, len, gives_back), 0)),
        }
    }
}

impl ReadImage for BlockingFile<'_> {
    fn read(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let blocks = self.blocks(at, into.len() as u64);
            let len = (blocks.end - blocks.start) as usize;
            let mut buffer = AlignedBuf::new(len, self.0.unit().max(4096) as usize)?;
            self.read_window(blocks.start, &mut buffer)?;
            let found = &buffer[(at - blocks.start) as usize..];
            let here = found.len().min(into.len());
            into[..here].copy_from_slice(&found[..here]);
            (at, into) = (at + here as u64, &mut into[here..]);
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.0.bytes().unwrap_or(0)
    }
}

impl WriteImage for BlockingFile<'_> {
    fn write(&self, mut at: u64, mut from: &[u8]) -> io::Result<()> {
        let unit = self.0.unit();
        while !from.is_empty() {
            let start = at - at % unit;
            let end = (at + from.len() as u64).next_multiple_of(unit).min(start + PIECE_BYTES);
            let mut buffer = AlignedBuf::new((end - start) as usize, unit.max(4096) as usize)?;
            let skip = (at - start) as usize;
            let here = from.len().min(buffer.len() - skip);
            if skip > 0 || here < buffer.len() {
                self.read_window(start, &mut buffer)?;
            }
            buffer[skip..skip + here].copy_from_slice(&from[..here]);
            self.write_window(start, &buffer)?;
            (at, from) = (at + here as u64, &from[here..]);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(self.0.flushed(retry_on_intr(|| fdatasync(self.0.os_file())))?)
    }
}

/// Carries out the operations of an image's tables until `done` returns a result.
///
/// # Errors
/// The result, or a queue does not end its operations.
pub(super) fn run<T>(image: &Image, done: impl Fn(&Tables) -> Option<Result<T, Errno>>) -> Result<T, Errno> {
    let mut waits = 0;
    loop {
        let step = |tables: &mut Tables| match done(tables) {
            Some(result) => Ok(result),
            None => Err((tables.next_op(), tables.has_due())),
        };
        let (op, has_more) = match image.with_tables(step) {
            Ok(result) => return result,
            Err(op) => op,
        };
        waits = if op.is_some() || has_more { 0 } else { waits + 1 };
        match op {
            Some(TableOp { id, kind }) => {
                let (buffer, result) = BlockingFile(&image.file).perform(kind);
                image.with_tables(|tables| tables.complete(id, buffer, result));
            }
            None if has_more => {}
            // A queue has the operations that this waits for.
            None if waits < WAITS_MAX => sleep(LOOK_AGAIN),
            None => return Err(Errno::TIMEDOUT),
        }
    }
}
