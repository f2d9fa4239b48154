//! System calls that do an operation and wait for it.
#![expect(unsafe_code, reason = "island: buffers handed to the kernel")]

use crate::files::Files;
use crate::op::{KernelBuffers, OpKind, RangeSyscall};
use crate::operations::in_flight::InFlight;
use rustix::io::Errno;
use rustix::ioctl::opcode;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Requests of linux/fs.h.
const BLKDISCARD: u32 = opcode::none(0x12, 119);
const BLKZEROOUT: u32 = opcode::none(0x12, 127);

/// An operation that stays in its slot, described for another thread.
#[derive(Debug)]
pub(crate) struct BlockingOp {
    pub(crate) op_slot: u32,
    pub(crate) owner: u32,
    file: Arc<File>,
    kind: OpKind,
    offset: u64,
    /// The address of the memory or, if `segments` is set, of the segments that describe it.
    at: usize,
    len: usize,
    segments: bool,
}

impl BlockingOp {
    /// Describes the operation in `op_slot`, which stays unchanged until this is done. Returns `None` if it
    /// has no file.
    pub(crate) fn of(op_slot: u32, operation: &mut InFlight, files: &Files) -> Option<Self> {
        let file = files.get(operation.held)?.0.clone();
        let (kind, offset, owner) = (operation.op.kind, operation.op.offset, operation.held.owner());
        let (at, len, segments) = match operation.view() {
            KernelBuffers::One(at, len) => (at.expose_provenance(), len, false),
            KernelBuffers::Many(at, count) => (at.expose_provenance(), count, true),
        };
        Some(Self { op_slot, owner, file, kind, offset, at, len, segments })
    }

    /// Does the operation, and waits for it.
    pub(crate) fn perform(self) -> Result<u32, Errno> {
        match self.kind {
            OpKind::Read | OpKind::Write { .. } => {
                let view = if self.segments {
                    KernelBuffers::Many(std::ptr::with_exposed_provenance(self.at), self.len)
                } else {
                    KernelBuffers::One(std::ptr::with_exposed_provenance_mut(self.at), self.len)
                };
                transfer(&self.file, self.kind, self.offset, &view)
            }
            OpKind::Flush => {
                // SAFETY: no memory is passed.
                if unsafe { libc::fdatasync(self.file.as_raw_fd()) } == 0 { Ok(0) } else { Err(last_error()) }
            }
            OpKind::Range { syscall, len } => on_range(self.file.as_raw_fd(), syscall, self.offset, len),
        }
    }
}

/// Transfers bytes between a file and memory that an operation keeps, and waits for it.
fn transfer(file: &File, kind: OpKind, offset: u64, view: &KernelBuffers) -> Result<u32, Errno> {
    let fd = file.as_raw_fd();
    // The kernel refuses larger offsets as invalid.
    let Ok(offset) = libc::off_t::try_from(offset) else { return Err(Errno::INVAL) };
    let one;
    let (segments, count) = match *view {
        KernelBuffers::One(at, len) => {
            one = libc::iovec { iov_base: at.cast(), iov_len: len };
            (&raw const one, 1)
        }
        KernelBuffers::Many(segments, count) => (segments, count as i32),
    };
    let flags = if kind == (OpKind::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
    // SAFETY: the operation owns the buffers, and stays in its slot unchanged until the call has returned.
    // Concurrent accesses to guest memory are between their authors and the kernel.
    let result = unsafe {
        match kind {
            OpKind::Read => libc::preadv2(fd, segments, count, offset, 0),
            _ => libc::pwritev2(fd, segments, count, offset, flags),
        }
    };
    match result {
        // At most 0x7fff_f000.
        bytes @ 0.. => Ok(bytes as u32),
        _ => Err(last_error()),
    }
}

/// Changes a range, and waits for it.
fn on_range(fd: RawFd, syscall: RangeSyscall, offset: u64, len: u64) -> Result<u32, Errno> {
    let Ok(at) = libc::off_t::try_from(offset) else { return Err(Errno::INVAL) };
    let result = if let Some(mode) = syscall.mode() {
        let Ok(len) = libc::off_t::try_from(len) else { return Err(Errno::INVAL) };
        // SAFETY: no memory is passed.
        unsafe { libc::fallocate(fd, mode, at, len) }
    } else {
        let request = if syscall == RangeSyscall::DeviceDiscard { BLKDISCARD } else { BLKZEROOUT };
        let range = [offset, len];
        // SAFETY: both calls read two 64-bit numbers there, for any kind of file: other kinds do not know
        // these requests.
        unsafe { libc::ioctl(fd, request as libc::Ioctl, range.as_ptr()) }
    };
    if result == 0 { Ok(0) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
