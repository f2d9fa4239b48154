//! Opens an image and its backing images.

use crate::image_file::open_file;
use crate::{Cache, Options};
use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, StorageExt, StorageOpenOptions};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// An open image with all its backing images.
pub(super) type Access = FormatAccess<Storage>;

/// The largest number of images in a chain. It also ends a circular chain.
const DEPTH_MAX: usize = 64;

/// The offset of the encryption method in the header, a number of 32 bits; 0 means none. The library ignores
/// it.
const CRYPT_METHOD: u64 = 32;

/// The error of a backing image.
#[derive(Debug, thiserror::Error)]
#[error("its backing image {name:?}: {error}")]
struct BackingError {
    name: String,
    error: io::Error,
}

impl BackingError {
    /// Makes the error. Only the innermost image is named.
    fn wrap(name: &str, error: io::Error) -> io::Error {
        if error.get_ref().is_some_and(|inner| inner.is::<Self>()) {
            return error;
        }
        io::Error::other(Self { name: name.to_owned(), error })
    }
}

/// Opens the image in `file` and its backing images. Returns it and the backing files.
///
/// # Errors
/// A sentence about one of them.
pub(super) fn open(
    path: &Path,
    file: File,
    direct: bool,
    writable: bool,
    cache: Cache,
) -> io::Result<(Access, Vec<File>)> {
    let mut chain = Chain { cache, files: Vec::new() };
    let access = chain.image(path, storage(path, file, direct, writable)?, writable)?;
    Ok((access, chain.files))
}

/// A chain of images while it is opened.
struct Chain {
    cache: Cache,
    /// The backing files.
    files: Vec<File>,
}

fn storage(path: &Path, file: File, direct: bool, writable: bool) -> io::Result<Storage> {
    let options = StorageOpenOptions::new().filename(path).write(writable).direct(direct);
    Storage::from_open_file(file, options)
}

impl Chain {
    fn image(&mut self, path: &Path, storage: Storage, writable: bool) -> io::Result<Access> {
        let mut method = [0; 4];
        storage.read(&mut method[..], CRYPT_METHOD)?;
        if method != [0; 4] {
            return Err(io::Error::other("it is encrypted, which is not supported"));
        }
        let mut image: Qcow2<Storage> = Qcow2::open_image(storage, writable)?;
        if image.requires_external_data_file() {
            return Err(io::Error::other("its data is in another file, which is not supported"));
        }
        image.set_data_file(None);
        let under = match image.implicit_backing_file() {
            None => None,
            Some(name) => {
                let format = image.implicit_backing_format().map(String::as_str);
                Some(self.backing(path, name, format).map_err(|error| BackingError::wrap(name, error))?)
            }
        };
        image.set_backing(under);
        Ok(FormatAccess::new(image))
    }

    /// Opens the backing image of the image at `path`, for reading.
    fn backing(&mut self, path: &Path, name: &str, format: Option<&str>) -> io::Result<Access> {
        if self.files.len() >= DEPTH_MAX {
            return Err(io::Error::other("the chain of backing images is too long"));
        }
        let is_qcow2 = match format {
            Some("qcow2") => true,
            Some("raw") => false,
            Some(other) => {
                return Err(io::Error::other(format!("its format {other:?} is not supported")));
            }
            None => {
                return Err(io::Error::other(
                    "its format is not stated, and guessing it would let a guest choose it (qemu-img rebase -u -F FORMAT -b FILE states it)",
                ));
            }
        };
        let path = resolve(path, name)?;
        let options = Options { read_only: true, cache: self.cache, merge: false };
        let (file, direct) = open_file(&path, &options).map_err(io::Error::other)?;
        self.files.push(file.try_clone()?);
        let storage = storage(&path, file, direct, false)?;
        if is_qcow2 {
            return self.image(&path, storage, false);
        }
        Ok(FormatAccess::new(Raw::open_image(storage, false)?))
    }
}

/// Returns the path of the image that the one at `path` calls `name`.
fn resolve(path: &Path, name: &str) -> io::Result<PathBuf> {
    // As in QEMU, a name with a colon before any slash is a protocol.
    let first = name.find([':', '/']).map(|at| name.as_bytes()[at]);
    if first == Some(b':') {
        return Err(io::Error::other("it is not a file"));
    }
    Ok(path.parent().unwrap_or(Path::new("")).join(name))
}
