//! The features of a disk, and the functions that run a request and wait for it, in C.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::ffi::{c_char, c_int, c_void};

use driver::{Data, Kind};
use kickless_spec::blk::{BlkFeatures, ID_LEN};

use crate::disk::Disk;
use crate::error::{Fault, guard};
use crate::pointer;
use crate::request::{self, Request};

/// The number of bytes that kl_disk_get_id() needs, with the terminating zero.
pub const KL_ID_SIZE: usize = 21;

const _: () = assert!(KL_ID_SIZE == ID_LEN + 1);

/// Returns 1 if the back-end offers requests of this kind, KL_READ to KL_GET_ID, otherwise 0.
///
/// A disk without flushes has no write cache, so every completed write is durable.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_offers(disk: *mut Disk, kind: u32) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        let features = disk.disk.blk_features();
        let writable = !features.contains(BlkFeatures::RO);
        let offers = match request::kind(kind)? {
            Kind::Read | Kind::GetId => true,
            Kind::Write => writable,
            Kind::Flush => features.contains(BlkFeatures::FLUSH),
            Kind::Discard => writable && features.contains(BlkFeatures::DISCARD),
            Kind::WriteZeroes => writable && features.contains(BlkFeatures::WRITE_ZEROES),
        };
        Ok(offers.into())
    })
}

/// Reads `len` bytes from `offset` on, all or none, by copies. `into` is not memory of a kl_buffer; for that,
/// use kl_disk_run().
///
/// Fails with -EINVAL if the range is invalid, -EIO if the device reports an error. Then the content of
/// `into` is undefined.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_read(disk: *mut Disk, into: *mut c_void, len: usize, offset: u64) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let (disk, place) =
            unsafe { (pointer::reference(disk, "disk")?, pointer::room(into.cast::<u8>(), len, "into")?) };
        // SAFETY: C's memory has valid bytes, and they are only written to.
        let bytes = unsafe { place.assume_init_mut() };
        disk.disk.read_at(bytes, offset)?;
        Ok(0)
    })
}

/// Writes `len` bytes from `offset` on, by copies. `from` is not memory of a kl_buffer; for that, use
/// kl_disk_run().
///
/// Fails with -EINVAL if the range is invalid, -EROFS if the disk is read-only, -EIO if the device reports an
/// error. Then the content of this range on the disk is undefined.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_write(
    disk: *mut Disk,
    from: *const c_void,
    len: usize,
    offset: u64,
) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let (disk, bytes) =
            unsafe { (pointer::reference(disk, "disk")?, pointer::array(from.cast::<u8>(), len, "from")?) };
        disk.disk.write_at(bytes, offset)?;
        Ok(0)
    })
}

/// Makes all completed writes durable. Without a write cache, does nothing.
///
/// Fails with -EIO if the device reports an error.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_flush(disk: *mut Disk) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        disk.disk.flush()?;
        Ok(0)
    })
}

/// Discards `len` bytes from `offset` on. Later reads of them return unknown data.
///
/// Fails with -EINVAL if the range is invalid, -EROFS if the disk is read-only, -EOPNOTSUPP if the back-end
/// does not offer this, -EIO if the device reports an error.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_discard(disk: *mut Disk, offset: u64, len: u64) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        disk.disk.discard(offset, len)?;
        Ok(0)
    })
}

/// Makes `len` bytes from `offset` on read as zeroes. `flags` is 0, or KL_UNMAP: the disk may free their
/// space.
///
/// Fails as kl_disk_discard() does.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_write_zeroes(disk: *mut Disk, offset: u64, len: u64, flags: u32) -> c_int {
    guard(|| {
        // SAFETY: a pointer as the crate's documentation requires.
        let disk = unsafe { pointer::reference(disk, "disk")? };
        if flags & !request::KL_UNMAP != 0 {
            return Err(Fault::Argument("flags must be 0 or KL_UNMAP"));
        }
        disk.disk.write_zeroes(offset, len, flags == request::KL_UNMAP)?;
        Ok(0)
    })
}

/// Writes the disk's identity string to `id`, with a terminating zero. `size` is KL_ID_SIZE or more. Returns
/// the length of the string.
///
/// Fails with -EIO if the device reports an error, -EOPNOTSUPP if it has no identity.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_get_id(disk: *mut Disk, id: *mut c_char, size: usize) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let (disk, place) =
            unsafe { (pointer::reference(disk, "disk")?, pointer::room(id.cast::<u8>(), size, "id")?) };
        if size < KL_ID_SIZE {
            return Err(Fault::Argument("size is less than KL_ID_SIZE"));
        }
        let data = disk.disk.run(driver::Request::get_id(disk.disk.buffer(ID_LEN)?))?;
        let mut text = [0; KL_ID_SIZE];
        if let Data::One(buffer) = data {
            buffer.read(0, text.get_mut(..ID_LEN).unwrap_or_default());
        }
        let len = text.iter().position(|byte| *byte == 0).unwrap_or(ID_LEN);
        for (place, byte) in place.iter_mut().zip(text) {
            place.write(byte);
        }
        c_int::try_from(len).map_err(|_| Fault::Overflow("the length of the string"))
    })
}

/// Runs one request on shared memory, without copies. Waits for room in a queue, and then until the request
/// is done. Ignores the cookie.
///
/// Fails with -EINVAL if the request is invalid, -EROFS if it would change a read-only disk, -EOPNOTSUPP if
/// the back-end does not offer its kind, -EIO if the device reports an error.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_disk_run(disk: *mut Disk, request: *const Request) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let (disk, request) = unsafe {
            let request = pointer::reference(request, "request")?;
            (pointer::reference(disk, "disk")?, request.convert(Vec::new)?)
        };
        disk.disk.run(request)?;
        Ok(0)
    })
}
