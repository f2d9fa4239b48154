//! Replaces a file as a whole.
#![cfg_attr(
    not(test),
    expect(clippy::disallowed_methods, reason = "only commands that are no daemon use it")
)]

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process;

use kickless_opener::{Want, explained};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid, fchmod, fchown, fsync, openat, renameat, unlinkat};
use rustix::io::Errno;

/// The most names that are tried for the new file, before it gets its own.
const NAMES_MAX: u32 = 100;

/// Replaces a file as a whole, or makes it. A reader finds the old text or the new one, also after a crash
/// of the host. The new file gets the permissions and the owner of the file `like`.
///
/// The directory may belong to another user: it is opened once, and no symbolic link in it is followed.
///
/// # Errors
/// The file is the old one, unless only the directory could not be synced.
pub(crate) fn replace(path: &Path, text: &str, like: Option<&Metadata>) -> io::Result<()> {
    replace_in(path, text, like).map_err(|error| explained(path, Want::Write, error))
}

fn replace_in(path: &Path, text: &str, like: Option<&Metadata>) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::IsADirectory))?;
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(CWD, directory.unwrap_or(Path::new(".")), flags, Mode::empty())?;
    let (file, temporary) = make(&directory, like.is_some())?;
    let replaced = fill(file, text, like)
        .and_then(|()| Ok(renameat(&directory, &*temporary, &directory, name)?))
        .inspect_err(|_| {
            let _ = unlinkat(&directory, &*temporary, AtFlags::empty());
        });
    replaced.and_then(|()| Ok(fsync(&directory)?))
}

/// Makes a new file, for the owner alone if it `gets_mode`.
fn make(directory: &OwnedFd, gets_mode: bool) -> io::Result<(File, String)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    // The umask takes its part.
    let mode = Mode::from_raw_mode(if gets_mode { 0o600 } else { 0o666 });
    let names = (0..NAMES_MAX).map(|number| format!(".kickless.{}.{number}", process::id()));
    for name in names {
        match openat(directory, OsStr::new(&name), flags, mode) {
            Ok(file) => return Ok((file.into(), name)),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::EXIST.into())
}

/// Writes the text to a new file.
fn fill(mut file: File, text: &str, like: Option<&Metadata>) -> io::Result<()> {
    if let Some(like) = like {
        let own = file.metadata()?;
        let uid = (own.uid() != like.uid()).then(|| Uid::from_raw(like.uid()));
        let gid = (own.gid() != like.gid()).then(|| Gid::from_raw(like.gid()));
        if uid.is_some() || gid.is_some() {
            fchown(&file, uid, gid)?;
        }
        fchmod(&file, Mode::from_raw_mode(like.mode() & 0o777))?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use rustix::process::geteuid;
    use tempfile::TempDir;

    use super::*;

    fn names(dir: &TempDir) -> Vec<String> {
        let names = fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> = names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_keeps_its_mode_and_its_owner() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("file");
        replace(&path, "old", None).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        if geteuid().is_root() {
            chown(&path, Some(54321), Some(54322)).unwrap();
        }
        let (before, old) = (fs::metadata(&path).unwrap(), File::open(&path).unwrap());
        replace(&path, "new", Some(&before)).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
        assert_eq!(
            (fs::read_to_string(&path).unwrap(), io::read_to_string(old).unwrap()),
            ("new".into(), "old".into())
        );
        assert_eq!(names(&dir), ["file"]);
    }

    #[test]
    fn names_that_others_have_put_there_are_not_followed() {
        let (dir, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let secret = elsewhere.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let path = dir.path().join("file");
        symlink(&secret, &path).unwrap();
        symlink(&secret, dir.path().join(format!(".kickless.{}.0", process::id()))).unwrap();
        replace(&path, "new", None).unwrap();
        assert!(path.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("directory");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, "new", None).is_err());
        assert!(replace(&dir.path().join("no/file"), "new", None).is_err());
        assert_eq!(names(&dir), ["directory"]);
        assert!(replace(Path::new("/"), "new", None).is_err());
    }
}
