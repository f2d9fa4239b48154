//! The control path of a file.

use super::disk::FileDisk;
use crate::Resized;
use crate::control::DiskControl;
use rustix::fs::fdatasync;
use rustix::io::retry_on_intr;
use std::fs::File;
use std::io;

impl DiskControl for FileDisk {
    fn identity(&self) -> &str {
        &self.origin.identity
    }

    fn refresh_size(&self) -> io::Result<Resized> {
        self.read_size()
    }

    fn is_replaced(&self) -> bool {
        FileDisk::is_replaced(self)
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }

    /// Writes the host's cache of the file to the file.
    fn write_back(&self) -> io::Result<()> {
        let Some(writeback) = &self.writeback else { return Ok(()) };
        Ok(writeback.flushed(retry_on_intr(|| fdatasync(&self.file)))?)
    }

    fn reload(&self, _locks: bool) -> io::Result<()> {
        self.drop_cache();
        self.accept_disk_size()
    }

    fn look(&self) -> io::Result<()> {
        self.accept_disk_size()
    }
}
