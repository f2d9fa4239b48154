//! Provides a block device that loses writes.

use std::path::Path;

use tempfile::NamedTempFile;

use crate::{LoopDevice, Tmpfs};

/// Bytes of the device, and those that its file system has at first.
const SIZE: u64 = 8 << 20;
const SPACE: u64 = 1 << 20;

/// A loop device on a file system that is too small for it. The kernel takes writes into the page cache, and
/// loses them when it writes them back.
pub struct LosingDevice {
    // The fields are dropped in this order.
    device: LoopDevice,
    tmpfs: Tmpfs,
}

impl LosingDevice {
    /// Creates a device of 8 MiB, for 1 MiB of data.
    ///
    /// # Errors
    /// Returns the reason why there is none: the right to mount or a loop device is missing.
    pub fn new() -> Result<Self, String> {
        let tmpfs = Tmpfs::mount(SPACE)?;
        let image = NamedTempFile::new_in(tmpfs.path()).unwrap();
        image.as_file().set_len(SIZE).unwrap();
        let device = LoopDevice::new(image, &[])?;
        device.write_single_pages()?;
        Ok(Self { device, tmpfs })
    }

    /// Returns the path of the device.
    pub fn path(&self) -> &Path {
        self.device.path()
    }

    /// Makes the file system large enough for the device.
    pub fn grow_file_system(&self) {
        self.tmpfs.resize(4 * SIZE);
    }
}
