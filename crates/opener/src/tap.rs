//! Queues of TAPs.
#![expect(unsafe_code, reason = "island: the ioctl that makes a queue of a TAP")]

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::client::{client, mismatch, without_refusal};
use crate::wire::{Reply, Request};

/// The file that makes queues of TAPs.
const TUN: &str = "/dev/net/tun";
/// The longest name of an interface, without the byte that ends it.
const NAME_MAX: usize = libc::IFNAMSIZ - 1;

/// The flags that a queue may have.
const FLAGS: i32 = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;

/// The step at which no queue of a TAP can be made.
#[derive(Debug)]
pub enum NoTap {
    /// /dev/net/tun cannot be opened.
    Device(io::Error),
    /// The kernel refuses the interface or its flags.
    Interface(io::Error),
}

/// Makes a queue of the TAP `name` with these flags of TUNSETIFF. Makes the TAP if it does not exist. The
/// descriptor does not block.
///
/// # Errors
/// The kernel refuses it.
pub fn tap(name: &str, flags: i32) -> Result<OwnedFd, NoTap> {
    let Some(client) = client() else { return tap_here(name, flags) };
    let answer = client.ask_with(&Request::Tap { name: name.into(), flags }, None);
    match answer.and_then(without_refusal).map_err(NoTap::Interface)? {
        (Reply::Done {}, Some(queue)) => Ok(queue),
        (Reply::Tap { step: DEVICE, errno }, _) => Err(NoTap::Device(io::Error::from_raw_os_error(errno))),
        (Reply::Tap { errno, .. }, _) => Err(NoTap::Interface(io::Error::from_raw_os_error(errno))),
        _ => Err(NoTap::Interface(mismatch())),
    }
}

/// The steps in a reply.
const DEVICE: u8 = 0;
const INTERFACE: u8 = 1;

impl NoTap {
    /// Returns the reply with this error.
    pub(crate) fn to_reply(&self) -> Reply {
        let (step, error) = match self {
            Self::Device(error) => (DEVICE, error),
            Self::Interface(error) => (INTERFACE, error),
        };
        Reply::Tap { step, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }
}

/// Makes a queue in this process.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn tap_here(name: &str, flags: i32) -> Result<OwnedFd, NoTap> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(TUN).map_err(NoTap::Device)?;
    set_interface(&file, name, flags).map_err(NoTap::Interface)?;
    Ok(file.into())
}

/// Returns whether a queue may have these flags. It is one of a TAP.
pub(crate) fn may_have(flags: i32) -> bool {
    flags & !FLAGS == 0 && flags & libc::IFF_TAP != 0
}

fn set_interface(file: &File, name: &str, flags: i32) -> io::Result<()> {
    // SAFETY: `ifreq` is an array of bytes and a union of plain data, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    // The flags of TAPs fit into 16 bits.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    for (to, from) in request.ifr_name.iter_mut().zip(&name.as_bytes()[..name.len().min(NAME_MAX)]) {
        *to = *from as libc::c_char;
    }
    // SAFETY: TUNSETIFF reads and writes an `ifreq`, whose name ends with a zero.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
