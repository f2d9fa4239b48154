//! Rules of landlock: the paths that a process can use.
//!
//! The kernel's interface has versions (ABI), which add rights that a ruleset can handle. A right that is
//! handled is refused unless a rule allows it. A right that this kernel does not know stays allowed.
#![expect(unsafe_code, reason = "island: three system calls that no library has")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr;

use bitflags::bitflags;
use libc::{c_int, c_long};
use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::error::Error;

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: c_int = 1;

bitflags! {
    /// Rights of files, and of all files below a directory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u64 {
        /// Starts a file as a program.
        const EXECUTE = 1 << 0;
        /// Opens a file for writing.
        const WRITE_FILE = 1 << 1;
        /// Opens a file for reading.
        const READ_FILE = 1 << 2;
        /// Opens a directory for reading.
        const READ_DIR = 1 << 3;
        /// Removes a directory.
        const REMOVE_DIR = 1 << 4;
        /// Removes a file.
        const REMOVE_FILE = 1 << 5;
        /// Makes a character device.
        const MAKE_CHAR = 1 << 6;
        /// Makes a directory.
        const MAKE_DIR = 1 << 7;
        /// Makes a file.
        const MAKE_REG = 1 << 8;
        /// Makes a socket.
        const MAKE_SOCK = 1 << 9;
        /// Makes a pipe.
        const MAKE_FIFO = 1 << 10;
        /// Makes a block device.
        const MAKE_BLOCK = 1 << 11;
        /// Makes a symbolic link.
        const MAKE_SYM = 1 << 12;
        /// Moves or links a file to another directory (ABI 2, Linux 5.19).
        const REFER = 1 << 13;
        /// Changes the size of a file (ABI 3, Linux 6.2).
        const TRUNCATE = 1 << 14;
        /// Uses ioctls of devices (ABI 5, Linux 6.10).
        const IOCTL_DEV = 1 << 15;
    }
}

/// TCP of a restricted process. Sockets that exist can be used all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tcp {
    /// It can connect to servers, and cannot be one.
    Connect,
    /// It can neither connect nor be a server.
    Nothing,
}

/// The rights that a ruleset handles (linux/landlock.h). Kernels take a structure that is longer than theirs
/// if the rest of it is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Handled {
    access_fs: u64,
    access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: c_int,
}

impl Handled {
    /// Returns everything that a version of the interface can refuse.
    fn of(abi: u32, tcp: Tcp) -> Self {
        let mut access = Access::all();
        for (since, right) in [(2, Access::REFER), (3, Access::TRUNCATE), (5, Access::IOCTL_DEV)] {
            access.set(right, abi >= since);
        }
        let (bind, connect) = (1, 2);
        let net = match tcp {
            Tcp::Connect => bind,
            Tcp::Nothing => bind | connect,
        };
        let (abstract_sockets, signals) = (1, 2);
        Self {
            access_fs: access.bits(),
            access_net: if abi >= 4 { net } else { 0 },
            scoped: if abi >= 6 { abstract_sockets | signals } else { 0 },
        }
    }
}

/// Returns the version of landlock that this kernel has, and 0 if it has none, or it is turned off.
pub fn abi() -> u32 {
    // SAFETY: with this flag, the kernel takes neither a structure nor a length.
    let version = unsafe {
        let nothing = ptr::null::<Handled>();
        libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, CREATE_RULESET_VERSION)
    };
    u32::try_from(version).unwrap_or(0)
}

/// Returns a descriptor that stands for a file or directory in rules. Nothing can be read through it.
///
/// # Errors
/// The path does not exist, or cannot be reached.
#[allow(clippy::disallowed_methods, reason = "a place of a rule, before the process loses its paths")]
pub fn place(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Everything that landlock can refuse, and the exceptions.
#[derive(Debug)]
pub struct Ruleset {
    /// `None` for a kernel without landlock.
    fd: Option<OwnedFd>,
    handled: Access,
}

impl Ruleset {
    /// Makes a ruleset of this version of landlock: that of [`abi`], or an older one. It refuses all rights
    /// of paths, sockets of other processes with abstract names, and signals to other processes. If the
    /// version is 0, the ruleset refuses nothing.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor for it.
    pub fn new(abi: u32, tcp: Tcp) -> Result<Self, Error> {
        if abi == 0 {
            return Ok(Self { fd: None, handled: Access::empty() });
        }
        let handled = Handled::of(abi, tcp);
        // SAFETY: the kernel reads a structure of this size, which is there during the call.
        let fd = check("making a ruleset", unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size_of::<Handled>(), 0_u32)
        })?;
        // SAFETY: the kernel made this descriptor, and nothing else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as c_int) };
        Ok(Self { fd: Some(fd), handled: Access::from_bits_retain(handled.access_fs) })
    }

    /// Allows rights of a file, or of everything below a directory. A rule holds for the file and not for its
    /// path: one for a directory does not hold for a file system that is mounted there later.
    ///
    /// # Errors
    /// The descriptor is that of a file, and a right is one of directories.
    pub fn allow(&mut self, below: impl AsFd, access: Access) -> Result<(), Error> {
        let allowed = access & self.handled;
        let Some(fd) = self.fd.as_ref().filter(|_| !allowed.is_empty()) else { return Ok(()) };
        let rule = PathBeneath { allowed_access: allowed.bits(), parent_fd: below.as_fd().as_raw_fd() };
        // SAFETY: the kernel reads a structure of this kind of rule, which is there during the call.
        // SAFETY: both descriptors are borrowed, so they are open.
        check("adding a rule", unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                fd.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0_u32,
            )
        })
        .map(drop)
    }

    /// Restricts the calling thread, and all threads and processes that it makes afterwards.
    pub(crate) fn restrict(self) -> Result<(), Error> {
        let Some(fd) = self.fd else { return Ok(()) };
        // SAFETY: the descriptor is open. The call takes rights, and changes no memory.
        check("restricting this process", unsafe {
            libc::syscall(libc::SYS_landlock_restrict_self, fd.as_raw_fd(), 0_u32)
        })
        .map(drop)
    }
}

fn check(step: &'static str, result: c_long) -> Result<c_long, Error> {
    match result {
        -1 => Err(Error::Landlock { step, source: io::Error::last_os_error() }),
        result => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_handles_its_rights() {
        let of = |abi| Handled::of(abi, Tcp::Nothing);
        assert_eq!(of(1), Handled { access_fs: (1 << 13) - 1, access_net: 0, scoped: 0 });
        assert_eq!(of(2), Handled { access_fs: (1 << 14) - 1, ..of(1) });
        assert_eq!(of(3), Handled { access_fs: (1 << 15) - 1, ..of(2) });
        assert_eq!(of(4), Handled { access_net: 3, ..of(3) });
        assert_eq!(of(5), Handled { access_fs: (1 << 16) - 1, ..of(4) });
        assert_eq!(of(6), Handled { scoped: 3, ..of(5) });
        assert_eq!(of(7), of(6));
        // A later version may handle more. Those rights are then as they were.
        assert_eq!(of(99), of(6));
        assert_eq!(Handled::of(4, Tcp::Connect), Handled { access_net: 1, ..of(4) });
    }

    #[test]
    fn this_kernel_takes_rulesets_of_all_older_versions() {
        for abi in 0..=abi() {
            let ruleset = Ruleset::new(abi, Tcp::Connect).unwrap();
            assert_eq!(ruleset.fd.is_some(), abi > 0);
        }
    }

    #[test]
    fn rights_of_directories_are_refused_for_files() {
        let mut ruleset = Ruleset::new(abi(), Tcp::Nothing).unwrap();
        let file = place("/proc/self/exe".as_ref()).unwrap();
        ruleset.allow(&file, Access::READ_FILE).unwrap();
        let refused = ruleset.allow(&file, Access::MAKE_REG);
        assert_eq!(refused.is_err(), abi() > 0);
        // A right that is not handled is none of the rule's.
        Ruleset::new(abi().min(1), Tcp::Nothing).unwrap().allow(&file, Access::IOCTL_DEV).unwrap();
    }
}
