//! A model of hand-overs: a disk passes from process to process and from host to host, at random, and nothing
//! of it may be lost.
//!
//! Two hosts ([`host`]) run a daemon each over one store ([`store`]). With loop devices, each host has a page
//! cache of its own over the same bytes. An NBD server has a cache for each connection. One guest at a time
//! ([`guest`]) uses the disk. An oracle ([`oracle`]) knows which values each sector may have. Steps
//! ([`steps`]) are requests of the guest, events in the lives of guest, daemons and store ([`life`]), and
//! programs that change the disk while no guest uses it ([`tools`], [`images`]). [`world`] has all of them.
//! A daemon can pass its disk to the next process of its host in an upgrade, which fails at a random step of
//! either process. No other program finds the image of a guest free meanwhile.
//!
//! A flushed write is never missing, and an old value is never read. A write that was acknowledged survives
//! an orderly hand-over without a flush of the guest. A write-back that fails is reported: the connection
//! ends instead of the reply to GET_VRING_BASE, the next flush fails, and SIGTERM ends with status 1.

pub mod guest;
pub mod host;
pub mod images;
pub mod life;
pub mod oracle;
pub mod steps;
pub mod store;
pub mod tools;
pub mod world;

use std::fmt;

/// The bytes under the disk, and the way to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// A file that two processes of one host have.
    File,
    /// A loop device for each host over one image. `block` is the smallest block of direct I/O.
    Loops {
        /// Bytes of a block.
        block: u32,
    },
    /// A connection for each daemon to one NBD server.
    Nbd {
        /// Each connection sees what another one has flushed.
        can_multi_conn: bool,
    },
}

/// The format of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Sectors as they are.
    Raw,
    /// QEMU's format.
    Qcow2 {
        /// Bytes of a cluster.
        cluster: u32,
        /// Clusters have subclusters.
        subclusters: bool,
        /// Images of the chain, from 1 to 3.
        layers: usize,
    },
}

/// A disk to hand over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The bytes under it.
    pub medium: Medium,
    /// Its format.
    pub format: Format,
    /// `--cache=writeback`.
    pub writeback: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.format {
            Format::Raw => write!(f, "raw")?,
            Format::Qcow2 { cluster, subclusters, layers } => {
                let sub = if subclusters { " with subclusters" } else { "" };
                write!(f, "qcow2, {layers} layers, clusters of {cluster}{sub}")?;
            }
        }
        match self.medium {
            Medium::File => write!(f, ", on a file")?,
            Medium::Loops { block } => write!(f, ", on loop devices with blocks of {block}")?,
            Medium::Nbd { can_multi_conn: true } => return write!(f, ", over NBD with CAN_MULTI_CONN"),
            Medium::Nbd { can_multi_conn: false } => return write!(f, ", over NBD"),
        }
        write!(f, ", cache={}", if self.writeback { "writeback" } else { "none" })
    }
}
