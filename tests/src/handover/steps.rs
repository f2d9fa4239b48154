//! The random walk.

use std::ops::Range;

use anyhow::{Context, Result, bail};
use kickless_testing::Random;

use crate::handover::Case;
use crate::handover::guest::Ask;
use crate::handover::life::Stopped;
use crate::handover::oracle::SECTOR;
use crate::handover::store::Store;
use crate::handover::world::{SECTORS, World};

/// Bytes for all images. They, their snapshots and what kills leak fit.
const SPACE: u64 = 32 << 20;
/// Bytes that a backup reads of an image. The tables are there, and most of the data.
const READ_AHEAD: u64 = 2 << 20;
/// Sectors of a request at most.
const LEN_MAX: u64 = 32;

/// Takes steps on one disk. Says so and returns `false` if the machine lacks what the disk needs.
///
/// # Errors
/// Something is lost, old, or reported without a reason. The message has the seed, the step, and the events
/// before it.
pub fn walk(case: &Case, seed: u64, steps: u64) -> Result<bool> {
    let store = match Store::make(case, (SECTORS * SECTOR) as u64, SPACE) {
        Ok(store) => store,
        Err(why) => {
            println!("SKIPPED: {case}: {why:#}");
            return Ok(false);
        }
    };
    let mut world = World::start(case, store, Random(seed)).with_context(|| format!("{case}"))?;
    for step in 0..steps {
        if let Err(error) = world.step() {
            bail!("{case}, seed {seed}, step {step}: {error:#}\n{}", world.report());
        }
    }
    if let Err(error) = world.end() {
        bail!("{case}, seed {seed}, after {steps} steps: {error:#}\n{}", world.report());
    }
    Ok(true)
}

impl World {
    /// Takes a step.
    ///
    /// # Errors
    /// Something is lost, old, or reported without a reason.
    pub fn step(&mut self) -> Result<()> {
        if self.store.is_full() && self.random.one_in(8) {
            return self.set_full(false);
        }
        if self.guest.is_none() {
            return self.step_without_guest();
        }
        let at = self.at;
        if self.hosts[at].keeps && self.random.one_in(4) {
            self.terminate(at)?;
            self.restart(at)?;
            return self.reconnect_or_abandon();
        }
        match self.random.below(100) {
            0..70 => {
                let asks = self.asks();
                self.ask(&asks)
            }
            70..74 => {
                self.maybe_submit()?;
                self.upgrade(at)
            }
            74..78 => {
                let is_durable = self.random.one_in(2);
                self.note(format!("durable: {is_durable}"));
                self.guest()?.set_durable(is_durable)
            }
            78..82 => self.read_all(),
            82..85 => self.pause(),
            85..91 => {
                self.maybe_submit()?;
                self.move_guest()
            }
            91..93 => {
                self.maybe_submit()?;
                self.kill(at)?;
                self.maybe_fail()?;
                self.restart(at)?;
                self.reconnect_or_abandon()
            }
            93 => {
                self.maybe_submit()?;
                self.terminate(at)?;
                self.maybe_fail()?;
                self.restart(at)?;
                self.reconnect_or_abandon()
            }
            94 if self.random.one_in(2) => self.upgrade(1 - at),
            94 => self.replace(1 - at),
            95 | 96 => self.quit(),
            97 | 98 => {
                let host = self.random.below(2) as usize;
                self.note(format!("a backup reads the images at host {host}"));
                self.store.read_ahead(host, READ_AHEAD)
            }
            _ => self.maybe_fail(),
        }
    }

    /// Ends guest and daemons in order, and reads the disk a last time in between.
    fn end(&mut self) -> Result<()> {
        if self.store.is_full() {
            self.set_full(false)?;
        }
        for _ in 0..2 {
            if self.guest.is_some() {
                self.quit()?;
            }
            self.clear_for(None)?;
            if self.guest.is_some() {
                self.abandon();
            }
        }
        let host = self.random.below(2) as usize;
        self.start_guest(host)?;
        self.read_all()?;
        self.terminate(host)?;
        self.abandon();
        self.terminate(1 - host)
    }

    fn step_without_guest(&mut self) -> Result<()> {
        let host = self.random.below(2) as usize;
        match self.random.below(12) {
            0..4 => self.start_guest(host),
            4..9 => self.use_tool(host),
            9 => self.start_during_commit(host),
            10 if self.random.one_in(2) => self.upgrade(host),
            10 => self.replace(host),
            _ => self.maybe_fail(),
        }
    }

    /// Replaces the daemon of a host that has no guest.
    fn replace(&mut self, host: usize) -> Result<()> {
        if self.random.one_in(2) && !self.hosts[host].keeps {
            self.kill(host)?;
        } else {
            self.terminate(host)?;
        }
        self.restart(host)
    }

    /// Stops the rings for a while.
    fn pause(&mut self) -> Result<()> {
        self.maybe_submit()?;
        if self.stop()? == Stopped::Kept {
            return Ok(());
        }
        if self.random.one_in(4) {
            self.maybe_fail()?;
        }
        self.note("the rings start again".into());
        self.resume_here()
    }

    /// Fills the store, or lets the server crash.
    pub(super) fn maybe_fail(&mut self) -> Result<()> {
        self.crash();
        let is_full = self.store.is_full();
        if self.store.can_be_full() { self.set_full(!is_full) } else { Ok(()) }
    }

    /// Leaves requests in flight for the next event.
    fn maybe_submit(&mut self) -> Result<()> {
        if self.random.one_in(2) {
            return Ok(());
        }
        let asks = self.asks();
        self.submit(&asks)
    }

    /// Returns requests, one for each ring. Reads come last, so that they know of the others.
    fn asks(&mut self) -> Vec<Ask> {
        let mut asks: Vec<Ask> = (0..=self.random.below(2)).map(|_| self.random_ask()).collect();
        asks.sort_by_key(|ask| matches!(ask, Ask::Read(_)));
        asks
    }

    fn random_ask(&mut self) -> Ask {
        let sectors = self.random_sectors();
        match self.random.below(16) {
            0..7 => Ask::Write(sectors),
            7..11 => Ask::Read(sectors),
            11 => Ask::Zeroes(sectors, self.random.one_in(2)),
            12 => Ask::Discard(sectors),
            _ => Ask::Flush,
        }
    }

    fn random_sectors(&mut self) -> Range<usize> {
        let size = self.oracle.sectors() as u64;
        let first = self.random.below(size);
        let len = 1 + self.random.below(LEN_MAX.min(size - first));
        first as usize..(first + len) as usize
    }
}
