//! The open file of an image that another process of this host has passed to this one.

use crate::{Cache, Error, Options};
use kickless_handover::{Given, v1};
use kickless_opener::Alignment;
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// An open file of another process, which still uses it. The flags of its description are not changed.
#[derive(Debug)]
pub(crate) struct HandedImage {
    pub(crate) file: Arc<File>,
    /// The description that reports losses of the page cache.
    pub(crate) witness: RefCell<Option<File>>,
    /// The alignment of direct I/O, or `None` if the file is not open for it.
    pub(crate) direct: Option<Alignment>,
    /// The bytes that a guest can reach, if this is the first image.
    pub(crate) size: u64,
    /// The file system can punch holes.
    pub(crate) punches_holes: bool,
    /// The path of the disk names this file, and not one above it in a chain.
    pub(crate) is_top: bool,
}

impl HandedImage {
    /// Takes the descriptors of a record. `name` is for sentences.
    ///
    /// # Errors
    /// A descriptor is missing, or is not of the file that the record describes.
    pub(crate) fn new(
        name: &Path,
        image: &v1::Image,
        is_top: bool,
        given: &mut Given,
    ) -> Result<Self, Error> {
        let failed = |source: io::Error| Error::Handed { disk: name.display().to_string(), source };
        let take = |given: &mut Given, fd| given.fd(fd).map(File::from).map_err(io::Error::other);
        let file = take(given, image.file).map_err(failed)?;
        let witness = image.witness.map(|fd| take(given, fd)).transpose().map_err(failed)?;
        for file in [&file].into_iter().chain(&witness) {
            let found = fstat(file).map_err(|error| failed(error.into()))?;
            if (found.st_dev, found.st_ino) != (image.device, image.inode) {
                return Err(failed(io::Error::other("a descriptor is of another file")));
            }
        }
        let direct = image.alignment.map(|(memory, offset)| Alignment::Known { memory, offset });
        let &v1::Image { size, punches_holes, .. } = image;
        Ok(Self { file: Arc::new(file), witness: witness.into(), direct, size, punches_holes, is_top })
    }

    /// Checks that the file is open in the mode of the options.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check_mode(&self, name: &Path, options: &Options) -> Result<(), Error> {
        let failed = |source| Error::Handed { disk: name.display().to_string(), source };
        let flags = fcntl_getfl(&*self.file).map_err(|error| failed(error.into()))?;
        // A file without a cache can have the flag, and needs no alignment.
        let is_direct = self.direct.is_some();
        let access = if options.read_only { [OFlags::RDONLY, OFlags::RDWR] } else { [OFlags::RDWR; 2] };
        let is_open_so = access.contains(&(flags & OFlags::ACCMODE))
            && !flags.intersects(OFlags::PATH | OFlags::APPEND)
            && (flags.contains(OFlags::DIRECT) || !is_direct)
            && !(is_direct && options.cache == Cache::Writeback);
        match is_open_so {
            true => Ok(()),
            false => Err(failed(io::Error::other("the file is open in another mode"))),
        }
    }
}
