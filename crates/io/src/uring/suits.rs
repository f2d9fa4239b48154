//! Files on which io_uring is slow.
//!
//! io_uring starts each operation without waiting, and where the file's driver cannot promise that (block devices in RAM,
//! some of the device mapper's, files on tmpfs) it hands every single one to a kernel thread. `io_submit` starts it in the caller: a
//! device in RAM, or tmpfs, is done with it by then, another one has it in its queue.

use crate::AlignedBuf;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, fstatfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// Whether io_uring would hand each operation on this file to a kernel thread, and `io_submit` would not wait for its end.
pub(super) fn aio_suits(file: &File) -> bool {
    const LEN: usize = 4096;
    let suits = || {
        let starts = match FileType::from_raw_mode(fstat(file)?.st_mode) {
            FileType::BlockDevice => true,
            // Other file systems that promise nothing wait for a disk or a network.
            FileType::RegularFile => fstatfs(file)?.f_type as u64 == TMPFS,
            _ => false,
        };
        Ok::<_, Errno>(starts && fcntl_getfl(file)?.contains(OFlags::DIRECT))
    };
    if suits() != Ok(true) {
        return false;
    }
    let Ok(mut buffer) = AlignedBuf::new(LEN, LEN) else { return false };
    let read = preadv2(file, &mut [IoSliceMut::new(&mut buffer)], 0, ReadWriteFlags::NOWAIT);
    read == Err(Errno::OPNOTSUPP)
}
