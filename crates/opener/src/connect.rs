//! Connections to servers.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};

use crate::client::{client, mismatch};
use crate::reason::{Want, explained};
use crate::wire::{Reply, Request};

/// The idle time after which TCP checks that the server is alive.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// The pause between two checks.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// The number of failed checks that end the connection.
const KEEPALIVE_COUNT: u32 = 3;

/// Connects to a unix socket. Never waits. The connection does not block either.
///
/// # Errors
/// The kernel refuses it. A listener whose backlog is full gives [`io::ErrorKind::WouldBlock`].
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    match client() {
        Some(client) => client.descriptor(&Request::ConnectUnix { path: path.to_owned() }),
        None => connect_here(path).map_err(|error| explained(path, Want::Connect, error)),
    }
}

/// Begins a connection over TCP to an address that [`resolve`] returned. The socket is writable when it is
/// connected or has failed, and `SO_ERROR` then tells which.
///
/// Small messages are sent at once, and a dead host is noticed. When the socket is closed, also by a kill of
/// this process, the kernel does not go on to send what is left.
///
/// # Errors
/// The kernel refuses it at once.
pub fn begin_tcp(address: SocketAddr) -> io::Result<OwnedFd> {
    match client() {
        Some(client) => client.descriptor(&Request::ConnectTcp { address }),
        None => begin_tcp_here(address),
    }
}

/// Returns the addresses of a host, at least one.
///
/// # Errors
/// The host has no address, or no name server answers.
pub fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let Some(client) = client() else { return resolve_here(host, port) };
    match client.ask(&Request::Resolve { host: host.into(), port })? {
        (Reply::Addresses { addresses }, _) if !addresses.is_empty() => Ok(addresses),
        _ => Err(mismatch()),
    }
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Connects to a unix socket in this process.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn connect_here(path: &Path) -> io::Result<OwnedFd> {
    let (socket, address) = (new_socket(AddressFamily::UNIX)?, SocketAddrUnix::new(path)?);
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Begins a connection over TCP in this process.
///
/// # Errors
/// The kernel refuses it at once.
pub(crate) fn begin_tcp_here(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = new_socket(if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 })?;
    // These settings are optional.
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_EVERY);
    let _ = sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT);
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// Looks the addresses of a host up in this process.
///
/// # Errors
/// The host has no address, or no name server answers.
pub(crate) fn resolve_here(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let found: Vec<_> = (host, port).to_socket_addrs()?.collect();
    match found.is_empty() {
        true => Err(io::Error::other(format!("{host} has no address"))),
        false => Ok(found),
    }
}

/// Returns the address that is written as such, so that no name has to be looked up.
pub(crate) fn literal(host: &str, port: u16) -> Option<SocketAddr> {
    Some(SocketAddr::new(host.parse().ok()?, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::io::{FdFlags, fcntl_getfd};
    use rustix::net::Shutdown;
    use rustix::net::sockopt::socket_error;
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_listener_with_a_full_backlog_is_told_apart_from_none() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let first = connect(&path);
        assert!(first.is_ok());
        let kinds: Vec<_> = (0..4).filter_map(|_| connect(&path).err()).map(|error| error.kind()).collect();
        assert!(kinds.contains(&io::ErrorKind::WouldBlock), "{kinds:?}");
        // Not by a close: a child that another test starts has a copy until it executes its program.
        rustix::net::shutdown(&listener, Shutdown::Both).unwrap();
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    /// A dead host is noticed, and small messages are sent at once.
    #[test]
    fn connections_have_keepalive_and_no_delay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = begin_tcp(listener.local_addr().unwrap()).unwrap();
        assert!(sockopt::tcp_nodelay(&socket).unwrap() && sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), KEEPALIVE_EVERY);
        assert_eq!(sockopt::tcp_keepcnt(&socket).unwrap(), KEEPALIVE_COUNT);
        assert_eq!(sockopt::socket_linger(&socket).unwrap(), Some(Duration::ZERO));
        assert!(fcntl_getfd(&socket).unwrap().contains(FdFlags::CLOEXEC));
    }

    #[test]
    fn only_an_address_is_literal() {
        for (host, address) in [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7")] {
            assert_eq!(literal(host, 7), Some(address.parse().unwrap()));
            assert_eq!(resolve(host, 7).unwrap(), [address.parse().unwrap()]);
        }
        assert_eq!(literal("localhost", 7), None);
    }

    #[test]
    fn a_refused_connection_over_tcp_is_seen_in_the_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(resolve("127.0.0.1", address.port()).unwrap(), [address]);
        let result = |socket: OwnedFd| {
            poll(&mut [PollFd::new(&socket, PollFlags::OUT)], None).unwrap();
            socket_error(&socket).unwrap()
        };
        assert_eq!(result(begin_tcp(address).unwrap()), Ok(()));
        rustix::net::shutdown(&listener, Shutdown::Both).unwrap();
        // The kernel may refuse it at once.
        assert!(!matches!(begin_tcp(address).map(result), Ok(Ok(()))));
    }
}
