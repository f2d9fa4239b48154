//! Uses the kernel's compressing RAM disk, a fast block device that exists on every machine.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_testing::pattern;
use kickless_tests::frontend::LIMIT;

use super::BLOCK;

/// The device.
pub(crate) const DEVICE: &str = "/dev/zram0";
/// Directory of the kernel's files for the device.
pub(crate) const CONTROL: &str = "/sys/block/zram0";

/// The device, in use by this benchmark until this is dropped.
pub(crate) struct Zram;

impl Zram {
    /// Sizes and fills the device.
    ///
    /// # Errors
    /// The device does not exist, or is in use.
    pub(crate) fn take(size: u64) -> Result<Zram> {
        let _ = Command::new("modprobe").arg("zram").stderr(Stdio::null()).status();
        let control = Path::new(CONTROL);
        ensure!(control.exists(), "there is no {DEVICE}");
        let in_use: u64 = fs::read_to_string(control.join("disksize"))?.trim().parse()?;
        ensure!(
            in_use == 0,
            "{DEVICE} has a size, so a program uses it; if none does: `echo 1 > {CONTROL}/reset`"
        );
        fs::write(control.join("disksize"), size.to_string())
            .with_context(|| format!("{DEVICE} cannot be sized"))?;
        let zram = Zram;
        fill(size).with_context(|| format!("{DEVICE} cannot be filled"))?;
        Ok(zram)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        // The kernel closes the files of an io_uring instance some time after its process has ended.
        let deadline = Instant::now() + LIMIT;
        while let Err(error) = fs::write(format!("{CONTROL}/reset"), "1") {
            if Instant::now() > deadline {
                return eprintln!("{DEVICE} cannot be reset: {error}");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Fills each block with random bytes in one half and zeroes in the other.
fn fill(size: u64) -> Result<()> {
    let mut device = File::options().write(true).open(DEVICE)?;
    let mut chunk = vec![0; 1 << 20];
    for number in 0..size / chunk.len() as u64 {
        for (block, bytes) in (0u64..).zip(chunk.chunks_mut(BLOCK as usize)) {
            let half = bytes.len() / 2;
            bytes[..half].copy_from_slice(&pattern(number << 16 | block, half));
        }
        device.write_all(&chunk)?;
    }
    Ok(device.sync_all()?)
}
