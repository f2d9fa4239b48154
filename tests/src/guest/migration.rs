//! Live migration of a guest from one QEMU to another on this machine, watched from outside.
//!
//! # On an emulated CPU
//! QEMU before 9.0 loses writes of an emulated CPU when a machine moves: taking the log of dirty pages leaves the CPU's cached
//! translations as they are, so that until they are flushed it writes to pages that count as clean. Every tenth or twentieth move
//! so breaks a guest, on a `virtio-blk` that QEMU itself serves too. So there the log is not taken a second time while the machine runs: it
//! works through all but the end of the first round, in which everything is sent once, and stands from before its end. What the
//! disk wrote and marked meanwhile is in the log then as it would be otherwise.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::guest::qemu::{Guest, GuestConfig, LIMIT};
use crate::guest::{Accel, Assets};

/// How often QEMU is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// A migration under way, as QEMU tells of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Pages that are still to be sent, as far as is known.
    pub pages_left: u64,
    /// Pages that the machine has.
    pub pages: u64,
    /// Pages that were written to since they were sent, a second.
    pub dirty_rate: u64,
    /// How often the log of dirty pages has been taken.
    pub rounds: u64,
    /// Mbit/s.
    pub mbps: f64,
    /// How long the guest would stand if it were moved now.
    pub downtime: Duration,
}

/// A migration that is over.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// From its beginning to its end.
    pub total: Duration,
    /// As long as the guest did not run.
    pub downtime: Duration,
    /// How often the log of dirty pages was taken.
    pub rounds: u64,
    /// What went over the wire.
    pub bytes: u64,
}

/// A QEMU that waits for a machine.
pub struct Destination {
    /// The machine, once it has come.
    pub guest: Guest,
    config: GuestConfig,
    uri: String,
    _dir: TempDir,
}

impl Destination {
    /// Starts QEMU with the same machine, on these disks.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(config: &GuestConfig) -> Result<Destination> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket: PathBuf = dir.path().join("migration");
        let uri = format!("unix:{}", socket.display());
        let guest = Guest::start(&GuestConfig { incoming: Some(socket), ..config.clone() })?;
        Ok(Destination { guest, config: config.clone(), uri, _dir: dir })
    }

    /// Takes the guest over from `source`, whose QEMU is left with nothing to run; `each` is told how far it is.
    ///
    /// # Errors
    /// The migration fails, or does not end in time.
    pub fn receive(
        mut self,
        source: &mut Guest,
        mut each: impl FnMut(&Progress),
    ) -> Result<(Guest, Finished)> {
        let emulated = Assets::get()?.accel() == Accel::Tcg;
        let stood = loop {
            self.begin(source, BANDWIDTH)?;
            if !emulated {
                break None;
            }
            if let Some(since) = stands_in_first_round(source, &mut each)? {
                break Some(since);
            }
            self = Destination::start(&self.config)?;
        };
        let finished = follow(source, each)
            .with_context(|| format!("the destination said:\n{}", self.guest.last_words()))?;
        let mut guest = self.guest;
        arrived(&mut guest, if emulated { "paused" } else { "running" })?;
        let Some(since) = stood else { return Ok((guest, finished)) };
        guest.qmp().execute("cont", json!({}))?;
        Ok((guest, Finished { downtime: since.elapsed(), ..finished }))
    }

    /// Where a source sends its guest.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Begins to receive the guest, at so many bytes a second at most.
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

/// Has a machine stand, that is on its way, before the log of dirty pages is taken a second time, and sends the rest as fast as can
/// be; since when it stands. `None`: that was too late, and it has gone on where it was.
fn stands_in_first_round(source: &mut Guest, mut each: impl FnMut(&Progress)) -> Result<Option<Instant>> {
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
                if rounds == 1 && pages_left < pages / LEFT_WHEN_IT_STANDS {
                    since = Some(Instant::now());
                    source.qmp().execute("stop", json!({}))?;
                    continue;
                }
            }
            (State::Over(how), _) => bail!("the migration {how}: {}", source.last_words()),
            (State::Active(_) | State::Completed(_), _) => {
                // The source has all that its guest wrote.
                let _ = source.qmp().execute("migrate_cancel", json!({}));
                source.qmp().execute("cont", json!({}))?;
                return Ok(None);
            }
        }
        ensure!(Instant::now() < deadline, "the migration does not go on");
        thread::sleep(ASK_EVERY);
    }
}

/// Waits until QEMU calls the state of a machine so that has come.
fn arrived(guest: &mut Guest, wanted: &str) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = guest.qmp().execute("query-status", json!({}))?;
        match status["status"].as_str() {
            Some(status) if status == wanted => return Ok(()),
            Some("inmigrate") if Instant::now() < deadline => thread::sleep(ASK_EVERY),
            _ => bail!("the guest has come, and stands: {status}"),
        }
    }
}

/// Bytes a second: a guest has some seconds in which it works while it moves.
pub const BANDWIDTH: u64 = 60 << 20;
/// The share of its pages that an emulated machine has yet to send when it is made to stand. What the disk writes there before they are sent
/// moves without marks: the less, the better, and yet the round must not have ended.
const LEFT_WHEN_IT_STANDS: u64 = 16;
/// Bytes a second: as many as can be.
const UNBOUNDED: u64 = 16 << 30;
/// The guest may stand for so long.
const DOWNTIME_MS: u64 = 300;

/// What a guest that is to be moved has on its kernel's command line: its task, and that memory is not cleared when it is taken. For where
/// the kernel writes a page just before the disk does, nobody finds out that the disk's writing was not marked.
pub const TASK: &str = "kl.task=migrate,check kl.size=8 init_on_alloc=0";

/// Waits until a guest at [`Destination::receive`]'s end, or anywhere, has gone once more through each kind of quick work that it does
/// over and over, since its results had `seen` lines.
///
/// # Errors
/// It fails, or does not get there in time.
pub fn works_on(guest: &Guest, seen: usize) -> Result<()> {
    guest.results().wait_from(seen, "the guest to work on", LIMIT, |line| match line {
        "KL: end=failed" => Some(Err(anyhow!("the guest failed: {}", guest.last_words()))),
        _ => line.starts_with("KL: progress.cached=").then_some(Ok(())),
    })?
}

/// Where a migration stands.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// It goes on.
    Active(Progress),
    /// It is done.
    Completed(Finished),
    /// It was given up, because it was asked for or something failed; the source can go on.
    Over(&'static str),
}

/// Asks a source how far it is.
///
/// # Errors
/// It does not answer.
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

/// Waits until a migration is done.
///
/// # Errors
/// It fails, or does not end in time.
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

/// Waits until a migration under way is as far as `enough` says.
///
/// # Errors
/// It is over before, or does not get there in time.
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

/// Waits until QEMU calls the state of a migration so.
///
/// # Errors
/// It does not in time.
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

/// Waits until a migration that is not to succeed is over, and the guest runs again where it was.
///
/// # Errors
/// It succeeds, or does not end in time.
pub fn comes_to_nothing(source: &mut Guest) -> Result<()> {
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
        ensure!(Instant::now() < deadline, "the guest does not go on: {status}");
        thread::sleep(ASK_EVERY);
    }
}
