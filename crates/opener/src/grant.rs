//! The things of the host that a device may use, and the reasons why one may not.
//!
//! Everything here is plain data. A [`Grant`] is made from the options of a device, and an [`Authority`] from
//! the command line.

use std::io;
use std::path::{Path, PathBuf};

/// A thing of the host that a device needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The option that names it.
    pub option: &'static str,
    /// The thing.
    pub to: Target,
}

/// A thing of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// An image or a block device.
    Image {
        /// Its path.
        path: PathBuf,
        /// It is also written.
        writes: bool,
        /// It can name backing images, which are read.
        chain: bool,
    },
    /// The file of a capture.
    Capture {
        /// Its path.
        path: PathBuf,
    },
    /// A socket that listens.
    Socket {
        /// Its path.
        path: PathBuf,
        /// Its permissions, or those of the umask.
        mode: Option<u32>,
        /// The name or the number of its group.
        group: Option<String>,
    },
    /// A unix socket of another program.
    Unix {
        /// Its path.
        path: PathBuf,
    },
    /// A server.
    Tcp {
        /// Its name or address.
        host: String,
        /// Its port.
        port: u16,
    },
    /// A TAP.
    Tap {
        /// Its name.
        name: String,
    },
    /// A process of passt.
    Passt {
        /// Its arguments.
        arguments: Vec<String>,
    },
    /// Backing images of an image that comes as a descriptor. They are read, below the roots for calls.
    Backing,
    /// A library that uses names itself. The sandbox of the process decides at the start whether it can.
    Library {
        /// Its name.
        name: String,
        /// The files that its settings name. It may read all files in their directories, because a setting
        /// of a file can name others.
        files: Vec<PathBuf>,
    },
}

impl Target {
    /// Returns whether this includes `other`: the same thing with the same or fewer rights.
    pub(crate) fn includes(&self, other: &Self) -> bool {
        let is_same_path = match (self.path(), other.path()) {
            (Some(path), Some(other)) => is_same(path, other),
            (path, other) => path == other,
        };
        is_same_path
            && match (self, other) {
                (
                    Self::Image { writes, chain, .. },
                    Self::Image { writes: also_writes, chain: has_chain, .. },
                ) => writes >= also_writes && chain >= has_chain,
                _ => self == other,
            }
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::Image { path, .. }
            | Self::Capture { path }
            | Self::Socket { path, .. }
            | Self::Unix { path } => Some(path),
            Self::Tcp { .. }
            | Self::Tap { .. }
            | Self::Passt { .. }
            | Self::Backing
            | Self::Library { .. } => None,
        }
    }
}

/// Returns whether two paths are the same bytes. Paths that are equal may have other spellings, as `/a//b`
/// and `/a/b/.` have.
pub(crate) fn is_same(path: &Path, other: &Path) -> bool {
    path.as_os_str() == other.as_os_str()
}

/// Returns whether the files of a directory belong together. Those in `/`, device nodes and the memory in
/// `/dev/shm` are of many owners, so an image or a call that names one of them may not name its neighbours.
pub fn is_narrow(directory: &Path) -> bool {
    let has_many_owners = directory.parent().is_none() || directory == Path::new("/dev/shm");
    let is_shared_memory = directory.starts_with("/dev/shm");
    !has_many_owners && (is_shared_memory || !directory.starts_with("/dev"))
}

/// The use of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathUse {
    /// An image or a block device.
    Image,
    /// A socket that listens.
    Socket,
    /// The file of a capture.
    Capture,
}

/// A directory below which files may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Its canonical path.
    pub directory: PathBuf,
    /// The uses of files below it.
    pub uses: Vec<PathUse>,
    /// Calls may name files below it. Otherwise only the start and the configuration file may.
    pub for_calls: bool,
}

/// The things that calls may name, beside those that the start or the configuration file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// None, because there are no calls.
    Nothing,
    /// Files below the roots for calls.
    Files,
    /// Such files, and TAPs, servers, sockets of other programs and passt.
    All,
}

/// The authority of a process over the things of the host, as its operator has given it.
#[derive(Clone, Debug)]
pub struct Authority {
    /// The things that the start or the configuration file names for devices.
    pub named: Vec<Target>,
    /// The control sockets.
    pub control: Vec<Target>,
    /// The directories of files.
    pub roots: Vec<Root>,
    /// The things that calls may name.
    pub calls: Calls,
    /// The libraries that the sandbox of this process has room for.
    pub libraries: Vec<String>,
}

/// The error of a device that may not use a thing of the host.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// The option that names the thing.
    pub option: &'static str,
    /// The reason.
    pub reason: Reason,
}

/// The reason why a device may not use a thing of the host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// It is a file outside of the roots.
    #[error(transparent)]
    Outside(#[from] Outside),
    /// It is named by a call only, and calls may not name such things.
    #[error(
        "the sandbox of this process has no room for what only a call names: name it at the start or in the \
         configuration file"
    )]
    NotNamed,
    /// It is passt with an option that can name files or users, and a call names it.
    #[error(
        "the sandbox allows calls only the options of passt that name no file and no user, written in full: name this \
         one at the start or in the configuration file"
    )]
    PasstOption,
    /// It is a library that needs a wider sandbox.
    #[error(
        "the sandbox of this process has no room for the library {0}: start kickless with a device that uses it, or \
         with --sandbox=off"
    )]
    Library(String),
    /// The process that opens files did not answer.
    #[error("the process that opens files cannot be asked: {0}")]
    Host(io::Error),
}

/// The error of a file that is outside of the roots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is outside of the directories that the sandbox allows: add --allow-root={}, or one above it",
    .path.display(),
    directory(.path).display()
)]
pub struct Outside {
    /// The path of the file, with all symbolic links resolved.
    pub path: PathBuf,
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_many_owners_are_not_narrow() {
        let is_narrow = |path| is_narrow(Path::new(path));
        assert!(is_narrow("/images") && is_narrow("/tmp") && is_narrow("/dev/shm/images"));
        assert!(!is_narrow("/") && !is_narrow("/dev") && !is_narrow("/dev/mapper") && !is_narrow("/dev/shm"));
    }

    #[test]
    fn a_sentence_names_the_option_that_helps() {
        let outside = Outside { path: "/srv/new/a.img".into() };
        assert_eq!(
            Refused { option: "blk-file", reason: outside.into() }.to_string(),
            "/srv/new/a.img is outside of the directories that the sandbox allows: add --allow-root=/srv/new, or one \
             above it"
        );
        assert!(Outside { path: "/".into() }.to_string().contains("--allow-root=/, or"));
    }

    #[test]
    fn fewer_rights_are_included() {
        let image = |writes, chain| Target::Image { path: "/a".into(), writes, chain };
        assert!(image(true, true).includes(&image(false, false)));
        assert!(image(false, false).includes(&image(false, false)));
        assert!(!image(false, true).includes(&image(true, false)));
        assert!(!image(true, false).includes(&image(false, true)));
        let other = Target::Image { path: "/b".into(), writes: false, chain: false };
        assert!(!image(true, true).includes(&other));
        assert!(!image(true, true).includes(&Target::Capture { path: "/a".into() }));
        let [socket, spelled] = ["/a", "/a/"].map(|path| Target::Unix { path: path.into() });
        assert!(socket.includes(&socket) && !socket.includes(&spelled));
    }
}
