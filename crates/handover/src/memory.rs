//! The memory in which a long record passes: a memfd that no process can change any more.

use crate::error::Error;
use crate::record::{HEAD_LEN, LEN_MAX};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{Errno, pread, write};
use std::os::fd::{BorrowedFd, OwnedFd};

/// The changes that are impossible, that of the seals too.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// Makes memory with these bytes.
///
/// # Errors
/// The kernel has no memory or descriptor for it.
pub(crate) fn seal(bytes: &[u8]) -> Result<OwnedFd, Error> {
    let memory = memfd_create("kickless-handover", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        match write(&memory, rest) {
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    fcntl_add_seals(&memory, SEALS)?;
    Ok(memory)
}

/// Returns a copy of the bytes of sealed memory. They come from another process.
///
/// # Errors
/// It is not sealed, or too long.
pub(crate) fn read(memory: BorrowedFd<'_>) -> Result<Vec<u8>, Error> {
    // Only memory has seals, so this is not a file or a socket that never answers.
    if !fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(Error::NotSealed);
    }
    let len = u64::try_from(fstat(memory)?.st_size).unwrap_or(u64::MAX);
    if len > LEN_MAX || len < HEAD_LEN as u64 {
        return Err(Error::TooLong { part: "memory", len, max: LEN_MAX });
    }
    let mut bytes = vec![0; len as usize];
    let mut at = 0;
    while at < bytes.len() {
        match pread(memory, &mut bytes[at..], at as u64) {
            Ok(0) => return Err(Error::Length),
            Ok(read) => at += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::ftruncate;
    use std::os::fd::AsFd;

    #[test]
    fn only_sealed_memory_is_read() {
        let bytes = vec![7; 100_000];
        let memory = seal(&bytes).unwrap();
        assert_eq!(read(memory.as_fd()).unwrap(), bytes);
        assert!(write(&memory, b"x").is_err() && ftruncate(&memory, 1).is_err());
        let open = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        write(&open, &bytes).unwrap();
        assert!(matches!(read(open.as_fd()), Err(Error::NotSealed)));
        fcntl_add_seals(&open, SEALS - SealFlags::WRITE).unwrap();
        assert!(matches!(read(open.as_fd()), Err(Error::NotSealed)));
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert!(matches!(read(pipe.as_fd()), Err(Error::NotSealed)));
    }

    #[test]
    fn memory_that_is_too_long_is_not_read() {
        let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, LEN_MAX + 1).unwrap();
        fcntl_add_seals(&memory, SEALS).unwrap();
        assert!(matches!(read(memory.as_fd()), Err(Error::TooLong { .. })));
        assert!(matches!(read(seal(b"short").unwrap().as_fd()), Err(Error::TooLong { .. })));
    }
}
