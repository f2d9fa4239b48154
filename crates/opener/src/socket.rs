//! Sockets that listen.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use kickless_values::SOCKET_PATH_BYTES_MAX;
use nix::unistd::Group;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tracing::warn;

use super::error::{SocketError, SocketProblem};

/// The options for the path, the permissions and the group of a socket.
const PATH_OPTION: &str = "socket-path";
const MODE_OPTION: &str = "socket-mode";
const GROUP_OPTION: &str = "socket-group";
/// Front-ends that can wait to be accepted. The kernel refuses further ones.
const BACKLOG: i32 = 16;
/// The time that all sockets together wait for locks on their directories. Each process holds such a lock
/// only briefly.
pub const TURN_WAIT: Duration = Duration::from_secs(5);

/// A listening socket, and its name in the file system if this process made the name.
#[derive(Debug)]
pub struct Listener {
    /// Dropped before the socket. No other process replaces the name while the socket listens.
    _name: Option<SocketName>,
    /// The socket.
    socket: UnixListener,
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
        Self { _name: None, socket }
    }

    /// Returns the socket.
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// Removes the name, and returns the socket.
    pub fn into_socket(self) -> UnixListener {
        self.socket
    }
}

/// The name of a socket in the file system. Dropping it removes the name.
#[derive(Debug)]
struct SocketName {
    path: PathBuf,
    /// Device and inode of the socket. Another process may have replaced it when the name is dropped.
    identity: (u64, u64),
}

impl Drop for SocketName {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // If this fails, the next process that uses the path replaces the name.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The path, permissions and group of a socket that is not made yet. They have been checked as far as
/// possible.
#[derive(Debug)]
pub struct Address {
    path: PathBuf,
    mode: Option<u32>,
    group: Option<u32>,
}

impl Address {
    /// Checks the path and the group of a socket. Changes nothing.
    ///
    /// # Errors
    /// Such a socket cannot be made.
    pub fn new(path: &Path, mode: Option<u32>, group: Option<&str>) -> Result<Self, SocketError> {
        let group = group.map(group_id).transpose();
        let group = group.map_err(|problem| SocketError { option: GROUP_OPTION, path: None, problem })?;
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            let problem = SocketProblem::TooLong { bytes };
            return Err(SocketError { option: PATH_OPTION, path: None, problem });
        }
        let address = Self { path: path.to_owned(), mode, group };
        check_path(path).map_err(|problem| address.error(PATH_OPTION, problem))?;
        Ok(address)
    }

    fn error(&self, option: &'static str, problem: SocketProblem) -> SocketError {
        SocketError { option, path: Some(self.path.clone()), problem }
    }

    /// Makes the socket and listens. Replaces a stale socket, whose process has ended. Waits until `deadline`
    /// for other processes that make sockets in the same directory. Front-ends that connect wait until they
    /// are accepted.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(&self, deadline: Instant) -> Result<Listener, SocketError> {
        let _lock = lock_directory(&self.path, deadline);
        let (socket, name) = self.make().map_err(|problem| self.error(PATH_OPTION, problem))?;
        // Front-ends can connect only after `listen`, when the permissions and the group are set.
        if let Some(group) = self.group {
            chown(&self.path, None, Some(group)).map_err(|error| {
                self.error(GROUP_OPTION, SocketProblem::host("its group cannot be set")(error))
            })?;
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(&self.path, fs::Permissions::from_mode(mode)).map_err(|error| {
                self.error(MODE_OPTION, SocketProblem::host("its permissions cannot be set")(error))
            })?;
        }
        listen(&socket, BACKLOG)
            .map_err(|error| self.error(PATH_OPTION, SocketProblem::host("it cannot listen")(error)))?;
        Ok(Listener { _name: Some(name), socket: socket.into() })
    }

    /// Makes a socket of this path that does not listen yet.
    fn make(&self) -> Result<(OwnedFd, SocketName), SocketProblem> {
        let path = &self.path;
        if check_path(path)? == Obstacle::StaleSocket {
            fs::remove_file(path)
                .map_err(SocketProblem::host("an old socket is there and cannot be removed"))?;
        }
        let address =
            SocketAddrUnix::new(path).map_err(SocketProblem::host("it cannot be the path of a socket"))?;
        let socket = new_socket(SocketFlags::CLOEXEC)?;
        match bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => return Err(SocketProblem::JustTaken),
            Err(error) => return Err(SocketProblem::host("the socket cannot be made there")(error)),
        }
        let made = fs::symlink_metadata(path).map_err(SocketProblem::host("the socket has gone"))?;
        Ok((socket, SocketName { path: path.to_owned(), identity: (made.dev(), made.ino()) }))
    }
}

/// Locks the directory of `path` until the returned file is closed. Returns `None` if the directory cannot be
/// locked.
///
/// The lock makes processes that start on the same path at the same time take turns. The process with the
/// lock checks the path, removes a stale socket, binds and listens. Another process then finds no socket, a
/// socket that answers, or a stale one. Without the lock, it could take a socket that is bound and does not
/// listen yet for a stale one, and remove it.
///
/// The process continues without the lock if it has no permission to read the directory, if the file system
/// has no such locks, or if the directory is still locked at the deadline. Each user who can read the
/// directory can lock it, such as a hypervisor. That must not keep the daemon from serving the disks of
/// others.
fn lock_directory(path: &Path, deadline: Instant) -> Option<fs::File> {
    let directory = fs::File::open(directory_of(path)).ok()?;
    loop {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Err(Errno::WOULDBLOCK) => {
                warn!(socket = %path.display(), "another process keeps the socket's directory locked; the socket is made without the lock");
                return None;
            }
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An obstacle at the path of a new socket.
#[derive(Debug, PartialEq, Eq)]
enum Obstacle {
    None,
    /// A socket that refuses connections, because its process has ended.
    StaleSocket,
}

/// Checks the file at `path`. Returns an error for a file that this process must not remove.
fn check_path(path: &Path) -> Result<Obstacle, SocketProblem> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return if directory_of(path).is_dir() {
                Ok(Obstacle::None)
            } else {
                Err(SocketProblem::NoDirectory)
            };
        }
        Err(error) => return Err(SocketProblem::host("its file status cannot be read")(error)),
        Ok(found) if found.is_dir() => return Err(SocketProblem::IsDirectory),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketProblem::IsFile),
        Ok(_) => {}
    }
    let probe = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    let address =
        SocketAddrUnix::new(path).map_err(SocketProblem::host("it cannot be the path of a socket"))?;
    match connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => Ok(Obstacle::StaleSocket),
        Err(Errno::NOENT) => Ok(Obstacle::None),
        Err(Errno::ACCESS | Errno::PERM) => Err(SocketProblem::NotAllowed),
        // A socket with a full backlog, or of another type, is in use as well.
        Ok(()) | Err(_) => Err(SocketProblem::Listening),
    }
}

fn new_socket(flags: SocketFlags) -> Result<OwnedFd, SocketProblem> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(SocketProblem::host("no socket can be made"))
}

/// Returns the number of the group with this name or number.
fn group_id(group: &str) -> Result<u32, SocketProblem> {
    if let Ok(id) = group.parse() {
        return Ok(id);
    }
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => Err(SocketProblem::NoGroup(group.into())),
        Err(error) => Err(SocketProblem::host("groups cannot be looked up")(io::Error::from(error))),
    }
}

/// Returns `path` with the canonical path of its directory. Different spellings of a path then compare equal.
pub fn real_path(path: &Path) -> PathBuf {
    match (directory_of(path).canonicalize(), path.file_name()) {
        (Ok(directory), Some(name)) => directory.join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use tempfile::TempDir;

    use super::*;

    fn bound(path: &Path, mode: Option<u32>) -> Result<Listener, String> {
        Address::new(path, mode, None).and_then(|address| address.listen(Instant::now() + TURN_WAIT)).map_err(
            |error| {
                format!(
                    "--{}: {error}: {}",
                    error.option,
                    error.source().map(ToString::to_string).unwrap_or_default()
                )
            },
        )
    }

    fn connected(path: &Path) -> bool {
        UnixStream::connect(path).is_ok()
    }

    #[test]
    fn dropping_a_listener_removes_its_name() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let endpoint = bound(&path, Some(0o640)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert!(connected(&path));
        drop(endpoint);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let _endpoint = bound(&path, None).unwrap();
        assert!(connected(&path));
    }

    #[test]
    fn a_listening_socket_is_not_replaced() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let _first = bound(&path, None).unwrap();
        let refused = bound(&path, None).unwrap_err();
        assert!(refused.contains("another process is listening there"), "{refused}");
        assert!(connected(&path));
        // The backlog fills up, because each attempt leaves a connection that is not accepted.
        for _ in 0..2 * BACKLOG {
            assert!(bound(&path, None).is_err());
        }
    }

    #[test]
    fn other_files_are_not_replaced() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, b"precious").unwrap();
        let refused = bound(&path, None).unwrap_err();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let refused = bound(dir.path(), None).unwrap_err();
        assert!(refused.contains("it is a directory"), "{refused}");

        let path = dir.path().join("datagrams");
        let _datagrams = UnixDatagram::bind(&path).unwrap();
        assert!(bound(&path, None).is_err());
        assert!(path.exists());
    }

    #[test]
    fn the_socket_of_another_process_is_not_removed() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let endpoint = bound(&path, None).unwrap();
        // The old socket still exists under another name, so that the new one gets another inode.
        fs::rename(&path, dir.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(endpoint);
        assert!(connected(&path));
    }

    #[test]
    fn one_of_several_concurrent_binds_succeeds() {
        let dir = TempDir::new().unwrap();
        let path = &dir.path().join("socket");
        for _ in 0..200 {
            // Each thread tries to replace this stale socket.
            drop(UnixListener::bind(path).unwrap());
            let all_at_once = &std::sync::Barrier::new(3);
            let start = || {
                all_at_once.wait();
                bound(path, None)
            };
            let made = thread::scope(|scope| {
                let threads = [(); 3].map(|()| scope.spawn(start));
                threads.map(|thread| thread.join().unwrap())
            });
            let refused = made.iter().filter_map(|made| made.as_ref().err());
            assert!(
                refused.clone().all(|said| said.contains("another process is listening there")),
                "{made:?}"
            );
            assert_eq!(refused.count(), 2, "{made:?}");
            assert!(connected(path));
            drop(made);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_directory_that_stays_locked_is_used_without_the_lock() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let _lock = lock_directory(&path, Instant::now()).unwrap();
        let _endpoint = bound(&path, None).unwrap();
        assert!(connected(&path));
    }

    #[test]
    fn invalid_paths_are_refused() {
        let dir = TempDir::new().unwrap();
        let missing = bound(&dir.path().join("nowhere/socket"), None).unwrap_err();
        assert!(missing.contains("--socket-path") && missing.contains("directory"), "{missing}");

        let room = SOCKET_PATH_BYTES_MAX - dir.path().as_os_str().len() - 1;
        let longest = dir.path().join("s".repeat(room));
        bound(&longest, None).unwrap();
        let refused = bound(&dir.path().join("s".repeat(room + 1)), None).unwrap_err();
        assert!(refused.contains("108 bytes"), "{refused}");
    }

    #[test]
    fn groups() {
        assert_eq!(group_id("0").unwrap(), 0);
        assert_eq!(group_id("root").unwrap(), 0);
        assert!(group_id("no such group").unwrap_err().to_string().contains("no such group"));
        let refused = Address::new(Path::new("socket"), None, Some("no such group")).unwrap_err();
        assert_eq!(refused.option, "socket-group", "{refused}");
    }
}
