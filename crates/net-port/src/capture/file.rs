//! The file of a capture.

use super::error::CaptureError;
use super::pcapng::{self, MAGIC, Statistics};
use rustix::fs::{FileType, FlockOperation, flock, fstat, ftruncate};
use rustix::io::{Errno, pread};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The file of a capture, with whole blocks only.
#[derive(Debug)]
pub(super) struct CaptureFile {
    file: File,
    /// The offset of the statistics, and of the end of the last whole block.
    pub(super) statistics_at: u64,
    pub(super) end: u64,
    /// The lock is this process's own, which releases it at the end.
    owns_lock: bool,
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
        check_and_lock(&file, path)?;
        let mut first = [0; MAGIC.len()];
        let len = pread(&file, &mut first, 0).map_err(failed)?;
        if len > 0 && first != MAGIC {
            return Err(CaptureError::Other { path: path.into() });
        }
        ftruncate(&file, 0).map_err(failed)?;
        let mut head = Vec::new();
        pcapng::push_head(&mut head, interface, len_max);
        let statistics_at = head.len() as u64;
        let mut file = Self { file, statistics_at, end: 0, owns_lock: true, block: Vec::new() };
        pcapng::push_statistics(&mut head, statistics);
        file.append(&head).map_err(|source| CaptureError::File { path: path.into(), source })?;
        Ok(file)
    }

    /// Takes the file of a capture over that another process has written up to here. Its lock belongs to the
    /// description, so this process has it too.
    ///
    /// # Errors
    /// It is no such file, or another process has the lock.
    pub(super) fn taken_over(
        file: OwnedFd,
        path: &Path,
        statistics_at: u64,
        end: u64,
    ) -> Result<Self, CaptureError> {
        let file = File::from(file);
        check_and_lock(&file, path)?;
        Ok(Self { file, statistics_at, end, owns_lock: false, block: Vec::new() })
    }

    /// Makes this process release the lock at the end.
    pub(super) fn own_lock(&mut self) {
        self.owns_lock = true;
    }

    pub(super) fn file(&self) -> &File {
        &self.file
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
        if self.owns_lock {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// Checks that this is a file, and locks it. If its description has the lock already, nothing changes.
fn check_and_lock(file: &File, path: &Path) -> Result<(), CaptureError> {
    let failed = |source: Errno| CaptureError::File { path: path.into(), source: source.into() };
    if FileType::from_raw_mode(fstat(file).map_err(failed)?.st_mode) != FileType::RegularFile {
        return Err(CaptureError::NoFile { path: path.into() });
    }
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::AGAIN) => Err(CaptureError::InUse { path: path.into() }),
        Err(error) => Err(failed(error)),
    }
}
