//! Unmaps memory on a thread of its device.
//!
//! To unmap memory can take seconds. The kernel visits each page that is there. If this was the last
//! reference to the file, it then frees all pages of the file: a mapping of one page can hold a file of many
//! GiB. The last reference to a [`Mapping`](crate::Mapping) is often that of a worker, which serves other
//! devices too. So the drop of a mapping only puts its [`Remains`] into a channel. The device's thread takes
//! them out and unmaps them.
//!
//! # Nobody waits for this thread, except its device
//! * *Hand-over.* A sender waits for no unmapping: it takes no lock but that which wakes the thread, and the
//!   channel has no bound. Its length is bounded by the mappings that the device may have
//!   ([`crate::quota`]), because a mapping counts until it is unmapped.
//! * *Existence.* The thread is started before the first mapping of its device. If that fails, nothing is
//!   mapped. So no mapping exists without a thread that unmaps it.
//! * *End.* Each mapping holds a sender, and so does the device's [`Mapper`](crate::Mapper). The thread ends
//!   after all of them are gone and the channel is empty. So a device has at most one thread.
//! * *Address space.* The kernel lets no other thread map or unmap memory while it visits the pages of one
//!   call. So a call unmaps at most [`PIECE`].
//! * *The file.* The thread closes it after the last call for its last mapping ([`crate::files`]). The kernel
//!   frees it then, in the same thread, with no lock held.
//!
//! Threads of the same device do wait. A session answers REM_MEM_REG when the memory is unmapped, and a
//! device that has reached its quota waits before it maps more ([`Unmapper::unused`]).
#![expect(unsafe_code, reason = "island: munmap")]

use crate::error::{Error, Purpose};
use crate::fault::{self, MappingEntry};
use crate::files::SharedFile;
use crate::quota::{Charge, CountedMapping, Quota};
use kickless_sync::lock;
use rustix::mm::munmap;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// The most bytes that one call unmaps, unless a page is larger: 8192 pages of 4 KiB. At 50 to 100 ns a page,
/// another thread of the process waits for less than a millisecond to map something. All calls for 1 TiB
/// without pages take a tenth of a second.
const PIECE: usize = 32 << 20;

/// The name of the threads.
const THREAD: &str = "unmap";

/// The thread of one device that unmaps its memory. It runs from the first mapping on.
#[derive(Debug, Default)]
pub(crate) struct Unmapper {
    sender: Mutex<Option<Sender<Item>>>,
}

/// An item of the channel.
#[derive(Debug)]
pub(crate) enum Item {
    /// Memory to unmap.
    Unmap(Remains),
    /// Everything before this is unmapped.
    Mark(Released),
}

impl Unmapper {
    /// Returns a sender to the thread, which is started if there is none.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn sender(&self) -> io::Result<Sender<Item>> {
        let mut sender = lock(&self.sender);
        if let Some(sender) = &*sender {
            return Ok(sender.clone());
        }
        let (new, items) = channel();
        thread::Builder::new().name(THREAD.into()).spawn(move || run(&items))?;
        Ok(sender.insert(new).clone())
    }

    /// Returns a handle with which the caller can wait until everything is unmapped that has no user now.
    /// Only threads of the device may wait.
    pub(crate) fn unused(&self) -> Released {
        let unused = Released::default();
        let sender = lock(&self.sender).clone();
        // The thread runs as long as there is a sender. Before the first mapping there is none.
        if sender.is_none_or(|sender| sender.send(Item::Mark(unused.clone())).is_err()) {
            unused.set();
        }
        unused
    }
}

fn run(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Unmap(remains) => drop(remains),
            Item::Mark(mark) => mark.set(),
        }
    }
}

/// The shares of one mapping in the limits of the process and of its device.
#[derive(Debug)]
pub(crate) struct Charges {
    _counted: CountedMapping,
    _charge: Option<Charge>,
}

impl Charges {
    /// Charges one mapping of `bytes`.
    pub(crate) fn new(purpose: Purpose, quota: Option<&Arc<Quota>>, bytes: u64) -> Result<Self, Error> {
        let counted = CountedMapping::new().map_err(|source| Error::Mmap { purpose, source })?;
        let charge = quota.map(|quota| quota.charge(bytes)).transpose();
        let charge = charge.map_err(|exhausted| Error::Refused { purpose, why: exhausted.into() })?;
        Ok(Self { _counted: counted, _charge: charge })
    }
}

/// Mapped memory without users. Its drop unmaps it, closes its file, and returns what it took of its device's
/// quota.
#[derive(Debug)]
pub(crate) struct Remains {
    /// The range that `mmap` returned.
    pub(crate) whole: NonNull<u8>,
    pub(crate) whole_len: usize,
    /// The size of its pages, of which both ends are multiples.
    pub(crate) page: usize,
    /// Its entry in the registry of [`crate::fault`].
    pub(crate) entry: &'static MappingEntry,
    pub(crate) file: Option<Arc<SharedFile>>,
    pub(crate) charges: Option<Charges>,
    pub(crate) released: Released,
}

// SAFETY: the pointer is to memory that nothing but these remains uses.
unsafe impl Send for Remains {}

impl Drop for Remains {
    fn drop(&mut self) {
        // Before the address range can be that of other memory. No thread touches this one any more.
        fault::remove(self.entry);
        // A call unmaps whole pages.
        let piece = PIECE.next_multiple_of(self.page);
        for at in (0..self.whole_len).step_by(piece) {
            let len = piece.min(self.whole_len - at);
            // SAFETY: `at` is in the range, whose length fits into isize.
            let start = unsafe { self.whole.add(at) };
            // SAFETY: a part of the range that `mmap` returned, although other memory may have replaced pages
            // of it since. All users held a reference to the mapping, so there is no user left.
            let unmapped = unsafe { munmap(start.as_ptr().cast(), len) };
            debug_assert!(unmapped.is_ok());
        }
        // First, so that a thread that waited finds the file freed, and can use the quota.
        self.file = None;
        self.charges = None;
        self.released.set();
    }
}

/// Tells when a [`Mapping`](crate::Mapping) has no user left, and when it is unmapped.
#[derive(Clone, Debug, Default)]
pub struct Released(Arc<Release>);

#[derive(Debug, Default)]
struct Release {
    is_unused: AtomicBool,
    /// The thread that has unmapped it.
    by: Mutex<Option<Thread>>,
    change: Condvar,
}

impl Released {
    /// Notes that the last reference is gone.
    pub(crate) fn set_unused(&self) {
        self.0.is_unused.store(true, Ordering::Release);
    }

    /// Returns a handle of memory that is unmapped.
    pub(crate) fn unmapped() -> Self {
        let released = Self::default();
        released.set();
        released
    }

    fn set(&self) {
        *lock(&self.0.by) = Some(thread::current());
        self.0.change.notify_all();
    }

    /// Returns whether the last reference to the mapping is gone. No thread of this process uses the memory
    /// then, although it may still be mapped.
    pub fn is_unused(&self) -> bool {
        // Acquire: the caller sees everything that users of the memory have done.
        self.0.is_unused.load(Ordering::Acquire)
    }

    /// Waits up to `timeout` until the memory is unmapped. Returns whether it is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let by = lock(&self.0.by);
        let by = self.0.change.wait_timeout_while(by, timeout, |by| by.is_none());
        by.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }

    /// Returns the thread that has unmapped the memory, once it is unmapped.
    pub fn unmapped_by(&self) -> Option<Thread> {
        lock(&self.0.by).clone()
    }
}
