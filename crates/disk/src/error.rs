//! What can be wrong with a disk, and with a request.

use kickless_io::Errno;
use std::io;
use std::path::PathBuf;

/// Why a disk cannot be had. One sentence for an operator each.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is missing, or may not be read.
    #[error("{} cannot be opened: {source}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It may not be written, though reading it may be allowed.
    #[error("{} cannot be opened for writing: {source} (--read-only needs no right to write)", path.display())]
    OpenForWriting {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A directory, a socket, a terminal.
    #[error("{} is {what}, not a disk image or a block device", path.display())]
    NotADisk {
        /// Which.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Not even one sector.
    #[error("{} is empty: give it a size first, such as with truncate --size=20G", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
    },
    /// Its file system has no O_DIRECT.
    #[error("{} lies on a file system without direct I/O; --cache=writeback serves it through the page cache", path.display())]
    NoDirect {
        /// Which.
        path: PathBuf,
    },
    /// Direct I/O can only reach whole blocks of the file system.
    #[error(
        "the {size} bytes of {} are no multiple of the {block} that direct I/O needs there; --cache=writeback serves them all",
        path.display()
    )]
    PartialBlock {
        /// Which.
        path: PathBuf,
        /// Its length in bytes.
        size: u64,
        /// What O_DIRECT needs in bytes.
        block: u64,
    },
    /// Direct I/O needs more than any request of ours could have.
    #[error("{} needs direct I/O in units of {block} bytes, more than the {max} that are possible", path.display())]
    HugeBlock {
        /// Which.
        path: PathBuf,
        /// What O_DIRECT needs in bytes.
        block: u64,
        /// What we do at most.
        max: u64,
    },
    /// A size that no disk has.
    #[error("a disk of {0} bytes is impossible: not a positive multiple of 512, or too large")]
    Size(u64),
    /// The kernel does not give that much address space.
    #[error("{size} bytes of memory for a disk cannot be had: {source}")]
    Memory {
        /// Bytes asked for.
        size: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Rules that mean nothing on the disk under them.
    #[error(
        "{fault} cannot be injected into {under}, which asks nothing of the host's kernel; it needs a file or block device"
    )]
    Fault {
        /// The fault, as it is written.
        fault: &'static str,
        /// The disk.
        under: &'static str,
    },
    /// Faults before a disk that has faults.
    #[error("a disk has its faults already; one list takes all rules")]
    FaultsTwice,
    /// No thread can be had for the delays of injected faults.
    #[error("there is no thread for injected delays: {0}")]
    Timer(#[source] io::Error),
    /// A kind of disk that this build lacks.
    #[error("this program was built without the feature {0}")]
    NotBuilt(&'static str),
    /// What a library, or who it speaks to, has against it.
    #[error("{disk} cannot be used: {source}")]
    Library {
        /// Which.
        disk: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The engine cannot take the file.
    #[error("the I/O engine cannot use the disk: {0}")]
    Engine(#[from] kickless_io::Error),
}

/// How a request failed. The guest is told no more than that it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Sectors that the disk does not have, or a part of a sector.
    #[error("outside of the disk")]
    Range,
    /// A write to a disk that is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The file is shorter than it was when it was opened.
    #[error("the file has become shorter")]
    Shrunk,
    /// The kernel neither writes nor says why, or asks to try again without end.
    #[error("no progress")]
    Stuck,
    /// The buffers' memory has lost pages.
    #[error("the guest's memory is damaged")]
    Damaged,
    /// This disk has no such requests.
    #[error("not supported")]
    Unsupported,
    /// The operating system's reason.
    #[error("{0}")]
    Os(Errno),
}
