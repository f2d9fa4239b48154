//! Whether io_uring works here.
#![expect(unsafe_code, reason = "island: a buffer handed to the kernel")]

use crate::{AlignedBuf, Error};
use io_uring::{IoUring, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsRawFd;

/// Does one read with a small ring of its own. A sysctl or a filter may forbid any of the calls that takes,
/// and an old kernel (before 5.6) fails the read itself.
pub(super) fn try_one() -> Result<(), Error> {
    let step = |step| move |source| Error::Uring { step, source };
    let ready = eventfd(1, EventfdFlags::CLOEXEC).map_err(|e| step("eventfd")(e.into()))?;
    let mut ring = IoUring::new(2).map_err(step("io_uring_setup"))?;
    let mut buf = AlignedBuf::new(8, 8).map_err(step("memory"))?;
    let (at, len) = buf.raw_window();
    let read = opcode::Read::new(types::Fd(ready.as_raw_fd()), at, len as u32).build();
    // SAFETY: `ready` and `buf` stay until the read has completed; where that cannot be seen, `buf` is leaked.
    let pushed = unsafe { ring.submission().push(&read) };
    debug_assert!(pushed.is_ok());
    let result = loop {
        if let Some(done) = ring.completion().next() {
            break done.result();
        }
        match ring.submit_and_wait(1) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => {
                std::mem::forget(buf);
                return Err(step("io_uring_enter")(e));
            }
            _ => {}
        }
    };
    match result {
        8 => Ok(()),
        errno @ ..0 => Err(step("a read")(Errno::from_raw_os_error(-errno).into())),
        _ => Err(step("a read")(io::ErrorKind::UnexpectedEof.into())),
    }
}
