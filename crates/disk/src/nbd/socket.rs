//! Connections to a server, none of which is waited for without end.

use super::handshake::{Export, negotiate};
use super::inbox::Inbox;
use super::wire::Problem;
use crate::spec::nbd_uri::Server;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// A server that says nothing and acknowledges nothing while nothing is asked of it is looked for after so long,
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// then so often,
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// and given up after so many times.
const KEEPALIVE_COUNT: u32 = 3;

/// Where a server listens, looked up.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Tcp(Vec<SocketAddr>),
    Unix(SocketAddrUnix),
}

impl Address {
    /// Looks a server up.
    pub(super) fn of(server: &Server) -> io::Result<Self> {
        match server {
            Server::Tcp { host, port } => {
                let found: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                if found.is_empty() {
                    return Err(io::Error::other(format!("{host} has no address")));
                }
                Ok(Self::Tcp(found))
            }
            Server::Unix(path) => Ok(Self::Unix(SocketAddrUnix::new(path)?)),
        }
    }

    /// Connects, and agrees with the server on an export.
    ///
    /// # Errors
    /// There is none, or not until `deadline`; or we are asked to stop.
    pub(super) fn connect(
        &self,
        export: &str,
        deadline: Instant,
        inbox: &Inbox,
    ) -> Result<(OwnedFd, Export), Problem> {
        let socket = match self {
            Self::Unix(path) => {
                let socket = new_socket(AddressFamily::UNIX)?;
                // It is there at once, or the server does not accept any.
                rustix::net::connect(&socket, path).map_err(io::Error::from)?;
                socket
            }
            Self::Tcp(addresses) => {
                let mut result = Err(Problem::Slow);
                for address in addresses {
                    result = tcp(*address, deadline, inbox);
                    if result.is_ok() {
                        break;
                    }
                }
                result?
            }
        };
        let agreed = negotiate(&mut Timed { socket: &socket, deadline, inbox }, export)?;
        Ok((socket, agreed))
    }
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?)
}

fn tcp(address: SocketAddr, deadline: Instant, inbox: &Inbox) -> Result<OwnedFd, Problem> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new_socket(family)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => {
            wait(&socket, PollFlags::OUT, deadline, inbox).map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => Problem::Slow,
                _ => Problem::Io(error),
            })?;
            sockopt::socket_error(&socket).map_err(io::Error::from)?.map_err(io::Error::from)?;
        }
        Err(error) => return Err(io::Error::from(error).into()),
    }
    // Without these it works as well.
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT);
    Ok(socket)
}

/// The time from now on until then.
pub(super) fn until(then: Instant) -> Timespec {
    let left = then.saturating_duration_since(Instant::now());
    // A little longer rather than a little too short, over and over.
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
        if inbox.is_stopping() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if ready {
            return Ok(());
        }
    }
}

/// A connection that takes no longer than until a certain time.
struct Timed<'a> {
    socket: &'a OwnedFd,
    deadline: Instant,
    inbox: &'a Inbox,
}

impl Timed<'_> {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        wait(self.socket, flags, self.deadline, self.inbox)
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            // Before each read: one that always has something to say is slow as well, and is never waited for.
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

impl Write for Timed<'_> {
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
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn all_addresses_are_tried_until_one_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        // Nobody can listen there but who listens on all addresses, of which the port is taken.
        let nowhere = SocketAddr::from(([127, 0, 0, 2], here.port()));
        let hello = [&b"NBDMAGICIHAVEOPT\0\0"[..], &4096_u64.to_be_bytes(), &[0; 126]].concat();
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
            let all = [&[here][..], &[nowhere, here], &[here, nowhere]].map(connect);
            // Those that it waits for where something is wrong.
            all.iter().for_each(|_| drop(TcpStream::connect(here)));
            assert!(all.iter().all(|found| matches!(found, Ok(4096))), "{all:?}");
        });
        assert!(matches!(connect(&[nowhere]), Err(Problem::Io(_))));
    }

    /// However much of it is there.
    #[test]
    fn what_comes_too_late_is_not_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"more").unwrap();
        let (socket, inbox) = (OwnedFd::from(ours), Inbox::new().unwrap());
        let read = |deadline| {
            Timed { socket: &socket, deadline, inbox: &inbox }.read(&mut [0]).map_err(|error| error.kind())
        };
        assert_eq!(read(Instant::now() + Duration::from_secs(60)), Ok(1));
        assert_eq!(read(Instant::now()), Err(io::ErrorKind::TimedOut));
    }

    /// A host that has gone is noticed, and nothing is held back to be sent with more.
    #[test]
    fn how_connections_are_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let socket = tcp(listener.local_addr().unwrap(), deadline, &Inbox::new().unwrap()).unwrap();
        assert!(sockopt::tcp_nodelay(&socket).unwrap() && sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), KEEPALIVE_EVERY);
        assert_eq!(sockopt::tcp_keepcnt(&socket).unwrap(), KEEPALIVE_COUNT);
        let flags = fcntl_getfd(&socket).unwrap();
        assert!(flags.contains(FdFlags::CLOEXEC));
    }
}
