//! An image that passes to another process of this host, with the images under it.
//!
//! All that a guest was told is written is in the file (R4), so no table passes. The old process closes the
//! image, and keeps its files and their locks. The new one reads the tables of the same files. It writes
//! nothing before the old one has ended, so it refuses an image that would have to be repaired.

use super::disk::Qcow2Disk;
use super::open::{Under, header, is_fit};
use crate::hand_over::{DiskHandOver, Suspended};
use crate::handed_image::HandedImage;
use crate::image_file::Source;
use crate::lock::ImageLock;
use crate::{Error, FileDisk, Options};
use kickless_handover::Giving;
use kickless_handover::v1::{Image, Medium};
use kickless_sync::lock;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Qcow2Disk {
    /// Makes a disk of the files of another process, which still uses them. They are opened later.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn of_handed(path: &Path, images: &[HandedImage], options: &Options) -> Result<Self, Error> {
        let failed = |source| Error::Handed { disk: format!("qcow2:{}", path.display()), source };
        let open = |image, options| FileDisk::open_image(Source::Handed(path, image), options).map(Arc::new);
        let (top, under) = images.split_first().ok_or_else(|| failed(io::Error::other("it has no image")))?;
        let file = open(top, options)?;
        let (header, _) = header(&file).map_err(failed)?;
        if !is_fit(&file, &header) {
            return Err(failed(io::Error::other("its file transfers larger units than its clusters")));
        }
        let disk = Self::closed(path, *options, (file, Arc::default()), &header).map_err(failed)?;
        disk.set_size(top.size).map_err(failed)?;
        let read_only = Options { read_only: true, ..*options };
        let under = under.iter().map(|image| open(image, &read_only)).collect::<Result<_, _>>()?;
        *lock(&disk.under) = under;
        disk.is_of_other.store(true, Ordering::Relaxed);
        Ok(disk)
    }
}

impl Qcow2Disk {
    /// Owns the locks of the backing images, or leaves them to another process.
    fn own_locks(&self, owns: bool) {
        lock(&self.locks).iter_mut().for_each(|image| image.own(owns));
    }
}

impl DiskHandOver for Qcow2Disk {
    fn give(&self, to: &mut Giving) -> io::Result<Medium> {
        // Another program can change the size of a free image. Its guest keeps the one that it knows.
        let mut images = vec![Image { size: self.size(), ..self.file.image(to)? }];
        if let Some((chain, _)) = self.chain() {
            for layer in chain.layers.iter().skip(1) {
                images.push(layer.file().image(to)?);
            }
        }
        Ok(Medium::Images(images))
    }

    fn settle(&self) -> io::Result<()> {
        match self.chain() {
            Some((chain, _)) if self.file.image_final().lost_writes == 0 => self.sync(self.written(&chain)),
            _ => Ok(()),
        }
    }

    fn suspend(&self, _is_taken: bool) -> io::Result<Suspended> {
        let _control = lock(&self.control);
        self.own_locks(false);
        let mut images = vec![self.file.image_final()];
        if let Some((chain, _)) = self.chain() {
            let image = self.written(&chain);
            self.sync(image)?;
            let under: Vec<_> = chain.layers.iter().skip(1).map(|layer| layer.file().clone()).collect();
            images.extend(under.iter().map(|file| file.image_final()));
            *lock(&self.under) = under;
            self.set_chain(None);
            self.close(image)?;
        }
        Ok(Suspended { images, nbd: None })
    }

    fn take_back(&self, is_taken: bool) -> io::Result<()> {
        let _control = lock(&self.control);
        self.own_locks(true);
        let under = std::mem::take(&mut *lock(&self.under));
        if !is_taken || self.chain().is_some() {
            return Ok(());
        }
        self.open_chain(Under::Open(&under)).map(drop).inspect_err(|_| self.lock_backing(Vec::new()))
    }

    fn receive(&self, state: &Suspended, is_taken: bool, locks: bool) -> io::Result<()> {
        let _control = lock(&self.control);
        let under = std::mem::take(&mut *lock(&self.under));
        let [image, ref others @ ..] = state.images[..] else {
            return Err(io::Error::other("its last state has no image"));
        };
        if others.len() != under.len() {
            return Err(io::Error::other("its last state has another number of images"));
        }
        self.file.receive_image(image);
        if !is_taken {
            return Ok(());
        }
        if locks {
            let lock = |file: &Arc<FileDisk>| ImageLock::of_handed(file.os_file(), true);
            let locks = under.iter().map(lock).collect::<Result<_, _>>().map_err(io::Error::other)?;
            self.lock_backing(locks);
        }
        self.open_chain(Under::Open(&under)).map(drop)
    }

    fn begin(&self) {
        self.own_locks(true);
        self.is_of_other.store(false, Ordering::Relaxed);
    }
}
