//! Runs one turn: a scenario on a target.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use kickless_driver::{Data, Disk, Request};

use super::layout::bytes;
use super::ledger::Ledger;
use super::load::{NAP, Submitter, ThreadResult, TurnContext, check};
use super::options::LoadOptions;
use super::pace::Cycle;
use super::progress::Progress;
use super::scenario::Scenario;
use super::slots::Slot;
use super::target::{Target, name_command, name_in};
use super::threads::ReadyTurn;
use super::turn::Turn;
use super::watch::Period;

/// Runs `scenario` on `target`.
///
/// # Errors
/// The target cannot be reached, lacks a required feature, dies or gives wrong data.
pub(crate) fn turn(
    scenario: &Scenario,
    target: &Target,
    load: &LoadOptions,
    stop: &AtomicBool,
    progress: &Progress,
) -> Result<Turn> {
    let options = scenario.driver_options(target.socket(), load).map_err(|sentence| anyhow!(sentence))?;
    let disk =
        Disk::connect(kickless_driver::Options { connect_timeout: target.connect_timeout(), ..options })
            .map_err(|error| name_in(name_command(error, "bench net or compare-net"), target.name()))?;
    let turn = ConnectedTurn { disk: &disk, scenario, target, load, stop, progress }.run();
    if turn.is_err() || stop.load(Ordering::Relaxed) {
        // This drops the requests in flight. No thread waits for them.
        disk.unplug();
    }
    disk.close();
    turn.map_err(|error| name_in(error, target.name()))
}

/// A turn on a disk that is connected.
struct ConnectedTurn<'a> {
    disk: &'a Disk,
    scenario: &'a Scenario,
    target: &'a Target,
    load: &'a LoadOptions,
    /// Set by a signal: the turn ends early.
    stop: &'a AtomicBool,
    progress: &'a Progress,
}

impl ConnectedTurn<'_> {
    fn run(&self) -> Result<Turn> {
        let (disk, scenario) = (self.disk, self.scenario);
        let blocks = self.blocks()?;
        let ledger = match scenario.verify {
            true => Some(Ledger::new(blocks, fastrand::u64(..))?),
            false => None,
        };
        let shared_by = usize::from(scenario.threads.div_ceil(scenario.queues));
        let slots: Vec<Vec<Slot>> = (0..scenario.queues)
            .map(|_| (0..shared_by * usize::from(scenario.depth)).map(|_| Slot::default()).collect())
            .collect();
        let done: Vec<AtomicU64> = (0..scenario.threads).map(|_| AtomicU64::new(0)).collect();
        let halted = AtomicBool::new(false);
        let period = Period::new(scenario.warm_up, scenario.time);
        let shared = TurnContext {
            scenario,
            ledger: ledger.as_ref(),
            blocks,
            cycle: scenario.on_off.map(|times| Cycle::new(times, period.from)),
            period,
            stop: &halted,
        };
        let mut submitters = Vec::new();
        for (thread, done) in (0..scenario.threads).zip(&done) {
            let (queue, place) = (usize::from(thread % scenario.queues), thread / scenario.queues);
            let slots = slots.get(queue).map(Vec::as_slice).unwrap_or_default();
            let first = u64::from(place) * u64::from(scenario.depth);
            submitters.push(Submitter::new(&shared, disk, thread, (slots, first), done)?);
        }
        // The memory is allocated; the measurement begins.
        let before = disk.counters();
        let (options, pid) = (&self.load.common, self.target.pid());
        let (stop, halted, progress) = (self.stop, &halted, self.progress);
        let ready = ReadyTurn { period, options, pid, stop, halted, progress };
        let (seen, turn) = ready.run(
            submitters.into_iter().map(|submitter| || submitter.run()),
            || (done.iter().map(|count| count.load(Ordering::Relaxed)).sum(), disk.counters().kicks),
            || disk.unplug(),
        )?;
        let after = disk.counters();
        let turn = Turn {
            submitted: after.submitted - before.submitted,
            kicks: after.kicks - before.kicks,
            calls: after.calls - before.calls,
            ..turn
        };
        let mut turn = seen.into_iter().try_fold(turn, add)?;
        match &ledger {
            Some(ledger) if !turn.is_interrupted => {
                let read_back = read_back(disk, scenario, ledger, self.stop)?;
                turn.verified.get_or_insert_default().read_back = read_back;
            }
            Some(_) => {}
            None => turn.verified = None,
        }
        if matches!(scenario.read, 0 | 100) {
            turn.operations.clear();
        }
        Ok(turn)
    }

    /// Returns the number of blocks that the load uses.
    ///
    /// # Errors
    /// The disk has too few queues, is smaller than `--range`, or has no room for a block.
    fn blocks(&self) -> Result<u64> {
        let Self { disk, scenario, .. } = self;
        if disk.queues() < usize::from(scenario.queues) {
            bail!("it has {} queues: lower --queues={}", disk.queues(), scenario.queues);
        }
        let size = match (scenario.range, disk.size()?) {
            (Some(range), size) if range > size => bail!(
                "--range={range} goes beyond the disk, which has {size} bytes ({}): use at most these",
                bytes(size)
            ),
            (range, size) => range.unwrap_or(size),
        };
        let blocks = size / u64::from(scenario.block_size);
        if blocks == 0 {
            bail!("{size} bytes are less than a block of {}: use more of the disk", scenario.block_size);
        }
        Ok(blocks)
    }
}

fn add(mut turn: Turn, seen: ThreadResult) -> Result<Turn> {
    turn.latencies.add(&seen.unsent_latencies)?;
    for operation in [seen.reads, seen.writes] {
        turn.latencies.add(&operation.latencies)?;
        turn.done += operation.done;
        match turn.operations.iter_mut().find(|known| known.name == operation.name) {
            Some(known) => known.add(&operation)?,
            None => turn.operations.push(operation),
        }
    }
    turn.unsent += seen.unsent;
    turn.failed += seen.failed;
    turn.failure = turn.failure.or(seen.failure);
    *turn.verified.get_or_insert_default() += seen.verified;
    Ok(turn)
}

/// Reads every block that was written and verifies it. Returns the number of these blocks.
///
/// # Errors
/// The disk is dead, or data are wrong.
fn read_back(disk: &Disk, scenario: &Scenario, ledger: &Ledger, stop: &AtomicBool) -> Result<u64> {
    let mut count = 0;
    let block_size = scenario.block_size as usize;
    let mut scratch = vec![0; block_size];
    let mut data = Data::from(disk.buffer(block_size)?);
    for block in 0..ledger.blocks() {
        let Some(claim) = ledger.try_claim(block) else { continue };
        if claim.generation == 0 {
            continue;
        }
        let request = Request::read(block * block_size as u64, data);
        let Some(read) = read_or_stop(disk, request, stop)? else { return Ok(count) };
        check(ledger, claim, &read, &mut scratch)?;
        (data, count) = (read, count + 1);
    }
    Ok(count)
}

/// Reads a block. Returns `None` if a signal ends the benchmark.
fn read_or_stop(disk: &Disk, request: Request, stop: &AtomicBool) -> Result<Option<Data>> {
    let queue = disk.queue(0);
    queue.submit_one(request).map_err(|refused| refused.error)?;
    let mut done = None;
    while done.is_none() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        queue.wait(1, Some(NAP), |completion| done = Some((completion.result, completion.data)))?;
    }
    let (result, data) = done.context("nothing was read")?;
    result?;
    Ok(Some(data))
}
