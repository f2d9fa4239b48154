//! Checks whether the kernel provides a file's pages promptly.
//!
//! A worker that touches a missing page of guest memory waits until the kernel has provided it. Some file
//! systems get the page from a user's process (FUSE) or from another machine (NFS, CIFS, 9p, Ceph). That can
//! last for ever, and it stops all other devices of the worker. So only these files are mapped, unless the
//! operator allows others:
//!
//! | file | source of a page |
//! |---|---|
//! | memfd, tmpfs, ramfs, hugetlbfs | memory, where it is or is made, or swap |
//! | ext2, ext3, ext4, XFS, Btrfs, F2FS, bcachefs, ZFS, also with DAX | a disk of this machine |
//! | a device of DAX | the device's memory |
//!
//! The check has limits. The disk under a local file system, or under swap, can itself be remote or broken. A
//! file system can be frozen. Only an administrator can cause these. A front-end without privileges can mount
//! tmpfs, FUSE and overlayfs only. The other two are not in the list.
//!
//! Every front-end can delay an access to its own tmpfs or memfd for as long as the kernel takes to punch a
//! hole there. The worker finds that out afterwards (`stall` in `kickless-worker`).
//!
//! - *overlayfs* reports itself, not the file system that has its files. That can be FUSE, so overlayfs is
//!   not in the list.
//! - *virtiofs* is FUSE to the kernel.
//! - *`memfd_secret`* is not in the list. Its pages are in memory, but the kernel does no I/O to them.
//! - *dma-buf* (udmabuf) is not in the list: its exporter decides where the memory comes from.
//! - *userfaultfd* affects the process that registers its own mapping. Another process, such as ours, finds
//!   or makes the page without waiting.

use rustix::fs::{FileType, StatFs, fcntl_get_seals, fstat, fstatfs};
use std::io;
use std::os::fd::AsFd;

/// Prompt file systems: `f_type` of statfs(2), from `linux/magic.h` and, for OpenZFS, `sys/zfs_vfsops.h`.
const PROMPT_FILE_SYSTEMS: [(u64, &str); 9] = [
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0x9584_58f6, "hugetlbfs"),
    (0xef53, "ext"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0xf2f5_2010, "f2fs"),
    (0xca45_1a4e, "bcachefs"),
    (0x2fc1_2fc1, "zfs"),
];

/// File systems that are known not to be prompt, for the error message.
const SLOW_FILE_SYSTEMS: [(u64, &str); 10] = [
    (0x6573_5546, "FUSE"),
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x794c_7630, "overlayfs"),
    (0x5345_434d, "secretmem"),
    (0x0116_1970, "GFS2"),
];

/// The error for a file whose pages the kernel may provide late or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its file is {}, whose pages may never come: share a memfd or a file on tmpfs, hugetlbfs or a local disk, or set \
     allow-slow-memory",
    self.name()
)]
pub struct SlowFile {
    /// The file system's number from statfs(2), or `None` if the file is no regular file.
    pub magic: Option<u64>,
}

impl SlowFile {
    fn name(&self) -> String {
        let Some(magic) = self.magic else { return "neither a regular file nor DAX".into() };
        match SLOW_FILE_SYSTEMS.iter().find(|known| known.0 == magic) {
            Some((_, name)) => format!("on {name}"),
            None => format!("on a file system of type {magic:#x}"),
        }
    }
}

/// Checks whether the file's pages are provided promptly.
pub(crate) fn check(file: impl AsFd) -> io::Result<Result<(), SlowFile>> {
    // Only the kernel's own memory (memfd, tmpfs, hugetlbfs) can be sealed. This question involves no file
    // system.
    if fcntl_get_seals(&file).is_ok() {
        return Ok(Ok(()));
    }
    let StatFs { f_type, .. } = fstatfs(&file)?;
    let stat = fstat(&file)?;
    let dax = || kickless_opener::char_subsystem(stat.st_rdev).is_ok_and(|name| name == "dax");
    Ok(check_type(FileType::from_raw_mode(stat.st_mode), f_type as u64, dax))
}

fn check_type(kind: FileType, magic: u64, dax: impl FnOnce() -> bool) -> Result<(), SlowFile> {
    match kind {
        FileType::RegularFile if PROMPT_FILE_SYSTEMS.iter().any(|known| known.0 == magic) => Ok(()),
        FileType::RegularFile => Err(SlowFile { magic: Some(magic) }),
        FileType::CharacterDevice if dax() => Ok(()),
        _ => Err(SlowFile { magic: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn files_are_checked_by_their_file_system() {
        let of = |magic| check_type(FileType::RegularFile, magic, || panic!("no device"));
        for (magic, name) in PROMPT_FILE_SYSTEMS {
            assert_eq!(of(magic), Ok(()), "{name}");
        }
        for (magic, name) in SLOW_FILE_SYSTEMS {
            let slow = of(magic).unwrap_err();
            let said = slow.to_string();
            assert!(said.contains(&format!("on {name},")) && said.contains("allow-slow-memory"), "{said}");
        }
        assert!(of(0xabcd).unwrap_err().to_string().contains("type 0xabcd"));
    }

    #[test]
    fn dax_is_the_only_prompt_device() {
        // The node of a device is on a tmpfs.
        let tmpfs = PROMPT_FILE_SYSTEMS[0].0;
        assert_eq!(check_type(FileType::CharacterDevice, tmpfs, || true), Ok(()));
        assert_eq!(check_type(FileType::CharacterDevice, tmpfs, || false), Err(SlowFile { magic: None }));
        for kind in [FileType::Unknown, FileType::BlockDevice, FileType::Fifo, FileType::Socket] {
            assert_eq!(check_type(kind, tmpfs, || true), Err(SlowFile { magic: None }), "{kind:?}");
        }
    }

    #[test]
    fn real_files() {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 4096).unwrap();
        assert_eq!(check(&memory).unwrap(), Ok(()));
        assert_eq!(check(std::fs::File::open("/dev/zero").unwrap()).unwrap(), Err(SlowFile { magic: None }));
        let proc = check(std::fs::File::open("/proc/self/maps").unwrap()).unwrap().unwrap_err();
        assert_eq!(proc.magic, Some(0x9fa0));
    }
}
