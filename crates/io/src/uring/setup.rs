//! Tries io_uring on this host, and makes a ring with the features that the kernel has.
#![expect(unsafe_code, reason = "island: a buffer handed to the kernel")]

use super::cancel::CANCELS_MAX;
use crate::error::SETUP;
use crate::{AlignedBuf, EngineOptions, Error};
use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsRawFd;

/// Does one read with a small ring of its own. A sysctl or a filter may forbid any of the calls, and an old
/// kernel (before 5.6) fails the read itself.
pub(super) fn try_one() -> Result<(), Error> {
    let step = |step| move |source| Error::Uring { step, source };
    let ready = eventfd(1, EventfdFlags::CLOEXEC).map_err(|e| step("eventfd")(e.into()))?;
    let mut ring = IoUring::new(2).map_err(step(SETUP))?;
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

/// Makes a ring for this many operations in flight. It belongs to the thread that enables it.
///
/// Each attempt omits a feature that the kernel lacked in the one before. 6.0 has rings of a single thread.
/// 5.19 has cooperative task work, which keeps completions from interrupting the worker. Deferred task work
/// (6.1) would go further, but a deferred completion does not wake a thread that waits for the ring with
/// epoll (seen in 6.18).
pub(super) fn make(options: &EngineOptions) -> Result<IoUring, Error> {
    let attempts: [Setup; 3] = [
        |builder| {
            builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        },
        |_| {},
    ];
    let mut refused = None;
    for setup in attempts {
        let mut builder = IoUring::builder();
        let total = options.shares().total() as u32;
        let depth = total.next_power_of_two();
        // There is room for each completion, so that none overflows. A child process has no use for the
        // rings. Only a disabled ring takes restrictions.
        builder
            .setup_clamp()
            .setup_cqsize((total + CANCELS_MAX).next_power_of_two())
            .setup_r_disabled()
            .dontfork();
        setup(&mut builder);
        match builder.build(depth.min(SUBMISSIONS_MAX)) {
            Ok(ring) => return Ok(ring),
            Err(e) => refused = Some(e),
        }
    }
    Err(Error::Uring { step: SETUP, source: refused.unwrap_or_else(|| io::ErrorKind::Unsupported.into()) })
}

/// `IORING_UNREGISTER_FILES` and `IORING_REGISTER_FILES_UPDATE`.
const REGISTER_OPS: [u8; 2] = [3, 6];
/// The operations that `entry.rs` and `cancel.rs` make.
const OPERATIONS: [u8; 5] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::AsyncCancel::CODE,
];

/// Restricts a ring to the operations of an engine, as long as it exists. Code that a guest has taken over
/// can then open or connect nothing by the ring. The ring gets no other resources than it has.
pub(super) fn restrict(ring: &IoUring) -> Result<(), Error> {
    let register = REGISTER_OPS.map(Restriction::register_op);
    let operations = OPERATIONS.map(Restriction::sqe_op);
    let flags = [Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits())];
    let mut restrictions: Vec<_> = register.into_iter().chain(operations).chain(flags).collect();
    let restricted = ring.submitter().register_restrictions(&mut restrictions);
    restricted.map_err(|source| Error::Uring { step: "restrictions", source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineKind;
    use crate::uring::Uring;
    use rustix::event::epoll;

    /// Returns the result of an operation.
    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: no entry of these tests has a buffer.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn rings_refuse_all_that_engines_do_not_use() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let ring = &mut Uring::open(&EngineOptions::new(EngineKind::Uring, 8), &epoll).unwrap().ring;
        ring.submitter().register_enable_rings().unwrap();

        let zero = std::fs::File::open("/dev/zero").unwrap();
        let file = types::Fd(zero.as_raw_fd());
        let read = || opcode::Read::new(file, std::ptr::null_mut(), 0).build();
        assert_eq!(result(ring, read()), 0);
        // Nothing has this number.
        let cancelled = result(ring, opcode::AsyncCancel::new(7).build());
        assert_eq!(cancelled, -libc::ENOENT);

        let path = c"/dev/zero".as_ptr();
        let refused = [
            opcode::Nop::new().build(),
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
            opcode::Close::new(types::Fd(-1)).build(),
            opcode::Fsync::new(file).build(),
            read().flags(squeue::Flags::IO_LINK),
            read().flags(squeue::Flags::ASYNC),
        ];
        for entry in refused {
            let text = format!("{entry:?}");
            assert_eq!(result(ring, entry), -libc::EACCES, "{text}");
        }

        let submitter = ring.submitter();
        submitter.register_files_update(0, &[zero.as_raw_fd()]).unwrap();
        submitter.unregister_files().unwrap();
        let refused = [
            submitter.register_files(&[zero.as_raw_fd()]),
            submitter.register_eventfd(zero.as_raw_fd()),
            submitter.register_restrictions(&mut [Restriction::sqe_op(opcode::Nop::CODE)]),
            // SAFETY: there is no buffer.
            unsafe { submitter.register_buffers(&[]) },
            submitter.register_personality().map(drop),
        ];
        for result in refused {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EACCES));
        }
        assert_eq!(result(ring, opcode::Nop::new().build()), -libc::EACCES);
    }
}
