//! Which files have their pages at hand.
//!
//! A worker that touches memory whose page is not there waits until the kernel has it. Where the kernel gets it from somebody else, a user's
//! process (FUSE) or another machine (NFS, CIFS, 9p, Ceph), that can last for ever, with all other devices of the worker. So only these
//! are mapped, unless the operator allows others:
//!
//! | | |
//! |---|---|
//! | memfd, tmpfs, ramfs, hugetlbfs | the page is in memory, is made there, or comes from swap |
//! | ext2, ext3, ext4, XFS, Btrfs, F2FS, bcachefs, ZFS, also with DAX | the page comes from a disk of this machine |
//! | a device of DAX | the page is the device's memory |
//!
//! What this does not see: the disk under a local file system, or under swap, can itself be far away or broken, and a file system can be frozen. Only
//! an administrator can make it so. A front-end cannot: without privileges it can mount tmpfs, FUSE and overlayfs, of which the
//! first is harmless and the others are not in the list.
//!
//! - *overlayfs* names itself, and not the file system that has its files. That can be FUSE, so it is not in the list.
//! - *virtiofs* is FUSE to the kernel.
//! - *`memfd_secret`* is not in the list. Its pages are at hand, but no I/O can be done to them.
//! - *dma-buf* (udmabuf) is not in the list: whose memory it is, the exporter decides.
//! - *userfaultfd* concerns the process that registers its own mapping. Another process, as we are, finds or makes the page without
//!   waiting.

use rustix::fs::{FileType, StatFs, fcntl_get_seals, fstat, fstatfs, major, minor};
use std::fs::read_link;
use std::io;
use std::os::fd::AsFd;

/// `f_type` of statfs(2), as `linux/magic.h` has them, and OpenZFS (`sys/zfs_vfsops.h`).
const AT_HAND: [(u64, &str); 9] = [
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

/// File systems that are known not to be, for the sentence that says so.
const NOT_AT_HAND: [(u64, &str); 10] = [
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

/// Refuses a file whose pages may be waited for without end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its file is {}, whose pages can take for ever to come: share a memfd or a file on tmpfs, hugetlbfs or a local disk, or say \
     allow-slow-memory",
    self.name()
)]
pub struct Slow {
    /// Its file system's number, as statfs(2) has it; `None`: it is no regular file.
    pub magic: Option<u64>,
}

impl Slow {
    fn name(&self) -> String {
        let Some(magic) = self.magic else { return "neither a regular file nor DAX".into() };
        match NOT_AT_HAND.iter().find(|known| known.0 == magic) {
            Some((_, name)) => format!("on {name}"),
            None => format!("on a file system of type {magic:#x}"),
        }
    }
}

/// Whether the file's pages are at hand.
pub(crate) fn check(file: impl AsFd) -> io::Result<Result<(), Slow>> {
    // Memory of the kernel's own (memfd, tmpfs, hugetlbfs), and nothing else, can be sealed. To ask that asks no file system.
    if fcntl_get_seals(&file).is_ok() {
        return Ok(Ok(()));
    }
    let StatFs { f_type, .. } = fstatfs(&file)?;
    let stat = fstat(&file)?;
    let dax = || {
        let (major, minor) = (major(stat.st_rdev), minor(stat.st_rdev));
        read_link(format!("/sys/dev/char/{major}:{minor}/subsystem")).is_ok_and(|bus| bus.ends_with("dax"))
    };
    Ok(judge(FileType::from_raw_mode(stat.st_mode), f_type as u64, dax))
}

fn judge(kind: FileType, magic: u64, dax: impl FnOnce() -> bool) -> Result<(), Slow> {
    match kind {
        FileType::RegularFile if AT_HAND.iter().any(|known| known.0 == magic) => Ok(()),
        FileType::RegularFile => Err(Slow { magic: Some(magic) }),
        FileType::CharacterDevice if dax() => Ok(()),
        _ => Err(Slow { magic: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn files_are_judged_by_their_file_system() {
        let of = |magic| judge(FileType::RegularFile, magic, || panic!("no device"));
        for (magic, name) in AT_HAND {
            assert_eq!(of(magic), Ok(()), "{name}");
        }
        for (magic, name) in NOT_AT_HAND {
            let slow = of(magic).unwrap_err();
            let said = slow.to_string();
            assert!(said.contains(&format!("on {name},")) && said.contains("allow-slow-memory"), "{said}");
        }
        assert!(of(0xabcd).unwrap_err().to_string().contains("type 0xabcd"));
    }

    #[test]
    fn of_devices_only_dax_is_at_hand() {
        // The device's node is on a tmpfs.
        let tmpfs = AT_HAND[0].0;
        assert_eq!(judge(FileType::CharacterDevice, tmpfs, || true), Ok(()));
        assert_eq!(judge(FileType::CharacterDevice, tmpfs, || false), Err(Slow { magic: None }));
        for kind in [FileType::Unknown, FileType::BlockDevice, FileType::Fifo, FileType::Socket] {
            assert_eq!(judge(kind, tmpfs, || true), Err(Slow { magic: None }), "{kind:?}");
        }
    }

    #[test]
    fn real_files() {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 4096).unwrap();
        assert_eq!(check(&memory).unwrap(), Ok(()));
        assert_eq!(check(std::fs::File::open("/dev/zero").unwrap()).unwrap(), Err(Slow { magic: None }));
        let proc = check(std::fs::File::open("/proc/self/maps").unwrap()).unwrap().unwrap_err();
        assert_eq!(proc.magic, Some(0x9fa0));
    }
}
