//! Waits for the end of a connection that was given up while changes were in flight on it.
//!
//! The requests are sent again on the next connection, or the guest gets an error and goes on. The server may
//! still read the first copies of the changes from the old connection. Their order against newer requests on
//! another connection is open, and the protocol has no fence. So nothing is sent before the old connection
//! has ended, or a limited time is over.
//!
//! The client shuts down its side, and the server reads the copies that it has got, then the end. It closes
//! its side. This proves that it reads nothing more from this connection. It does not prove that the server
//! has done what it read: nbdkit and a process that was killed close after their last request, qemu-nbd
//! before. A connection that this host's kernel has given up ends at once, and proves nothing.
//!
//! If the time is over, closing a TCP connection resets it (`socket.rs`), so that the kernel sends nothing
//! more. The server may still read what has arrived.

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The shortest and the longest wait.
const WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// The largest number of reads in a row before other work.
const READS_IN_A_ROW: usize = 16;

/// The bytes of a read. They are ignored.
const READ_BYTES: usize = 16 << 10;

/// A connection that ends.
#[derive(Debug)]
pub(super) struct Ending {
    socket: OwnedFd,
    deadline: Instant,
}

impl Ending {
    /// Begins to end a connection. Requests wait `reconnect_delay` for the next one. Half of this time may be
    /// spent here.
    pub(super) fn begin(socket: OwnedFd, reconnect_delay: Duration) -> Self {
        // A connection that has ended cannot be shut down.
        let _ = shutdown(&socket, Shutdown::Write);
        let (least, most) = WITHIN;
        Self { socket, deadline: Instant::now() + (reconnect_delay / 2).clamp(least, most) }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits so long that no test sees the end of it.
    #[cfg(test)]
    pub(super) fn extend(&mut self) {
        self.deadline += Duration::from_secs(3600);
    }

    /// Returns whether the server has closed its side, so that it reads nothing more. Ignores what it sends.
    pub(super) fn has_ended(&self) -> bool {
        let mut ignored = [0; READ_BYTES];
        for _ in 0..READS_IN_A_ROW {
            match rustix::io::read(&self.socket, &mut ignored) {
                Ok(0) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::ioctl_fionbio;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(60);

    fn begin(socket: impl Into<OwnedFd>) -> Ending {
        let socket = socket.into();
        ioctl_fionbio(&socket, true).unwrap();
        Ending::begin(socket, LONG)
    }

    fn tcp_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    /// The server reads all that was sent, and then the end. The wait is over when it closes.
    fn ends(ours: impl Into<OwnedFd>, mut theirs: impl Read + Write) {
        let ending = begin(ours);
        assert!(!ending.has_ended());
        theirs.write_all(&[0; 100]).unwrap();
        assert!(!ending.has_ended(), "replies are ignored");
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"sent before");
        assert!(!ending.has_ended());
        drop(theirs);
        while !ending.has_ended() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_wait_is_over_when_the_server_closes() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"sent before").unwrap();
        ends(ours, theirs);
        let (mut ours, theirs) = tcp_pair();
        ours.write_all(b"sent before").unwrap();
        ends(ours, theirs);
    }

    /// A server that closes with unread requests does not read them.
    #[test]
    fn the_wait_is_over_when_the_server_closes_with_unread_requests() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"sent before").unwrap();
        drop(theirs);
        assert!(begin(ours).has_ended());
    }

    #[test]
    fn the_wait_is_limited() {
        let (least, most) = WITHIN;
        for (delay, within) in [(0, least), (4, Duration::from_secs(2)), (3600, most)] {
            let before = Instant::now();
            let ending = Ending::begin(UnixStream::pair().unwrap().0.into(), Duration::from_secs(delay));
            assert!((before + within..=Instant::now() + within).contains(&ending.deadline()));
        }
    }
}
