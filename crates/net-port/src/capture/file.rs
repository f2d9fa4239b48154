//! The file of a capture.

use super::error::CaptureError;
use super::pcapng::{self, MAGIC, Statistics};
use rustix::fs::{FileType, FlockOperation, flock, fstat, ftruncate};
use rustix::io::{Errno, pread};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The file of a capture, with whole blocks only.
#[derive(Debug)]
pub(super) struct CaptureFile {
    file: File,
    /// The offset of the statistics, and of the end of the last whole block.
    statistics_at: u64,
    end: u64,
    /// Space for a statistics block.
    block: Vec<u8>,
}

impl CaptureFile {
    /// Creates the file, or overwrites an earlier capture.
    ///
    /// # Errors
    /// The file cannot be created, or is not one to overwrite.
    pub(super) fn create(
        path: &Path,
        interface: &str,
        len_max: u32,
        statistics: &Statistics,
    ) -> Result<Self, CaptureError> {
        let failed = |source: Errno| CaptureError::File { path: path.into(), source: source.into() };
        let opened = kickless_opener::capture(path);
        let opened = opened.map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::LOOP) => CaptureError::Link { path: path.into() },
            _ => CaptureError::File { path: path.into(), source },
        });
        let file = opened?;
        if FileType::from_raw_mode(fstat(&file).map_err(failed)?.st_mode) != FileType::RegularFile {
            return Err(CaptureError::NoFile { path: path.into() });
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Err(CaptureError::InUse { path: path.into() }),
            Err(error) => return Err(failed(error)),
        }
        let mut first = [0; MAGIC.len()];
        let len = pread(&file, &mut first, 0).map_err(failed)?;
        if len > 0 && first != MAGIC {
            return Err(CaptureError::Other { path: path.into() });
        }
        ftruncate(&file, 0).map_err(failed)?;
        let mut head = Vec::new();
        pcapng::push_head(&mut head, interface, len_max);
        let mut file = Self { file, statistics_at: head.len() as u64, end: 0, block: Vec::new() };
        pcapng::push_statistics(&mut head, statistics);
        file.append(&head).map_err(|source| CaptureError::File { path: path.into(), source })?;
        Ok(file)
    }

    /// Appends whole blocks. After an error, the file has none of them.
    pub(super) fn append(&mut self, blocks: &[u8]) -> io::Result<()> {
        match self.file.write_all_at(blocks, self.end) {
            Ok(()) => {
                self.end += blocks.len() as u64;
                Ok(())
            }
            Err(error) => {
                // A part that stays would end the file in the middle of a block, until the next append.
                let _ = ftruncate(&self.file, self.end);
                Err(error)
            }
        }
    }

    /// Replaces the statistics. They have a place in the file, so this works on a full disk.
    pub(super) fn set_statistics(&mut self, statistics: &Statistics) -> io::Result<()> {
        self.block.clear();
        pcapng::push_statistics(&mut self.block, statistics);
        self.file.write_all_at(&self.block, self.statistics_at)
    }
}

impl Drop for CaptureFile {
    fn drop(&mut self) {
        // A child of the process may hold a copy of the descriptor until it executes its program, and with it
        // the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}
