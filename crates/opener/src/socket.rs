//! Makes sockets that listen, in this process.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kickless_values::SOCKET_PATH_BYTES_MAX;
use nix::unistd::Group;
use rustix::fs::{FileType, Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use super::directory::{Directory, Found, Identity, SocketRights};
use super::error::{GROUP_OPTION, MODE_OPTION, PATH_OPTION, SocketError, SocketProblem};
use super::reason::{Want, explained};

/// The mark of a socket that is being made: no other socket is sticky, as the bit has no meaning for one. So
/// a file that gets the name between the calls that make a socket is not taken for it.
const NEW: Mode = Mode::SVTX;
/// Front-ends that can wait to be accepted. The kernel refuses further ones.
const BACKLOG: i32 = 16;
/// A socket that was made.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Dropped before the socket. No other process replaces the name while the socket listens.
    pub(crate) name: SocketName,
    pub(crate) socket: UnixListener,
    /// Its permissions and its owner.
    pub(crate) rights: SocketRights,
    /// Another process had its directory locked until the deadline.
    pub(crate) was_locked: bool,
}

/// The name of a socket in the file system. Dropping it removes the name.
#[derive(Debug)]
pub(crate) struct SocketName {
    path: PathBuf,
    /// Another process may have replaced the socket when the name is dropped.
    identity: Identity,
}

impl SocketName {
    /// Takes the name from a process that ends without removing it.
    pub(crate) fn of(path: PathBuf, identity: Identity) -> Self {
        Self { path, identity }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Keeps the name. Returns the identity of the socket, by which [`remove`] removes it later.
    pub(crate) fn keep(mut self) -> Identity {
        self.path = PathBuf::new();
        self.identity
    }
}

impl Drop for SocketName {
    fn drop(&mut self) {
        // If this fails, the next process that uses the path replaces the name. An empty path has no name.
        let _ = remove(&self.path, self.identity);
    }
}

/// Removes the name of a socket, if it still stands for that of this identity.
///
/// # Errors
/// The kernel refuses it.
pub(crate) fn remove(path: &Path, identity: Identity) -> Result<(), Errno> {
    let Some(name) = path.file_name() else { return Ok(()) };
    Directory::of(path)?.remove(name, identity).map(drop)
}

/// Says whether a socket may be in a directory.
pub(crate) type Admits<'a> = &'a dyn Fn(&Directory) -> Result<(), SocketProblem>;

/// The path, permissions and group of a socket that is not made yet.
pub(crate) struct HostAddress<'a> {
    path: PathBuf,
    mode: Option<u32>,
    group: Option<u32>,
    admits: Admits<'a>,
}

impl<'a> HostAddress<'a> {
    /// Returns the address of a socket.
    pub(crate) fn of(path: &Path, mode: Option<u32>, group: Option<u32>, admits: Admits<'a>) -> Self {
        Self { path: path.to_owned(), mode, group, admits }
    }

    /// Checks the path. Changes nothing.
    ///
    /// # Errors
    /// Such a socket cannot be made.
    pub(crate) fn check(&self) -> Result<(), SocketError> {
        let bytes = self.path.as_os_str().as_bytes().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            let problem = SocketProblem::TooLong { bytes };
            return Err(SocketError { option: PATH_OPTION, path: None, problem });
        }
        let checked = self.directory().and_then(|(directory, name)| check(&directory, name));
        checked.map(drop).map_err(|problem| self.error(PATH_OPTION, problem))
    }

    fn error(&self, option: &'static str, problem: SocketProblem) -> SocketError {
        let problem = match problem {
            SocketProblem::Host { source, .. }
                if option == PATH_OPTION && source.kind() == io::ErrorKind::PermissionDenied =>
            {
                self.denied()
            }
            problem => problem,
        };
        SocketError { option, path: Some(self.path.clone()), problem }
    }

    /// Returns the problem of a user who may not make the socket.
    fn denied(&self) -> SocketProblem {
        SocketProblem::Denied(explained(&self.path, Want::Make, Errno::ACCESS.into()).to_string())
    }

    /// Opens the directory, and returns the name of the socket in it.
    fn directory(&self) -> Result<(Directory, &OsStr), SocketProblem> {
        let directory = match Directory::of(&self.path) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(SocketProblem::NoDirectory),
            opened => opened.map_err(SocketProblem::host("its directory cannot be opened"))?,
        };
        (self.admits)(&directory)?;
        let name = self.path.file_name().ok_or(SocketProblem::IsDirectory)?;
        Ok((directory, name))
    }

    /// Makes the socket and listens. Replaces a stale socket, whose process has ended. Waits until `deadline`
    /// for other processes that make sockets in the same directory. Front-ends that connect wait until they
    /// are accepted.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn listen(&self, deadline: Instant) -> Result<Bound, SocketError> {
        let at_path = |problem| self.error(PATH_OPTION, problem);
        let (directory, name) = self.directory().map_err(at_path)?;
        let was_locked = directory.lock(deadline);
        self.remove_stale(&directory, name).map_err(at_path)?;
        let socket = self.bind().map_err(at_path)?;
        let found = made(&directory, name).map_err(at_path)?;
        let (file_name, identity) = (name, found.identity());
        let name = SocketName { path: self.path.clone(), identity };
        // Front-ends can connect only after `listen`, when the permissions and the group are set.
        self.give_rights(&found)?;
        let again = directory.find(file_name).ok().flatten();
        let rights = again.filter(|again| again.identity() == identity).unwrap_or(found).rights();
        listen(&socket, BACKLOG).map_err(|error| at_path(SocketProblem::host("it cannot listen")(error)))?;
        Ok(Bound { name, socket: socket.into(), rights, was_locked })
    }

    /// Removes a stale socket, if there is one.
    ///
    /// # Errors
    /// Something else has the name.
    fn remove_stale(&self, directory: &Directory, name: &OsStr) -> Result<(), SocketProblem> {
        let Some(stale) = check(directory, name)? else { return Ok(()) };
        let removed = directory.remove(name, stale.identity());
        match removed.map_err(SocketProblem::host("an old socket is there and cannot be removed"))? {
            true => Ok(()),
            false => Err(SocketProblem::JustTaken),
        }
    }

    /// Makes a socket of this path with the mark of a new one. It does not listen yet. If it will get other
    /// permissions, it has those of its owner alone until then.
    fn bind(&self) -> Result<OwnedFd, SocketProblem> {
        let address = address(&self.path)?;
        let socket = new_socket(SocketFlags::CLOEXEC)?;
        let others = if self.mode.is_some() { Mode::empty() } else { Mode::RWXG | Mode::RWXO };
        // The file gets these permissions when it is made, less those of the umask.
        let marked = fchmod(&socket, Mode::RWXU | others | NEW);
        marked.map_err(SocketProblem::host("the permissions of a socket cannot be set"))?;
        match bind(&socket, &address) {
            Ok(()) => Ok(socket),
            Err(Errno::ADDRINUSE) => Err(SocketProblem::JustTaken),
            Err(error) => Err(SocketProblem::host("the socket cannot be made there")(error)),
        }
    }

    /// Sets the group and the permissions of the new socket, and takes the mark from it.
    fn give_rights(&self, socket: &Found) -> Result<(), SocketError> {
        if let Some(group) = self.group {
            let set = socket.set_group(group).map_err(SocketProblem::host("its group cannot be set"));
            set.map_err(|problem| self.error(GROUP_OPTION, problem))?;
        }
        let mode = self.mode.map_or(socket.mode() - NEW, Mode::from_raw_mode);
        let set = socket.set_mode(mode).map_err(SocketProblem::host("its permissions cannot be set"));
        set.map_err(|problem| self.error(MODE_OPTION, problem))
    }
}

/// Returns the socket that [`HostAddress::bind`] has just made with this name.
///
/// # Errors
/// The name stands for something else. This process must not change it.
fn made(directory: &Directory, name: &OsStr) -> Result<Found, SocketProblem> {
    let found = directory.find(name).map_err(SocketProblem::host("the socket has gone"))?;
    let is_new = |found: &Found| found.file_type() == FileType::Socket && found.mode().contains(NEW);
    found.filter(is_new).ok_or(SocketProblem::Exchanged)
}

/// Checks what has this name. Returns a socket that refuses connections, because its process has ended.
///
/// # Errors
/// There is something that this process must not remove.
fn check(directory: &Directory, name: &OsStr) -> Result<Option<Found>, SocketProblem> {
    let found = directory.find(name).map_err(SocketProblem::host("its file status cannot be read"))?;
    let Some(found) = found else { return Ok(None) };
    match found.file_type() {
        FileType::Socket => {}
        FileType::Directory => return Err(SocketProblem::IsDirectory),
        _ => return Err(SocketProblem::IsFile),
    }
    let probe = new_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    // This very socket is probed, and not one that gets its name meanwhile.
    match connect(&probe, &address(&found.path())?) {
        Err(Errno::CONNREFUSED) => Ok(Some(found)),
        Err(error @ Errno::NOENT) => {
            Err(SocketProblem::host("there is no /proc to probe a socket by")(error))
        }
        Err(Errno::ACCESS | Errno::PERM) => Err(SocketProblem::NotAllowed),
        // A socket with a full backlog, or of another type, is in use as well.
        Ok(()) | Err(_) => Err(SocketProblem::Listening),
    }
}

fn address(path: &Path) -> Result<SocketAddrUnix, SocketProblem> {
    SocketAddrUnix::new(path).map_err(SocketProblem::host("it cannot be the path of a socket"))
}

fn new_socket(flags: SocketFlags) -> Result<OwnedFd, SocketProblem> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(SocketProblem::host("no socket can be made"))
}

/// Returns the number of the group with this name or number.
///
/// # Errors
/// There is no such group.
pub(crate) fn group_id(group: &str) -> Result<u32, SocketProblem> {
    if let Ok(id) = group.parse() {
        return Ok(id);
    }
    match Group::from_name(group) {
        Ok(Some(found)) => Ok(found.gid.as_raw()),
        Ok(None) => Err(SocketProblem::NoGroup(group.into())),
        Err(error) => Err(SocketProblem::host("groups cannot be looked up")(io::Error::from(error))),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::thread;

    use tempfile::TempDir;

    use super::*;
    use crate::listener::{Address, Listener, TURN_WAIT};

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

    /// Makes a socket that nothing listens on. A process that another test starts has the listener too, until
    /// it becomes another program.
    fn make_stale(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
        while connected(path) {
            std::thread::yield_now();
        }
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
        make_stale(&path);
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
            make_stale(path);
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
        let directory = Directory::of(&path).unwrap();
        directory.lock(Instant::now());
        let _endpoint = bound(&path, None).unwrap();
        assert!(connected(&path));
    }

    /// Exchanges the new socket for something else before its rights are set, and after it was found.
    #[test]
    fn only_the_new_socket_gets_rights() {
        let (dir, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let (path, secret) = (dir.path().join("socket"), elsewhere.path().join("secret"));
        let moved = dir.path().join("moved");
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
        let address = HostAddress::of(&path, Some(0o666), None, &|_| Ok(()));
        let (directory, name) = address.directory().unwrap();
        let link = || symlink(&secret, &path).unwrap();
        let hard_link = || fs::hard_link(&secret, &path).unwrap();
        let socket = || make_stale(&path);
        let nothing = || {};
        fs::write(&secret, "").unwrap();
        let secret_mode = mode(&secret);
        let exchanges: [&dyn Fn(); 4] = [&link, &hard_link, &socket, &nothing];
        for exchange in exchanges {
            for is_found in [false, true] {
                let _socket = address.bind().unwrap();
                let found = is_found.then(|| made(&directory, name).unwrap());
                fs::rename(&path, &moved).unwrap();
                exchange();
                let before = path.symlink_metadata().map(|found| found.mode());
                match found {
                    Some(found) => address.give_rights(&found).unwrap(),
                    None => assert!(matches!(made(&directory, name), Err(SocketProblem::Exchanged))),
                }
                assert_eq!(mode(&moved), if is_found { 0o666 } else { 0o1700 });
                assert_eq!(path.symlink_metadata().map(|found| found.mode()).ok(), before.ok());
                assert_eq!(mode(&secret), secret_mode);
                let _ = fs::remove_file(&path);
            }
        }
    }

    #[test]
    fn a_stale_socket_that_is_exchanged_is_not_removed() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let address = HostAddress::of(&path, None, None, &|_| Ok(()));
        let (directory, name) = address.directory().unwrap();
        make_stale(&path);
        let stale = check(&directory, name).unwrap().unwrap();
        fs::rename(&path, dir.path().join("moved")).unwrap();
        fs::write(&path, "precious").unwrap();
        assert_eq!(directory.remove(name, stale.identity()), Ok(false));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    /// The directory gets another meaning after it was looked up.
    #[test]
    fn nothing_of_another_directory_is_removed() {
        let dir = TempDir::new().unwrap();
        let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        let path = ours.join("socket");
        make_stale(&path);
        let address = HostAddress::of(&path, None, None, &|_| Ok(()));
        let (directory, name) = address.directory().unwrap();
        let stale = check(&directory, name).unwrap().unwrap();
        make_stale(&theirs.join("socket"));
        fs::rename(&ours, dir.path().join("moved")).unwrap();
        symlink(&theirs, &ours).unwrap();
        assert_eq!(directory.remove(name, stale.identity()), Ok(true));
        assert!(theirs.join("socket").exists() && !dir.path().join("moved/socket").exists());
    }

    #[test]
    fn a_socket_without_a_mode_has_that_of_the_umask() {
        let dir = TempDir::new().unwrap();
        let (ours, plain) = (dir.path().join("ours"), dir.path().join("plain"));
        let _endpoint = bound(&ours, None).unwrap();
        let _plain = UnixListener::bind(&plain).unwrap();
        assert_eq!(fs::metadata(&ours).unwrap().mode(), fs::metadata(&plain).unwrap().mode());
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
