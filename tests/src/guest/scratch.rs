//! Provides scratch disks, and compares their content on the host with the guest's results.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::guest::qemu::Results;
use crate::guest::{image_dir, make_image, sha256};
use crate::handover::store::{LAYERS, Store};
use crate::handover::{Case, Format, Medium};
use crate::qcow2::qemu_img;

/// Size of the image in MiB. It is larger than the range of the guest's verified writes.
const SIZE_MIB: u64 = 96;
/// MiB that the host fills from the start of the image. The guest fills the same amount after it.
/// `guest/init` has the same constant.
const PART_MIB: u64 = 2;

/// An image file. Dropping it removes the file.
pub struct Scratch {
    path: PathBuf,
    _dir: TempDir,
}

impl Scratch {
    /// Creates an image that starts with random bytes for the guest to read.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new() -> Result<Scratch> {
        let dir = image_dir()?;
        let path = dir.path().join("disk.img");
        make_image(&path, SIZE_MIB, PART_MIB)?;
        Ok(Scratch { path, _dir: dir })
    }

    /// Returns the path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies the image into a qcow2 image that two hosts have, each with a page cache of its own.
    ///
    /// # Errors
    /// The machine lacks something, such as loop devices.
    pub fn to_two_hosts(&self) -> Result<Store> {
        let format = Format::Qcow2 { cluster: 65536, subclusters: false, layers: 1 };
        let case = Case { medium: Medium::Loops { block: 512 }, format, writeback: true };
        let store = Store::make(&case, SIZE_MIB << 20, (3 * SIZE_MIB) << 20)?;
        let device = store.dir(0).context("no directory")?.join(LAYERS[0]);
        Self::convert(&["-f", "raw", "-O", "qcow2"], &self.path, &device)?;
        store.sync(0)?;
        Ok(store)
    }

    /// Copies the qcow2 image back, as a host sees it that has nothing in its page cache.
    ///
    /// # Errors
    /// `qemu-img` fails.
    pub fn copy_back(&self, store: &Store) -> Result<()> {
        store.sync(0)?;
        let device = store.dir(0).context("no directory")?.join(LAYERS[0]);
        Self::convert(&["-f", "qcow2", "-O", "raw"], &device, &self.path)
    }

    fn convert(formats: &[&str], from: &Path, to: &Path) -> Result<()> {
        let paths = [from, to].map(|path| path.to_str().unwrap_or_default());
        qemu_img(Path::new("/"), &[&["convert"], formats, &paths].concat())?;
        Ok(())
    }

    /// Compares the image with the results of the guest's check. `disk` is the guest's name of this disk.
    ///
    /// # Errors
    /// They differ, or the guest did not complete the check.
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

/// Returns the numbers of a result that has several, such as interrupts by queue.
///
/// # Errors
/// The result does not exist, or is not made of numbers.
pub fn numbers(results: &Results, key: &str) -> Result<Vec<u64>> {
    let text = results.get(key).with_context(|| format!("the guest reported no {key}"))?;
    text.split_whitespace().map(|word| word.parse().with_context(|| format!("{key}={text}"))).collect()
}
