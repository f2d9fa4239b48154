//! The errors of disks and of requests.

use kickless_io::Errno;
use kickless_opener::NoDescriptor;
use std::io;
use std::path::PathBuf;

/// The reason why a disk cannot be used. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is missing, or may not be read.
    #[error("{} cannot be opened: {source}", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// There is no such file, and the name has the form of another program.
    #[error("there is no file {}: {cure}", path.display())]
    Foreign {
        /// The name.
        path: PathBuf,
        /// The name to write instead, as the end of a sentence.
        cure: String,
    },
    /// The descriptor that stands for the disk is not there.
    #[error(transparent)]
    NoDescriptor(#[from] NoDescriptor),
    /// The descriptor was not opened in the way that the disk needs.
    #[error("{} {why}", name.display())]
    Descriptor {
        /// Its name.
        name: PathBuf,
        /// The reason, as the end of a sentence.
        why: &'static str,
    },
    /// The file may be read, and not written.
    #[error("{} cannot be opened for writing: {source}: change that, or set read-only", path.display())]
    OpenForWriting {
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The file is a directory, a socket, a terminal or the like.
    #[error("{} is {what}, not a disk image or a block device", path.display())]
    NotADisk {
        /// The path.
        path: PathBuf,
        /// The type of the file.
        what: &'static str,
    },
    /// The file has less than one sector.
    #[error("{} is empty: give it a size first, such as with truncate --size=20G", path.display())]
    Empty {
        /// The path.
        path: PathBuf,
    },
    /// The file system does not support O_DIRECT.
    #[error("{} is on a file system without direct I/O: use --cache=writeback", path.display())]
    NoDirect {
        /// The path.
        path: PathBuf,
    },
    /// Direct I/O can only access whole blocks of the file system.
    #[error(
        "{} has {size} bytes, not a multiple of the {block} that direct I/O needs: use --cache=writeback",
        path.display()
    )]
    PartialBlock {
        /// The path.
        path: PathBuf,
        /// The length in bytes.
        size: u64,
        /// The alignment that O_DIRECT requires, in bytes.
        block: u64,
    },
    /// Direct I/O requires larger units than this program supports.
    #[error("{} needs direct I/O in units of {block} bytes, and {max} is the most: use --cache=writeback", path.display())]
    HugeBlock {
        /// The path.
        path: PathBuf,
        /// The alignment that O_DIRECT requires, in bytes.
        block: u64,
        /// The largest supported alignment.
        max: u64,
    },
    /// The size is invalid for a disk.
    #[error("a disk of {0} bytes is impossible: the size must be a positive multiple of 512 below 8E")]
    Size(u64),
    /// The kernel refuses the address space.
    #[error("{size} bytes of memory for a disk cannot be allocated: {source}")]
    Memory {
        /// The number of bytes.
        size: u64,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A fault cannot happen on this kind of disk.
    #[error("{fault} cannot be injected into {under}: it needs a file or block device")]
    Fault {
        /// The fault, as in the rules.
        fault: &'static str,
        /// The disk.
        under: &'static str,
    },
    /// The disk has faults already.
    #[error("a disk can have one fault: only, with all rules in it")]
    FaultsTwice,
    /// The thread for delays cannot be started.
    #[error("the thread for injected delays cannot be started: {0}")]
    Timer(#[source] io::Error),
    /// This build lacks the kind of disk.
    #[error("this program was built without the feature {0}")]
    NotBuilt(&'static str),
    /// The file is no qcow2 image, and its name says that it is one.
    #[error("{} is no qcow2 image: if it is a raw one, leave out qcow2:", path.display())]
    NotQcow2 {
        /// The path.
        path: PathBuf,
    },
    /// A library or its server refuses the disk.
    #[error("{disk} cannot be used: {source}")]
    Library {
        /// The disk.
        disk: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The state of the disk in another process cannot be used.
    #[error("{disk} cannot be taken over: {source}")]
    Handed {
        /// The disk.
        disk: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The engine cannot use the file.
    #[error("the I/O engine cannot use the disk: {0}")]
    Engine(#[from] kickless_io::Error),
}

/// The reason why a request failed. The guest learns only that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// Sectors beyond the disk, or a part of a sector.
    #[error("outside of the disk")]
    Range,
    /// A write to a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The file is shorter than the disk.
    #[error("the file has become shorter")]
    Shrunk,
    /// The kernel makes no progress and reports no reason, or asks for retries without end.
    #[error("no progress")]
    Stuck,
    /// The memory of the buffers has lost pages.
    #[error("the guest's memory is damaged")]
    Damaged,
    /// The disk does not support this request.
    #[error("not supported")]
    Unsupported,
    /// The error of the operating system.
    #[error("{0}")]
    Os(Errno),
}

impl IoError {
    /// The result of a cancelled request.
    pub(crate) const CANCELLED: Self = Self::Os(Errno::CANCELED);
}
