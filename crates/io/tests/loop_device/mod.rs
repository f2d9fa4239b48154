//! Loop devices, for the tests of this crate and of those above it.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::NamedTempFile;

/// A loop device, until this is dropped.
pub struct Loop {
    path: PathBuf,
    image: NamedTempFile,
}

impl Loop {
    /// A device over an image; `arguments` are losetup's.
    ///
    /// # Errors
    /// Why there is none: no right to make one, no such device, no such program.
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

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, and its image, so many bytes long.
    pub fn resize(&self, bytes: u64) {
        self.image.as_file().set_len(bytes).unwrap();
        let status = Command::new("losetup").arg("--set-capacity").arg(&self.path).status().unwrap();
        assert!(status.success());
    }

    /// How often the kernel has flushed it: the sixteenth number, says its Documentation/block/stat.rst.
    pub fn flushes(&self) -> u64 {
        let stat = Path::new("/sys/block").join(self.path.file_name().unwrap()).join("stat");
        fs::read_to_string(stat).unwrap().split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A disk that still has it open only puts this off.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
