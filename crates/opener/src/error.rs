//! Errors of sockets that cannot be made. Each is one sentence for an operator.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use kickless_values::SOCKET_PATH_BYTES_MAX;

/// The error of a socket of a device that cannot be made.
#[derive(Debug)]
pub struct SocketError {
    /// The option to change: `socket-path`, `socket-mode` or `socket-group`.
    pub option: &'static str,
    /// The path of the socket, if the problem is about the path.
    pub(crate) path: Option<PathBuf>,
    pub(crate) problem: SocketProblem,
}

impl fmt::Display for SocketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => path.display().fmt(f),
            None => self.problem.fmt(f),
        }
    }
}

impl Error for SocketError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self.path {
            Some(_) => Some(&self.problem),
            None => self.problem.source(),
        }
    }
}

/// The reason why a socket cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketProblem {
    /// The path is longer than the address of a unix socket allows.
    #[error("the path has {bytes} bytes and a socket's may have {SOCKET_PATH_BYTES_MAX}: use a shorter one")]
    TooLong {
        /// Bytes of the path.
        bytes: usize,
    },
    /// The directory of the socket does not exist.
    #[error("the directory does not exist: make it first or use another path")]
    NoDirectory,
    /// The path is that of a directory.
    #[error("it is a directory: name a socket in it")]
    IsDirectory,
    /// The path is that of a file which is not a socket.
    #[error("there is a file that is not a socket: remove it or use another path")]
    IsFile,
    /// The path is that of a socket, and this process has no permission to probe it.
    #[error("there is a socket that this process has no permission to use: use another path")]
    NotAllowed,
    /// Another process listens on a socket of this path.
    #[error("another process is listening there: stop it or use another path")]
    Listening,
    /// Another process made a socket of this path at the same time.
    #[error("another process has just made a socket there: use another path")]
    JustTaken,
    /// Another program replaced the socket, or its directory, while it was made.
    #[error(
        "another program exchanged it while it was made: use a directory that only trusted programs may change"
    )]
    Exchanged,
    /// The group does not exist.
    #[error("there is no group {0}")]
    NoGroup(String),
    /// The inherited descriptor is a socket of another kind.
    #[error("it is not a unix stream socket")]
    NotUnixStream,
    /// The descriptor of a call is a socket that does not listen.
    #[error("it does not listen: a connection is served by kickless blk --fd=N")]
    NotListening,
    /// The kernel refused an operation.
    #[error("{what}")]
    Host {
        /// The operation that failed, as a sentence.
        what: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl SocketError {
    /// Returns the error of the socket with this path.
    pub fn of(path: &Path, problem: SocketProblem) -> Self {
        Self { option: "socket-path", path: Some(path.to_owned()), problem }
    }
}

impl SocketProblem {
    /// Returns a function that turns an error of the kernel into a problem with the failed operation.
    pub fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Host { what, source: error.into() }
    }
}
