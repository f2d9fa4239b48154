//! Scratch disks whose content is compared from both ends: what the host put there, and what the guest did.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::guest::qemu::Results;
use crate::guest::{image_dir, make_image, sha256};

/// Size of the image in MiB: the guest's verified writes end well below.
const SIZE_MIB: u64 = 96;
/// How much of its start the host fills, in MiB, and how much after that the guest fills; `guest/init` knows it too.
const PART_MIB: u64 = 8;

/// An image file; removed when dropped.
pub struct Scratch {
    path: PathBuf,
    _dir: TempDir,
}

impl Scratch {
    /// Makes an image that starts with random bytes for the guest to read.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new() -> Result<Scratch> {
        let dir = image_dir()?;
        let path = dir.path().join("disk.img");
        make_image(&path, SIZE_MIB, PART_MIB)?;
        Ok(Scratch { path, _dir: dir })
    }

    /// The image file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compares what the guest's check of this disk (named as the guest names it) found with the image.
    ///
    /// # Errors
    /// They differ, or the guest did not check the disk to the end.
    pub fn compare(&self, results: &Results, disk: &str) -> Result<()> {
        let result = |key: &str| {
            results
                .get(&format!("{disk}.{key}"))
                .with_context(|| format!("{disk}: the guest reported no {key}"))
        };
        ensure!(result("checked")? == "yes", "{disk}: the guest's verified I/O failed");
        let part = PART_MIB << 20;
        ensure!(*result("from_host")? == sha256(&self.path, 0, part)?, "{disk}: the guest read wrong data");
        ensure!(
            *result("from_guest")? == sha256(&self.path, part, part)?,
            "{disk}: the guest's data is not on the disk"
        );
        Ok(())
    }
}

/// Numbers in a result that holds several, such as interrupts by queue.
///
/// # Errors
/// There is no such result, or it is not made of numbers.
pub fn numbers(results: &Results, key: &str) -> Result<Vec<u64>> {
    let text = results.get(key).with_context(|| format!("the guest reported no {key}"))?;
    text.split_whitespace().map(|word| word.parse().with_context(|| format!("{key}={text}"))).collect()
}
