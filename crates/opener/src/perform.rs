//! Carries requests out that are allowed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_getfl, memfd_create};
use rustix::io::Errno;

use crate::answers::FileStatus;
use crate::authority::{Admission, Denied, Granted, NotEntered, Permit, State, Within};
use crate::client::{Answer, Client, mismatch};
use crate::connect::{begin_tcp_here, connect_here, literal};
use crate::directory::{Directory, Identity, SocketRights, directory_of, real_path_of};
use crate::error::{GROUP_OPTION, Parts, SocketError, SocketProblem};
use crate::file::{FileUse, Opened, capture_here, path_of, reopen_here, status_of, with_alignment};
use crate::grant::{Authority, PathUse, Target};
use crate::listener::{admit, real_path_here};
use crate::name::name_here;
use crate::reason::{Want, check_group};
use crate::socket::HostAddress;
use crate::sysfs::{block_facts_here, char_subsystem_here};
use crate::tap::tap_here;
use crate::wire::{Reply, Request};

/// The longest configuration file.
const CONFIG_BYTES_MAX: usize = 4 << 20;
/// The longest wait for a lock on a directory.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The configuration file, as it is now.
#[derive(Debug)]
pub struct ConfigFile {
    /// Its text.
    pub text: Vec<u8>,
    /// The things that it names, or `None` if it is not valid: the things of the last valid one count then.
    pub named: Option<Vec<Target>>,
}

/// The configuration file that the operator named at the start.
pub struct Config {
    /// Its path. Nothing else opens or makes a file with this path, or the file that it stands for.
    pub path: PathBuf,
    /// Reads it.
    pub read: Box<dyn Fn() -> io::Result<ConfigFile> + Send + Sync>,
}

/// Carries requests out. Each thread calls it.
pub(crate) struct Performer {
    state: Mutex<State>,
    /// The roots of images, as they were at the start.
    roots: Vec<(PathBuf, Option<Identity>)>,
    /// The process that starts programs and looks names up.
    launcher: Option<Client>,
    config: Option<Config>,
}

impl From<io::Error> for Reply {
    fn from(error: io::Error) -> Self {
        Self::failure(&error)
    }
}

impl From<Errno> for Reply {
    fn from(errno: Errno) -> Self {
        Self::Errno { errno: errno.raw_os_error() }
    }
}

impl From<SocketError> for Reply {
    fn from(error: SocketError) -> Self {
        let Parts { option, problem, number, text } = error.to_parts();
        Self::Socket { option, problem, number, text }
    }
}

impl From<Denied> for Reply {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::NotGranted => Errno::PERM.into(),
            Denied::Busy => Errno::AGAIN.into(),
        }
    }
}

impl Performer {
    pub(crate) fn new(authority: Authority, launcher: Option<Client>, config: Option<Config>) -> Self {
        let roots = authority
            .roots
            .iter()
            .filter(|root| root.uses.contains(&PathUse::Image))
            .map(|root| (root.directory.clone(), identity_of(&root.directory)));
        let roots = roots.collect();
        Self { state: Mutex::new(State::new(authority)), roots, launcher, config }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries a request out. `given` came with it.
    ///
    /// # Errors
    /// The host refuses it, or the file is outside of the roots.
    pub(crate) fn perform(
        &self,
        request: &Request,
        permit: &Permit,
        given: Option<OwnedFd>,
    ) -> Result<Answer, Reply> {
        let only = |reply| Ok((reply, None));
        let with = |fd: OwnedFd| Ok((Reply::Done {}, Some(fd)));
        match request {
            Request::Enter { entry, targets } => self.enter(*entry, targets).and_then(only),
            Request::Leave { entry } => {
                self.state().leave(*entry);
                only(Reply::Done {})
            }
            Request::Status { path } => {
                let (_, _, status) = self.named(path, permit)?;
                only(Reply::Status { status })
            }
            Request::Image { path, writes, is_direct } => self.image(path, *writes, *is_direct, permit),
            Request::Capture { path } => {
                let directory = self.directory(path, PathUse::Capture, permit)?;
                let name = path.file_name().ok_or(Errno::ISDIR)?;
                match directory.find(name)? {
                    Some(found) if !can_be_capture(found.file_type()) => Err(Errno::PERM.into()),
                    Some(found) if self.is_config(found.identity()) => Err(Errno::PERM.into()),
                    None if self.is_name_of_config(&directory, name) => Err(Errno::PERM.into()),
                    Some(_) | None => with(capture_here(directory.as_fd(), name)?.into()),
                }
            }
            Request::Reopen { writes, is_direct } => {
                let given = given.ok_or(Errno::BADF)?;
                reopened(given.as_fd(), *writes, *is_direct).map(answer)
            }
            Request::CheckSocket { path } => {
                self.with_address(path, permit, |address| address.check())?;
                only(Reply::Done {})
            }
            Request::Listen { path, wait_ms } => {
                let wait = Duration::from_millis((*wait_ms).into()).min(WAIT_MAX);
                let made =
                    self.with_address(path, permit, |address| address.listen(Instant::now() + wait))?;
                let Identity(device, inode) = made.name.keep();
                let SocketRights { mode, uid, gid } = made.rights;
                let was_locked = made.was_locked;
                let reply = Reply::Listening { device, inode, mode, uid, gid, was_locked };
                Ok((reply, Some(made.socket.into())))
            }
            Request::Unlink { path, device, inode } => {
                let directory = self.directory(path, PathUse::Socket, permit)?;
                let name = path.file_name().ok_or(Errno::ISDIR)?;
                match directory.remove(name, Identity(*device, *inode))? {
                    true => only(Reply::Done {}),
                    false => Err(Errno::NOENT.into()),
                }
            }
            Request::RealPath { path } => only(Reply::Path { path: real_path_here(path) }),
            Request::ConnectUnix { path } => with(self.connect(path, permit)?),
            Request::Resolve { host, port } => self.resolve(host, *port).and_then(only),
            Request::ConnectTcp { address } => with(begin_tcp_here(*address)?),
            Request::Tap { name, flags } => with(tap_here(name, *flags).map_err(|error| error.to_reply())?),
            Request::FindPasst {} | Request::StartPasst { .. } | Request::EndPasst { .. } => {
                self.passt(request, permit)
            }
            Request::BlockFacts { device } => only(Reply::Block { facts: block_facts_here(*device) }),
            Request::CharSubsystem { device } => only(Reply::Text { text: char_subsystem_here(*device)? }),
            Request::ReadConfig {} => with(self.read_config()?),
            // It is never allowed.
            Request::Group { .. } => Err(Errno::PERM.into()),
        }
    }

    /// Asks whether each thing may get into an entry, and records the entry.
    fn enter(&self, number: u64, targets: &[Target]) -> Result<Reply, Reply> {
        let mut grants = Vec::with_capacity(targets.len());
        for (grant, target) in (0..).zip(targets) {
            let admission = self.state().admit(target);
            let refused = |reason, text: &str| Reply::Refused { grant, reason, text: text.into() };
            match admission {
                Ok(Admission::Granted(granted)) => grants.push(granted),
                Ok(Admission::IfBelow(usage, path)) => {
                    let real = match usage {
                        PathUse::Image => real_ancestor(&path),
                        PathUse::Socket | PathUse::Capture => real_ancestor(directory_of(&path)),
                    };
                    let is_below = |real: &PathBuf| self.state().is_within(&Within::CallRoots, usage, real);
                    if !real.as_ref().is_some_and(is_below) {
                        // The sentence names the directory of this path.
                        let named = match (real, usage) {
                            (Some(real), PathUse::Image) => real,
                            (Some(directory), _) => directory.join(path.file_name().unwrap_or_default()),
                            (None, _) => path,
                        };
                        return Err(Reply::Outside { grant, path: named });
                    }
                    grants.push(Granted::by_call(target.clone()));
                }
                Err(NotEntered::NotNamed) => return Err(refused(NOT_NAMED, "")),
                Err(NotEntered::PasstOption) => return Err(refused(PASST_OPTION, "")),
                Err(NotEntered::Library(name)) => return Err(refused(LIBRARY, &name)),
            }
        }
        self.state().enter(number, grants)?;
        Ok(Reply::Done {})
    }

    /// Opens the name of an image. Returns its canonical path and its status too.
    fn named(&self, path: &Path, permit: &Permit) -> Result<(File, PathBuf, FileStatus), Reply> {
        let named = name_here(path).map_err(|error| Reply::of_path(path, Want::Read, error))?;
        let real = real_path_of(named.as_fd())?;
        if !self.state().is_within(&permit.within, PathUse::Image, &real) {
            return Err(Reply::Outside { grant: 0, path: real });
        }
        self.state().found(permit, path, &real);
        let status = status_of(&named)?;
        Ok((named, real, status))
    }

    fn image(&self, path: &Path, writes: bool, is_direct: bool, permit: &Permit) -> Result<Answer, Reply> {
        let (named, real, status) = self.named(path, permit)?;
        if !status.can_be_image() || self.is_config(Identity(status.device, status.inode)) {
            // The process that asks looks at the status first, for a sentence.
            return Err(Errno::PERM.into());
        }
        // The name may stand for another file by now. This is the one that was looked at.
        let file = reopen_here(named.as_fd(), FileUse::Image { writes, is_direct });
        match file {
            Ok(file) => Ok(answer(with_alignment(file))),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && self.is_mounted_over(&real) => {
                Err(Reply::Outside { grant: 0, path: real })
            }
            Err(error) => Err(Reply::of_path(path, if writes { Want::Write } else { Want::Read }, error)),
        }
    }

    /// Connects to a socket. One that a call names is below a root.
    fn connect(&self, path: &Path, permit: &Permit) -> Result<OwnedFd, Reply> {
        let failed = |error| Reply::of_path(path, Want::Connect, error);
        if permit.within == Within::Roots {
            return connect_here(path).map_err(failed);
        }
        let named = name_here(path).map_err(failed)?;
        let real = real_path_of(named.as_fd())?;
        match self.state().is_within(&permit.within, PathUse::Socket, directory_of(&real)) {
            // The name may stand for another socket by now. This is the one that was looked at.
            true => connect_here(&path_of(named.as_fd())).map_err(failed),
            false => Err(Reply::Outside { grant: 0, path: real }),
        }
    }

    /// Returns whether this is the configuration file, which says what the operator named.
    fn is_config(&self, identity: Identity) -> bool {
        let config = self.config.as_ref().and_then(|config| identity_of(&config.path));
        config == Some(identity)
    }

    /// Returns whether a file that is made here would be the configuration file.
    fn is_name_of_config(&self, directory: &Directory, name: &OsStr) -> bool {
        let path = self.config.as_ref().map(|config| config.path.as_path());
        path.is_some_and(|path| {
            path.file_name() == Some(name)
                && Directory::of(path).and_then(|of| of.real_path()) == directory.real_path()
        })
    }

    /// Returns whether a file system was mounted over each root of a file since the start. The kernel does
    /// not look at the rule of a directory that is under a mount point.
    fn is_mounted_over(&self, real: &Path) -> bool {
        let mut above = self.roots.iter().filter(|(root, _)| real.starts_with(root)).peekable();
        above.peek().is_some() && above.all(|(root, at_start)| identity_of(root) != *at_start)
    }

    /// Opens the directory of a file that is made in it.
    fn directory(&self, path: &Path, usage: PathUse, permit: &Permit) -> Result<Directory, Reply> {
        let directory = Directory::of(path)?;
        let real = directory.real_path()?;
        match self.state().is_within(&permit.within, usage, &real) {
            true => Ok(directory),
            false => Err(Reply::Outside { grant: 0, path: real.join(path.file_name().unwrap_or_default()) }),
        }
    }

    /// Acts on the address of a socket that has the permissions and the group of its grant.
    fn with_address<T>(
        &self,
        path: &Path,
        permit: &Permit,
        act: impl FnOnce(&HostAddress<'_>) -> Result<T, SocketError>,
    ) -> Result<T, Reply> {
        let group = |name| self.group(name).and_then(|id| check_group(name, id));
        let group = permit.group.as_deref().map(group).transpose();
        let group = group.map_err(|problem| SocketError { option: GROUP_OPTION, path: None, problem })?;
        let is_root = |real: &Path| self.state().is_within(&permit.within, PathUse::Socket, real);
        let admits = |directory: &Directory| admit(directory, path, is_root);
        Ok(act(&HostAddress::of(path, permit.mode, group, &admits))?)
    }

    fn group(&self, name: &str) -> Result<u32, SocketProblem> {
        if let Ok(id) = name.parse() {
            return Ok(id);
        }
        match self.launch(&Request::Group { name: name.into() }) {
            Ok((Reply::Group { id }, _)) => Ok(id),
            Err(Reply::Errno { errno }) if errno == Errno::NOENT.raw_os_error() => {
                Err(SocketProblem::NoGroup(name.into()))
            }
            Ok(_) => Err(SocketProblem::host("groups cannot be looked up")(mismatch())),
            Err(reply) => Err(SocketProblem::host("groups cannot be looked up")(match reply {
                Reply::Errno { errno } => io::Error::from_raw_os_error(errno),
                _ => mismatch(),
            })),
        }
    }

    fn resolve(&self, host: &str, port: u16) -> Result<Reply, Reply> {
        let addresses = match literal(host, port) {
            Some(address) => vec![address],
            None => match self.launch(&Request::Resolve { host: host.into(), port })? {
                (Reply::Addresses { addresses }, _) => addresses,
                _ => return Err(mismatch().into()),
            },
        };
        self.state().resolved(host, port, &addresses);
        Ok(Reply::Addresses { addresses })
    }

    /// Asks the launcher.
    fn launch(&self, request: &Request) -> Result<Answer, Reply> {
        let launcher = self.launcher.as_ref().ok_or(Errno::NOSYS)?;
        match launcher.ask_with(request, None)? {
            (reply @ (Reply::Errno { .. } | Reply::Failed { .. }), _) => Err(reply),
            answer => Ok(answer),
        }
    }

    fn passt(&self, request: &Request, permit: &Permit) -> Result<Answer, Reply> {
        if let Request::EndPasst { child, .. } = request
            && !self.state().ended(*child)
        {
            // It is ending already.
            return Err(Errno::SRCH.into());
        }
        let answer = self.launch(request)?;
        if let Reply::Started { child, .. } = answer.0 {
            self.state().started(child, permit);
        }
        match answer.0 {
            Reply::Found { .. } | Reply::Started { .. } | Reply::Ended { .. } => Ok(answer),
            _ => Err(mismatch().into()),
        }
    }

    /// Returns the text of the configuration file in memory that nothing can change.
    fn read_config(&self) -> Result<OwnedFd, Reply> {
        let config = self.config.as_ref().ok_or(Errno::PERM)?;
        let ConfigFile { text, named } = (config.read)().map_err(|error| match error.kind() {
            // It may be a link to a directory that is not that of the start.
            io::ErrorKind::PermissionDenied => {
                let real = name_here(&config.path).ok().and_then(|named| real_path_of(named.as_fd()).ok());
                real.map_or_else(|| error.into(), |path| Reply::Outside { grant: 0, path })
            }
            _ => error.into(),
        })?;
        if text.len() > CONFIG_BYTES_MAX {
            return Err(Errno::FBIG.into());
        }
        let memory = memfd_create("config", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut file = File::from(memory);
        file.write_all(&text)?;
        io::Seek::rewind(&mut file)?;
        let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        fcntl_add_seals(&file, seals)?;
        if let Some(named) = named {
            self.state().set_file(named);
        }
        Ok(file.into())
    }
}

/// Returns whether a capture can be written to such a file. Others can be devices, which act when they are
/// opened.
fn can_be_capture(file_type: FileType) -> bool {
    matches!(file_type, FileType::RegularFile | FileType::Fifo | FileType::Symlink)
}

fn answer(opened: Opened) -> Answer {
    (Reply::Opened { alignment: opened.alignment }, Some(opened.file.into()))
}

/// Returns which directory has this path now.
fn identity_of(directory: &Path) -> Option<Identity> {
    let status = name_here(directory).and_then(status_of).ok()?;
    Some(Identity(status.device, status.inode))
}

/// Opens the file of a descriptor again, with no more rights than the descriptor has.
fn reopened(given: BorrowedFd<'_>, writes: bool, is_direct: bool) -> Result<Opened, Reply> {
    let (flags, status) = (fcntl_getfl(given)?, status_of(given)?);
    let access = flags & OFlags::ACCMODE;
    let has_rights = access == OFlags::RDWR || (access == OFlags::RDONLY && !writes);
    // The name of a file has no rights, and the open of a pipe or a device could wait.
    if flags.contains(OFlags::PATH) || !has_rights || !status.can_be_image() {
        return Err(Errno::PERM.into());
    }
    Ok(with_alignment(reopen_here(given, FileUse::Image { writes, is_direct })?))
}

/// Returns the canonical path of a file. Of one that cannot be found, returns that of the nearest directory
/// above it which can, with the rest of the path. Returns `None` if `..` is in the rest, whose meaning is not
/// known.
fn real_ancestor(path: &Path) -> Option<PathBuf> {
    let mut rest = Vec::new();
    let mut at = path;
    loop {
        if let Ok(real) = at.canonicalize() {
            return Some(rest.iter().rev().fold(real, |path, name| path.join(name)));
        }
        rest.push(at.file_name()?);
        at = directory_of(at);
    }
}

/// The reasons of [`Reply::Refused`].
pub(crate) const NOT_NAMED: u8 = 0;
pub(crate) const PASST_OPTION: u8 = 1;
pub(crate) const LIBRARY: u8 = 2;
