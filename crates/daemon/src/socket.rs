//! The source of front-ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use kickless_opener::{Listener, NameOfSocket, SocketProblem, SocketRights, real_path};
use rustix::fs::fstat;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// The source of front-ends.
#[derive(Debug)]
pub enum Endpoint {
    /// A socket that front-ends connect to, one after the other.
    Listening(Listener),
    /// The connection of the only front-end.
    Connected(UnixStream),
    /// The connection of the only front-end, whose session another process has given.
    Restored,
}

impl Endpoint {
    /// Uses a socket that came with a call.
    ///
    /// # Errors
    /// `socket` is not a unix stream socket that listens.
    pub(crate) fn given(socket: OwnedFd) -> Result<Self, SocketProblem> {
        match Self::inherited(socket)? {
            listening @ Self::Listening(_) => Ok(listening),
            Self::Connected(_) | Self::Restored => Err(SocketProblem::NotListening),
        }
    }

    /// Uses a socket that this process inherited from another program.
    ///
    /// # Errors
    /// `socket` is not a unix stream socket that listens or is connected.
    pub fn inherited(socket: OwnedFd) -> Result<Self, SocketProblem> {
        let family = sockopt::socket_domain(&socket).map_err(SocketProblem::host("it is not a socket"))?;
        let kind = sockopt::socket_type(&socket).map_err(SocketProblem::host("it is not a socket"))?;
        if family != AddressFamily::UNIX || kind != SocketType::STREAM {
            return Err(SocketProblem::NotUnixStream);
        }
        if sockopt::socket_acceptconn(&socket).map_err(SocketProblem::host("it is not a socket"))? {
            return Ok(Self::Listening(Listener::of(socket.into())));
        }
        let stream = UnixStream::from(socket);
        stream.peer_addr().map_err(SocketProblem::host("it neither listens nor is connected"))?;
        Ok(Self::Connected(stream))
    }

    /// Returns the identity of the socket, by which the same socket under another name is known. It is
    /// written as the kernel writes the link of its descriptor. Returns `None` if the kernel does not tell.
    pub(crate) fn identity(&self) -> Option<PathBuf> {
        let socket = match self {
            Self::Listening(listener) => listener.socket().as_fd(),
            Self::Connected(stream) => stream.as_fd(),
            Self::Restored => return None,
        };
        fstat(socket).ok().map(|stat| PathBuf::from(format!("socket:[{}]", stat.st_ino)))
    }
}

/// A listening socket that passes to another process. Dropping it does not remove the name.
#[derive(Debug)]
pub struct PassedListener {
    /// The socket.
    pub socket: UnixListener,
    /// Its name, if the process that serves it removes the name.
    pub name: Option<NameOfSocket>,
    /// The permissions and the owner of the name, if they are known.
    pub rights: Option<SocketRights>,
}

impl PassedListener {
    /// Returns a duplicate of a listening socket.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn of(listener: &Listener) -> io::Result<Self> {
        let (socket, name) = (listener.socket().try_clone()?, listener.name());
        Ok(Self { socket, name, rights: listener.rights() })
    }

    /// Returns a duplicate.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()?, name: self.name.clone(), rights: self.rights })
    }

    /// Uses a socket that the service manager has passed. Its name stays. Must be called by a process that
    /// can use paths.
    ///
    /// # Errors
    /// `socket` is not a unix stream socket that listens.
    pub fn passed(socket: OwnedFd) -> Result<Self, SocketProblem> {
        match Endpoint::given(socket)? {
            Endpoint::Listening(listener) => {
                let passed = Self { socket: listener.into_socket(), name: None, rights: None };
                let rights = passed.path().and_then(|path| SocketRights::of(&path));
                Ok(Self { rights, ..passed })
            }
            Endpoint::Connected(_) | Endpoint::Restored => Err(SocketProblem::NotListening),
        }
    }

    /// Returns the path of the socket, as the process that made it wrote it.
    pub fn path(&self) -> Option<PathBuf> {
        self.socket.local_addr().ok()?.as_pathname().map(Path::to_owned)
    }

    /// Returns whether this is the path of the socket.
    pub fn has_path(&self, path: &Path) -> bool {
        self.path()
            .is_some_and(|own| own == path || own == real_path(path) || real_path(&own) == real_path(path))
    }

    /// Serves front-ends of this socket from now on. Its name is removed at the end.
    pub(crate) fn into_endpoint(self) -> Endpoint {
        Endpoint::Listening(self.into_listener())
    }

    /// Returns the socket of this process, which removes its name at the end. The process that had it before
    /// does not.
    pub fn into_listener(self) -> Listener {
        match self.name {
            Some(name) => Listener::taken_over(self.socket, name),
            None => Listener::of(self.socket),
        }
        .with_rights(self.rights)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use rustix::net::{SocketFlags, socket_with};
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn inherited_sockets() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let of = |socket: OwnedFd| Endpoint::inherited(socket);
        assert!(matches!(of(listener.into()), Ok(Endpoint::Listening(_))));
        assert!(path.exists());
        assert!(matches!(of(stream.into()), Ok(Endpoint::Connected(_))));
        assert!(of(UnixDatagram::unbound().unwrap().into()).is_err());
        assert!(of(std::fs::File::open("/dev/null").unwrap().into()).is_err());
        let fresh = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert!(of(fresh).is_err());
    }
}
