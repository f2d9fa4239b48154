//! Why something cannot be done, as types. A caller shows an error with [`sentence`](fn@crate::sentence).

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kickless_values::SOCKET_PATH_BYTES_MAX;
use kickless_vhost::Ended;

use super::config::Mistake;

/// Why the socket of a device cannot be made.
#[derive(Debug)]
pub struct SocketError {
    /// The option to change: `socket-path`, `socket-mode` or `socket-group`.
    pub option: &'static str,
    /// The path of the socket, where the problem lies there.
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

/// A mistake about a socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketProblem {
    /// More bytes than the address of a unix socket has.
    #[error("the path has {bytes} bytes and a socket's may have {SOCKET_PATH_BYTES_MAX}: use a shorter one")]
    TooLong {
        /// Bytes of the path.
        bytes: usize,
    },
    /// No directory for the socket.
    #[error("the directory does not exist: make it first or use another path")]
    NoDirectory,
    /// A directory of this name.
    #[error("it is a directory: name a socket in it")]
    IsDirectory,
    /// A file of this name.
    #[error("there is a file that is not a socket: remove it or use another path")]
    IsFile,
    /// A socket of this name that cannot be probed.
    #[error("there is a socket that we may not use: use another path")]
    NotAllowed,
    /// A socket of this name that is in use.
    #[error("another process is listening there: stop it or use another path")]
    Listening,
    /// A socket of this name that was made a moment ago.
    #[error("another process has just taken it: use another path")]
    JustTaken,
    /// An unknown group.
    #[error("there is no group {0}")]
    NoGroup(String),
    /// An inherited socket of another kind.
    #[error("it is not a unix stream socket")]
    NotUnixStream,
    /// A refusal of the kernel.
    #[error("{what}")]
    Host {
        /// The operation that failed, as a sentence.
        what: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Returns a function that adds the operation that failed to an error of the kernel.
pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> SocketProblem {
    move |error| SocketProblem::Host { what, source: error.into() }
}

/// Why a device cannot be made of its configuration. The factory of the devices returns it.
#[derive(Debug)]
pub struct MakeError {
    /// The option to change.
    pub option: &'static str,
    /// The reason.
    pub source: Box<dyn Error + Send + Sync>,
}

impl fmt::Display for MakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for MakeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

/// Why a device cannot be added. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// A device of this name with another configuration.
    #[error(
        "there is a device {name} already, with another configuration: remove it first or use another name"
    )]
    Different {
        /// The name of both.
        name: String,
    },
    /// A device of this name that another caller is adding or removing.
    #[error("the device {name} is being {doing}: try again when that is done")]
    Busy {
        /// The name of both.
        name: String,
        /// `added` or `removed`.
        doing: &'static str,
    },
    /// The socket of another device.
    #[error("the device {name} has {} already: use another one", path.display())]
    SocketTaken {
        /// The other device.
        name: String,
        /// The path of the socket.
        path: PathBuf,
    },
    /// No socket, neither by a path nor by a descriptor.
    #[error("the device needs a socket")]
    NoSocket,
    /// As many devices as the pool has reserves for.
    #[error("the pool has room for {max} devices: remove one first, or start another daemon")]
    Full {
        /// The most devices.
        max: usize,
    },
    /// No pool yet: [`Registry::set_pool`](crate::Registry::set_pool).
    #[error("the workers have not been started")]
    NoPool,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
    /// Options that do not go together.
    #[error("{}", .0.why)]
    Mistake(Mistake),
    /// A socket that cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A device that cannot be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// No thread, or no descriptor to stop it with.
    #[error("no threads can be started")]
    Thread(#[source] io::Error),
}

impl AddError {
    /// Returns the option that is to blame, if it is a single one.
    pub fn option(&self) -> Option<&'static str> {
        match self {
            Self::Different { .. } | Self::Busy { .. } => Some("name"),
            Self::SocketTaken { .. } | Self::NoSocket => Some("socket-path"),
            Self::Mistake(mistake) => Some(mistake.option),
            Self::Socket(error) => Some(error.option),
            Self::Make(error) => Some(error.option),
            Self::Full { .. } | Self::NoPool | Self::Stopping | Self::Thread(_) => None,
        }
    }
}

/// Why a device cannot be removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// A front-end uses the device, which goes on. Only [`Removal::Refuse`](crate::Removal::Refuse) fails so.
    #[error("a front-end is connected to the device {name}: disconnect it first, or drain the device")]
    InUse {
        /// The device.
        name: String,
    },
    /// Requests are still in flight. The device takes no new ones, and its name and socket stay in use until the last of
    /// them ends; remove it again to wait for that.
    #[error("requests of the device {name} are still in flight after {waited:?}; it takes no new ones")]
    Deadline {
        /// The device.
        name: String,
        /// The time that was waited.
        waited: Duration,
    },
    /// The device is not served yet.
    #[error("the device {name} is being added: try again when that is done")]
    BeingAdded {
        /// The device.
        name: String,
    },
}

/// Why a device is not served any longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listener fails, or a worker has ended.
    #[error("no front-end can be served any more")]
    Listener(#[source] io::Error),
    /// The connection that was passed on cannot be used.
    #[error("the connection of --fd cannot be used")]
    Connection(#[source] io::Error),
    /// The connection that was passed on ended in an error.
    #[error("the connection of --fd was dropped")]
    Dropped(#[source] Ended),
    /// The session thread panicked.
    #[error("a session panicked")]
    Panicked,
}
