//! The answers of the host, as plain data.

use rustix::fs::FileType;

/// The status of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// The number of its file system.
    pub device: u64,
    /// Its number in the file system.
    pub inode: u64,
    /// The number of the device that it stands for.
    pub special: u64,
    /// Its type and permissions, as the kernel writes them.
    pub mode: u32,
    /// Its length in bytes.
    pub size: u64,
}

impl FileStatus {
    /// Returns its type.
    pub fn file_type(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// Returns whether an image can be there: a regular file or a block device.
    pub(crate) fn can_be_image(&self) -> bool {
        matches!(self.file_type(), FileType::RegularFile | FileType::BlockDevice)
    }
}

/// The alignment that direct I/O of a file needs, as the kernel reports it since Linux 6.1 for some file
/// systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// The kernel reports none.
    Unknown,
    /// Direct I/O is impossible.
    Impossible,
    /// Alignments in bytes.
    Known {
        /// The alignment of addresses.
        memory: u32,
        /// The alignment of offsets and lengths.
        offset: u32,
    },
}

/// The names of the numbers that are known of a block device. The kernel's documentation
/// (ABI/stable/sysfs-block) describes them.
const NUMBERS: [&str; 8] = [
    ALIGNMENT_OFFSET,
    "logical_block_size",
    "physical_block_size",
    "minimum_io_size",
    "optimal_io_size",
    "discard_max_bytes",
    "discard_granularity",
    "write_zeroes_max_bytes",
];
/// The number that a partition has itself. The others are those of its disk.
const ALIGNMENT_OFFSET: &str = "alignment_offset";

/// The properties of a block device, from /sys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockFacts {
    /// It refuses writes.
    pub is_protected: bool,
    /// It keeps its bytes in RAM: zram, brd, or a partition of one.
    pub is_in_ram: bool,
    /// In the order of the names.
    pub(crate) numbers: Vec<Option<u64>>,
}

impl BlockFacts {
    /// Returns the number with this name in /sys, such as `discard_max_bytes`.
    pub fn number(&self, name: &str) -> Option<u64> {
        let nth = NUMBERS.iter().position(|known| *known == name)?;
        self.numbers.get(nth).copied().flatten()
    }

    /// Fills in the numbers. `read` returns the number with a name, of the device itself or of its disk.
    pub(crate) fn set_numbers(&mut self, read: impl Fn(&str, bool) -> Option<u64>) {
        self.numbers = NUMBERS.iter().map(|name| read(name, *name == ALIGNMENT_OFFSET)).collect();
    }
}
