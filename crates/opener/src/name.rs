//! The name of a file, without the file.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::retry_on_intr;

/// Opens the name of a file in this process, for its status and for
/// [`reopen_here`](crate::file::reopen_here). A pipe or a device notices nothing.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn name_here(path: &Path) -> io::Result<File> {
    // The standard library takes this flag away with musl, which counts it to the access mode.
    let open = || openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    Ok(retry_on_intr(open)?.into())
}
