//! Questions about descriptors, for which there are only plain system calls.
#![expect(unsafe_code, reason = "island: socket options and a comparison that no library has")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The option of unix sockets to take descriptors, on by default, since Linux 6.16 (asm-generic/socket.h).
/// The architectures that kickless runs on have this number.
const SO_PASSRIGHTS: libc::c_int = 83;
/// The comparison of open file descriptions (linux/kcmp.h).
const KCMP_FILE: libc::c_int = 0;

/// Makes a unix socket, and the connections that it accepts later, refuse descriptors: a client that sends
/// one gets EPERM.
///
/// # Errors
/// The kernel is older than 6.16. The socket takes descriptors.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    let (socket, off): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 0);
    let len = size_of_val(&off) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `off`, which is there during the call.
    match unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const off).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The process at the other end of a unix socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its user when it connected.
    pub uid: u32,
    /// Its number, or 0 if it is of another namespace of processes.
    pub pid: i32,
}

/// Returns the process that has connected a unix socket. `rustix` has no number for a process of another
/// namespace, and returns an error that is not there.
///
/// # Errors
/// It is no such socket.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&credentials) as libc::socklen_t;
    let (socket, option) = (socket.as_fd().as_raw_fd(), libc::SO_PEERCRED);
    let to = (&raw mut credentials).cast();
    // SAFETY: the kernel writes at most `len` bytes of `credentials`, which is there during the call and
    // valid with each content.
    match unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, to, &raw mut len) } {
        0 => Ok(Peer { uid: credentials.uid, pid: credentials.pid }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether two descriptors have the same open file description: its locks, flags and position.
///
/// # Errors
/// The kernel or a seccomp filter does not allow the comparison.
pub fn is_same_description(one: impl AsFd, other: impl AsFd) -> io::Result<bool> {
    let (one, other) = (one.as_fd().as_raw_fd(), other.as_fd().as_raw_fd());
    let process = std::process::id();
    // SAFETY: kcmp takes numbers only, and changes nothing. The descriptors are borrowed, so they are open.
    match unsafe { libc::syscall(libc::SYS_kcmp, process, process, KCMP_FILE, one, other) } {
        -1 => Err(io::Error::last_os_error()),
        order => Ok(order == 0),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::io::Errno;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_socket_that_refuses_descriptors_takes_bytes() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        if let Err(error) = refuse_descriptors(&listener) {
            // Before Linux 6.16.
            assert_eq!(error.raw_os_error(), Some(Errno::NOPROTOOPT.raw_os_error()));
            return;
        }
        // Also before it is accepted.
        let client = UnixStream::connect(&path).unwrap();
        let send = |control: &mut SendAncillaryBuffer<'_, '_, '_>| {
            sendmsg(&client, &[IoSlice::new(b"a")], control, SendFlags::NOSIGNAL)
        };
        let (own, mut space) =
            (File::open("/dev/null").unwrap(), [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let own = [own.as_fd()];
        let mut with_descriptor = SendAncillaryBuffer::new(&mut space);
        assert!(with_descriptor.push(SendAncillaryMessage::ScmRights(&own)));
        assert_eq!(send(&mut with_descriptor), Err(Errno::PERM));
        assert_eq!(send(&mut SendAncillaryBuffer::default()), Ok(1));
        let _accepted = listener.accept().unwrap();
        assert_eq!(send(&mut with_descriptor), Err(Errno::PERM));
    }

    #[test]
    fn a_socket_knows_its_peer() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let own = Peer { uid: rustix::process::geteuid().as_raw(), pid: std::process::id() as i32 };
        assert_eq!(peer(&socket).unwrap(), own);
        assert!(peer(File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn a_duplicate_has_the_same_description_and_a_second_open_has_another() {
        let open = || File::open("/proc/self/exe").unwrap();
        let first = open();
        // A kernel without kcmp cannot tell.
        let Ok(is_same) = is_same_description(&first, first.try_clone().unwrap()) else { return };
        assert!(is_same);
        assert!(!is_same_description(&first, open()).unwrap());
    }
}
