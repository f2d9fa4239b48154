//! A file that passes to another process of this host.

use super::disk::FileDisk;
use crate::hand_over::{DiskHandOver, Suspended};
use kickless_handover::Giving;
use kickless_handover::v1::{Image, ImageFinal, Medium};
use rustix::fs::{fdatasync, fstat};
use rustix::io::retry_on_intr;
use std::io;

impl FileDisk {
    /// Adds duplicates of the descriptors, and says what they are.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub(crate) fn image(&self, to: &mut Giving) -> io::Result<Image> {
        let stat = fstat(&self.file)?;
        // Both alignments are at most that of a buffer.
        let alignment = self.direct.as_ref().map(|direct| (direct.address as u32, direct.block as u32));
        Ok(Image {
            file: to.fd(&self.file)?,
            witness: self.writeback.as_ref().map(|writeback| writeback.give(to)).transpose()?.flatten(),
            device: stat.st_dev,
            inode: stat.st_ino,
            alignment,
            size: self.size(),
            punches_holes: self.limits.zeroes_may_unmap,
        })
    }

    /// Returns what the host has lost of the file.
    pub(crate) fn image_final(&self) -> ImageFinal {
        ImageFinal { lost_writes: self.writeback.as_ref().map_or(0, |writeback| writeback.latched()) }
    }

    /// Takes what the host has lost of the file.
    pub(crate) fn receive_image(&self, image: ImageFinal) {
        if let Some(writeback) = &self.writeback {
            writeback.set_latched(image.lost_writes);
        }
    }

    /// Writes the host's cache of the file to the file, unless flushes fail already.
    ///
    /// # Errors
    /// Some data could not be written.
    pub(crate) fn sync_early(&self) -> io::Result<()> {
        match self.writeback.as_ref().filter(|writeback| writeback.latched() == 0) {
            Some(writeback) => Ok(writeback.flushed(retry_on_intr(|| fdatasync(&self.file)))?),
            None => Ok(()),
        }
    }
}

impl DiskHandOver for FileDisk {
    fn give(&self, to: &mut Giving) -> io::Result<Medium> {
        Ok(Medium::Images(vec![self.image(to)?]))
    }

    fn settle(&self) -> io::Result<()> {
        self.sync_early()
    }

    fn suspend(&self, _is_taken: bool) -> io::Result<Suspended> {
        Ok(Suspended { images: vec![self.image_final()], nbd: None })
    }

    fn receive(&self, state: &Suspended, _is_taken: bool, _locks: bool) -> io::Result<()> {
        let [image] = state.images[..] else {
            return Err(io::Error::other("its last state has another number of images"));
        };
        self.receive_image(image);
        Ok(())
    }
}
