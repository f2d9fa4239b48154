//! Sockets that listen.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::{Answer, Client, client, mismatch, without_refusal};
use crate::directory::{Directory, Identity, SocketRights, directory_of, warn_of_lock};
use crate::error::{GROUP_OPTION, Parts, SocketError, SocketProblem};
use crate::grant::Outside;
use crate::reason::check_group;
use crate::socket::{HostAddress, SocketName, group_id};
use crate::wire::{Reply, Request};

/// The time that all sockets together wait for locks on their directories. Each process holds such a lock
/// only briefly.
pub const TURN_WAIT: Duration = Duration::from_secs(5);

/// A listening socket, and its name in the file system if this process made the name.
#[derive(Debug)]
pub struct Listener {
    /// Dropped before the socket. No other process replaces the name while the socket listens.
    name: Option<Name>,
    /// The socket.
    socket: UnixListener,
    /// The permissions and the owner of the name, if they are known.
    rights: Option<SocketRights>,
}

/// The name of a socket. Dropping it removes the name.
#[derive(Debug)]
enum Name {
    /// This process removes it.
    Here(SocketName),
    /// The process that opens files removes it.
    Opener(OpenerName),
}

/// The name of a socket that its process removes, for the next process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameOfSocket {
    /// The path.
    pub path: PathBuf,
    /// The device of its inode.
    pub device: u64,
    /// The number of its inode. A name of another inode is not removed.
    pub inode: u64,
}

/// The name of a socket that the process that opens files made, and removes.
#[derive(Debug)]
struct OpenerName {
    path: PathBuf,
    identity: Identity,
}

impl Drop for OpenerName {
    fn drop(&mut self) {
        let Identity(device, inode) = self.identity;
        // If this fails, the next process that uses the path replaces the name.
        let _ = client().map(|client| {
            client.give_back(&Request::Unlink { path: self.path.clone(), device, inode }, Duration::ZERO)
        });
    }
}

impl Listener {
    /// Makes a socket of this path and mode, and listens on it. Replaces a stale socket, whose process has
    /// ended.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, SocketError> {
        Address::new(path, Some(mode), None)?.listen(Instant::now() + TURN_WAIT)
    }

    /// Takes a listening socket that another program has made. Its name stays.
    pub fn of(socket: UnixListener) -> Self {
        Self { name: None, socket, rights: None }
    }

    /// Takes a listening socket, and its name, from a process that ends without removing the name.
    pub fn taken_over(socket: UnixListener, name: NameOfSocket) -> Self {
        let NameOfSocket { path, device, inode } = name;
        let identity = Identity(device, inode);
        let name = match client() {
            Some(_) => Name::Opener(OpenerName { path, identity }),
            None => Name::Here(SocketName::of(path, identity)),
        };
        Self { name: Some(name), socket, rights: None }
    }

    /// Returns the name, if dropping this removes it.
    pub fn name(&self) -> Option<NameOfSocket> {
        let (path, Identity(device, inode)) = match self.name.as_ref()? {
            Name::Here(name) => (name.path(), name.identity()),
            Name::Opener(OpenerName { path, identity }) => (path.as_path(), *identity),
        };
        Some(NameOfSocket { path: path.to_owned(), device, inode })
    }

    /// Returns the socket.
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// Returns the permissions and the owner of the name, if they are known.
    pub fn rights(&self) -> Option<SocketRights> {
        self.rights
    }

    /// Notes the permissions and the owner of the name.
    #[must_use]
    pub fn with_rights(self, rights: Option<SocketRights>) -> Self {
        Self { rights, ..self }
    }

    /// Removes the name, and returns the socket.
    pub fn into_socket(self) -> UnixListener {
        self.socket
    }
}

/// The path, permissions and group of a socket that is not made yet. They have been checked as far as
/// possible.
#[derive(Debug)]
pub struct Address {
    path: PathBuf,
    mode: Option<u32>,
    /// The number of the group. The process that opens files has it from the [`Grant`](crate::Grant).
    group: Option<u32>,
}

impl Address {
    /// Checks the path and the group of a socket. Changes nothing.
    ///
    /// # Errors
    /// Such a socket cannot be made.
    pub fn new(path: &Path, mode: Option<u32>, group: Option<&str>) -> Result<Self, SocketError> {
        let address = |group| Self { path: path.to_owned(), mode, group };
        if let Some(client) = client() {
            let address = address(None);
            return match address.ask(client, &Request::CheckSocket { path: path.to_owned() })? {
                (Reply::Done {}, _) => Ok(address),
                _ => Err(address.failed(mismatch())),
            };
        }
        let group = group.map(|name| group_id(name).and_then(|id| check_group(name, id))).transpose();
        let group = group.map_err(|problem| SocketError { option: GROUP_OPTION, path: None, problem })?;
        let address = address(group);
        address.here().check()?;
        Ok(address)
    }

    /// Returns the address for this process.
    fn here(&self) -> HostAddress<'static> {
        HostAddress::of(&self.path, self.mode, self.group, &|_| Ok(()))
    }

    /// Makes the socket and listens. Replaces a stale socket, whose process has ended. Waits until `deadline`
    /// for other processes that make sockets in the same directory. Front-ends that connect wait until they
    /// are accepted.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(&self, deadline: Instant) -> Result<Listener, SocketError> {
        let (name, socket, rights, was_locked) = match client() {
            Some(client) => {
                let wait = deadline.saturating_duration_since(Instant::now()).min(TURN_WAIT);
                let request = Request::Listen { path: self.path.clone(), wait_ms: wait.as_millis() as u32 };
                let (Reply::Listening { device, inode, mode, uid, gid, was_locked }, Some(socket)) =
                    self.ask(client, &request)?
                else {
                    return Err(self.failed(mismatch()));
                };
                let name = OpenerName { path: self.path.clone(), identity: Identity(device, inode) };
                (Name::Opener(name), socket.into(), SocketRights { mode, uid, gid }, was_locked)
            }
            None => {
                let made = self.here().listen(deadline)?;
                (Name::Here(made.name), made.socket, made.rights, made.was_locked)
            }
        };
        if was_locked {
            warn_of_lock(&self.path);
        }
        Ok(Listener { name: Some(name), socket, rights: Some(rights) })
    }

    fn ask(&self, client: &Client, request: &Request) -> Result<Answer, SocketError> {
        let failed = |error| self.failed(error);
        match client.ask_with(request, None).map_err(failed)? {
            (Reply::Socket { option, problem, number, text }, _) => {
                let error = SocketError::from_parts(Parts { option, problem, number, text }, &self.path);
                Err(error.unwrap_or_else(|| self.failed(mismatch())))
            }
            (Reply::Outside { path, .. }, _) => Err(SocketError::of(&self.path, Outside { path }.into())),
            answer => without_refusal(answer).map_err(failed),
        }
    }

    fn failed(&self, error: std::io::Error) -> SocketError {
        SocketError::of(&self.path, SocketProblem::host("the process that opens files refuses it")(error))
    }
}

/// Returns `path` with the canonical path of its directory. Different spellings of a path then compare equal.
pub fn real_path(path: &Path) -> PathBuf {
    let Some(client) = client() else { return real_path_here(path) };
    match client.ask(&Request::RealPath { path: path.to_owned() }) {
        Ok((Reply::Path { path }, _)) => path,
        _ => path.to_owned(),
    }
}

/// Does the same in this process.
pub(crate) fn real_path_here(path: &Path) -> PathBuf {
    match (directory_of(path).canonicalize(), path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => path.to_owned(),
    }
}

/// Checks whether a socket may be in its directory: `is_root` says so of the canonical path of the directory.
///
/// # Errors
/// It may not.
pub(crate) fn admit(
    directory: &Directory,
    socket: &Path,
    is_root: impl Fn(&Path) -> bool,
) -> Result<(), SocketProblem> {
    let no_proc = SocketProblem::host("there is no /proc to see its directory by");
    let real = directory.real_path().map_err(no_proc)?;
    match is_root(&real) {
        true => Ok(()),
        false => Err(Outside { path: real.join(socket.file_name().unwrap_or_default()) }.into()),
    }
}
