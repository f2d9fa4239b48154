//! What the kernel says of the host's devices: that one has another size.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

/// The kernel's own messages; udev's are another group's.
const FROM_KERNEL: u32 = 1;
/// No message is longer.
const MESSAGE_MAX: usize = 8192;

/// A socket on which the kernel tells of devices.
pub(crate) struct Resizes(OwnedFd);

impl Resizes {
    /// Listens from now on.
    ///
    /// # Errors
    /// The host, or what this process is locked into, has no such socket.
    pub(crate) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, FROM_KERNEL))?;
        Ok(Self(socket))
    }

    /// Takes all messages; whether one of them is of a size, or some were lost.
    pub(crate) fn take(&self) -> bool {
        let mut message = [0; MESSAGE_MAX];
        let mut resized = false;
        loop {
            match recv(&self.0, &mut message[..], RecvFlags::DONTWAIT) {
                Ok((len, _)) => resized |= message.get(..len).is_some_and(is_resize),
                Err(rustix::io::Errno::INTR) => {}
                // Messages were lost: what they said may have been that.
                Err(rustix::io::Errno::NOBUFS) => resized = true,
                Err(_) => return resized,
            }
        }
    }
}

impl AsFd for Resizes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A message is a heading and assignments, each with a zero after it.
fn is_resize(message: &[u8]) -> bool {
    let has = |wanted: &[u8]| message.split(|&byte| byte == 0).any(|word| word == wanted);
    has(b"SUBSYSTEM=block") && has(b"RESIZE=1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_nothing_else() {
        let resize =
            b"change@/devices/virtual/block/loop0\0ACTION=change\0SUBSYSTEM=block\0RESIZE=1\0SEQNUM=7\0";
        assert!(is_resize(resize));
        assert!(!is_resize(b"change@/devices/virtual/block/loop0\0ACTION=change\0SUBSYSTEM=block\0"));
        assert!(!is_resize(b"change@/x\0SUBSYSTEM=tty\0RESIZE=1\0"));
        assert!(!is_resize(b"change@/x\0SUBSYSTEM=block\0RESIZE=10\0"));
        assert!(!is_resize(&[]));
    }
}
