//! Provides loop devices.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use tempfile::NamedTempFile;

/// A loop device. Dropping it detaches the device.
pub struct LoopDevice {
    path: PathBuf,
    image: Arc<NamedTempFile>,
}

impl LoopDevice {
    /// Creates a device for an image. `arguments` are further arguments of losetup.
    ///
    /// # Errors
    /// Returns the reason why there is none: no right to create one, no such device, no such program.
    pub fn new(image: NamedTempFile, arguments: &[&str]) -> Result<Self, String> {
        Self::over(Arc::new(image), arguments)
    }

    /// Creates another device for the same image, with a page cache of its own.
    ///
    /// # Errors
    /// As for [`LoopDevice::new`].
    pub fn another(&self, arguments: &[&str]) -> Result<Self, String> {
        Self::over(Arc::clone(&self.image), arguments)
    }

    fn over(image: Arc<NamedTempFile>, arguments: &[&str]) -> Result<Self, String> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .args(arguments)
            .arg(image.path())
            .output()
            .map_err(|error| format!("losetup: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        Ok(Self { path: String::from_utf8(output.stdout).unwrap().trim().into(), image })
    }

    /// Returns the path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the device write single pages. A request that the image takes only in part would count as done:
    /// the kernel ignores short writes to the image of a loop device.
    ///
    /// # Errors
    /// Returns the reason why it cannot.
    pub fn write_single_pages(&self) -> Result<(), String> {
        let limit = self.sysfs().join("queue/max_sectors_kb");
        fs::write(&limit, "4").map_err(|error| format!("{}: {error}", limit.display()))
    }

    fn sysfs(&self) -> PathBuf {
        Path::new("/sys/block").join(self.path.file_name().unwrap())
    }

    /// Returns the path of the image.
    pub fn image(&self) -> &Path {
        self.image.path()
    }

    /// Sets the size of the device and its image.
    pub fn resize(&self, bytes: u64) {
        self.image.as_file().set_len(bytes).unwrap();
        let status = Command::new("losetup").arg("--set-capacity").arg(&self.path).status().unwrap();
        assert!(status.success());
    }

    /// Returns the number of flushes of the device. The kernel's Documentation/block/stat.rst describes
    /// `stat`.
    pub fn flushes(&self) -> u64 {
        let stat = fs::read_to_string(self.sysfs().join("stat")).unwrap();
        stat.split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // If a disk still has the device open, the kernel detaches it when the disk closes it.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
