//! News about the interfaces of a network namespace.

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The group of messages about interfaces (`RTMGRP_LINK`).
const GROUP_LINK: u32 = 1;

/// A descriptor that is readable after an interface has changed, in the network namespace of the thread that
/// opened it. An AF_XDP socket itself does not become readable when its interface is gone.
#[derive(Debug)]
pub struct LinkChanges(OwnedFd);

impl LinkChanges {
    /// Waits for changes from now on.
    ///
    /// # Errors
    /// The process has no free descriptor.
    #[expect(
        clippy::disallowed_methods,
        reason = "the address is a group of messages, and no name of the host"
    )]
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // The first protocol of these is that of interfaces and routes.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUP_LINK))?;
        Ok(Self(socket))
    }

    /// Forgets all changes so far. The descriptor is not readable afterwards.
    pub fn clear(&self) {
        // The kernel cuts each message, whose content does not matter.
        let mut message = [0; 1];
        // There is no buffer left: changes were lost, and others wait.
        while let Ok(_) | Err(Errno::NOBUFS | Errno::INTR) =
            recv(&self.0, &mut message, RecvFlags::empty()).map(|_| ())
        {}
    }
}

impl AsFd for LinkChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
