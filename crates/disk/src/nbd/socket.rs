//! Connections to a server. No wait is without limit.

use super::handshake::{Export, negotiate};
use super::inbox::Inbox;
use super::wire::Problem;
use crate::spec::nbd_uri::Server;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The resolved address of a server.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
    /// A host that is looked up for each connection, because it could not be before.
    Unresolved {
        host: String,
        port: u16,
    },
}

impl Address {
    /// Resolves the address of a server.
    pub(super) fn of(server: &Server) -> io::Result<Self> {
        match server {
            Server::Tcp { host, port } => Ok(Self::Tcp(kickless_opener::resolve(host, *port)?)),
            Server::Unix(path) => Ok(Self::Unix(path.into())),
        }
    }

    /// Resolves the address of a server to which there is a connection already.
    pub(super) fn of_connected(server: &Server) -> Self {
        let unresolved = |error: io::Error| match server {
            Server::Tcp { host, port } => {
                tracing::warn!(%host, %error, "the NBD server cannot be looked up now, but when its connection is lost");
                Self::Unresolved { host: host.clone(), port: *port }
            }
            Server::Unix(path) => Self::Unix(path.into()),
        };
        Self::of(server).unwrap_or_else(unresolved)
    }

    /// Connects and selects an export.
    ///
    /// # Errors
    /// This fails, takes longer than `deadline`, or the thread must do something else.
    pub(super) fn connect(
        &self,
        export: &str,
        deadline: Instant,
        inbox: &Inbox,
    ) -> Result<(OwnedFd, Export), Problem> {
        let socket = match self {
            Self::Unix(path) => {
                // This succeeds at once, or the server does not accept connections.
                kickless_opener::connect(path)?
            }
            Self::Tcp(addresses) => tcp_of_any(addresses, deadline, inbox)?,
            Self::Unresolved { host, port } => {
                tcp_of_any(&kickless_opener::resolve(host, *port)?, deadline, inbox)?
            }
        };
        let agreed = negotiate(&mut DeadlineStream { socket: &socket, deadline, inbox }, export)?;
        Ok((socket, agreed))
    }
}

/// Connects to the first address that answers.
fn tcp_of_any(addresses: &[SocketAddr], deadline: Instant, inbox: &Inbox) -> Result<OwnedFd, Problem> {
    let mut result = Err(Problem::Slow);
    for address in addresses {
        result = tcp(*address, deadline, inbox);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn tcp(address: SocketAddr, deadline: Instant, inbox: &Inbox) -> Result<OwnedFd, Problem> {
    let socket = kickless_opener::begin_tcp(address)?;
    wait(&socket, PollFlags::OUT, deadline, inbox).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => Problem::Slow,
        _ => Problem::Io(error),
    })?;
    sockopt::socket_error(&socket).map_err(io::Error::from)?.map_err(io::Error::from)?;
    Ok(socket)
}

/// Returns the time from now until `deadline`.
pub(super) fn until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    // A little longer avoids repeated waits that are a little too short.
    let left = left + Duration::from_micros(if left.is_zero() { 0 } else { 100 });
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

/// Waits for a socket.
fn wait(socket: &OwnedFd, flags: PollFlags, deadline: Instant, inbox: &Inbox) -> io::Result<()> {
    loop {
        let waker = inbox.waker();
        let mut fds = [
            PollFd::from_borrowed_fd(socket.as_fd(), flags),
            PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&until(deadline))) {
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => {}
        }
        let (ready, woken) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if woken {
            waker.clear();
        }
        if inbox.is_urgent() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if ready {
            return Ok(());
        }
    }
}

/// A connection with a deadline for each read and write.
struct DeadlineStream<'a> {
    socket: &'a OwnedFd,
    deadline: Instant,
    inbox: &'a Inbox,
}

impl DeadlineStream<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        wait(self.socket, flags, self.deadline, self.inbox)
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            // The check comes before each read, because a server that sends bytes all the time never makes
            // this wait.
            if Instant::now() >= self.deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match rustix::io::read(self.socket, &mut *into) {
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                result => return Ok(result?),
            }
        }
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::net::send(self.socket, from, SendFlags::NOSIGNAL) {
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                result => return Ok(result?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_testing::hostile_nbd::{SIZE, hello};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn all_addresses_are_tried_until_one_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        // Only a listener on all addresses could listen there, and its port is taken.
        let no_listener = SocketAddr::from(([127, 0, 0, 2], here.port()));
        let hello = hello(false);
        let inbox = Inbox::new().unwrap();
        let connect = |addresses: &[SocketAddr]| {
            let deadline = Instant::now() + Duration::from_secs(60);
            let found = Address::Tcp(addresses.to_vec()).connect("disk", deadline, &inbox);
            found.map(|(_, export)| export.size)
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    let (mut stream, _) = listener.accept().unwrap();
                    let _ = stream.write_all(&hello);
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            });
            let all = [&[here][..], &[no_listener, here], &[here, no_listener]].map(connect);
            // This ends the server's waits if something is wrong.
            all.iter().for_each(|_| drop(TcpStream::connect(here)));
            assert!(all.iter().all(|found| matches!(found, Ok(SIZE))), "{all:?}");
        });
        assert!(matches!(connect(&[no_listener]), Err(Problem::Io(_))));
    }

    /// Data that have arrived are not read after the deadline either.
    #[test]
    fn data_after_the_deadline_are_not_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"more").unwrap();
        let (socket, inbox) = (OwnedFd::from(ours), Inbox::new().unwrap());
        let read = |deadline| {
            DeadlineStream { socket: &socket, deadline, inbox: &inbox }
                .read(&mut [0])
                .map_err(|error| error.kind())
        };
        assert_eq!(read(Instant::now() + Duration::from_secs(60)), Ok(1));
        assert_eq!(read(Instant::now()), Err(io::ErrorKind::TimedOut));
    }
}
