//! The call that submits, for the thread beside the worker.
#![expect(unsafe_code, reason = "island: a system call that no library wraps for another thread")]

use crate::submit_thread::handover::Submission;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// A call of `io_uring_enter` for the entries in the submission ring.
#[derive(Clone)]
pub(super) struct Enter {
    pub(super) ring: Arc<OwnedFd>,
    pub(super) count: u32,
}

impl Submission for Enter {
    type Result = Result<usize, Errno>;

    fn run(&mut self) -> Self::Result {
        let (ring, count) = (self.ring.as_raw_fd(), self.count);
        let none = std::ptr::null::<libc::sigset_t>();
        // SAFETY: the descriptor is a ring's, and no set of signals is passed. The memory of its entries was
        // promised when they were pushed.
        let taken = unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, count, 0, 0, none, 0) };
        usize::try_from(taken)
            .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}
