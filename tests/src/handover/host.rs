//! A host with its daemon.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_testing::Random;

use crate::daemon::Daemon;
use crate::handover::store::Store;
use crate::handover::{Case, Medium};

/// Rings of the guest.
pub const QUEUES: u16 = 2;
const LIMIT: Duration = Duration::from_secs(60);

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
        let daemon = Some(start(case, store, number, random)?);
        Ok(Host { daemon, may_fail: false, keeps: false, has_reported: false })
    }

    /// Returns the daemon.
    ///
    /// # Errors
    /// It has ended.
    pub fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("no daemon")
    }

    /// Lets another process take over. One of the two can fail at a step. `meanwhile` runs until it is over.
    ///
    /// # Errors
    /// Neither process ends, or the result is impossible.
    pub fn upgrade(
        &mut self,
        random: &mut Random,
        mut meanwhile: impl FnMut() -> Result<()>,
    ) -> Result<Upgraded> {
        let daemon = self.daemon.as_mut().context("no daemon")?;
        let seen = daemon.log().len();
        let fault = random_fault(random);
        let mut new = daemon.begin_upgrade(&[&fault], &[])?;
        let deadline = Instant::now() + LIMIT;
        let serves = loop {
            meanwhile()?;
            let (old_lives, new_lives) = (daemon.is_running()?, new.child.try_wait()?.is_none());
            let said = |words: &str| daemon.log().lines().iter().skip(seen).any(|line| line.contains(words));
            let has_fault = || said("fault: ") || !new.log.grep("fault: ").is_empty();
            match (old_lives, new_lives) {
                (false, true) if !new.log.grep("was read again").is_empty() => break Upgraded::Yes,
                (true, false) if said("the upgrade to") => {
                    return Ok(Upgraded::No { has_fault: has_fault() });
                }
                (false, false) => {
                    ensure!(has_fault(), "both processes end: {:?}", new.log.lines());
                    break Upgraded::Died;
                }
                _ => {}
            }
            ensure!(Instant::now() < deadline, "neither process ends: {:?}", new.log.lines());
        };
        match serves {
            Upgraded::Yes => drop(daemon.becomes(new).child.wait()?),
            _ => self.daemon = None,
        }
        Ok(serves)
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
        ensure!(panic.is_none(), "{panic:?}");
        Ok(status)
    }

    /// Starts the daemon again after it has ended.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self, case: &Case, store: &Store, number: usize, random: &mut Random) -> Result<()> {
        self.daemon = Some(start(case, store, number, random)?);
        (self.keeps, self.has_reported) = (false, false);
        Ok(())
    }

    /// Returns the last lines of the log.
    pub fn last_words(&self) -> String {
        let lines = self.daemon.as_ref().map(|daemon| daemon.log().lines()).unwrap_or_default();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

/// The result of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upgraded {
    /// The new process serves.
    Yes,
    /// The old process goes on.
    No {
        /// One of the two was made to fail.
        has_fault: bool,
    },
    /// Both have ended, because one of them was killed when only that one could serve.
    Died,
}

/// Returns a variable of the environment: a fault in this upgrade or, if the process takes over, in the next
/// one. Half of them name no step.
fn random_fault(random: &mut Random) -> String {
    let end = ["old", "new"][random.below(2) as usize];
    let fault = ["kill", "exit", "error"][random.below(3) as usize];
    format!("KICKLESS_UPGRADE_FAULT={end}:{}:{fault}", 1 + random.below(24))
}

fn start(case: &Case, store: &Store, number: usize, random: &mut Random) -> Result<Daemon> {
    let engine = ["io_uring", "aio", "threads"][random.below(if case.writeback { 2 } else { 3 }) as usize];
    // AIO cannot use the page cache.
    let engine = if case.writeback && engine == "aio" { "threads" } else { engine };
    let cache = if case.writeback { "writeback" } else { "none" };
    let mut arguments = vec!["--control"];
    if matches!(case.medium, Medium::Loops { .. }) {
        // The names of backing images are links to devices. Beside an image, a sandbox allows files only.
        arguments.push("--allow-root=/dev");
    }
    let disk = store.disk(number);
    let disk = disk.to_str().context("the path is not UTF-8")?;
    let device = format!("blk-file = '{disk}'\nnum-queues = {QUEUES}\nincoming = true\ncache = '{cache}'");
    Daemon::serve_in(
        &[&random_fault(random)],
        &arguments,
        &format!("engine = '{engine}'"),
        &[("blk", &device)],
    )
}
