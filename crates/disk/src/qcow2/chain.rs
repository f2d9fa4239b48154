//! An image and those under it.

use crate::image_file::open_file;
use crate::{Cache, Options};
use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, StorageExt, StorageOpenOptions};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// An image that is open, with all under it.
pub(super) type Access = FormatAccess<Storage>;

/// Images under one another at most: a chain that is a circle ends here.
const DEPTH_MAX: usize = 64;

/// Where the header says how the data is encrypted, a number of 32 bits; 0: it is not. The library does not look there.
const CRYPT_METHOD: u64 = 32;

/// What is wrong with an image that another names as the one under it.
#[derive(Debug, thiserror::Error)]
#[error("an image under it, {name:?}: {error}")]
struct Under {
    name: String,
    error: io::Error,
}

impl Under {
    /// The innermost alone is named.
    fn said(name: &str, error: io::Error) -> io::Error {
        if error.get_ref().is_some_and(|inner| inner.is::<Self>()) {
            return error;
        }
        io::Error::other(Self { name: name.to_owned(), error })
    }
}

/// Opens the image in `file`, and those under it, whose files are the second that is returned.
///
/// # Errors
/// What is wrong with one of them, as a sentence.
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

/// Images that are being opened.
struct Chain {
    cache: Cache,
    /// Of those under the first.
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
                Some(self.backing(path, name, format).map_err(|error| Under::said(name, error))?)
            }
        };
        image.set_backing(under);
        Ok(FormatAccess::new(image))
    }

    /// Opens the image that the one at `path` names as the one under it, for reading.
    fn backing(&mut self, path: &Path, name: &str, format: Option<&str>) -> io::Result<Access> {
        if self.files.len() >= DEPTH_MAX {
            return Err(io::Error::other("there are too many under one another"));
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

/// Where an image is that the one at `path` calls by this name.
fn resolve(path: &Path, name: &str) -> io::Result<PathBuf> {
    // As QEMU tells them apart: what has a colon before any slash is a protocol.
    let first = name.find([':', '/']).map(|at| name.as_bytes()[at]);
    if first == Some(b':') {
        return Err(io::Error::other("it is not in a file"));
    }
    Ok(path.parent().unwrap_or(Path::new("")).join(name))
}
