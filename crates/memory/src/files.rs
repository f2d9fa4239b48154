//! Keeps the files of a device's mappings open.
//!
//! The process that takes a device over has to map the same memory, so it needs the descriptors that the
//! front-end has sent. A device keeps one for each distinct file, because many regions can be of one file.
//! It closes the descriptor after the last mapping of the file is unmapped, on the same thread
//! ([`crate::unmapper`]): to close the last reference to a file can take as long as to unmap it.
//!
//! The number of files is bounded, so that front-ends cannot use up the descriptors of the process. Files
//! beyond the limit are mapped all the same, but a device with such a file cannot be handed over.

use kickless_sync::lock;
use rustix::io::fcntl_dupfd_cloexec;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

/// Device and inode of a regular file. No other file gets them as long as it is open.
pub(crate) type Identity = (u64, u64);

/// The open files of one device.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    max: usize,
    open: Mutex<OpenFiles>,
}

#[derive(Debug, Default)]
struct OpenFiles {
    count: usize,
    /// The regular files.
    known: BTreeMap<Identity, Weak<SharedFile>>,
}

/// A file that is open as long as a mapping of it exists.
#[derive(Debug)]
pub(crate) struct SharedFile {
    // Before the count, so that a file counts until it is closed.
    file: OwnedFd,
    _count: OpenFile,
}

/// The share of one file in [`OpenFiles`].
#[derive(Debug)]
struct OpenFile {
    identity: Option<Identity>,
    files: Arc<SharedFiles>,
}

impl SharedFiles {
    /// Allows `max` files.
    pub(crate) fn new(max: usize) -> Self {
        Self { max, open: Mutex::default() }
    }

    /// Keeps a mapped file open. Duplicates its descriptor, unless a file with this identity is open already.
    /// Returns `None` if there are too many files, or no free descriptor.
    pub(crate) fn keep(
        self: &Arc<Self>,
        file: impl AsFd,
        identity: Option<Identity>,
    ) -> Option<Arc<SharedFile>> {
        let mut open = lock(&self.open);
        if let Some(known) = identity.and_then(|identity| open.known.get(&identity)?.upgrade()) {
            return Some(known);
        }
        if open.count >= self.max {
            return None;
        }
        let file = fcntl_dupfd_cloexec(file, 0).ok()?;
        let kept = Arc::new(SharedFile { file, _count: OpenFile { identity, files: self.clone() } });
        open.count += 1;
        if let Some(identity) = identity {
            open.known.insert(identity, Arc::downgrade(&kept));
        }
        Some(kept)
    }
}

impl AsFd for SharedFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let mut open = lock(&self.files.open);
        open.count -= 1;
        // The same file can be open again since this one had no user.
        if let Some(identity) = self.identity
            && open.known.get(&identity).is_some_and(|known| known.strong_count() == 0)
        {
            open.known.remove(&identity);
        }
    }
}
