//! The part of the kernel's AIO interface (linux/aio_abi.h) that is used here.
#![expect(unsafe_code, reason = "island: system calls that no library wraps")]

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// Tries Linux AIO by doing an operation: a filter may forbid any of the calls, and a kernel may lack them.
pub(crate) fn try_one() -> io::Result<()> {
    let file = memfd_create(c"empty", MemfdFlags::CLOEXEC)?;
    let context = Context::open(1)?;
    let mut control = [Control { opcode: PREAD, fd: file.as_raw_fd(), ..Control::default() }];
    // SAFETY: it reads no byte.
    let taken = unsafe { context.submit(&mut control) }?;
    let done = context.events(true, &mut [Event::default()])?;
    if (taken, done) == (1, 1) { Ok(()) } else { Err(io::ErrorKind::Other.into()) }
}

/// The most operations in one call.
pub(crate) const BATCH: usize = 64;

/// `IOCB_CMD_*`.
pub(crate) const PREAD: u16 = 0;
pub(crate) const PWRITE: u16 = 1;
pub(crate) const PREADV: u16 = 7;
pub(crate) const PWRITEV: u16 = 8;
/// `IOCB_FLAG_RESFD`: the completion signals `event_fd`.
pub(crate) const SIGNAL_EVENT: u32 = 1;

/// `struct iocb`, on a little-endian machine.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Control {
    pub(crate) data: u64,
    pub(crate) key: u32,
    pub(crate) rw_flags: u32,
    pub(crate) opcode: u16,
    pub(crate) priority: i16,
    pub(crate) fd: RawFd,
    pub(crate) buf: u64,
    pub(crate) nbytes: u64,
    pub(crate) offset: u64,
    pub(crate) reserved: u64,
    pub(crate) flags: u32,
    pub(crate) event_fd: RawFd,
}

/// `struct io_event`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Event {
    pub(crate) data: u64,
    pub(crate) control: u64,
    pub(crate) result: i64,
    pub(crate) result2: i64,
}

/// An AIO context. Dropping it waits for the operations in flight.
#[derive(Debug)]
pub(crate) struct Context(libc::c_ulong);

impl Context {
    /// Opens a context for this many operations.
    pub(crate) fn open(depth: usize) -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one `aio_context_t` to the address in the second argument.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, depth as libc::c_uint, &raw mut context) };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(context)) }
    }

    /// Starts at most the first [`BATCH`] of these operations, in this order, up to one that the kernel
    /// cannot take. Returns the number that it took. An error is that of the first.
    ///
    /// # Safety
    /// The buffers that a control names must stay valid until its event has been taken. The kernel may write
    /// to those of a read.
    pub(crate) unsafe fn submit(&self, controls: &mut [Control]) -> Result<usize, Errno> {
        let mut pointers = [std::ptr::null_mut::<Control>(); BATCH];
        for (pointer, control) in pointers.iter_mut().zip(&mut *controls) {
            *pointer = control;
        }
        let count = controls.len().min(BATCH);
        // SAFETY: `count` pointers to controls, which the kernel copies before it returns; the buffers are
        // the caller's promise.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.0, count, pointers.as_ptr()) };
        usize::try_from(taken).map_err(|_| last_error())
    }

    /// Takes the events of completed operations, at least one if `wait`. Returns their number.
    pub(crate) fn events(&self, wait: bool, into: &mut [Event]) -> Result<usize, Errno> {
        let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = if wait { std::ptr::null() } else { &raw const no_time };
        let (least, most) = (libc::c_long::from(wait), into.len() as libc::c_long);
        // SAFETY: room for `most` events; the timeout, if there is one, lives until the call returns.
        let count =
            unsafe { libc::syscall(libc::SYS_io_getevents, self.0, least, most, into.as_mut_ptr(), timeout) };
        usize::try_from(count).map_err(|_| last_error())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this value owns the context, which is not used again.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
