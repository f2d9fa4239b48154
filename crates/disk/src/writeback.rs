//! Latches that the host has lost writes that were in its page cache.
//!
//! When the kernel cannot write a page of its cache to the disk, it marks the page as clean all the same: the data are lost, and it
//! does not try again. It reports that once to each open file description, by the next `fdatasync` or durable write. All queues of
//! a disk have one description in common. So the report of one queue hides the loss from all others, and nothing tells how
//! many writes are lost, or whose they are.
//!
//! So a failed flush of a file that goes through the cache is final, as it is in QEMU (`page_cache_inconsistent` of
//! `block/file-posix.c`): from then on each flush and each durable write of the disk fails, until the disk is opened anew. Neither
//! a new front-end nor [`crate::Disk::take_over`] ends that, for the same guest may have come back. Direct I/O has no such pages:
//! there each flush reports what it found itself, and nothing is latched, in QEMU as well.
//!
//! # Why no flush slips through
//! Two flushes can be in the kernel at the same time, and one of them takes the report. QEMU lets one flush of a disk run at a
//! time. Here they run together, and each has its result checked when it is over: [`Writeback`] holds a description of its own, the
//! witness, that nothing else uses. The kernel records a failure before it ends the write-back that a flush waits for. So when
//! a flush is over, an earlier failure is in its result, or the witness reports it now, or the witness has reported it before. In the
//! last case it is latched: the witness is asked and the failure is latched under one lock, and the latch is read after the lock
//! was released. The same holds for a durable write, whose own pages may be the lost ones.
//!
//! A failed durable write latches only what the witness reports. It may have failed before it reached the cache (`ENOSPC`), and
//! then nothing that was acknowledged is lost.
//!
//! On overlayfs there is no witness: the kernel asks an inode that has no pages there. Nor is there one without `/proc`. Each failed
//! durable write is latched then, and of two flushes that are in the kernel together one may slip through.
//!
//! The witness is opened with the disk. A failure from before, that no description was told of, is reported by the first flush.

use kickless_io::{Errno, writeback_error};
use rustix::fs::fstatfs;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use tracing::Span;

/// Magic number of statfs(2).
const OVERLAYFS_MAGIC: u64 = 0x794c_7630;

/// Whether the host has lost writes of a file that goes through its cache.
#[derive(Debug)]
pub(crate) struct Writeback {
    /// Locked for each flush and each durable write, which take far longer. `None`: the kernel cannot be asked.
    witness: Mutex<Option<File>>,
    /// The error that is latched, or 0.
    latched: AtomicI32,
    /// Names the disk in the log. Workers serve many.
    span: Span,
}

impl Writeback {
    /// Watches a file from now on. What is logged about it later belongs to the current span.
    pub(crate) fn watch(file: &File) -> Self {
        let is_overlay = fstatfs(file).is_ok_and(|fs| fs.f_type as u64 == OVERLAYFS_MAGIC);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let witness = if is_overlay { None } else { File::open(path).ok() };
        Self { witness: Mutex::new(witness), latched: AtomicI32::new(0), span: Span::current() }
    }

    /// Returns how a flush ends that ended like this in the kernel.
    pub(crate) fn flushed<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        if let Err(errno) = result {
            self.latch(errno);
        }
        self.written(result)
    }

    /// Returns how a durable write ends that ended like this in the kernel.
    pub(crate) fn written<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        let is_asked = self.ask();
        let bytes = result.inspect_err(|errno| {
            // It need not be the cache's, but is final where the kernel cannot be asked.
            if !is_asked && *errno != Errno::FAULT {
                self.latch(*errno);
            }
        })?;
        match self.latched.load(Ordering::Acquire) {
            0 => Ok(bytes),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Asks the kernel, and latches what it says. `false`: it cannot be asked.
    fn ask(&self) -> bool {
        let witness = self.witness.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = witness.as_ref().and_then(writeback_error) {
            self.latch(errno);
        }
        witness.is_some()
    }

    fn latch(&self, errno: Errno) {
        // Release: with the load in `written`, for a flush that finds the report taken by a result.
        let set =
            self.latched.compare_exchange(0, errno.raw_os_error(), Ordering::Release, Ordering::Relaxed);
        if set.is_ok() {
            tracing::error!(
                parent: &self.span,
                %errno,
                "the host could not write what was in its cache, and has lost it: flushes of this disk fail until the process is started again"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A durable write that fails before the cache has it leaves nothing behind, if the kernel can say so.
    #[test]
    fn a_failed_durable_write_is_final_where_the_kernel_cannot_be_asked() {
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
