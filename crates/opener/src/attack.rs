//! Lies to the process that opens files, for tests. Release builds do not have this module.
//!
//! Each lie has a name. It asks for a thing that no entry has, or enters a thing that the operator does not
//! allow, or sends a message that is none. A few tell the truth, so that a test knows that the others were
//! heard. All files are below one directory, which a test makes.

mod lies;

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::fs::{CWD, Mode, OFlags, openat, stat};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::client::{Client, client, mismatch};
use crate::error::{Parts, SocketError, SocketProblem};
use crate::perform::{NOT_NAMED, PASST_OPTION};
use crate::reason::errno_of;
use crate::wire::{Reply, Request};
use lies::{ENTRY, Given, Lie};

#[cfg(not(debug_assertions))]
compile_error!("only tests lie");

/// The time in which a message that is none ends this process.
const END_WAIT: Duration = Duration::from_secs(20);

/// Descriptors and facts that the process cannot have in the sandbox.
#[derive(Debug)]
struct Held {
    path_only: OwnedFd,
    directory: OwnedFd,
    outside: OwnedFd,
    /// The device and the inode of a plain file among the sockets.
    plain: (u64, u64),
}

static HELD: OnceLock<Held> = OnceLock::new();

/// Opens what lies need. A process calls this before it loses its rights.
///
/// # Errors
/// A file is missing.
pub fn prepare(directory: &Path) -> io::Result<()> {
    let open = |path: &Path, flags| openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty());
    let plain = stat(directory.join("sockets/plain"))?;
    let held = Held {
        path_only: open(&directory.join("disks/image"), OFlags::PATH)?,
        directory: open(directory, OFlags::RDONLY | OFlags::DIRECTORY)?,
        outside: open(&directory.join("secret/file"), OFlags::RDONLY)?,
        plain: (plain.st_dev, plain.st_ino),
    };
    HELD.set(held).map_err(|_| Errno::ALREADY.into())
}

/// An answer that is no success.
#[derive(Debug)]
pub enum Refusal {
    /// An error number.
    Errno(i32),
    /// A word for a refusal of the opener.
    Word(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        errno_of(&error).map_or_else(|| Self::Word(error.to_string()), Self::Errno)
    }
}

/// Returns the names of all lies.
pub fn names() -> Vec<&'static str> {
    lies::all(Path::new(""), (0, 0)).into_iter().map(|(name, _)| name).collect()
}

/// Tells the lie with this name, about files below `directory`. Returns `None` if there is no such lie.
pub fn attempt(name: &str, directory: &Path) -> Option<Result<(), Refusal>> {
    let plain = HELD.get().map_or((0, 0), |held| held.plain);
    let (_, lie) = lies::all(directory, plain).into_iter().find(|(known, _)| *known == name)?;
    let Some(client) = client() else { return Some(Err(Refusal::Word("none".into()))) };
    let answer = tell(client, lie, directory);
    // Another lie begins with the entries of the devices only.
    let _ = client.ask(&Request::Leave { entry: ENTRY });
    Some(answer)
}

fn tell(client: &Client, lie: Lie, directory: &Path) -> Result<(), Refusal> {
    match lie {
        Lie::Ask(requests) => requests.into_iter().try_for_each(|request| {
            let (reply, _) = client.ask_with(&request, None)?;
            judge(reply)
        }),
        Lie::With(request, given) => {
            let given = given.get(client, directory)?;
            judge(client.ask_with(&request, Some(given.as_fd()))?.0)
        }
        Lie::Message(bytes, given) => {
            let fds = given.iter().map(|given| given.get(client, directory));
            let fds = fds.collect::<Result<Vec<_>, Refusal>>()?;
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            sendmsg(client.socket(), &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
                .map_err(io::Error::from)?;
            thread::sleep(END_WAIT);
            Ok(())
        }
    }
}

fn judge(reply: Reply) -> Result<(), Refusal> {
    let word = |word: &str| Err(Refusal::Word(word.into()));
    match reply {
        Reply::Errno { errno } | Reply::Explained { errno, .. } | Reply::Tap { errno, .. } => {
            Err(Refusal::Errno(errno))
        }
        Reply::Failed { text } => Err(Refusal::Word(text)),
        Reply::Outside { .. } => word("outside"),
        Reply::Refused { reason: NOT_NAMED, .. } => word("not-named"),
        Reply::Refused { reason: PASST_OPTION, .. } => word("passt-option"),
        Reply::Refused { .. } => word("library"),
        Reply::Socket { option, problem, number, text } => {
            let parts = Parts { option, problem, number, text };
            match SocketError::from_parts(parts, Path::new("")).map(|error| error.problem) {
                Some(SocketProblem::Outside(_)) => word("outside"),
                Some(SocketProblem::IsFile) => word("is-file"),
                Some(SocketProblem::Listening) => word("listening"),
                Some(SocketProblem::NoGroup(_)) => word("no-group"),
                problem => word(&format!("{problem:?}").replace(' ', "-")),
            }
        }
        _ => Ok(()),
    }
}

impl Given {
    fn get(self, client: &Client, directory: &Path) -> Result<OwnedFd, Refusal> {
        let held = HELD.get().ok_or(Errno::BADF).map_err(io::Error::from)?;
        Ok(match self {
            Self::NamedImage => {
                let path = directory.join("disks/image");
                client.descriptor_of(&Request::Image { path, writes: true, is_direct: false })?
            }
            Self::PathOnly => held.path_only.try_clone()?,
            Self::Directory => held.directory.try_clone()?,
            Self::Outside => held.outside.try_clone()?,
        })
    }
}

impl Client {
    /// Makes a request, and returns the descriptor that comes with its reply.
    fn descriptor_of(&self, request: &Request) -> io::Result<OwnedFd> {
        self.ask(request)?.1.ok_or_else(mismatch)
    }
}
