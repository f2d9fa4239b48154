//! Asks the kernel whether writing a file's cache to the disk has failed.
#![expect(unsafe_code, reason = "island: a system call without a safe wrapper")]

use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};

/// An offset at which no file has pages, so the call waits for nothing.
const BEHIND_ALL: i64 = i64::MAX - 0xffff;

/// Returns the error of a write-back that failed since the last report to this open file description.
///
/// The kernel reports a failure once to each open file description. The call neither writes nor waits. It
/// also returns `None` if the kernel cannot be asked.
pub fn writeback_error(file: impl AsFd) -> Option<Errno> {
    let file = file.as_fd().as_raw_fd();
    // SAFETY: no memory is passed, and the descriptor is open: it is borrowed.
    let failed =
        unsafe { libc::sync_file_range(file, BEHIND_ALL, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) } != 0;
    let errno =
        failed.then(|| std::io::Error::last_os_error().raw_os_error().map(Errno::from_raw_os_error))??;
    let unable = [Errno::INVAL, Errno::SPIPE, Errno::NOSYS, Errno::PERM, Errno::BADF, Errno::INTR];
    (!unable.contains(&errno)).then_some(errno)
}
