//! Errors of sockets that cannot be made. Each is one sentence for an operator.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use kickless_values::SOCKET_PATH_BYTES_MAX;
use rustix::io::Errno;

use crate::grant::Outside;

/// The options of a socket.
pub(crate) const PATH_OPTION: &str = "socket-path";
pub(crate) const MODE_OPTION: &str = "socket-mode";
pub(crate) const GROUP_OPTION: &str = "socket-group";

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
    #[error("there is no group {0}: name one of /etc/group, or give its number")]
    NoGroup(String),
    /// The inherited descriptor is a socket of another kind.
    #[error("it is not a unix stream socket")]
    NotUnixStream,
    /// The descriptor of a call is a socket that does not listen.
    #[error("it does not listen: a connection is served by kickless blk --fd=N")]
    NotListening,
    /// Its directory is outside of the roots.
    #[error(transparent)]
    Outside(#[from] Outside),
    /// The user of this process may not use its directory.
    #[error("{0}")]
    Denied(String),
    /// The kernel refused an operation.
    #[error("{what}")]
    Host {
        /// The operation that failed, as a sentence.
        what: Cow<'static, str>,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl SocketError {
    /// Returns the error of the socket with this path.
    pub fn of(path: &Path, problem: SocketProblem) -> Self {
        Self { option: PATH_OPTION, path: Some(path.to_owned()), problem }
    }

    /// Returns whether the value of the option is wrong, whatever the host has at its path.
    pub fn is_wrong_value(&self) -> bool {
        matches!(self.problem, SocketProblem::TooLong { .. } | SocketProblem::NoGroup(_))
    }

    /// Returns the error as numbers and a text, for another process.
    pub(crate) fn to_parts(&self) -> Parts {
        let option = OPTIONS.iter().position(|option| *option == self.option).unwrap_or_default() as u8;
        let option = if self.path.is_some() { option } else { option | WITHOUT_PATH };
        let (problem, number, text) = match &self.problem {
            SocketProblem::TooLong { bytes } => (0, *bytes as u64, String::new()),
            SocketProblem::NoDirectory => (1, 0, String::new()),
            SocketProblem::IsDirectory => (2, 0, String::new()),
            SocketProblem::IsFile => (3, 0, String::new()),
            SocketProblem::NotAllowed => (4, 0, String::new()),
            SocketProblem::Listening => (5, 0, String::new()),
            SocketProblem::JustTaken => (6, 0, String::new()),
            SocketProblem::Exchanged => (7, 0, String::new()),
            SocketProblem::NoGroup(group) => (8, 0, group.clone()),
            SocketProblem::NotUnixStream => (9, 0, String::new()),
            SocketProblem::NotListening => (10, 0, String::new()),
            // A path that is no text is shown like this too.
            SocketProblem::Outside(Outside { path }) => (11, 0, path.display().to_string()),
            SocketProblem::Denied(why) => (13, 0, why.clone()),
            SocketProblem::Host { what, source } => {
                let errno = source.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                (12, errno as u64, what.clone().into_owned())
            }
        };
        Parts { option, problem, number, text }
    }

    /// Returns the error of the socket with this path.
    pub(crate) fn from_parts(parts: Parts, path: &Path) -> Option<Self> {
        let Parts { option, problem, number, text } = parts;
        let problem = match problem {
            0 => SocketProblem::TooLong { bytes: number as usize },
            1 => SocketProblem::NoDirectory,
            2 => SocketProblem::IsDirectory,
            3 => SocketProblem::IsFile,
            4 => SocketProblem::NotAllowed,
            5 => SocketProblem::Listening,
            6 => SocketProblem::JustTaken,
            7 => SocketProblem::Exchanged,
            8 => SocketProblem::NoGroup(text),
            9 => SocketProblem::NotUnixStream,
            10 => SocketProblem::NotListening,
            11 => Outside { path: text.into() }.into(),
            12 => {
                SocketProblem::Host { what: text.into(), source: io::Error::from_raw_os_error(number as i32) }
            }
            13 => SocketProblem::Denied(text),
            _ => return None,
        };
        let path = (option & WITHOUT_PATH == 0).then(|| path.to_owned());
        Some(Self { option: OPTIONS.get(usize::from(option & !WITHOUT_PATH))?, path, problem })
    }
}

/// An error for another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) option: u8,
    pub(crate) problem: u8,
    pub(crate) number: u64,
    pub(crate) text: String,
}

/// The options, by their numbers in [`Parts`].
const OPTIONS: [&str; 3] = [PATH_OPTION, MODE_OPTION, GROUP_OPTION];
/// The mark of an error without a path.
const WITHOUT_PATH: u8 = 0x80;

impl SocketProblem {
    /// Returns a function that turns an error of the kernel into a problem with the failed operation.
    pub fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Host { what: what.into(), source: error.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_same_in_another_process() {
        let host = |what| SocketProblem::host(what)(Errno::ACCESS);
        let problems = [
            SocketProblem::TooLong { bytes: 200 },
            SocketProblem::NoDirectory,
            SocketProblem::IsDirectory,
            SocketProblem::IsFile,
            SocketProblem::NotAllowed,
            SocketProblem::Listening,
            SocketProblem::JustTaken,
            SocketProblem::Exchanged,
            SocketProblem::NoGroup("disk".into()),
            SocketProblem::NotUnixStream,
            SocketProblem::NotListening,
            Outside { path: "/a".into() }.into(),
            SocketProblem::Denied("user disk may not enter /a".into()),
            host("the socket cannot be made there"),
        ];
        let path = Path::new("/s");
        for (problem, option) in problems.into_iter().zip(OPTIONS.into_iter().cycle()) {
            let mut error = SocketError { option, path: Some(path.to_owned()), problem };
            assert_eq!(passed(&error), shown(&error));
            error.path = None;
            assert_eq!(passed(&error), shown(&error));
        }
        let unknown = Parts { option: 0, problem: 14, number: 0, text: String::new() };
        assert!(SocketError::from_parts(unknown.clone(), path).is_none());
        assert!(SocketError::from_parts(Parts { option: 3, problem: 1, ..unknown }, path).is_none());
    }

    /// Returns all that an operator can see of an error.
    fn shown(error: &SocketError) -> Vec<String> {
        let mut shown = vec![error.option.to_owned(), error.to_string()];
        let mut source = error.source();
        while let Some(error) = source {
            shown.push(error.to_string());
            source = error.source();
        }
        shown
    }

    fn passed(error: &SocketError) -> Vec<String> {
        shown(&SocketError::from_parts(error.to_parts(), "/s".as_ref()).unwrap())
    }
}
