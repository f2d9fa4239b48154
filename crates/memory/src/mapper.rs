//! The limits within which a device's files are mapped.

use crate::backing;
use crate::error::{Error, Purpose};
use crate::files::{Identity, SharedFile, SharedFiles};
use crate::quota::Quota;
use crate::unmapper::{Charges, Item, Released, Unmapper};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// The time that a device which has reached its quota waits for its memory to be unmapped. A log or a table
/// of sparse memory takes a millisecond. Larger memory has a session that waits for it ([`Mapper::unused`]).
const CATCH_UP: Duration = Duration::from_secs(2);

/// Maps the files of a device's front-ends, and unmaps them on a thread of the device. It can limit the
/// address space that the device uses, keep the files open, and refuse slow files. The default does none of
/// these. Clones are the same device's.
#[derive(Clone, Debug)]
pub struct Mapper {
    quota: Option<Arc<Quota>>,
    files: Option<Arc<SharedFiles>>,
    refuse_slow: bool,
    /// `None`: the thread that drops a mapping unmaps it.
    unmapper: Option<Arc<Unmapper>>,
}

impl Default for Mapper {
    fn default() -> Self {
        Self { unmapper: Some(Arc::default()), ..Self::of_process() }
    }
}

impl Mapper {
    /// Makes a mapper that charges its mappings to `quota`, and keeps as many files open as that allows.
    pub fn within(quota: Arc<Quota>) -> Self {
        let files = Some(Arc::new(SharedFiles::new(quota.files_max())));
        Self { quota: Some(quota), files, ..Self::default() }
    }

    /// Returns the mapper of mappings that belong to no device. The thread that drops one unmaps it.
    ///
    /// So a driver has no thread, and its process can `fork` at any time: fio does. A thread that unmaps
    /// memory holds locks meanwhile, and the child would have the locks without the thread.
    pub(crate) fn of_process() -> Self {
        Self { quota: None, files: None, refuse_slow: false, unmapper: None }
    }

    /// Makes this mapper refuse files whose pages a worker might wait for without end: those of FUSE, of
    /// network file systems, and of others that are not known to be prompt.
    #[must_use]
    pub fn refuse_slow(self) -> Self {
        Self { refuse_slow: true, ..self }
    }

    /// Checks whether the file may be mapped.
    pub(crate) fn admit(&self, purpose: Purpose, file: impl AsFd) -> Result<(), Error> {
        if self.refuse_slow {
            let checked = backing::check(file).map_err(|source| Error::Mmap { purpose, source })?;
            checked.map_err(|slow| Error::Refused { purpose, why: slow.into() })?;
        }
        Ok(())
    }

    /// Charges one mapping of `bytes` to the process, and to the quota if there is one. If there is no room,
    /// waits until the device's unused memory is unmapped.
    pub(crate) fn charge(&self, purpose: Purpose, bytes: u64) -> Result<Charges, Error> {
        let charge = || Charges::new(purpose, self.quota.as_ref(), bytes);
        charge().or_else(|error| if self.unused().wait(CATCH_UP) { charge() } else { Err(error) })
    }

    /// Keeps a mapped file open. Returns `None` if this mapper keeps no files, or has no descriptor for it.
    pub(crate) fn keep(&self, file: impl AsFd, identity: Option<Identity>) -> Option<Arc<SharedFile>> {
        self.files.as_ref()?.keep(file, identity)
    }

    /// Returns a handle with which the caller can wait until all memory of the device is unmapped that has no
    /// user now. Only for threads that no other device waits for.
    pub fn unused(&self) -> Released {
        self.unmapper.as_ref().map_or_else(Released::unmapped, |unmapper| unmapper.unused())
    }

    /// Returns a sender to the thread that unmaps the device's memory, or `None` if there is to be none.
    pub(crate) fn unmapper(&self) -> io::Result<Option<Sender<Item>>> {
        self.unmapper.as_ref().map(|unmapper| unmapper.sender()).transpose()
    }
}
