//! Creates the targets of the measurement.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kickless_tests::driver::load::half_random;
use kickless_tests::guest::image_dir;
use tempfile::TempDir;

use crate::common::zram::{DEVICE, Zram};

/// Bytes of each target.
const SIZE: u64 = 1 << 30;
/// Bytes of each target in the short form.
const SIZE_QUICK: u64 = 16 << 20;

/// A target. Dropping it removes the target.
pub(crate) struct Target {
    name: &'static str,
    disk: OsString,
    size: u64,
    held: Held,
}

enum Held {
    Zram { _zram: Zram },
    File { _dir: TempDir },
    Nothing,
    Memory,
}

impl Target {
    /// Creates a target.
    ///
    /// # Errors
    /// The target does not exist on this machine.
    pub(crate) fn take(name: &'static str, quick: bool) -> Result<Target> {
        let size = if quick { SIZE_QUICK } else { SIZE };
        let (disk, held) = match name {
            "zram" => (DEVICE.into(), Held::Zram { _zram: Zram::take(size)? }),
            "tmpfs" => filled(tempfile::Builder::new().prefix("kickless-").tempdir_in("/dev/shm")?, size)?,
            "file" => filled(image_dir()?, size)?,
            "mem" => (format!("mem:{size}").into(), Held::Memory),
            _ => (format!("null:{size}").into(), Held::Nothing),
        };
        Ok(Target { name, disk, size, held })
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the value for `--blk-file`.
    pub(crate) fn disk(&self) -> &OsStr {
        &self.disk
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the path for fio, if fio can use this target.
    pub(crate) fn path(&self) -> Option<&Path> {
        matches!(self.held, Held::Zram { .. } | Held::File { .. }).then_some(Path::new(&self.disk))
    }

    /// Returns whether the storage daemon can serve such a target.
    pub(crate) fn has_peer(&self) -> bool {
        !matches!(self.held, Held::Memory)
    }

    /// Returns whether the target is empty and must be filled first.
    pub(crate) fn is_to_be_filled(&self) -> bool {
        matches!(self.held, Held::Memory)
    }
}

/// Creates a file full of data.
fn filled(dir: TempDir, size: u64) -> Result<(OsString, Held)> {
    let path: PathBuf = dir.path().join("disk.img");
    let mut file = File::create_new(&path)?;
    let chunk = half_random(1 << 20);
    for _ in 0..size / chunk.len() as u64 {
        file.write_all(&chunk).context("the file cannot be filled")?;
    }
    file.sync_all()?;
    Ok((path.into(), Held::File { _dir: dir }))
}
