//! Provides loop devices.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::NamedTempFile;

/// A loop device. Dropping it detaches the device.
pub struct LoopDevice {
    path: PathBuf,
    image: NamedTempFile,
}

impl LoopDevice {
    /// Creates a device for an image. `arguments` are further arguments of losetup.
    ///
    /// # Errors
    /// Returns the reason why there is none: no right to create one, no such device, no such program.
    pub fn new(image: NamedTempFile, arguments: &[&str]) -> Result<Self, String> {
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

    /// Sets the size of the device and its image.
    pub fn resize(&self, bytes: u64) {
        self.image.as_file().set_len(bytes).unwrap();
        let status = Command::new("losetup").arg("--set-capacity").arg(&self.path).status().unwrap();
        assert!(status.success());
    }

    /// Returns the number of flushes of the device. The kernel's Documentation/block/stat.rst describes
    /// `stat`.
    pub fn flushes(&self) -> u64 {
        let stat = Path::new("/sys/block").join(self.path.file_name().unwrap()).join("stat");
        fs::read_to_string(stat).unwrap().split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // If a disk still has the device open, the kernel detaches it when the disk closes it.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
