//! Remembers that the host has lost writes in its page cache.
//!
//! If the kernel cannot write a page of its cache to the disk, it still marks the page as clean. The data are
//! lost, and it does not try again. It reports that once to each open file description, by the next
//! `fdatasync` or durable write. All queues of a disk share one description. So the report to one queue hides
//! the loss from all others, and nothing shows how many writes are lost, or of which queue.
//!
//! So a failed flush of a file that uses the cache is final, as in QEMU (`page_cache_inconsistent` of
//! `block/file-posix.c`). From then on, each flush and each durable write of the disk fails, until the disk
//! is opened again. Neither a new front-end nor [`crate::DiskControl::reload`] ends that, because the same
//! guest may have come back. Direct I/O has no such pages: each flush reports its own errors, and nothing is
//! remembered, as in QEMU.
//!
//! # Why no flush misses a loss
//! Two flushes can be in the kernel at the same time, and only one of them gets the report. QEMU runs one
//! flush of a disk at a time. Here they run together, and each result is checked at its end. [`Writeback`]
//! has an open file description of its own, the witness, which nothing else uses.
//!
//! The kernel records a failure before it ends the write-back that a flush waits for. So at the end of a
//! flush, an earlier failure is in its result, or the witness reports it now, or the witness has reported it
//! before. In the last case it is latched: the witness is asked and the failure is latched under one lock,
//! and the latch is read after the lock was released. The same holds for a durable write, whose own pages may
//! be the lost ones.
//!
//! A failed durable write latches only the error that the witness reports. It may have failed before it
//! reached the cache (`ENOSPC`), and then no acknowledged write is lost.
//!
//! On overlayfs there is no witness, because the kernel asks an inode without pages there. There is none
//! without `/proc` either. Then each failed durable write is latched, and of two concurrent flushes one may
//! miss a loss.
//!
//! The witness is opened with the disk, and passes with it to the next process of the host. So does the
//! latched error. An earlier failure that was reported to no description is reported by the first flush.

use kickless_handover::{Fd, Giving};
use kickless_io::{Errno, writeback_error};
use kickless_opener::reopen;
use kickless_sync::lock;
use rustix::fs::fstatfs;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use tracing::Span;

/// The magic number of statfs(2).
const OVERLAYFS_MAGIC: u64 = 0x794c_7630;

/// The losses of writes of a file in the host's cache.
#[derive(Debug)]
pub(crate) struct Writeback {
    /// The open file description for reports of the kernel. `None` if the kernel has none for this file.
    /// Locked for each flush and each durable write, which take far longer.
    witness: Mutex<Option<File>>,
    /// The error that is latched, or 0.
    latched: AtomicI32,
    /// Identifies the disk in the log, because workers serve many disks.
    span: Span,
}

impl Writeback {
    /// Watches a file from now on. Later log lines about it belong to the current span.
    pub(crate) fn watch(file: &File) -> Self {
        let is_overlay = fstatfs(file).is_ok_and(|fs| fs.f_type as u64 == OVERLAYFS_MAGIC);
        let witness = if is_overlay { None } else { reopen(file.as_fd(), false, false).ok() };
        Self::of_witness(witness.map(|opened| opened.file))
    }

    /// Goes on for a process that has watched the file with this witness.
    pub(crate) fn of_witness(witness: Option<File>) -> Self {
        Self { witness: Mutex::new(witness), latched: AtomicI32::new(0), span: Span::current() }
    }

    /// Adds a duplicate of the witness, if there is one.
    pub(crate) fn give(&self, to: &mut Giving) -> io::Result<Option<Fd>> {
        lock(&self.witness).as_ref().map(|witness| to.fd(witness)).transpose()
    }

    /// Returns the number of the error that is latched, or 0.
    pub(crate) fn latched(&self) -> i32 {
        self.latched.load(Ordering::Acquire)
    }

    /// Latches the error that another process has latched. No flush is in flight.
    pub(crate) fn set_latched(&self, errno: i32) {
        self.latched.store(errno, Ordering::Release);
    }

    /// Returns whether the kernel reports each loss to an open file description of this disk alone.
    pub(crate) fn has_witness(&self) -> bool {
        lock(&self.witness).is_some()
    }

    /// Returns the final result of a flush, given its result in the kernel.
    pub(crate) fn flushed<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        if let Err(errno) = result {
            self.latch(errno);
        }
        self.written(result)
    }

    /// Returns the final result of a durable write, given its result in the kernel.
    pub(crate) fn written<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        let has_witness = self.check_witness();
        let bytes = result.inspect_err(|errno| {
            // The error need not come from the cache, but is final if there is no witness.
            if !has_witness && *errno != Errno::FAULT {
                self.latch(*errno);
            }
        })?;
        match self.latched() {
            0 => Ok(bytes),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Latches the error that the kernel reports to the witness. Returns `false` if there is no witness.
    fn check_witness(&self) -> bool {
        let witness = lock(&self.witness);
        if let Some(errno) = witness.as_ref().and_then(writeback_error) {
            self.latch(errno);
        }
        witness.is_some()
    }

    fn latch(&self, errno: Errno) {
        // Release. Partner: the load in `latched`, of a flush whose error was reported to another request.
        let set =
            self.latched.compare_exchange(0, errno.raw_os_error(), Ordering::Release, Ordering::Relaxed);
        if set.is_ok() {
            tracing::error!(
                parent: &self.span,
                %errno,
                "the host lost writes in its cache: flushes of this disk fail until the process is restarted"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A durable write that fails before it reaches the cache has no later effect, if the kernel can confirm
    /// that.
    #[test]
    fn a_failed_durable_write_is_final_without_a_witness() {
        let file = tempfile::tempfile().unwrap();
        for (witness, error, final_error) in [
            (true, Errno::NOSPC, None),
            (false, Errno::FAULT, None),
            (false, Errno::NOSPC, Some(Errno::NOSPC)),
        ] {
            let watched = Writeback::watch(&file);
            *watched.witness.lock().unwrap() = witness.then(|| file.try_clone().unwrap());
            assert_eq!(watched.written::<u32>(Err(error)), Err(error));
            let flushed = watched.flushed(Ok(0));
            assert_eq!(flushed, final_error.map_or(Ok(0), Err), "{witness} {error}");
        }
        let watched = Writeback::watch(&file);
        assert_eq!(watched.flushed::<u32>(Err(Errno::IO)), Err(Errno::IO));
        assert_eq!([watched.flushed(Ok(0)), watched.written(Ok(512))], [Err(Errno::IO); 2]);
    }
}
