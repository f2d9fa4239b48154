//! Migrates a guest live from one QEMU to another on this machine, and watches the migration from outside.
//!
//! # On an emulated CPU
//!
//! QEMU before 9.0 loses writes of an emulated CPU during a migration. When it takes the log of dirty
//! pages, it keeps the CPU's cached translations. Until QEMU flushes them, the CPU writes to pages that
//! count as clean. About one move in 10 to 20 breaks the guest, also with a `virtio-blk` that QEMU itself
//! serves.
//!
//! So with an emulated CPU, QEMU must not take the log a second time while the machine runs. The first
//! round sends each page once. The test stops the machine shortly before the end of this round. The log
//! then has the pages that the disk wrote and marked meanwhile, as in any other migration.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::guest::qemu::{Guest, GuestConfig, LIMIT};
use crate::guest::{Accel, Assets};

/// Time between two queries of a migration's progress.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// The progress of a running migration, as QEMU reports it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Pages that QEMU still has to send, as far as it knows.
    pub pages_left: u64,
    /// Pages of the machine.
    pub pages: u64,
    /// Pages that the guest changed per second after QEMU had sent them.
    pub dirty_rate: u64,
    /// Number of times that QEMU has taken the log of dirty pages.
    pub rounds: u64,
    /// Bandwidth in Mbit/s.
    pub mbps: f64,
    /// Expected pause of the guest if QEMU moved it now.
    pub downtime: Duration,
}

/// The result of a completed migration.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// Time of the whole migration.
    pub total: Duration,
    /// Time in which the guest did not run.
    pub downtime: Duration,
    /// Number of times that QEMU took the log of dirty pages.
    pub rounds: u64,
    /// Bytes that QEMU sent.
    pub bytes: u64,
}

/// A QEMU that waits for a migrating machine.
pub struct Destination {
    /// The guest. It runs after the migration.
    pub guest: Guest,
    config: GuestConfig,
    uri: String,
    _dir: TempDir,
}

impl Destination {
    /// Starts QEMU with the same machine on these disks.
    ///
    /// # Errors
    /// QEMU does not start.
    pub fn start(config: &GuestConfig) -> Result<Destination> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket: PathBuf = dir.path().join("migration");
        let uri = format!("unix:{}", socket.display());
        let guest = Guest::start(&GuestConfig { incoming: Some(socket), ..config.clone() })?;
        Ok(Destination { guest, config: config.clone(), uri, _dir: dir })
    }

    /// Receives the guest from `source`, whose QEMU then has nothing to run. Calls `each` with the
    /// progress.
    ///
    /// # Errors
    /// The migration fails, or does not end in time.
    pub fn receive(self, source: &mut Guest, each: impl FnMut(&Progress)) -> Result<(Guest, Finished)> {
        self.receive_at(BANDWIDTH, source, each)
    }

    /// Does the same with at most `bandwidth` bytes per second.
    ///
    /// # Errors
    /// As for [`Destination::receive`].
    pub fn receive_at(
        mut self,
        bandwidth: u64,
        source: &mut Guest,
        mut each: impl FnMut(&Progress),
    ) -> Result<(Guest, Finished)> {
        let emulated = Assets::get()?.accel() == Accel::Tcg;
        let stood = loop {
            self.begin(source, bandwidth)?;
            if !emulated {
                break None;
            }
            if let Some(since) = stop_in_first_round(source, &mut each)? {
                break Some(since);
            }
            self = Destination::start(&self.config)?;
        };
        let finished = follow(source, each)
            .with_context(|| format!("the destination said:\n{}", self.guest.last_words()))?;
        let mut guest = self.guest;
        wait_for_arrival(&mut guest, if emulated { "paused" } else { "running" })?;
        let Some(since) = stood else { return Ok((guest, finished)) };
        guest.qmp().execute("cont", json!({}))?;
        Ok((guest, Finished { downtime: since.elapsed(), ..finished }))
    }

    /// Returns the address to which a source sends its guest.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Starts the migration to this destination with at most `bandwidth` bytes per second.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn begin(&self, source: &mut Guest, bandwidth: u64) -> Result<()> {
        let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": DOWNTIME_MS });
        source.qmp().execute("migrate-set-parameters", parameters)?;
        source.qmp().execute("migrate", json!({ "uri": self.uri }))?;
        Ok(())
    }
}

/// Stops a migrating machine before QEMU takes the log of dirty pages a second time, and removes the limit
/// of the bandwidth. Returns the time of the stop, or `None` if it came too late and the guest runs at the
/// source again.
fn stop_in_first_round(source: &mut Guest, mut each: impl FnMut(&Progress)) -> Result<Option<Instant>> {
    let deadline = Instant::now() + LIMIT;
    let mut since = None;
    loop {
        match (state(source)?, since) {
            (State::Active(progress), Some(since)) if progress.rounds == 1 => {
                source.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": UNBOUNDED }))?;
                return Ok(Some(since));
            }
            (State::Active(progress), None) if progress.rounds <= 1 => {
                each(&progress);
                let Progress { pages, pages_left, rounds, .. } = progress;
                if rounds == 1 && pages_left < pages / LEFT_AT_STOP {
                    since = Some(Instant::now());
                    source.qmp().execute("stop", json!({}))?;
                    continue;
                }
            }
            (State::Over(how), _) => bail!("the migration {how}: {}", source.last_words()),
            (State::Active(_) | State::Completed(_), _) => {
                // The memory of the source has all that the guest wrote.
                let _ = source.qmp().execute("migrate_cancel", json!({}));
                source.qmp().execute("cont", json!({}))?;
                return Ok(None);
            }
        }
        ensure!(Instant::now() < deadline, "the migration does not progress");
        thread::sleep(ASK_EVERY);
    }
}

/// Waits until QEMU reports this state for a machine that has arrived.
fn wait_for_arrival(guest: &mut Guest, wanted: &str) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = guest.qmp().execute("query-status", json!({}))?;
        match status["status"].as_str() {
            Some(status) if status == wanted => return Ok(()),
            Some("inmigrate") if Instant::now() < deadline => thread::sleep(ASK_EVERY),
            _ => bail!("the guest has arrived, but its state is {status}"),
        }
    }
}

/// Bytes per second. The guest works for some seconds while it moves.
pub const BANDWIDTH: u64 = 60 << 20;
/// A machine with an emulated CPU stops when one part in this many of its pages is left to send. The disk's
/// writes to these pages move without marks, so few pages must be left. But the stop must come before the
/// end of the round.
const LEFT_AT_STOP: u64 = 16;
/// Bytes per second without a limit in practice.
const UNBOUNDED: u64 = 16 << 30;
/// Longest pause of the guest.
const DOWNTIME_MS: u64 = 300;

/// Kernel parameters of a guest that migrates: its task, and no clearing of allocated memory. If the kernel
/// cleared a page just before the disk writes to it, the kernel's mark would hide a missing mark of the
/// disk.
pub const TASK: &str = "kl.task=migrate,check kl.size=8 init_on_alloc=0";

/// Waits until the guest has completed each kind of its short, repeated work once more. `seen` is the
/// number of lines of its results before. The guest may be at any point of its work when this is called.
///
/// # Errors
/// The guest reports a failure, or does not complete the work in time.
pub fn wait_for_work(guest: &Guest, seen: usize) -> Result<()> {
    guest.results().wait_from(seen, "the guest to work on", LIMIT, |line| match line {
        "KL: end=failed" => Some(Err(anyhow!("the guest failed: {}", guest.last_words()))),
        _ => line.starts_with("KL: progress.cached=").then_some(Ok(())),
    })?
}

/// The state of a migration.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// It is running.
    Active(Progress),
    /// It has completed.
    Completed(Finished),
    /// It was cancelled or has failed. The guest can continue at the source.
    Over(&'static str),
}

/// Queries the state of a migration from its source.
///
/// # Errors
/// QEMU does not answer.
pub fn state(source: &mut Guest) -> Result<State> {
    let info = source.qmp().execute("query-migrate", json!({}))?;
    let ram = &info["ram"];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let millis = |key: &str| Duration::from_millis(number(&info[key]));
    Ok(match info["status"].as_str() {
        Some("completed") => State::Completed(Finished {
            total: millis("total-time"),
            downtime: millis("downtime"),
            rounds: number(&ram["dirty-sync-count"]),
            bytes: number(&ram["transferred"]),
        }),
        Some("failed") => State::Over("failed"),
        Some("cancelled") => State::Over("cancelled"),
        Some(_) => {
            let page = number(&ram["page-size"]).max(1);
            State::Active(Progress {
                pages_left: number(&ram["remaining"]) / page,
                pages: number(&ram["total"]) / page,
                dirty_rate: number(&ram["dirty-pages-rate"]),
                rounds: number(&ram["dirty-sync-count"]),
                mbps: ram["mbps"].as_f64().unwrap_or(0.0),
                downtime: millis("expected-downtime"),
            })
        }
        None => bail!("no migration: {info}"),
    })
}

/// Waits until a migration has completed.
///
/// # Errors
/// The migration fails, or does not complete in time.
pub fn follow(source: &mut Guest, mut each: impl FnMut(&Progress)) -> Result<Finished> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match state(source)? {
            State::Completed(finished) => return Ok(finished),
            State::Over(how) => bail!("the migration {how}: {}", source.last_words()),
            State::Active(progress) => each(&progress),
        }
        ensure!(Instant::now() < deadline, "the migration does not end");
        thread::sleep(ASK_EVERY);
    }
}

/// Waits until `enough` returns true for the progress of a running migration.
///
/// # Errors
/// The migration ends before, or `enough` does not return true in time.
pub fn wait_for(source: &mut Guest, what: &str, enough: impl Fn(&Progress) -> bool) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match state(source)? {
            State::Active(progress) if enough(&progress) => return Ok(()),
            State::Active(_) => {}
            over => bail!("{what}: {over:?}"),
        }
        ensure!(Instant::now() < deadline, "{what}: not in time");
        thread::sleep(ASK_EVERY);
    }
}

/// Waits until QEMU reports this status of a migration.
///
/// # Errors
/// QEMU does not report it in time.
pub fn wait_for_status(source: &mut Guest, status: &str) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let info = source.qmp().execute("query-migrate", json!({}))?;
        if info["status"] == status {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not {status} in time: {info}");
        thread::sleep(ASK_EVERY);
    }
}

/// Waits until a migration has failed or been cancelled and the guest runs at the source again.
///
/// # Errors
/// The migration succeeds, or does not end in time.
pub fn wait_for_failure(source: &mut Guest) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let over = match state(source)? {
            State::Over(_) => true,
            State::Completed(_) => bail!("the migration succeeded"),
            State::Active(_) => false,
        };
        let status = source.qmp().execute("query-status", json!({}))?;
        if over && status["status"] == "running" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest does not run again: {status}");
        thread::sleep(ASK_EVERY);
    }
}
