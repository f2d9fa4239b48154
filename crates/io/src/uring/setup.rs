//! Tries io_uring on this host, and makes a ring with the features that the kernel has.
#![expect(unsafe_code, reason = "island: a buffer handed to the kernel")]

use super::cancel::CANCELS_MAX;
use crate::{AlignedBuf, EngineOptions, Error};
use io_uring::{Builder, IoUring, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsRawFd;

/// Does one read with a small ring of its own. A sysctl or a filter may forbid any of the calls, and an old
/// kernel (before 5.6) fails the read itself.
pub(super) fn try_one() -> Result<(), Error> {
    let step = |step| move |source| Error::Uring { step, source };
    let ready = eventfd(1, EventfdFlags::CLOEXEC).map_err(|e| step("eventfd")(e.into()))?;
    let mut ring = IoUring::new(2).map_err(step("io_uring_setup"))?;
    let mut buf = AlignedBuf::new(8, 8).map_err(step("memory"))?;
    let (at, len) = buf.raw_window();
    let read = opcode::Read::new(types::Fd(ready.as_raw_fd()), at, len as u32).build();
    // SAFETY: `ready` and `buf` stay until the read has completed. If this cannot be known, `buf` is leaked.
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

/// The size of the submission ring. A longer batch takes more than one call.
const SUBMISSIONS_MAX: u32 = 256;

/// Requests features of a ring.
type Setup = fn(&mut Builder);

/// Makes a ring for this many operations in flight. Returns whether it is enabled already.
///
/// Each attempt omits a feature that the kernel lacked in the one before. 6.0 has rings of a single thread.
/// 5.19 has cooperative task work, which keeps completions from interrupting the worker. Deferred task work
/// (6.1) would go further, but a deferred completion does not wake a thread that waits for the ring with
/// epoll (seen in 6.18).
pub(super) fn make(options: &EngineOptions) -> Result<(IoUring, bool), Error> {
    let attempts: [(Setup, bool); 3] = [
        (
            |builder| {
                builder
                    .setup_single_issuer()
                    .setup_coop_taskrun()
                    .setup_taskrun_flag()
                    .setup_submit_all()
                    // The ring belongs to the thread that enables it, not to the one that makes it.
                    .setup_r_disabled();
            },
            false,
        ),
        (
            |builder| {
                builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
            },
            true,
        ),
        (|_| {}, true),
    ];
    let mut refused = None;
    for (setup, enabled) in attempts {
        let mut builder = IoUring::builder();
        let total = options.shares().total() as u32;
        let depth = total.next_power_of_two();
        // There is room for each completion, so that none overflows. A child process has no use for the
        // rings.
        builder.setup_clamp().setup_cqsize((total + CANCELS_MAX).next_power_of_two()).dontfork();
        setup(&mut builder);
        match builder.build(depth.min(SUBMISSIONS_MAX)) {
            Ok(ring) => return Ok((ring, enabled)),
            Err(e) => refused = Some(e),
        }
    }
    Err(Error::Uring {
        step: "io_uring_setup",
        source: refused.unwrap_or_else(|| io::ErrorKind::Unsupported.into()),
    })
}
