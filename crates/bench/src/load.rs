//! The load of one thread: keeps requests in flight and measures their latencies.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kickless_driver::{Completion, Data, Disk, Error, Failure, Queue, Request};

use super::ledger::{Claim, Ledger};
use super::offsets::Offsets;
use super::pace::{Cycle, Schedule};
use super::scenario::Scenario;
use super::slots::{Slot, SlotRecord};
use super::turn::{Latencies, Operation, Verified, latencies};
use super::wait::Wait;
use super::watch::Period;

/// The longest sleep between two checks whether the turn is over.
pub(super) const NAP: Duration = Duration::from_millis(50);
/// The largest number of histogram entries for the requests that were never sent.
const UNSENT_STEPS: u64 = 100_000;

/// The values that all threads of a turn share.
#[derive(Debug)]
pub(crate) struct TurnContext<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) ledger: Option<&'a Ledger>,
    /// The number of blocks in use.
    pub(crate) blocks: u64,
    /// The times at which the load is on. `None` means always.
    pub(crate) cycle: Option<Cycle>,
    /// The measured time. Its end is that of the load.
    pub(crate) period: Period,
    /// Ends the turn early.
    pub(crate) stop: &'a AtomicBool,
}

/// The figures of one thread.
#[derive(Debug)]
pub(crate) struct ThreadResult {
    pub(crate) reads: Operation,
    pub(crate) writes: Operation,
    /// The times of the requests that were never sent, from when each was due to the end.
    pub(crate) unsent_latencies: Latencies,
    /// Requests that were due in the measured time and never sent, because no slot was free.
    pub(crate) unsent: u64,
    pub(crate) failed: u64,
    pub(crate) failure: Option<String>,
    pub(crate) verified: Verified,
}

impl ThreadResult {
    fn new() -> Result<Self> {
        Ok(Self {
            reads: Operation::new("reads")?,
            writes: Operation::new("writes")?,
            unsent_latencies: latencies()?,
            unsent: 0,
            failed: 0,
            failure: None,
            verified: Verified::default(),
        })
    }
}

/// One thread that submits requests and reaps completions.
pub(crate) struct Submitter<'a> {
    shared: &'a TurnContext<'a>,
    queue: Queue,
    /// The slots of all threads that share the queue.
    slots: &'a [Slot],
    offsets: Offsets,
    /// Free slots, each with its buffer.
    idle: Vec<(u64, Data)>,
    /// The times at which requests are due, if there is a rate.
    schedule: Option<Schedule>,
    /// Room for the content of one block, if the run verifies data.
    scratch: Vec<u8>,
    /// A copy of `counted` for the thread that shows the progress.
    done: &'a AtomicU64,
    /// The number of requests that completed without an error, at any time.
    counted: u64,
    /// The figures so far.
    seen: ThreadResult,
}

impl<'a> Submitter<'a> {
    /// Makes the thread number `thread`. Its slots are the `depth` slots of its queue from `first_slot` on.
    ///
    /// # Errors
    /// The disk has no memory left.
    pub(crate) fn new(
        shared: &'a TurnContext<'a>,
        disk: &Disk,
        thread: u16,
        (slots, first_slot): (&'a [Slot], u64),
        done: &'a AtomicU64,
    ) -> Result<Submitter<'a>> {
        let scenario = shared.scenario;
        let queue = disk.queue(usize::from(thread % scenario.queues));
        let block_size = scenario.block_size as usize;
        let mut idle = Vec::with_capacity(slots.len());
        for slot in 0..u64::from(scenario.depth) {
            let mut buffer = disk.buffer(block_size)?;
            // This allocates the pages before the measurement. The pattern makes written data differ from
            // zeroes.
            buffer.write(0, &vec![0xa5; block_size]);
            idle.push((first_slot + slot, Data::from(buffer)));
        }
        let (thread, threads) = (u64::from(thread), u64::from(scenario.threads));
        let schedule = scenario.rate.map(|rate| Schedule::new(rate, thread, threads, shared.cycle));
        Ok(Submitter {
            shared,
            queue,
            slots,
            offsets: Offsets::new(scenario.pattern, shared.blocks, thread, threads, scenario.seed),
            idle,
            schedule,
            scratch: vec![0; if shared.ledger.is_some() { block_size } else { 0 }],
            done,
            counted: 0,
            seen: ThreadResult::new()?,
        })
    }

    #[inline]
    fn now(&self) -> u64 {
        self.shared.period.epoch.elapsed().as_nanos() as u64
    }

    fn is_over(&self, now: u64) -> bool {
        now >= self.shared.period.to || self.is_interrupted()
    }

    /// Runs the load until the turn ends and all requests are done. Returns the figures so far if a signal
    /// ended the turn, even if the disk does not answer any more.
    ///
    /// # Errors
    /// The disk is dead, or data are wrong.
    pub(crate) fn run(mut self) -> Result<ThreadResult> {
        let ended = self.run_to_the_end();
        match ended {
            Err(error) if !self.is_interrupted() || !error.is::<Error>() => Err(error),
            _ => {
                self.record_unsent(self.now());
                Ok(self.seen)
            }
        }
    }

    fn is_interrupted(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    fn run_to_the_end(&mut self) -> Result<()> {
        let mut batch = Vec::with_capacity(self.idle.len());
        let mut reaped = VecDeque::with_capacity(self.slots.len());
        let mut now = self.now();
        while !self.is_over(now) {
            self.prepare(now, &mut batch)?;
            if !batch.is_empty() {
                self.queue.submit_or_wait(&mut batch)?;
            }
            self.reap(&mut reaped, self.wait_max(now))?;
            now = self.now();
            self.account(now, &mut reaped)?;
        }
        while self.queue.in_flight() > 0 {
            self.reap(&mut reaped, NAP)?;
            now = self.now();
            self.account(now, &mut reaped)?;
        }
        // Another thread may have reaped completions of this queue meanwhile.
        self.queue.poll(usize::MAX, |completion| reaped.push_back(completion))?;
        self.account(now, &mut reaped)
    }

    /// Records the requests that were due and never sent, with the time that they have waited so far.
    fn record_unsent(&mut self, now: u64) {
        let Some(schedule) = &self.schedule else { return };
        let Period { from, to, .. } = self.shared.period;
        // A turn that ends early has made all that was due so far.
        let left = schedule.unsent(from, to.min(now));
        // A histogram needs no more steps than this. Each step stands for `stride` requests.
        let stride = ((left.end - left.start) / UNSENT_STEPS).max(1);
        let mut at = left.start;
        while at < left.end {
            let count = stride.min(left.end - at);
            let waited = now.saturating_sub(schedule.due_of(at));
            self.seen.unsent_latencies.saturating_record_n(waited.max(1), count);
            self.seen.unsent += count;
            at += count;
        }
    }

    /// Adds requests to `batch`: one for each free slot, or with a rate only those that are due.
    fn prepare(&mut self, now: u64, batch: &mut Vec<Request>) -> Result<()> {
        if self.schedule.is_none() && self.on_from(now) > now {
            return Ok(());
        }
        while !self.idle.is_empty() {
            let start = match &mut self.schedule {
                None => now,
                Some(schedule) if schedule.due() <= now => {
                    let due = schedule.due();
                    schedule.advance();
                    due
                }
                Some(_) => return Ok(()),
            };
            let Some((slot, data)) = self.idle.pop() else { return Ok(()) };
            let read = self.offsets.reads(self.shared.scenario.read);
            let Some((record, data)) = self.choose_block(start, read, data)? else { continue };
            if let Some(at) = self.slots.get(slot as usize) {
                at.store(record);
            }
            let offset = record.claim.block * u64::from(self.shared.scenario.block_size);
            let request = if read { Request::read(offset, data) } else { Request::write(offset, data) };
            batch.push(request.token(slot));
        }
        Ok(())
    }

    /// Chooses the block of a request, and the data to write.
    fn choose_block(&mut self, start: u64, read: bool, mut data: Data) -> Result<Option<(SlotRecord, Data)>> {
        let offsets = &mut self.offsets;
        let Some(ledger) = self.shared.ledger else {
            let claim = Claim { block: offsets.next(), generation: 0 };
            return Ok(Some((SlotRecord { start, read, claim }, data)));
        };
        let mut claim = ledger
            .claim(|| offsets.next())
            .context("--verify finds no free block: lower --depth, or use more of the disk")?;
        if !read {
            claim.generation = Ledger::next_generation(claim.generation);
            ledger.fill(claim, &mut self.scratch);
            if let Data::One(buffer) = &mut data {
                buffer.write(0, &self.scratch);
            }
        }
        Ok(Some((SlotRecord { start, read, claim }, data)))
    }

    /// Returns the time from which the load is on: `now`, or the start of the next period.
    fn on_from(&self, now: u64) -> u64 {
        self.shared.cycle.map_or(now, |cycle| cycle.on_from(now))
    }

    /// Returns the longest time to wait for completions. It ends when the next request is due, if a slot is
    /// free.
    fn wait_max(&self, now: u64) -> Duration {
        let next = match &self.schedule {
            _ if self.idle.is_empty() => return NAP,
            Some(schedule) => schedule.due(),
            // While the load is on, only a completion makes room for a request.
            None => match self.on_from(now) {
                on if on > now => on,
                _ => return NAP,
            },
        };
        Duration::from_nanos(next.saturating_sub(self.now())).min(NAP)
    }

    /// Reaps completions. Waits for one unless the scenario polls.
    fn reap(&self, reaped: &mut VecDeque<Completion>, wait_max: Duration) -> Result<(), Error> {
        let max = self.slots.len();
        let take = |completion| reaped.push_back(completion);
        match self.shared.scenario.wait {
            // With the load off and nothing in flight, polling would only waste processor time.
            Wait::Poll if self.is_off() => {
                thread::sleep(wait_max);
                Ok(0)
            }
            Wait::Poll => self.queue.poll(max, take),
            Wait::Sleep if wait_max.is_zero() => self.queue.poll(max, take),
            Wait::Sleep => self.queue.wait(max, Some(wait_max), take),
        }
        .map(drop)
    }

    /// Returns whether the load is off and all requests are done.
    fn is_off(&self) -> bool {
        self.shared.cycle.is_some() && self.queue.in_flight() == 0 && {
            let now = self.now();
            self.on_from(now) > now
        }
    }

    /// Records completions and frees their slots.
    fn account(&mut self, now: u64, reaped: &mut VecDeque<Completion>) -> Result<()> {
        let before = self.counted;
        while let Some(Completion { token, result, data }) = reaped.pop_front() {
            let Some(slot) = self.slots.get(token as usize) else { continue };
            let record = slot.load();
            let operation = if record.read { &mut self.seen.reads } else { &mut self.seen.writes };
            match result {
                Ok(()) => {
                    let measured = self.shared.period.from..self.shared.period.to;
                    // The latency counts even if the request completes after the measured time. Otherwise,
                    // the slowest requests would be missing.
                    if measured.contains(&record.start) {
                        operation.latencies.saturating_record(now.saturating_sub(record.start).max(1));
                    }
                    operation.done += u64::from(measured.contains(&now));
                    self.counted += 1;
                }
                // After a signal, the disk was left, and what it had in flight with it.
                Err(Failure::Dead) if self.shared.stop.load(Ordering::Relaxed) => {}
                Err(failure) => {
                    self.seen.failed += 1;
                    self.seen.failure.get_or_insert_with(|| failure.to_string());
                }
            }
            self.verify_and_release(record, result.is_ok(), &data)?;
            self.idle.push((token, data));
        }
        if self.counted != before {
            self.done.store(self.counted, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Verifies the data of a read and releases the block.
    fn verify_and_release(&mut self, record: SlotRecord, ok: bool, data: &Data) -> Result<()> {
        let Some(ledger) = self.shared.ledger else { return Ok(()) };
        let SlotRecord { read, claim, .. } = record;
        if read && ok {
            check(ledger, claim, data, &mut self.scratch)?;
            let Verified { reads, unknown_reads, .. } = &mut self.seen.verified;
            *(if claim.generation == 0 { unknown_reads } else { reads }) += 1;
        }
        // A failed write leaves unknown content, so the block counts as never written.
        ledger.release(claim.block, if ok || read { claim.generation } else { 0 });
        Ok(())
    }
}

/// Checks that a block holds the data that were written last.
///
/// # Errors
/// The block holds something else.
pub(crate) fn check(ledger: &Ledger, claim: Claim, data: &Data, scratch: &mut [u8]) -> Result<()> {
    if let Data::One(buffer) = data {
        buffer.read(0, scratch);
    }
    match ledger.first_wrong(claim, scratch) {
        None => Ok(()),
        Some(byte) => {
            let offset = claim.block * scratch.len() as u64 + byte as u64;
            Err(anyhow!("verification failed: byte {offset} of the disk differs from the last write"))
        }
    }
}
