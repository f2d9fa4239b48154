//! Makes a disk of what another process of this host gives.

use super::{Disk, FaultDisk};
use crate::handed_image::HandedImage;
use crate::image_file::Source;
use crate::qcow2::disk::Qcow2Disk;
use crate::{DiskSpec, Error, FileDisk, LibraryDisk, MemoryDisk, Options};
use kickless_handover::Given;
use kickless_handover::v1::{Image, Medium};
use std::io;
use std::path::Path;

impl Disk {
    /// Makes the disk that another process gives
    /// ([`DiskHandOver::give`](crate::DiskHandOver::give)), and still uses.
    ///
    /// # Errors
    /// One sentence for the operator: the state is that of another disk, or the disk cannot be used.
    pub fn of_handed(
        spec: &DiskSpec,
        options: &Options,
        medium: Medium,
        given: &mut Given,
    ) -> Result<Self, Error> {
        let images = |path: &Path, images: &[Image], given: &mut Given| {
            let mut is_top = true;
            let image = |image| HandedImage::new(path, image, std::mem::take(&mut is_top), given);
            images.iter().map(image).collect::<Result<Vec<_>, _>>()
        };
        Ok(match (spec, medium) {
            (DiskSpec::Fault(rules, under), medium) => {
                Self::Fault(Box::new(FaultDisk::new(rules, Self::of_handed(under, options, medium, given)?)?))
            }
            (DiskSpec::Null(_) | DiskSpec::Rbd(_), Medium::Anew) => Self::open(spec, options)?,
            (DiskSpec::Memory(size), Medium::Memory { file, .. }) => {
                let failed = |source| Error::Handed { disk: spec.to_string(), source };
                let file = given.fd(file).map_err(|error| failed(io::Error::other(error)))?;
                Self::Memory(MemoryDisk::of_file(file, *size, options.read_only)?)
            }
            (DiskSpec::File(path), Medium::Images(all)) if all.len() == 1 => {
                let [image] = &images(path, &all, given)?[..] else { return Err(mismatch(spec)) };
                Self::File(FileDisk::open_source(Source::Handed(path, image), options)?)
            }
            (DiskSpec::Qcow2(path), Medium::Images(all)) => {
                Self::Qcow2(Box::new(Qcow2Disk::of_handed(path, &images(path, &all, given)?, options)?))
            }
            (DiskSpec::Nbd(uri), Medium::Nbd(nbd)) => {
                Self::Library(Box::new(LibraryDisk::of_handed(uri, options, nbd, given)?))
            }
            _ => return Err(mismatch(spec)),
        })
    }
}

/// Returns the error of a disk that the other process describes as one of another kind.
fn mismatch(spec: &DiskSpec) -> Error {
    let source = io::Error::other("its state is that of another kind of disk");
    Error::Handed { disk: spec.to_string(), source }
}
