//! Makes, changes and checks qcow2 images with QEMU's tools, beside the daemon that serves them.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use kickless_driver::{Disk, Options};
use tempfile::TempDir;

use crate::daemon::{Daemon, DaemonConfig, Program};
use crate::frontend::LIMIT;
use crate::guest::image_dir;

/// A directory with an image, `disk`. Dropping it removes the directory.
pub struct Qcow2Image {
    dir: TempDir,
}

/// The result of `qemu-img check`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Clusters that are counted more often than they are used.
    pub leaks: u64,
    /// All other errors.
    pub corruptions: u64,
}

/// Runs `qemu-img` in a directory, and returns its standard output.
///
/// # Errors
/// It fails. The message has its words.
pub fn qemu_img(dir: &Path, words: &[&str]) -> Result<String> {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output().context("qemu-img")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img {words:?}: {said}");
    Ok(String::from_utf8(output.stdout)?)
}

impl Qcow2Image {
    /// Makes an image with the words of `qemu-img create -f qcow2`, without its name.
    ///
    /// # Errors
    /// `qemu-img` fails.
    pub fn create(words: &[&str], size: u64) -> Result<Self> {
        let image = Self::empty()?;
        let size = size.to_string();
        image.img(&[&["create", "-q", "-f", "qcow2"], words, &["disk", &size]].concat())?;
        Ok(image)
    }

    /// Makes the directory, without the image.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn empty() -> Result<Self> {
        Ok(Self { dir: image_dir()? })
    }

    /// Makes the directory below `parent`, without the image.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn empty_in(parent: &Path) -> Result<Self> {
        Ok(Self { dir: tempfile::tempdir_in(parent)? })
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the image.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn run(&self, program: &str, words: &[impl AsRef<OsStr>]) -> Result<Output> {
        let output = Command::new(program).args(words).current_dir(self.dir()).output();
        output.with_context(|| format!("cannot run {program}"))
    }

    /// Runs `qemu-img` in the image's directory. Returns its standard output.
    ///
    /// # Errors
    /// It fails. The message has its words.
    pub fn img(&self, words: &[&str]) -> Result<String> {
        qemu_img(self.dir(), words)
    }

    /// Runs commands of `qemu-io` on the image, with the effect of discards.
    ///
    /// # Errors
    /// A command fails. The message has its words.
    pub fn io(&self, commands: &[String]) -> Result<()> {
        self.io_on("disk", commands)
    }

    /// Runs commands of `qemu-io` on an image in the directory, with the effect of discards.
    ///
    /// # Errors
    /// A command fails. The message has its words.
    pub fn io_on(&self, name: &str, commands: &[String]) -> Result<()> {
        let mut words = vec!["-f", "qcow2", "-d", "unmap"];
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        words.push(name);
        let output = self.run("qemu-io", &words)?;
        let said = [&output.stdout[..], &output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        // Its status does not tell of each command that fails.
        ensure!(output.status.success() && !said.contains("failed"), "qemu-io {commands:?}: {said}");
        Ok(())
    }

    /// Returns the report of `qemu-img check`. No process may use the image.
    ///
    /// # Errors
    /// The check itself fails.
    pub fn check(&self) -> Result<CheckReport> {
        let output = self.run("qemu-img", &["check", "-f", "qcow2", "--output=json", "disk"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).with_context(|| said.into_owned())?;
        let count = |name: &str| report.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        ensure!(count("check-errors") == 0, "{report}");
        Ok(CheckReport { leaks: count("leaks"), corruptions: count("corruptions") })
    }

    /// Returns the contents of the disk, as QEMU reads them.
    ///
    /// # Errors
    /// `qemu-img` fails.
    pub fn contents(&self) -> Result<Vec<u8>> {
        self.converted(&[])
    }

    /// Returns the contents of a snapshot, as QEMU reads them.
    ///
    /// # Errors
    /// `qemu-img` fails.
    pub fn snapshot(&self, name: &str) -> Result<Vec<u8>> {
        self.converted(&["-l", name])
    }

    fn converted(&self, words: &[&str]) -> Result<Vec<u8>> {
        self.img(&[&["convert", "-f", "qcow2", "-O", "raw"], words, &["disk", "contents"]].concat())?;
        let contents = self.dir().join("contents");
        let bytes = fs::read(&contents)?;
        fs::remove_file(contents)?;
        Ok(bytes)
    }

    /// Returns the options of a kickless that serves the image.
    pub fn config(&self) -> DaemonConfig {
        let mut disk = std::ffi::OsString::from("qcow2:");
        disk.push(self.path());
        DaemonConfig { program: Program::Kickless, ..DaemonConfig::new(disk) }
    }

    /// Serves the image, and connects our driver. The driver does not reconnect.
    ///
    /// # Errors
    /// The daemon does not start.
    pub fn serve(&self) -> Result<(Daemon, Disk)> {
        serve(&self.config())
    }
}

/// Starts a daemon, and connects our driver. The driver does not reconnect.
///
/// # Errors
/// The daemon does not start.
pub fn serve(config: &DaemonConfig) -> Result<(Daemon, Disk)> {
    let daemon = Daemon::start(config)?;
    let options = Options {
        connect_timeout: LIMIT,
        reconnect_limit: std::time::Duration::ZERO,
        ..Options::new(daemon.socket())
    };
    let disk = Disk::connect(options)?;
    Ok((daemon, disk))
}
