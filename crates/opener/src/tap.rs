//! Queues of TAPs.
#![expect(unsafe_code, reason = "island: the ioctl that makes a queue of a TAP")]

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// The file that makes queues of TAPs.
const TUN: &str = "/dev/net/tun";
/// The longest name of an interface, without the byte that ends it.
const NAME_MAX: usize = libc::IFNAMSIZ - 1;

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
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(TUN).map_err(NoTap::Device)?;
    set_interface(&file, name, flags).map_err(NoTap::Interface)?;
    Ok(file.into())
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
