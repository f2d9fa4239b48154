//! A disk, in C.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::ffi::c_int;
use std::ptr;

use kickless_spec::blk::BlkFeatures;

use crate::error::{Fault, guard};
use crate::options::Options;
use crate::pointer;

/// A virtio-blk disk behind a vhost-user back-end.
pub struct Disk {
    pub(crate) disk: driver::Disk,
    pub(crate) queue_size: u16,
}

/// Connects to a back-end and starts its queues. `*disk` is the disk, or null on failure.
///
/// Fails with -ENOENT or -ECONNREFUSED if no back-end listens, -ETIMEDOUT if the back-end does not reply,
/// -EPROTO if it breaks the protocol, -EPROTOTYPE if it serves a network card, -EOPNOTSUPP if it lacks a
/// feature that the options require, -E2BIG if the options set a member that this version of the library
/// does not know.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_open(options: *const Options, disk: *mut *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let options = unsafe {
            pointer::put(disk, ptr::null_mut(), "disk")?;
            Options::read(options)?
        };
        let queue_size = options.queue_size;
        let opened = Disk { disk: driver::Disk::connect(options)?, queue_size };
        // SAFETY: as above.
        unsafe { pointer::put(disk, pointer::handle(opened), "disk")? };
        Ok(0)
    })
}

/// Closes a disk. Its queues accept no requests afterwards. Ignores null.
///
/// Waits for the requests in flight. The handles of the queues and buffers must still be closed and freed.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_close(disk: *mut Disk) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation requires.
        if let Some(disk) = unsafe { pointer::take_back(disk)? } {
            disk.disk.close();
        }
        Ok(())
    });
}

/// Returns the size of the disk in bytes. Asks the back-end if it has reported a change.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_size(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        i64::try_from(disk.disk.size()?).map_err(|_| Fault::Overflow("the size of the disk"))
    })
}

/// Returns the size of a logical block in bytes. Transfers of whole blocks are fastest, but not required.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_block_size(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        Ok(disk.disk.block_size()?.into())
    })
}

/// Returns the largest length in bytes of a read or write with one piece of memory.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_length_max(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        i64::try_from(disk.disk.len_max()?).map_err(|_| Fault::Overflow("the length"))
    })
}

/// Returns 1 if the disk is read-only, otherwise 0.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_is_read_only(disk: *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        Ok(disk.disk.blk_features().contains(BlkFeatures::RO).into())
    })
}

/// Returns the number of queues of the disk.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_queues(disk: *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        c_int::try_from(disk.disk.queues()).map_err(|_| Fault::Overflow("the number of queues"))
    })
}
