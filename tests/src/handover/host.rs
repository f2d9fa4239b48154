//! A host with its daemon.

use std::process::ExitStatus;

use anyhow::{Context, Result};
use kickless_testing::Random;

use crate::daemon::{Daemon, DaemonConfig, Program};
use crate::handover::store::Store;
use crate::handover::{Case, Medium};

/// Rings of the guest.
pub const QUEUES: u16 = 2;

/// A daemon, and what it may say.
pub struct Host {
    daemon: Option<Daemon>,
    /// A write-back may fail here: the store was full since the page cache was last written.
    pub may_fail: bool,
    /// The daemon has ended a connection because a write-back failed. It keeps the disk.
    pub keeps: bool,
    /// A flush has failed in this process.
    pub has_reported: bool,
}

impl Host {
    /// Starts the daemon of a host.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(case: &Case, store: &Store, number: usize, random: &mut Random) -> Result<Host> {
        let daemon = Some(Daemon::start(&config(case, store, number, random))?);
        Ok(Host { daemon, may_fail: false, keeps: false, has_reported: false })
    }

    /// Returns the daemon.
    ///
    /// # Errors
    /// It has ended.
    pub fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("no daemon")
    }

    /// Kills the daemon by SIGKILL. Its guest, if any, lives.
    pub fn kill(&mut self) {
        self.daemon = None;
    }

    /// Ends the daemon by SIGTERM.
    ///
    /// # Errors
    /// It does not end.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let (status, log) = self.daemon.take().context("no daemon")?.stop()?;
        let panic = log.iter().find(|line| line.contains("panicked"));
        anyhow::ensure!(panic.is_none(), "{panic:?}");
        Ok(status)
    }

    /// Starts the daemon again after it has ended.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self, case: &Case, store: &Store, number: usize, random: &mut Random) -> Result<()> {
        self.daemon = Some(Daemon::start(&config(case, store, number, random))?);
        (self.keeps, self.has_reported) = (false, false);
        Ok(())
    }

    /// Returns the last lines of the log.
    pub fn last_words(&self) -> String {
        let lines = self.daemon.as_ref().map(|daemon| daemon.log().lines()).unwrap_or_default();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

fn config(case: &Case, store: &Store, number: usize, random: &mut Random) -> DaemonConfig {
    let engine = ["io_uring", "aio", "threads"][random.below(if case.writeback { 2 } else { 3 }) as usize];
    // AIO cannot use the page cache.
    let engine = if case.writeback && engine == "aio" { "threads" } else { engine };
    let cache = if case.writeback { "writeback" } else { "none" };
    let mut arguments = vec!["--incoming".to_owned(), format!("--cache={cache}")];
    if matches!(case.medium, Medium::Loops { .. }) {
        // The names of backing images are links to devices. Beside an image, a sandbox allows files only.
        arguments.push("--allow-root=/dev".to_owned());
    }
    DaemonConfig {
        program: Program::Kickless,
        queues: QUEUES,
        engine: Some(engine.to_owned()),
        arguments,
        ..DaemonConfig::new(store.disk(number))
    }
}
