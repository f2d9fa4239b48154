//! Says why the host refuses a path: which directory is missing or closed, and to which user.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, absolute};
use std::sync::OnceLock;

use rustix::fs::{FileType, Mode, Stat, fstat};
use rustix::process::{Gid, getegid, geteuid, getgroups};
use rustix::thread::{CapabilitySet, capabilities};

use crate::error::SocketProblem;
use crate::name::name_here;

/// The list of users.
const USERS: &str = "/etc/passwd";

/// The user of this process, for sentences.
static USER: OnceLock<User> = OnceLock::new();

#[derive(Debug)]
struct User {
    uid: u32,
    /// The name and the number, or the number alone.
    shown: String,
    /// The groups that this process can give a file to. `None` for all groups.
    groups: Option<Vec<u32>>,
}

/// The use that the host refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The file is to be read.
    Read,
    /// The file is to be written.
    Write,
    /// A socket is to be made in the directory of the path.
    Make,
    /// The socket is to be connected to.
    Connect,
}

/// Notes the user of this process for later sentences. A sandbox takes the right to read the list of users.
pub(crate) fn note_user() {
    user();
}

fn user() -> &'static User {
    USER.get_or_init(|| {
        let uid = geteuid().as_raw();
        let shown = match name_of(&fs::read_to_string(USERS).unwrap_or_default(), uid) {
            Some(name) => format!("{name} (uid {uid})"),
            None => format!("with the uid {uid}"),
        };
        User { uid, shown, groups: groups() }
    })
}

/// Returns the number of the user of this process.
pub fn user_id() -> u32 {
    user().uid
}

/// Returns the groups that this process can give a file to. `None` for all groups.
fn groups() -> Option<Vec<u32>> {
    let may_give_away = capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::CHOWN));
    if may_give_away {
        return None;
    }
    let mut groups = getgroups().unwrap_or_default();
    groups.push(getegid());
    Some(groups.into_iter().map(Gid::as_raw).collect())
}

/// Checks that this process can give a socket to the group with this name and number. Returns the number.
///
/// # Errors
/// It cannot.
pub(crate) fn check_group(name: &str, id: u32) -> Result<u32, SocketProblem> {
    let User { shown, groups, .. } = user();
    if groups.as_ref().is_none_or(|groups| groups.contains(&id)) {
        return Ok(id);
    }
    Err(SocketProblem::Denied(format!(
        "user {shown} is not in the group {name}: add it (SupplementaryGroups={name} in a unit, or usermod -aG \
         {name})"
    )))
}

/// Returns the name of a user in the text of a list of users.
fn name_of(users: &str, uid: u32) -> Option<&str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// The error of a call of the host, with its reason.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub(crate) struct Explained {
    pub(crate) errno: i32,
    pub(crate) why: String,
}

/// Returns the number of an error of the host, also of one that was [`explained`].
pub fn errno_of(error: &io::Error) -> Option<i32> {
    let explained = error.get_ref().and_then(|error| error.downcast_ref::<Explained>());
    error.raw_os_error().or(explained.map(|explained| explained.errno))
}

/// Returns `error`, which the host has for this path, with a sentence in place of the text of its number. The
/// sentence names the directory or the user, and says what to do. Returns an error without such a sentence as
/// it is.
///
/// Looks the directories of the path up. Opens none of them.
pub fn explained(path: &Path, want: Want, error: io::Error) -> io::Error {
    if error.raw_os_error().is_none() {
        return error;
    }
    let why = match error.kind() {
        ErrorKind::PermissionDenied => Some(denied(path, want)),
        ErrorKind::NotFound | ErrorKind::NotADirectory => Some(missing(path, want)),
        ErrorKind::ConnectionRefused if want == Want::Connect => Some(refused(path)),
        ErrorKind::IsADirectory => Some("it is a directory: name a file in it".into()),
        _ => None,
    };
    match (why, error.raw_os_error()) {
        (Some(why), Some(errno)) => io::Error::new(error.kind(), Explained { errno, why }),
        _ => error,
    }
}

/// Returns the directories of a path, beginning with the first.
fn directories(path: &Path) -> impl Iterator<Item = &Path> {
    let mut all: Vec<_> = path.ancestors().skip(1).filter(|path| *path != Path::new("")).collect();
    all.reverse();
    all.into_iter()
}

/// Returns the error of a look into a directory.
fn look_into(directory: &Path) -> Option<ErrorKind> {
    // The kernel asks for the right to enter it.
    name_here(&directory.join(".")).err().map(|error| error.kind())
}

/// Says why the user of this process may not use a path.
fn denied(path: &Path, want: Want) -> String {
    let User { uid, shown, .. } = user();
    let closed = directories(path).find(|dir| look_into(dir) == Some(ErrorKind::PermissionDenied));
    if let Some(closed) = closed.map(Path::display) {
        return format!(
            "user {shown} may not enter the directory {closed}: give it the right (setfacl -m u:{uid}:x {closed}), \
             or use another path"
        );
    }
    match want {
        Want::Read => format!("user {shown} may not read it{}: change its owner or its mode", rights(path)),
        Want::Write => format!("user {shown} may not write it{}", rights(path)),
        Want::Connect => {
            format!("user {shown} may not connect to it{}: use another user or its group", rights(path))
        }
        Want::Make => {
            let here = || absolute(".").unwrap_or(".".into());
            let named = path.parent().filter(|dir| *dir != Path::new("")).map(Path::to_owned);
            let directory = named.unwrap_or_else(here);
            let (rights, directory) = (rights(&directory), directory.display());
            format!(
                "user {shown} may not make a socket in the directory {directory}{rights}: change its owner or its mode, \
                 or use another path"
            )
        }
    }
}

/// Returns the status of a file, without opening it.
fn status_here(path: &Path) -> io::Result<Stat> {
    Ok(fstat(name_here(path)?)?)
}

/// Returns the mode and the owner of a file, in brackets. Returns nothing if they cannot be read.
fn rights(path: &Path) -> String {
    status_here(path).map_or_else(
        |_| String::new(),
        |of| {
            let mode = Mode::from_raw_mode(of.st_mode).bits();
            format!(" (mode {mode:04o}, owner {}:{})", of.st_uid, of.st_gid)
        },
    )
}

/// Says which part of a path is not there.
fn missing(path: &Path, want: Want) -> String {
    for dir in directories(path) {
        match look_into(dir) {
            Some(ErrorKind::NotFound) => {
                return format!(
                    "there is no directory {}: make it first, or correct the path",
                    dir.display()
                );
            }
            Some(ErrorKind::NotADirectory) => {
                return format!("{} is no directory: correct the path", dir.display());
            }
            _ => {}
        }
    }
    match want {
        Want::Connect => {
            "there is no such socket: start the program that listens there, or correct the path".into()
        }
        Want::Read | Want::Write | Want::Make => {
            "there is no such file: correct the path, or make it first".into()
        }
    }
}

/// Says why a connection is refused.
fn refused(path: &Path) -> String {
    match status_here(path).map(|of| FileType::from_raw_mode(of.st_mode)) {
        Ok(FileType::Socket) => {
            "no program listens there any more: start it again, or correct the path".into()
        }
        _ => "it is no socket: correct the path".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::io::Errno;
    use tempfile::TempDir;

    use super::*;

    fn sentence(path: &Path, want: Want, errno: Errno) -> String {
        explained(path, want, errno.into()).to_string()
    }

    #[test]
    fn users_have_names() {
        let users = "root:x:0:0:root:/:/bin/sh\nann:x:1000:1000::/srv/ann:/bin/sh\n:x:7:7\nbad\n";
        assert_eq!(name_of(users, 1000), Some("ann"));
        assert_eq!((name_of(users, 7), name_of(users, 8)), (None, None));
        assert!(user().shown.contains("uid"));
    }

    #[test]
    fn the_part_that_is_missing_is_named() {
        let dir = TempDir::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").unwrap();
        assert_eq!(
            sentence(&at("none/disk.img"), Want::Read, Errno::NOENT),
            format!("there is no directory {}: make it first, or correct the path", at("none").display())
        );
        assert_eq!(
            sentence(&at("disk.img"), Want::Read, Errno::NOENT),
            "there is no such file: correct the path, or make it first"
        );
        let under = sentence(&at("file/disk.img"), Want::Read, Errno::NOTDIR);
        assert_eq!(under, format!("{} is no directory: correct the path", at("file").display()));
        let relative = sentence(Path::new("none-here/a/disk.img"), Want::Read, Errno::NOENT);
        assert_eq!(relative, "there is no directory none-here: make it first, or correct the path");
    }

    #[test]
    fn a_socket_of_a_program_that_has_ended() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let dead = sentence(&path, Want::Connect, Errno::CONNREFUSED);
        assert_eq!(dead, "no program listens there any more: start it again, or correct the path");
        let no_socket = sentence(dir.path(), Want::Connect, Errno::CONNREFUSED);
        assert_eq!(no_socket, "it is no socket: correct the path");
    }

    #[test]
    fn other_errors_keep_their_text() {
        let kind = |error: io::Error| explained(Path::new("/"), Want::Read, error).kind();
        assert_eq!(kind(Errno::NOENT.into()), ErrorKind::NotFound);
        let own = explained(Path::new("/a/b"), Want::Read, io::Error::new(ErrorKind::NotFound, "a reason"));
        assert_eq!((own.to_string(), errno_of(&own)), ("a reason".into(), None));
        let number = |error: io::Error| errno_of(&explained(Path::new("/a/b"), Want::Read, error));
        assert_eq!((number(Errno::NOENT.into()), number(Errno::IO.into())), (Some(2), Some(5)));
        assert!(sentence(Path::new("/"), Want::Read, Errno::IO).contains("Input/output error"));
        assert!(sentence(Path::new("/"), Want::Read, Errno::ACCESS).contains("may not read it (mode 0"));
    }
}
