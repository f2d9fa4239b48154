//! The load of one thread on its queue pair.
//!
//! # Latencies
//! A frame that is echoed can carry the time when it was due, in the eight bytes after its headers. Zero
//! means that it carries none. With a rate, each frame carries it. Without one, one frame of 64 does, because
//! a histogram would cost more than the rest of a frame's way. The bytes come back from the back-end. A time
//! that is not of this turn is not counted.
//!
//! # Two cards
//! With [`Direction::Pass`], a thread sends frames to one card and receives them from another. The receiver
//! sends a frame first, so that a switch knows where it is.
//!
//! # Losses
//! A card may drop frames. Without a rate, a thread that sees no frame for [`LOST_AFTER`] takes those in
//! flight for lost, and sends as many new ones. At the end, it waits that long for the last frames.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use kickless_driver::{CardCounters, Frame, Interest, QueuePair};

use super::options::Direction;
use super::packet::{ADDRESS_LEN, Head, STAMP_LEN, Work};
use super::scenario::Scenario;
use crate::pace::Schedule;
use crate::turn::{Latencies, latencies};
use crate::wait::Wait;
use crate::watch::Period;

/// The longest sleep between two checks whether the turn is over.
const NAP: Duration = Duration::from_millis(20);
/// The time after which a frame that is not back counts as lost, in nanoseconds. A busy host delays frames
/// for less.
const LOST_AFTER: u64 = 200_000_000;
/// The time for the back-end to take the first frame of the second card.
const INTRODUCTION_MAX: Duration = Duration::from_secs(5);
/// The number of frames of which one carries its time, if there is no rate.
const STAMPED: u64 = 64;
/// The last byte of the address of a thread's first card, and of its second one. The number of the thread is
/// before it.
const FIRST: u8 = 1;
const SECOND: u8 = 2;
const BROADCAST: [u8; ADDRESS_LEN] = [0xff; ADDRESS_LEN];
/// The length of the frame that says where the second card is.
const INTRODUCTION_LEN: u32 = 60;

/// The values that all threads of a turn share.
#[derive(Debug)]
pub(crate) struct TurnContext<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) period: Period,
    /// Ends the turn early.
    pub(crate) stop: &'a AtomicBool,
}

/// The counters of a thread, for the thread that watches.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) done: AtomicU64,
    pub(crate) kicks: AtomicU64,
}

/// The figures of one thread.
#[derive(Debug)]
pub(crate) struct ThreadResult {
    pub(crate) latencies: Latencies,
    /// Frames that were done in the measured time: back, sent or received.
    pub(crate) done: u64,
    /// Frames that were done at any time.
    pub(crate) total: u64,
    pub(crate) lost: u64,
    /// Frames that were due in the measured time and never sent, because too many were in flight.
    pub(crate) unsent: u64,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
}

/// Memory of the thread with a frame to send, and for a frame that was received.
struct Payload {
    sent: Vec<u8>,
    received: Vec<u8>,
}

/// One thread and its queue pair.
pub(crate) struct Loader<'a> {
    shared: &'a TurnContext<'a>,
    pair: QueuePair,
    /// The queue pair of the second card, which receives.
    peer: Option<QueuePair>,
    /// The beginning of sent frames.
    head: Head,
    payload: Option<Payload>,
    schedule: Option<Schedule>,
    shown: &'a Shown,
    before: CardCounters,
    /// Frames sent that are neither back nor lost.
    in_flight: u64,
    /// The number of frames that were sent without a rate, to choose those with a time.
    stamps: u64,
    seen: ThreadResult,
}

impl<'a> Loader<'a> {
    /// Makes the thread number `thread`.
    pub(crate) fn new(
        shared: &'a TurnContext<'a>,
        pair: QueuePair,
        peer: Option<QueuePair>,
        thread: u16,
        shown: &'a Shown,
    ) -> Result<Self> {
        let scenario = shared.scenario;
        let len = scenario.frame_size as usize;
        if len > pair.frame_len_max() {
            bail!("frames of {len} bytes do not fit into its queues: raise --queue-size");
        }
        let mut head = Head::new(scenario.frame_size, scenario.work);
        if peer.is_some() {
            head.set_addresses(address(thread, SECOND), address(thread, FIRST));
        }
        let (thread, threads) = (u64::from(thread), u64::from(scenario.pairs));
        let schedule = scenario.rate.map(|rate| Schedule::new(rate, thread, threads, None));
        let seen = ThreadResult {
            latencies: latencies()?,
            done: 0,
            total: 0,
            lost: 0,
            unsent: 0,
            kicks: 0,
            calls: 0,
        };
        let before = pair.counters();
        let payload = scenario.touch.then(|| Payload { sent: vec![1; len], received: vec![0; len] });
        let mut loader = Self {
            shared,
            pair,
            peer,
            head,
            payload,
            schedule,
            shown,
            before,
            in_flight: 0,
            stamps: 0,
            seen,
        };
        // Lossless: there are at most 127 pairs.
        loader.introduce(thread as u16)?;
        Ok(loader)
    }

    /// Sends a frame from the second card to all, so that a switch knows where it is.
    fn introduce(&mut self, thread: u16) -> Result<()> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let mut head = Head::new(INTRODUCTION_LEN, None);
        head.set_addresses(BROADCAST, address(thread, SECOND));
        peer.send_with(1, |_| INTRODUCTION_LEN as usize, |_, frame| head.write(frame, 0))?;
        peer.flush(Some(INTRODUCTION_MAX))?;
        Ok(())
    }

    #[inline]
    fn now(&self) -> u64 {
        self.shared.period.epoch.elapsed().as_nanos() as u64
    }

    fn is_over(&self, now: u64) -> bool {
        now >= self.shared.period.to || self.shared.stop.load(Ordering::Relaxed)
    }

    /// Runs the load until the turn ends and the last frames are back.
    ///
    /// # Errors
    /// The card is dead.
    pub(crate) fn run(mut self) -> Result<ThreadResult> {
        let mut now = self.now();
        let mut last = now;
        while !self.is_over(now) {
            let done = self.step(now, true)?;
            now = self.now();
            if done > 0 {
                last = now;
                self.count(now, done);
            } else {
                if self.in_flight > 0 && now.saturating_sub(last) > LOST_AFTER {
                    self.lose();
                    last = now;
                }
                self.rest(now)?;
                now = self.now();
            }
        }
        last = now;
        while self.in_flight > 0 && !self.shared.stop.load(Ordering::Relaxed) {
            let done = self.step(now, false)?;
            now = self.now();
            if done > 0 {
                last = now;
                self.count(now, done);
            } else if now.saturating_sub(last) > LOST_AFTER {
                self.lose();
            }
        }
        if let Some(schedule) = &self.schedule {
            // A turn that ends early has sent all that was due so far.
            let left = schedule.unsent(self.shared.period.from, self.shared.period.to.min(now));
            self.seen.unsent = left.end - left.start;
        }
        let after = self.pair.counters();
        self.seen.kicks = after.kicks - self.before.kicks;
        self.seen.calls = after.calls.wrapping_sub(self.before.calls);
        Ok(self.seen)
    }

    /// Takes the frames in flight for lost.
    fn lose(&mut self) {
        self.seen.lost += self.in_flight;
        self.in_flight = 0;
    }

    fn count(&mut self, now: u64, done: u64) {
        let Period { from, to, .. } = self.shared.period;
        self.seen.total += done;
        if (from..to).contains(&now) {
            self.seen.done += done;
        }
        self.shown.done.store(self.seen.total, Ordering::Relaxed);
        self.shown.kicks.store(self.pair.kicks() - self.before.kicks, Ordering::Relaxed);
    }

    /// Sends and receives once. Returns the number of frames that are done. `sends`: new frames are sent.
    fn step(&mut self, now: u64, sends: bool) -> Result<u64> {
        let batch = usize::from(self.shared.scenario.batch);
        match self.shared.scenario.direction {
            Direction::Echo | Direction::Pass => self.round_trip(now, sends),
            Direction::Transmit => self.transmit(now, sends),
            Direction::Receive => Ok(self.pair.receive(batch, |_| {})? as u64),
            Direction::Forward => Ok(self.pair.forward(batch, |_| true)? as u64),
        }
    }

    /// Sends up to `count` frames that carry the time `stamp_of` of each, and returns their number.
    fn send(&mut self, count: usize, mut stamp_of: impl FnMut(usize) -> u64) -> Result<usize> {
        let len = self.shared.scenario.frame_size as usize;
        let Self { pair, head, payload, .. } = self;
        let write = |at: usize, frame: &mut Frame<'_>| {
            if let Some(payload) = payload {
                frame.write(0, &payload.sent);
            }
            head.write(frame, stamp_of(at));
        };
        let sent = pair.send_with(count, |_| len, write)?;
        self.in_flight += sent as u64;
        Ok(sent)
    }

    /// Sends the frames that are due, as many as may be in flight.
    fn send_due(&mut self, now: u64) -> Result<()> {
        let scenario = self.shared.scenario;
        let room = u64::from(scenario.depth).saturating_sub(self.in_flight);
        let room = room.min(scenario.batch.into()) as usize;
        let Some(mut schedule) = self.schedule else { return Ok(()) };
        let mut ahead = schedule;
        let due = (0..room)
            .take_while(|_| {
                let is_due = ahead.due() <= now;
                ahead.advance();
                is_due
            })
            .count();
        if due > 0 {
            let first = schedule;
            // A time of 0 would mean that there is none.
            let stamp_of = |at: usize| first.due_later(at as u64).max(1);
            let sent = self.send(due, stamp_of)?;
            (0..sent).for_each(|_| schedule.advance());
            self.schedule = Some(schedule);
        }
        Ok(())
    }

    /// Sends frames, and takes them back from the same card or, to pass frames on, from the second one.
    fn round_trip(&mut self, now: u64, sends: bool) -> Result<u64> {
        match self.schedule {
            Some(_) if sends => self.send_due(now)?,
            None if sends => self.send_missing(now)?,
            _ => {}
        }
        let again = sends && self.schedule.is_none() && self.peer.is_none();
        self.take_back(now, again)
    }

    /// Sends new frames in the place of those that are done.
    fn send_missing(&mut self, now: u64) -> Result<()> {
        let scenario = self.shared.scenario;
        let missing = u64::from(scenario.depth).saturating_sub(self.in_flight);
        if missing > 0 {
            let count = missing.min(scenario.batch.into()) as usize;
            let first = self.stamps;
            self.stamps += self.send(count, |at| stamp(first + at as u64, now))? as u64;
        }
        Ok(())
    }

    /// Receives frames, records their latencies, and sends them again if `again`.
    ///
    /// # Errors
    /// The card is dead, or the back-end has done the work of a packet that was left to the receiver.
    fn take_back(&mut self, now: u64, again: bool) -> Result<u64> {
        let Period { from, to, epoch } = self.shared.period;
        let Self { pair, peer, head, payload, stamps, seen, shared, .. } = self;
        let pair = peer.as_mut().unwrap_or(pair);
        let (mut received, sent) = match payload {
            Some(Payload { sent, received }) => (Some(received), Some(&*sent)),
            None => (None, None),
        };
        let latencies = &mut seen.latencies;
        let stamp_at = head.stamp();
        let mut bytes = [0; STAMP_LEN];
        let mut changed = None;
        let mut take = |frame: &Frame<'_>| {
            changed = changed.or(head.other_work(frame));
            if let Some(received) = &mut received {
                frame.read(0, received);
                std::hint::black_box(&received);
            }
            frame.read(stamp_at, &mut bytes);
            let due = u64::from_le_bytes(bytes);
            if due != 0 {
                let back = epoch.elapsed().as_nanos() as u64;
                if (from..to).contains(&due) && due <= back {
                    latencies.saturating_record((back - due).max(1));
                }
            }
            due
        };
        let batch = usize::from(shared.scenario.batch);
        let done = match again {
            false => pair.receive(batch, |frame| {
                take(frame);
            })?,
            true => pair.forward(batch, |frame| {
                let due = take(frame);
                let stamp = stamp(*stamps, now);
                *stamps += 1;
                if let Some(sent) = sent {
                    // The headers stay.
                    frame.write(stamp_at + STAMP_LEN, sent);
                }
                if stamp != due {
                    frame.write(stamp_at, &stamp.to_le_bytes());
                }
                true
            })?,
        };
        match (changed, shared.scenario.work) {
            (Some(found), Some(Work::Segments(size))) => bail!(
                "packets come back with segments of {} bytes instead of {size} (0: without segmentation)",
                found.segmentation.map_or(0, |segmentation| segmentation.size),
            ),
            (Some(found), _) => bail!("packets come back with another checksum: {:?}", found.checksum),
            (None, _) => {}
        }
        if !again {
            self.in_flight = self.in_flight.saturating_sub(done as u64);
        }
        Ok(done as u64)
    }

    fn transmit(&mut self, now: u64, sends: bool) -> Result<u64> {
        let scenario = self.shared.scenario;
        let left = self.pair.in_flight()?;
        let done = self.in_flight.saturating_sub(left);
        self.in_flight = left;
        if sends {
            match self.schedule {
                Some(_) => self.send_due(now)?,
                None => {
                    let room = u64::from(scenario.depth).saturating_sub(left).min(scenario.batch.into());
                    self.send(room as usize, |_| 0)?;
                }
            }
        }
        Ok(done)
    }

    /// Waits for a frame or for room, if the scenario sleeps.
    fn rest(&mut self, now: u64) -> Result<()> {
        let scenario = self.shared.scenario;
        if scenario.wait == Wait::Poll {
            return Ok(());
        }
        let is_full = self.in_flight >= u64::from(scenario.depth);
        let time = match &self.schedule {
            Some(schedule) if !is_full => Duration::from_nanos(schedule.due().saturating_sub(now)).min(NAP),
            _ => NAP,
        };
        let interest = match scenario.direction {
            Direction::Transmit if !is_full && self.schedule.is_some() => {
                // There is room; only the time is missing.
                std::thread::sleep(time);
                return Ok(());
            }
            Direction::Transmit => Interest::Send,
            _ => Interest::Receive,
        };
        match interest {
            // Room in the queue is there at once; a lower depth waits for frames in flight.
            Interest::Send => self.pair.flush(Some(time))?,
            _ => self.peer.as_mut().unwrap_or(&mut self.pair).wait(interest, Some(time))?,
        };
        Ok(())
    }
}

/// Returns an address for local use.
fn address(thread: u16, card: u8) -> [u8; ADDRESS_LEN] {
    let [high, low] = thread.to_be_bytes();
    [2, 0, 0, high, low, card]
}

/// Returns the time that a frame without a rate carries.
#[inline]
fn stamp(number: u64, now: u64) -> u64 {
    if number.is_multiple_of(STAMPED) { now.max(1) } else { 0 }
}
