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

/// Connects to a back-end and starts its queues. `*disk` is the disk, or null when this fails.
///
/// Fails with -ENOENT or -ECONNREFUSED if nobody listens, -ETIMEDOUT if the back-end does not answer, -EPROTO if it does not
/// keep to the protocol, -EOPNOTSUPP if it does not offer a feature that the options insist on, -E2BIG if the options set
/// something that this version of the library does not know.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_open(options: *const Options, disk: *mut *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation says.
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

/// Closes a disk, also for its queues and buffers, which are of no use any more but have to be closed and freed all the
/// same. Waits for what is in flight; null is left alone.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_close(disk: *mut Disk) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation says.
        if let Some(disk) = unsafe { pointer::take_back(disk)? } {
            disk.disk.close();
        }
        Ok(())
    });
}

/// Bytes of the disk. Asks the back-end if it has said that something changed.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_size(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation says.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        i64::try_from(disk.disk.size()?).map_err(|_| Fault::Overflow("the size of the disk"))
    })
}

/// Bytes of a logical block: what is best to read and write, not a limit.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_block_size(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation says.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        Ok(disk.disk.block_size()?.into())
    })
}

/// Most bytes that one read or write request can have in one piece of memory.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_length_max(disk: *mut Disk) -> i64 {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation says.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        i64::try_from(disk.disk.len_max()?).map_err(|_| Fault::Overflow("the length"))
    })
}

/// 1 if the disk can only be read, otherwise 0.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_is_read_only(disk: *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation says.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        Ok(disk.disk.blk_features().contains(BlkFeatures::RO).into())
    })
}

/// How many queues the disk has.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_queues(disk: *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation says.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        c_int::try_from(disk.disk.queues()).map_err(|_| Fault::Overflow("the number of queues"))
    })
}
