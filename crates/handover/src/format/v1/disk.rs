//! The parts of a disk.

use crate::error::Error;
use crate::format::v1::session::check_range;
use crate::parts::{Amounts, Checked, Fd, Span};
use serde::{Deserialize, Serialize};

/// The smallest alignment in a file that direct I/O can need: a sector.
const ALIGNMENT_MIN: u32 = 512;
/// The largest alignment that a disk is accepted with.
const ALIGNMENT_MAX: u32 = 64 << 10;
/// The largest count of lost connections. No server loses as many, and sums of it do not overflow.
const LOSSES_MAX: u64 = 1 << 48;
/// The largest number of queues of a disk.
const QUEUES_MAX: usize = 256;

/// All of a disk that the new process makes before the pause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The configuration space, as the guest reads it. A disk that differs for the guest is not taken over.
    pub config_space: Span,
    /// The storage behind the disk.
    pub medium: Medium,
}

/// The storage behind a disk. The configuration of the device says the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Medium {
    /// Nothing that passes to the new process, which makes the disk anew.
    Anew,
    /// Memory of the process.
    Memory {
        /// Its file.
        file: Fd,
        /// Its length in bytes.
        len: u64,
    },
    /// A file, or an image and those under it: the top one first.
    Images(Vec<Image>),
    /// A connection to an NBD server.
    Nbd(Nbd),
}

/// An open file of a disk. Its lock belongs to the description and passes with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// The description that requests use.
    pub file: Fd,
    /// The description that reports losses of the page cache.
    pub witness: Option<Fd>,
    /// The device of its inode.
    pub device: u64,
    /// The number of its inode.
    pub inode: u64,
    /// The alignments in memory and in the file that direct I/O needs.
    pub alignment: Option<(u32, u32)>,
    /// The bytes that a guest can reach, if this is the first image.
    pub size: u64,
    /// The file system can punch holes, or the device can write zeroes itself, as its guest knows it.
    pub punches_holes: bool,
}

/// A connection to an NBD server on which nothing is in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nbd {
    /// The socket. `None`: the server is away.
    pub socket: Option<Fd>,
    /// The size of the disk in bytes.
    pub size: u64,
    /// The flags of the export.
    pub flags: u16,
    /// The least, the preferred and the largest size of a request in bytes.
    pub block_sizes: (u32, u32, u32),
    /// Replies come in chunks.
    pub is_structured: bool,
}

/// Describes a disk in the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFinal {
    /// A guest uses the disk, so its images are locked.
    pub is_taken: bool,
    /// A front-end has connected since the disk was given up.
    pub is_new_guest: bool,
    /// The field `writeback` of the configuration space.
    pub writeback: bool,
    /// The driver's choices are known.
    pub driver_known: bool,
    /// The next queue to start is the first one of a newly reset driver.
    pub fresh_driver: bool,
    /// Writes were lost, and no flush has said so.
    pub has_lost_writes: bool,
    /// An operator has paused the disk.
    pub is_paused: bool,
    /// The number of times that it has stopped on an error.
    pub stops: u64,
    /// The images, in the order of the record.
    pub images: Vec<ImageFinal>,
    /// The connection to the server.
    pub nbd: Option<NbdFinal>,
    /// The counters of operations.
    pub operations: Amounts,
}

/// Describes an image in the pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageFinal {
    /// The error number of writes that the page cache has lost, or 0.
    pub lost_writes: i32,
}

/// Describes a connection to an NBD server in the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NbdFinal {
    /// Writes were made since the last flush.
    pub is_dirty: bool,
    /// The number of times that a connection has ended with writes that were not flushed.
    pub losses: u64,
    /// The number of losses with which the driver began.
    pub at_driver_start: u64,
    /// The number of losses that each queue has reported. `None`: it has not started yet.
    pub reported: Vec<Option<u64>>,
}

impl Checked for Disk {
    fn check(&self) -> Result<(), Error> {
        match &self.medium {
            Medium::Memory { len, .. } => check_range("memory", 0, *len),
            Medium::Images(images) if images.is_empty() => Err(Error::field("number of images", 0)),
            Medium::Images(images) => images.iter().try_for_each(Image::check),
            Medium::Anew | Medium::Nbd(_) => Ok(()),
        }
    }
}

impl Image {
    fn check(&self) -> Result<(), Error> {
        let is_alignment = |bytes: u32| bytes.is_power_of_two() && bytes <= ALIGNMENT_MAX;
        match self.alignment {
            Some((memory, file)) if !is_alignment(memory) || !is_alignment(file) || file < ALIGNMENT_MIN => {
                Err(Error::field("alignment", format!("{memory} and {file}")))
            }
            _ => Ok(()),
        }
    }
}

impl NbdFinal {
    fn check(&self) -> Result<(), Error> {
        if self.reported.len() > QUEUES_MAX {
            return Err(Error::field("number of queues", self.reported.len()));
        }
        let counts =
            [self.losses, self.at_driver_start].into_iter().chain(self.reported.iter().flatten().copied());
        match counts.into_iter().find(|count| *count > LOSSES_MAX) {
            Some(count) => Err(Error::field("count of losses", count)),
            None => Ok(()),
        }
    }
}

impl Checked for DiskFinal {
    fn check(&self) -> Result<(), Error> {
        self.nbd.as_ref().map_or(Ok(()), NbdFinal::check)?;
        match self.images.iter().find(|image| !(0..4096).contains(&image.lost_writes)) {
            Some(image) => Err(Error::field("error number", image.lost_writes)),
            None => Ok(()),
        }
    }
}
