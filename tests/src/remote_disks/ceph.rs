//! Creates images in the Ceph cluster that `tools/ceph` sets up, and stops the one OSD of the cluster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::remote_disks::nbd::all_threads_stopped;

/// Time limit for the cluster.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the cluster's directory.
fn dir() -> Result<PathBuf> {
    let dir = std::env::var_os("KICKLESS_TEST_CEPH");
    Ok(dir.context("there is no cluster: run `make test-rbd`, which starts one and runs these tests")?.into())
}

fn conf() -> Result<PathBuf> {
    Ok(dir()?.join("ceph.conf"))
}

/// Runs `rbd`.
///
/// # Errors
/// `rbd` fails.
pub fn rbd(words: &[&str]) -> Result<()> {
    let mut command = Command::new("rbd");
    let output = command.env("CEPH_CONF", conf()?).args(words).output().context("cannot run rbd")?;
    ensure!(output.status.success(), "rbd {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// An image. Dropping it removes the image.
pub struct CephImage {
    name: String,
}

impl CephImage {
    fn named() -> CephImage {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        CephImage { name: format!("rbd/end-{}-{number}", std::process::id()) }
    }

    /// Creates an empty image of `mib` MiB.
    ///
    /// # Errors
    /// The image cannot be created.
    pub fn create(mib: u64) -> Result<CephImage> {
        let image = CephImage::named();
        rbd(&["create", &format!("--size={mib}M"), &image.name])?;
        Ok(image)
    }

    /// Creates an image with the content of a file.
    ///
    /// # Errors
    /// The image cannot be created.
    pub fn import(path: &Path) -> Result<CephImage> {
        let image = CephImage::named();
        rbd(&["import", "--no-progress", path.to_str().context("path")?, &image.name])?;
        Ok(image)
    }

    /// Writes the content of the image to an existing file.
    ///
    /// # Errors
    /// The image cannot be read, or the file cannot be written.
    pub fn export(&self, path: &Path) -> Result<()> {
        // `rbd export` only creates files.
        std::fs::remove_file(path)?;
        rbd(&["export", "--no-progress", &self.name, path.to_str().context("path")?])
    }

    /// Changes the size of the image.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn resize(&self, mib: u64) -> Result<()> {
        rbd(&["resize", "--no-progress", &format!("--size={mib}M"), &self.name])
    }

    /// Returns the disk specification. With it, a stop waits one second for the cluster.
    ///
    /// # Errors
    /// There is no cluster.
    pub fn text(&self) -> Result<String> {
        Ok(format!("rbd:{}?conf={}&stop-timeout=1", self.name, conf()?.display()))
    }

    /// Returns a disk specification for a process without Ceph's configuration file. Contains the needed
    /// settings only if `settings` is true.
    ///
    /// # Errors
    /// There is no cluster.
    pub fn text_alone(&self, settings: bool) -> Result<String> {
        if !settings {
            return Ok(format!("rbd:{}", self.name));
        }
        let conf = std::fs::read_to_string(conf()?)?;
        let monitors =
            conf.lines().find_map(|line| line.strip_prefix("mon host = ")).context("no monitors")?;
        let keyring = dir()?.join("keyring");
        Ok(format!("rbd:{}?mon_host={monitors}&keyring={}", self.name, keyring.display()))
    }
}

impl Drop for CephImage {
    fn drop(&mut self) {
        // The image may still be open; it then ends with the cluster.
        let mut remove = Command::new("timeout");
        remove.args(["10", "rbd", "remove", "--no-progress", &self.name]).stderr(Stdio::null());
        if let Ok(conf) = conf() {
            let _ = remove.env("CEPH_CONF", conf).status();
        }
    }
}

/// The cluster's one OSD, stopped by a signal. Dropping this continues it.
pub struct StoppedOsd(Pid);

impl StoppedOsd {
    /// Stops the OSD. All its threads have stopped when this returns.
    ///
    /// # Errors
    /// The OSD does not run.
    pub fn stop() -> Result<StoppedOsd> {
        let pid = std::fs::read_to_string(dir()?.join("run/osd.0.pid"))?.trim().parse()?;
        let stopped = StoppedOsd(Pid::from_raw(pid).context("no process id")?);
        kill_process(stopped.0, Signal::STOP)?;
        let deadline = Instant::now() + LIMIT;
        while !all_threads_stopped(u32::try_from(pid)?)? {
            ensure!(Instant::now() < deadline, "the OSD does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(stopped)
    }

    /// Kills the OSD. `tools/ceph` starts another one.
    ///
    /// # Errors
    /// The OSD has ended.
    pub fn kill(self) -> Result<()> {
        Ok(kill_process(self.0, Signal::KILL)?)
    }
}

impl Drop for StoppedOsd {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}
