//! Receives the kernel's events about new sizes of the host's block devices.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

/// The netlink group of the kernel's messages. Those of udev have another group.
const FROM_KERNEL: u32 = 1;
/// The length of the longest message.
const MESSAGE_MAX: usize = 8192;

/// A socket on which the kernel reports changes of devices.
pub(crate) struct Resizes(OwnedFd);

impl Resizes {
    /// Starts to receive events.
    ///
    /// # Errors
    /// The host or the container has no such socket.
    #[expect(clippy::disallowed_methods, reason = "the address of a netlink socket is no name of a file")]
    pub(crate) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, FROM_KERNEL))?;
        Ok(Self(socket))
    }

    /// Takes all messages. Returns whether one of them reports a new size, or some were lost.
    pub(crate) fn take(&self) -> bool {
        let mut message = [0; MESSAGE_MAX];
        let mut resized = false;
        loop {
            match recv(&self.0, &mut message[..], RecvFlags::DONTWAIT) {
                Ok((len, _)) => resized |= message.get(..len).is_some_and(is_resize),
                Err(rustix::io::Errno::INTR) => {}
                // Messages were lost. One of them may have reported a new size.
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

/// Returns whether a message reports a new size. A message is a heading and assignments, each followed by a
/// zero byte.
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
