//! A unit of the small service manager: its directory, its configuration file and its commands.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use tempfile::TempDir;

use crate::daemon::kickless_binary;
use crate::manager::Manager;
use crate::transcript::Transcript;

/// Time limit of a start.
const LIMIT: Duration = Duration::from_secs(60);

/// A unit with its manager. The sockets of its devices are in its directory.
pub struct Unit {
    /// The manager, which has no main process at first.
    pub manager: Manager,
    program: PathBuf,
    dir: TempDir,
}

impl Unit {
    /// Makes a unit with these devices. Each has a name and further lines of its `[[device]]`.
    ///
    /// # Errors
    /// The files or the manager cannot be made, or the program is not built.
    pub fn new(devices: &[(&str, &str)]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("kickless-unit-").tempdir()?;
        let unit = Self { manager: Manager::new()?, program: kickless_binary()?, dir };
        unit.write(devices)?;
        Ok(unit)
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of a file of the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Writes the configuration file anew.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, devices: &[(&str, &str)]) -> Result<()> {
        let device = |(name, lines): &(&str, &str)| {
            let socket = self.path(&format!("{name}.sock"));
            format!("[[device]]\nname = '{name}'\nsocket-path = '{}'\n{lines}\n", socket.display())
        };
        Ok(fs::write(self.path("devices.toml"), devices.iter().map(device).collect::<String>())?)
    }

    /// Returns the command of `ExecStart=`, with further arguments.
    pub fn words(&self, more: &[&str]) -> Vec<OsString> {
        let option = |option: &str, name: &str| format!("--{option}={}", self.path(name).display()).into();
        let mut words = vec![(&self.program).into(), "serve".into()];
        words.extend([option("config", "devices.toml"), option("control", "control.sock")]);
        words.extend(more.iter().map(OsString::from));
        words
    }

    /// Returns the command of `ExecReload=`.
    pub fn reload_words(&self) -> Vec<OsString> {
        let from = format!("--upgrade-from={}", self.path("control.sock").display());
        self.words(&[&from, "--background"])
    }

    /// Returns the command of `ExecStop=`.
    pub fn store_words(&self) -> Vec<OsString> {
        let control = format!("--control={}", self.path("control.sock").display());
        vec![(&self.program).into(), "store".into(), control.into()]
    }

    /// Starts the main process, and waits until it serves. Returns its log.
    ///
    /// # Errors
    /// It does not serve in time.
    pub fn start(&self) -> Result<Transcript> {
        let log = self.manager.start(&self.words(&[]))?;
        log.wait_for("the line that it serves", LIMIT, |line| line.contains(" serving ").then_some(()))?;
        Ok(log)
    }
}
