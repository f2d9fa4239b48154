//! Images of the Ceph cluster that `tools/ceph` sets up, and its one OSD.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::remote_disks::nbd::stands_still;

/// Nothing takes the cluster so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the cluster keeps its things.
fn dir() -> Result<PathBuf> {
    let dir = std::env::var_os("KICKLESS_TEST_CEPH");
    Ok(dir.context("there is no cluster: `make test-rbd` sets one up and runs these tests")?.into())
}

fn conf() -> Result<PathBuf> {
    Ok(dir()?.join("ceph.conf"))
}

/// Runs `rbd`.
///
/// # Errors
/// It fails.
pub fn rbd(words: &[&str]) -> Result<()> {
    let mut command = Command::new("rbd");
    let output = command.env("CEPH_CONF", conf()?).args(words).output().context("cannot run rbd")?;
    ensure!(output.status.success(), "rbd {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// An image, removed when this is dropped.
pub struct CephImage {
    name: String,
}

impl CephImage {
    fn named() -> CephImage {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        CephImage { name: format!("rbd/end-{}-{number}", std::process::id()) }
    }

    /// An empty one of so many MiB.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn create(mib: u64) -> Result<CephImage> {
        let image = CephImage::named();
        rbd(&["create", &format!("--size={mib}M"), &image.name])?;
        Ok(image)
    }

    /// One with what a file holds.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn import(path: &Path) -> Result<CephImage> {
        let image = CephImage::named();
        rbd(&["import", "--no-progress", path.to_str().context("path")?, &image.name])?;
        Ok(image)
    }

    /// Puts what it holds into a file that is there.
    ///
    /// # Errors
    /// It cannot be read, or the file cannot be written.
    pub fn export(&self, path: &Path) -> Result<()> {
        // `rbd export` makes files, and puts nothing into one that is there.
        std::fs::remove_file(path)?;
        rbd(&["export", "--no-progress", &self.name, path.to_str().context("path")?])
    }

    /// Makes it so many MiB large.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn resize(&self, mib: u64) -> Result<()> {
        rbd(&["resize", "--no-progress", &format!("--size={mib}M"), &self.name])
    }

    /// How it is written; a stop waits a second for the cluster.
    ///
    /// # Errors
    /// There is no cluster.
    pub fn text(&self) -> Result<String> {
        Ok(format!("rbd:{}?conf={}&stop-timeout=1", self.name, conf()?.display()))
    }

    /// How it is written where there is no configuration: with all that is needed of it, or without.
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
        // It may be open still; it goes with the cluster.
        let mut remove = Command::new("timeout");
        remove.args(["10", "rbd", "remove", "--no-progress", &self.name]).stderr(Stdio::null());
        if let Ok(conf) = conf() {
            let _ = remove.env("CEPH_CONF", conf).status();
        }
    }
}

/// The one OSD, stopped where it is; it goes on when this is dropped.
pub struct StoppedOsd(Pid);

impl StoppedOsd {
    /// Stops it; all of its threads stand still when this returns.
    ///
    /// # Errors
    /// It does not run.
    pub fn stop() -> Result<StoppedOsd> {
        let pid = std::fs::read_to_string(dir()?.join("run/osd.0.pid"))?.trim().parse()?;
        let stopped = StoppedOsd(Pid::from_raw(pid).context("no process id")?);
        kill_process(stopped.0, Signal::STOP)?;
        let deadline = Instant::now() + LIMIT;
        while !stands_still(u32::try_from(pid)?)? {
            ensure!(Instant::now() < deadline, "the OSD does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(stopped)
    }

    /// Kills it instead. `tools/ceph` starts another.
    ///
    /// # Errors
    /// It has ended.
    pub fn kill(self) -> Result<()> {
        Ok(kill_process(self.0, Signal::KILL)?)
    }
}

impl Drop for StoppedOsd {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}
