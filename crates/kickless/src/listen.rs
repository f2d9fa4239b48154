//! The socket that front-ends connect to.

use std::fs;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kickless_values::SOCKET_PATH_BYTES_MAX;
use nix::unistd::Group;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use tracing::warn;

/// Front-ends that wait for their turn; more are refused.
const BACKLOG: i32 = 16;
/// How long all sockets together wait for others that make sockets in the same directories. Each takes a moment.
pub(crate) const TURN_WAIT: Duration = Duration::from_secs(5);

/// Where front-ends come from.
#[derive(Debug)]
pub(crate) enum Endpoint {
    /// They connect, one after the other.
    Listening(Listener),
    /// There is one, and it is connected.
    Connected(UnixStream),
}

/// A listening socket, and its name in the file system if we gave it one.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Goes before the socket: as long as we listen, no other process replaces the name.
    _name: Option<Name>,
    /// The socket.
    pub(crate) socket: UnixListener,
}

/// The name of a socket, removed when this is dropped.
#[derive(Debug)]
struct Name {
    path: PathBuf,
    /// Device and inode: the path may be somebody else's by then.
    identity: (u64, u64),
}

impl Drop for Name {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // Whoever starts next replaces a name that stays behind.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Endpoint {
    /// Takes over the socket that was inherited under the number `fd`. To be called before any other descriptor is opened.
    ///
    /// # Errors
    /// It is no socket that front-ends could come from; one sentence that names the option.
    pub(crate) fn inherit(fd: i32) -> Result<Self> {
        take_over(fd).and_then(Self::of_inherited).with_context(|| format!("--fd={fd}"))
    }

    /// Sorts out what kind of socket somebody else made.
    fn of_inherited(socket: OwnedFd) -> Result<Self> {
        let family = sockopt::socket_domain(&socket).context("it is not a socket")?;
        ensure!(
            family == AddressFamily::UNIX && sockopt::socket_type(&socket)? == SocketType::STREAM,
            "it is not a unix stream socket"
        );
        if sockopt::socket_acceptconn(&socket)? {
            return Ok(Self::Listening(Listener { _name: None, socket: socket.into() }));
        }
        let stream = UnixStream::from(socket);
        stream.peer_addr().context("it neither listens nor is connected")?;
        Ok(Self::Connected(stream))
    }
}

/// A socket that can be made, as far as can be told without making it.
#[derive(Debug)]
pub(crate) struct Address {
    path: PathBuf,
    mode: Option<u32>,
    group: Option<u32>,
    /// How a sentence names the options that say the path, the mode and the group.
    options: [String; 3],
}

impl Address {
    /// Checks what was said of the socket; changes nothing. `named` says how a sentence names an option.
    ///
    /// # Errors
    /// It could not be made; one sentence that names the option.
    pub(crate) fn new(
        path: &Path,
        mode: Option<u32>,
        group: Option<&str>,
        named: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let options = ["socket-path", "socket-mode", "socket-group"].map(named);
        let group = group.map(group_id).transpose().with_context(|| options[2].clone())?;
        let length = path.as_os_str().as_bytes().len();
        ensure!(
            length <= SOCKET_PATH_BYTES_MAX,
            "{}: the path has {length} bytes and a socket's may have {SOCKET_PATH_BYTES_MAX}: use a shorter one",
            options[0]
        );
        let address = Self { path: path.to_owned(), mode, group, options };
        look_at(path).with_context(|| address.named())?;
        Ok(address)
    }

    fn named(&self) -> String {
        format!("{}: {}", self.options[0], self.path.display())
    }

    /// Makes the socket, replacing one that nobody listens on any more. From here on whoever connects waits to be served. Others that
    /// make sockets in the same directory are waited for until `deadline`.
    ///
    /// # Errors
    /// It cannot be made; one sentence that names the option.
    pub(crate) fn bind(&self, deadline: Instant) -> Result<Endpoint> {
        let listener = self.listen(deadline).with_context(|| self.named())?;
        Ok(Endpoint::Listening(listener))
    }

    /// Sets permissions and group before anybody can connect.
    fn listen(&self, deadline: Instant) -> Result<Listener> {
        let path = &self.path;
        let _turn = take_turn(path, deadline);
        if look_at(path)? == Found::Stale {
            fs::remove_file(path).context("an old socket is there and cannot be removed")?;
        }
        let address = SocketAddrUnix::new(path).context("it cannot be the path of a socket")?;
        let socket = new_socket(SocketFlags::CLOEXEC)?;
        match bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => bail!("another process has just taken it: use another path"),
            Err(error) => return Err(error).context("the socket cannot be made there"),
        }
        let made = fs::symlink_metadata(path).context("the socket has gone")?;
        let name = Name { path: path.to_owned(), identity: (made.dev(), made.ino()) };
        if let Some(group) = self.group {
            chown(path, None, Some(group))
                .with_context(|| format!("its group cannot be set ({})", self.options[2]))?;
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(path, fs::Permissions::from_mode(mode))
                .with_context(|| format!("its permissions cannot be set ({})", self.options[1]))?;
        }
        listen(&socket, BACKLOG).context("nobody can connect to it")?;
        Ok(Listener { _name: Some(name), socket: socket.into() })
    }
}

/// Locks the directory of `path` until the file that is returned is closed. `None`: it cannot be locked.
///
/// Processes that start on one path at once take turns so. In its turn, each looks at what is there, removes what is stale,
/// binds and listens. So none takes a socket that is bound and does not listen yet for a stale one, and none removes a name
/// that another has just made: it either finds nothing, or a socket that answers, or one whose process has gone.
///
/// A directory that we may not read, or a file system without such locks, goes without. So does a directory that stays locked:
/// each user who may read it can lock it, a hypervisor above all, and must not keep the disks of others from being served.
fn take_turn(path: &Path, deadline: Instant) -> Option<fs::File> {
    let directory = fs::File::open(directory_of(path)).ok()?;
    loop {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Err(Errno::WOULDBLOCK) => {
                warn!(socket = %path.display(), "another process keeps the socket's directory locked; it is used all the same");
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

/// What stands in the way of a new socket.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    /// A socket that refuses connections: whoever listened has gone.
    Stale,
}

/// Looks at what is at `path`. Whatever is not ours to remove is an error.
fn look_at(path: &Path) -> Result<Found> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            ensure!(
                directory_of(path).is_dir(),
                "the directory does not exist: make it first or use another path"
            );
            return Ok(Found::Nothing);
        }
        Err(error) => return Err(error).context("it cannot be looked at"),
        Ok(found) if found.is_dir() => bail!("it is a directory: name a socket in it"),
        Ok(found) if !found.file_type().is_socket() => {
            bail!("there is a file that is not a socket: remove it or use another path")
        }
        Ok(_) => {}
    }
    let probe = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(Found::Stale),
        Err(Errno::NOENT) => Ok(Found::Nothing),
        Err(Errno::ACCESS | Errno::PERM) => bail!("there is a socket that we may not use: use another path"),
        // A full backlog, or a socket of another type, belongs to somebody as well.
        Ok(()) | Err(_) => bail!("another process is listening there: stop it or use another path"),
    }
}

fn new_socket(flags: SocketFlags) -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).context("no socket can be made")
}

/// The number of a group given by name or number.
fn group_id(group: &str) -> Result<u32> {
    if let Ok(id) = group.parse() {
        return Ok(id);
    }
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => bail!("there is no group {group}"),
        Err(error) => Err(error).context("groups cannot be looked up"),
    }
}

/// Takes possession of a descriptor that was inherited under the number `fd`.
#[expect(unsafe_code, reason = "only the command line knows whose the number is")]
fn take_over(fd: i32) -> Result<OwnedFd> {
    ensure!(
        fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok(),
        "no descriptor with that number was passed on to us"
    );
    // SAFETY:
    // - open: it was a moment ago, and the only other thread that runs yet, the log's, closes nothing;
    // - ours alone: whoever started us gave it to us by this number, and called once, before this program has opened a
    //   descriptor that it keeps, no other owner of the number exists.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl_setfd(socket.as_fd(), FdFlags::CLOEXEC)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use tempfile::TempDir;

    use super::*;

    fn bound(path: &Path, mode: Option<u32>) -> Result<Endpoint, String> {
        Address::new(path, mode, None, |option| format!("--{option}"))
            .and_then(|address| address.bind(Instant::now() + TURN_WAIT))
            .map_err(|error| format!("{error:#}"))
    }

    fn connected(path: &Path) -> bool {
        UnixStream::connect(path).is_ok()
    }

    #[test]
    fn the_name_goes_with_the_listener() {
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
    fn a_live_one_is_not() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let _first = bound(&path, None).unwrap();
        let refused = bound(&path, None).unwrap_err();
        assert!(refused.contains("another process is listening there"), "{refused}");
        assert!(connected(&path));
        // Nor one whose backlog is full: each attempt leaves a connection that nobody accepts.
        for _ in 0..2 * BACKLOG {
            assert!(bound(&path, None).is_err());
        }
    }

    #[test]
    fn nor_is_anything_that_is_no_socket_of_ours() {
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
    fn somebody_elses_name_is_left_alone() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let endpoint = bound(&path, None).unwrap();
        // Kept open, so that its inode is not given out again.
        fs::rename(&path, dir.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(endpoint);
        assert!(connected(&path));
    }

    #[test]
    fn of_several_at_once_one_listens() {
        let dir = TempDir::new().unwrap();
        let path = &dir.path().join("socket");
        for _ in 0..200 {
            // Stale, so that each wants to replace it.
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
    fn a_directory_that_stays_locked() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let _turn = take_turn(&path, Instant::now()).unwrap();
        let _endpoint = bound(&path, None).unwrap();
        assert!(connected(&path));
    }

    #[test]
    fn paths_that_cannot_be() {
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
        let named = |option: &str| format!("--{option}");
        let refused = Address::new(Path::new("socket"), None, Some("no such group"), named).unwrap_err();
        assert!(refused.to_string().contains("--socket-group"), "{refused}");
    }

    #[test]
    fn inherited_sockets() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let of = |socket: OwnedFd| Endpoint::of_inherited(socket);
        assert!(matches!(of(listener.into()), Ok(Endpoint::Listening(_))));
        assert!(path.exists());
        assert!(matches!(of(stream.into()), Ok(Endpoint::Connected(_))));
        assert!(of(UnixDatagram::unbound().unwrap().into()).is_err());
        assert!(of(fs::File::open("/dev/null").unwrap().into()).is_err());
        let fresh = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert!(of(fresh).is_err());
        let nobody = Endpoint::inherit(999_999).unwrap_err();
        assert!(format!("{nobody:#}").contains("--fd=999999"));
    }
}
