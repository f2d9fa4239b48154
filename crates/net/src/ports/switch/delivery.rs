//! Copies the frames of a batch into the inboxes of their destinations.
//!
//! The work is that of the copies: for each frame, only the ports that get it are looked at. What a batch
//! costs is known before the first copy, so a delivery is cut where its limit ends. The rest of the batch
//! waits with its sender.

use super::members::{Member, Members};
use super::rule::Head;
use super::tag::Change;
use crate::card::counters::RingCounters;
use crate::frame::header::segments_max;
use crate::frame::loop_queue::{Batch, LoopQueue, Near, Wake};
use crate::ring::cost::BatchCost;

/// The most decisions about one batch before its frames are delivered. They take some 5 microseconds, for
/// which other senders wait.
pub(super) const RUNS_MAX: usize = 64;
/// The costs, in frames of a batch, which take some 40 nanoseconds. A decision looks up both addresses: with
/// the copy that follows it, that takes 50 to 140 nanoseconds. An inbox is locked for the copies of a batch,
/// and is seldom in a cache. A signal to a receiver that sleeps is a system call of 600. A receiver on the
/// same worker is put on the poll list in 80, by an estimate.
pub(super) const RUN_FRAMES: u32 = 1;
pub(super) const TARGET_FRAMES: u32 = 2;
const SIGNAL_FRAMES: u32 = 16;
pub(super) const NEAR_FRAMES: u32 = 2;
/// Ports that are looked at in the time of one frame: their order, and whether they receive.
const PORTS_PER_FRAME: usize = 4;

/// The frames of a batch that the switch has not passed on, by reasons, and its work for the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) spoofed: u64,
    pub(crate) tagged: u64,
    /// Frames that no other port carries.
    pub(crate) unforwarded: u64,
    /// Copies for receive rings with a full inbox.
    pub(crate) late: u64,
    /// The cost of all work beyond one decision and one inbox ([`crate::ring::cost`]): decisions, copies,
    /// dropped or not, and signals.
    pub(crate) copied: u32,
}

impl Forwarded {
    /// Adds the drops to the counters of a ring.
    pub(crate) fn count(&self, counters: &RingCounters) {
        counters.sent_spoofed.add(self.spoofed);
        counters.sent_tagged.add(self.tagged);
        counters.sent_unforwarded.add(self.unforwarded);
        counters.dropped_late.add(self.late);
    }
}

/// The destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// The frame is dropped.
    Nowhere,
    /// One port.
    Port(u16),
    /// All other ports of the VLAN.
    Flood,
}

/// The decision about frames of a batch that follow one another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) route: Route,
    /// The parts that decide about a tag. `None` if the frames are refused.
    pub(super) head: Option<Head>,
    pub(super) frames: usize,
    /// The number of the first frame in its batch, and its offset. Known during the delivery.
    first: (usize, usize),
}

impl Run {
    /// Begins with one frame.
    pub(super) fn new(route: Route, head: Option<Head>) -> Self {
        Self { route, head, frames: 1, first: (0, 0) }
    }

    /// Returns the run of frames that are flooded.
    pub(super) fn flooded(Flooded { head, frames }: Flooded) -> Self {
        Self { frames, ..Self::new(Route::Flood, Some(head)) }
    }
}

/// Frames that follow one another, and for which the decision to flood them is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flooded {
    /// The parts that decide, which are the same in all of them.
    pub(super) head: Head,
    pub(super) frames: usize,
}

/// The part of a batch that is delivered: the frames before this one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    /// The number of the next frame, and its offset.
    pub(super) next: usize,
    pub(super) start: usize,
    /// The next frames, if the decision to flood them is made. There is no second decision about them: one
    /// that names a single port could be for a port that has got the frames.
    pub(super) flooded: Option<Flooded>,
    /// The last port that the flood of the next frames has passed. Ports get them in the order of their
    /// numbers.
    got: Option<u16>,
}

/// Space for the decisions about one batch, and frames that wait for the next poll. It belongs to a transmit
/// ring, and keeps its memory.
#[derive(Debug, Default)]
pub(crate) struct Forwarder {
    /// The frames in their order. Most batches are one run.
    pub(super) runs: Vec<Run>,
    /// Each port that gets frames of a run, with the index of the run.
    targets: Vec<(u16, u16)>,
    /// Frames for one port.
    copies: Batch,
    /// Frames that cost more than the last poll had left, and how far they are delivered.
    pub(super) waiting: Batch,
    pub(super) at: Position,
    /// The worker that runs the ring, and the receivers there that sleep.
    pub(crate) near: Near,
    /// The last batch went as it was to a receive ring of the same worker.
    pub(crate) is_near: bool,
}

/// The port that sends, its transmit ring, and the ports of its switch.
pub(super) struct From<'a> {
    pub(super) number: u16,
    pub(super) pair: u16,
    pub(super) members: &'a Members,
}

impl Forwarder {
    /// Returns whether frames wait for the next poll.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.len() > 0
    }

    /// Returns the number of ports that were looked at for the last decisions.
    #[cfg(test)]
    pub(super) fn target_count(&self) -> usize {
        self.targets.len()
    }

    /// Delivers the frames from `at` on that were decided about. If all of them are for all ports, they may
    /// go to some of these only, until `work` is used up.
    pub(super) fn deliver(
        &mut self,
        frames: &mut Batch,
        at: &mut Position,
        from: &From<'_>,
        work: &mut BatchCost,
        forwarded: &mut Forwarded,
    ) {
        let total = self.runs.iter().map(|run| run.frames).sum();
        // The first decision belongs to the cost of the frames. That about a begun frame is charged already.
        let runs = self.runs.len() - usize::from(at.next == 0 || at.got.is_some());
        // Lossless, because there are at most `RUNS_MAX`.
        work.add_all(0, RUN_FRAMES * runs as u32);
        self.is_near = false;
        if total == frames.len()
            && let Some(member) = only_member(&self.runs, from.members)
        {
            at.next = total;
            let Some(inbox) = member.open_inbox(from.pair) else {
                forwarded.late += frames.len() as u64;
                return;
            };
            self.is_near = self.near.task_of(inbox).is_some();
            // The whole batch becomes the inbox's, without a copy if that is empty.
            forwarded.late += inbox.send_from(&mut self.near, frames).dropped as u64;
            return;
        }
        let (mut next, mut start) = (at.next, at.start);
        for run in &mut self.runs {
            run.first = (next, start);
            start += (next..next + run.frames).map(|number| frames.frame_len(number)).sum::<usize>();
            next += run.frames;
        }
        if let [Run { route: Route::Flood, head: Some(head), frames: count, .. }] = self.runs[..] {
            let flooded = Flooded { head, frames: count };
            at.got = self.flood(flooded, at.got, frames, from, work, forwarded);
            if at.got.is_some() {
                at.flooded = Some(flooded);
                return;
            }
        } else {
            self.list_targets(from, forwarded);
            // Lossless, because a batch has few frames, and a process few ports.
            work.add_all(0, (self.targets.len() / PORTS_PER_FRAME) as u32);
            for group in self.targets.chunk_by(|(port, _), (other, _)| port == other) {
                let runs = group.iter().map(|(_, run)| &self.runs[usize::from(*run)]);
                let via = (&mut self.copies, &mut self.near);
                copy_to(group[0].0, runs, via, frames, from, work, forwarded);
            }
        }
        *at = Position { next, start, ..Position::default() };
    }

    /// Copies all frames that were decided about to the ports behind `got`, until `work` is used up.
    /// Returns the last port that was passed, if there are more. A list of all ports would cost as much for
    /// each part of the flood.
    fn flood(
        &mut self,
        flooded: Flooded,
        got: Option<u16>,
        frames: &Batch,
        from: &From<'_>,
        work: &mut BatchCost,
        forwarded: &mut Forwarded,
    ) -> Option<u16> {
        let (mut last, mut passed) = (None, 0);
        let carriers = from.members.carriers_after(flooded.head.vlan, got);
        for port in carriers.filter(|port| *port != from.number) {
            if last.is_some() && work.is_used_up() {
                return last;
            }
            let via = (&mut self.copies, &mut self.near);
            copy_to(port, self.runs.iter(), via, frames, from, work, forwarded);
            last = Some(port);
            passed += 1;
            work.add_all(0, u32::from(passed % PORTS_PER_FRAME == 0));
        }
        if last.or(got).is_none() {
            forwarded.unforwarded += flooded.frames as u64;
        }
        None
    }

    /// Lists the ports that get frames, each with its runs in order, and counts frames that nobody gets.
    fn list_targets(&mut self, from: &From<'_>, forwarded: &mut Forwarded) {
        let Self { runs, targets, .. } = self;
        targets.clear();
        // Lossless, because there are at most `RUNS_MAX`.
        for (index, run) in (0u16..).zip(runs.iter()) {
            let Some(head) = &run.head else { continue };
            let before = targets.len();
            match run.route {
                Route::Nowhere => {}
                Route::Port(to) => targets.push((to, index)),
                Route::Flood => {
                    let carriers = from.members.carriers_after(head.vlan, None);
                    let others = carriers.filter(|to| *to != from.number);
                    targets.extend(others.map(|to| (to, index)));
                }
            }
            if targets.len() == before {
                forwarded.unforwarded += run.frames as u64;
            }
        }
        targets.sort_unstable();
    }
}

/// Copies the frames of these runs into the inbox of a port.
fn copy_to<'r>(
    port: u16,
    runs: impl Iterator<Item = &'r Run>,
    (copies, near): (&mut Batch, &mut Near),
    frames: &Batch,
    from: &From<'_>,
    work: &mut BatchCost,
    forwarded: &mut Forwarded,
) {
    let Some(member) = from.members.get(port) else { return };
    let Some(inbox) = member.open_inbox(from.pair) else {
        // A card without a driver misses nothing that was for all.
        let missed = runs.filter(|run| run.route == Route::Port(port));
        forwarded.late += missed.map(|run| run.frames as u64).sum::<u64>();
        return;
    };
    work.add_all(0, TARGET_FRAMES);
    for run in runs {
        let Some(head) = &run.head else { continue };
        let change = Change::between(head, &member.rule);
        for frame in frames.frames(run.first.0, run.first.1).take(run.frames) {
            let len = change.len(frame.len());
            if !copies.has_room(len, 1) {
                forwarded.late += pass(inbox, copies, near, work);
            }
            change.copy(frame, copies.push(len));
            work.add_packet(len as u64, segments_max(frame));
        }
    }
    forwarded.late += pass(inbox, copies, near, work);
}

/// Passes frames to an inbox, and empties the batch. Returns the number of frames that are dropped.
fn pass(inbox: &LoopQueue, copies: &mut Batch, near: &mut Near, work: &mut BatchCost) -> u64 {
    let sent = inbox.send_from(near, copies);
    work.add_all(
        0,
        match sent.wake {
            Wake::None => 0,
            Wake::Near => NEAR_FRAMES,
            Wake::Signal => SIGNAL_FRAMES,
        },
    );
    sent.dropped as u64
}

/// Returns the port that gets all frames of a batch, if it gets them as they are.
pub(super) fn only_member<'m>(runs: &[Run], members: &'m Members) -> Option<&'m Member> {
    let [Run { route: Route::Port(to), head: Some(head), .. }, rest @ ..] = runs else { return None };
    let is_same = |run: &Run| {
        run.route == Route::Port(*to) && run.head.is_some_and(|other| other.is_tagged == head.is_tagged)
    };
    let member = members.get(*to).filter(|_| rest.iter().all(is_same))?;
    (Change::between(head, &member.rule) == Change::Nothing).then_some(&**member)
}
