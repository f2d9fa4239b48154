//! Provides a small file system in memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::statvfs;
use tempfile::TempDir;

/// A file system with a limit. Dropping it unmounts the file system.
pub struct Tmpfs {
    at: PathBuf,
    /// The directory, if it was made for the file system.
    directory: Option<TempDir>,
}

impl Tmpfs {
    /// Mounts a new file system of so many bytes in a directory of its own.
    ///
    /// # Errors
    /// Returns the reason why it cannot be mounted: no right to mount, no such program.
    pub fn mount(bytes: u64) -> Result<Self, String> {
        let dir = TempDir::with_prefix("kickless-").map_err(|error| error.to_string())?;
        let mut mounted = Self::mount_at(dir.path(), bytes)?;
        mounted.directory = Some(dir);
        Ok(mounted)
    }

    /// Mounts a new file system of so many bytes over a directory.
    ///
    /// # Errors
    /// As [`Tmpfs::mount`].
    pub fn mount_at(directory: &Path, bytes: u64) -> Result<Self, String> {
        mount(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"], directory)?;
        Ok(Self { at: directory.to_owned(), directory: None })
    }

    /// Returns the directory where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Sets the number of bytes that it can have.
    pub fn resize(&self, bytes: u64) {
        mount(&["-o", &format!("remount,size={bytes}")], self.path()).unwrap();
    }

    /// Returns the number of free bytes.
    pub fn free_bytes(&self) -> u64 {
        let space = statvfs(self.path()).unwrap();
        space.f_bavail * space.f_frsize
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // If a file is still open, the kernel unmounts when it is closed.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

fn mount(arguments: &[&str], at: &Path) -> Result<(), String> {
    let output = Command::new("mount").args(arguments).arg(at).output();
    let output = output.map_err(|error| format!("mount: {error}"))?;
    let stderr = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(stderr()) }
}
