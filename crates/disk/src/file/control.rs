//! What the control path asks of a file.

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

    fn look_at_size(&self) -> io::Result<Resized> {
        self.read_size()
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }

    /// Puts what the host's cache holds of the file into the file.
    fn hand_over(&self) -> io::Result<()> {
        let Some(writeback) = &self.writeback else { return Ok(()) };
        Ok(writeback.flushed(retry_on_intr(|| fdatasync(&self.file)))?)
    }

    /// Lets go of what the host's cache holds of the file: it may have been written elsewhere since.
    fn take_over(&self) -> io::Result<()> {
        if self.writeback.is_some()
            && let Err(error) = fadvise(&self.file, 0, None, Advice::DontNeed)
        {
            tracing::warn!(%error, "the host may have old data of the image in its cache");
        }
        Ok(())
    }
}
