//! The control path of a file.

use super::disk::FileDisk;
use crate::Resized;
use crate::control::DiskControl;
use rustix::fs::{Advice, fadvise, fdatasync};
use rustix::io::retry_on_intr;
use std::fs::File;
use std::io;

impl DiskControl for FileDisk {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn refresh_size(&self) -> io::Result<Resized> {
        self.read_size()
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }

    /// Writes the host's cache of the file to the file.
    fn write_back(&self) -> io::Result<()> {
        let Some(writeback) = &self.writeback else { return Ok(()) };
        Ok(writeback.flushed(retry_on_intr(|| fdatasync(&self.file)))?)
    }

    /// Drops the host's cache of the file, because another host may have written since.
    fn reload(&self) -> io::Result<()> {
        if self.writeback.is_some()
            && let Err(error) = fadvise(&self.file, 0, None, Advice::DontNeed)
        {
            tracing::warn!(%error, "the host's cache may have old data of the image");
        }
        Ok(())
    }
}
