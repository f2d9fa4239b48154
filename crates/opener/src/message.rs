//! Messages over a socket, each with at most one descriptor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Makes a connection between two processes, for requests and replies.
///
/// # Errors
/// The process has no free descriptor.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Received {
    /// Its bytes in the buffer. None mean the end.
    pub(crate) len: usize,
    /// Its descriptors. Two mean that there were two or more.
    pub(crate) fds: Vec<OwnedFd>,
    /// It was longer than the buffer.
    pub(crate) is_cut: bool,
    /// A descriptor came, and this process has no room for it.
    pub(crate) lost_fd: bool,
}

/// Waits for a message.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let lost_fd = got.flags.contains(ReturnFlags::CTRUNC) && fds.is_empty();
    Ok(Received { len: got.bytes, fds, is_cut: got.flags.contains(ReturnFlags::TRUNC), lost_fd })
}

/// Sends a message. Waits until the other end has room for it.
///
/// # Errors
/// The kernel refuses it, or the other end is closed.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = fd.as_ref().map(std::slice::from_ref);
    if let Some(rights) = rights
        && !control.push(SendAncillaryMessage::ScmRights(rights))
    {
        return Err(Errno::NOBUFS.into());
    }
    let sent =
        retry_on_intr(|| sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?;
    // A message is sent as a whole.
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE.into()) }
}
