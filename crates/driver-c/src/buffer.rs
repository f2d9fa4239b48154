//! Memory shared with the back-end, in C.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;

use driver::Registered;

use crate::disk::Disk;
use crate::error::{Fault, guard};
use crate::pointer;

/// Memory shared with the back-end, which requests use without a copy.
pub struct Buffer(Memory);

enum Memory {
    /// A piece of the disk's own shared memory.
    Own(driver::SharedBuffer),
    /// The caller's memory, and the disk that it is registered with.
    Registered(Registered, driver::Disk),
}

impl Buffer {
    /// Returns `len` bytes from `offset` on.
    #[inline]
    pub(crate) fn piece(&self, offset: u64, len: u64) -> Result<driver::Buffer, Fault> {
        let piece = match (&self.0, u32::try_from(len)) {
            (_, Err(_)) => None,
            (Memory::Own(memory), Ok(len)) => memory.buffer(offset, len),
            (Memory::Registered(memory, _), Ok(len)) => memory.buffer(offset, len),
        };
        piece.ok_or(Fault::Argument("a request names bytes beyond the end of its buffer"))
    }
}

/// Allocates `len` bytes of the disk's shared memory, whose size is kl_options.buffer_memory. They begin on a
/// page, and their content is undefined.
///
/// Fails with -ENOMEM if no free piece of that length is left.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_buffer_alloc(disk: *mut Disk, len: usize, buffer: *mut *mut Buffer) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let disk = unsafe {
            pointer::put(buffer, ptr::null_mut(), "buffer")?;
            pointer::reference(disk, "disk")?
        };
        let memory = Memory::Own(disk.disk.buffer(len)?.share());
        // SAFETY: as above.
        unsafe { pointer::put(buffer, pointer::handle(Buffer(memory)), "buffer")? };
        Ok(0)
    })
}

/// Shares memory of the caller: `len` bytes from `offset` on of a file that can be mapped, such as a memfd.
///
/// Both numbers are multiples of a page. The descriptor can be closed afterwards. kl_buffer_data returns
/// where this library has mapped the memory.
///
/// The back-end accepts a limited number of such regions, often only 7. So register one large region instead
/// of many small ones. If the back-end can only replace the whole table of regions, this function waits until
/// nothing is in flight.
///
/// Fails with -ENOSPC if the back-end accepts no more regions, -EINVAL if the file is too short, -EBADF if it
/// is not open, or with the kernel's error if it cannot be mapped.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_buffer_register(
    disk: *mut Disk,
    fd: c_int,
    offset: u64,
    len: u64,
    buffer: *mut *mut Buffer,
) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let disk = unsafe {
            pointer::put(buffer, ptr::null_mut(), "buffer")?;
            pointer::reference(disk, "disk")?
        };
        if fd < 0 {
            return Err(Fault::Argument("fd is negative"));
        }
        // SAFETY: the descriptor is not -1. The kernel checks that it is open when it is duplicated, and the
        // caller does not close it meanwhile.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let memory = Memory::Registered(disk.disk.register(file, offset, len)?, disk.disk.clone());
        // SAFETY: as above.
        unsafe { pointer::put(buffer, pointer::handle(Buffer(memory)), "buffer")? };
        Ok(0)
    })
}

/// Returns the address of the buffer's bytes in this process; null for null. They must not be used after
/// kl_buffer_free.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_buffer_data(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: a pointer as the crate's documentation requires.
    match unsafe { pointer::reference(buffer, "buffer") } {
        Ok(Buffer(Memory::Own(memory))) => memory.as_ptr().as_ptr().cast(),
        Ok(Buffer(Memory::Registered(memory, _))) => memory.as_ptr().as_ptr().cast(),
        Err(_) => ptr::null_mut(),
    }
}

/// Returns the number of the buffer's bytes; 0 for null.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_buffer_size(buffer: *mut Buffer) -> usize {
    // SAFETY: a pointer as the crate's documentation requires.
    match unsafe { pointer::reference(buffer, "buffer") } {
        Ok(Buffer(Memory::Own(memory))) => memory.capacity(),
        Ok(Buffer(Memory::Registered(memory, _))) => usize::try_from(memory.len()).unwrap_or(usize::MAX),
        Err(_) => 0,
    }
}

/// Frees a buffer or stops sharing it. Ignores null.
///
/// Requests in flight go on and keep the memory as long as they need it. Registered memory is removed from
/// the back-end at once, or with the next registration if requests still use it.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_buffer_free(buffer: *mut Buffer) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation requires.
        let buffer = unsafe { pointer::take_back(buffer)? };
        if let Some(Buffer(Memory::Registered(memory, disk))) = buffer.map(|buffer| *buffer) {
            // If the disk is dead, there is no back-end to tell.
            let _ = disk.unregister(memory);
        }
        Ok(())
    });
}
