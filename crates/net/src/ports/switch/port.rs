//! The switch and its ports.

use super::delivery::{
    Flooded, Forwarded, Forwarder, From, Position, RUN_FRAMES, RUNS_MAX, Route, Run, TARGET_FRAMES,
    only_member,
};
use super::fixed::FixedAddresses;
use super::members::{Member, Members};
use super::rule::{EthernetHeader, HEAD_LEN, Head, Refusal, Rule};
use super::table::{PORT_ADDRESSES_MAX, RESERVE, Table};
use crate::frame::header::segments_max;
use crate::frame::loop_queue::{Batch, HEADER, LoopQueue};
use crate::ring::cost::BatchCost;
use kickless_device::PARCEL_HEAD_LEN;
use kickless_sync::lock;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The switches of this process, by their names. A switch ends with its last port.
static SWITCHES: Mutex<Vec<(String, Weak<Switch>)>> = Mutex::new(Vec::new());

/// A switch.
///
/// Lock order: none. Each lock is held alone, for [`RUNS_MAX`] decisions at most, and never while a task
/// waits.
#[derive(Debug)]
struct Switch {
    state: Mutex<State>,
    /// The second in which the switch was made.
    start: i64,
}

#[derive(Debug, Default)]
struct State {
    table: Table,
    members: Arc<Members>,
    fixed: FixedAddresses,
    /// The ports that lead to another network.
    uplinks: Vec<u16>,
}

/// A port of a switch. Dropping it removes the port.
#[derive(Debug)]
pub(crate) struct SwitchPort {
    switch: Arc<Switch>,
    number: u16,
    member: Arc<Member>,
    /// The place of the port's address among the fixed ones, if it has an address.
    place: Option<usize>,
}

/// The ports that decisions about frames of a batch name.
struct Decisions {
    members: Arc<Members>,
    /// The frames behind those, if they go to all ports. They are delivered by themselves, because they cost
    /// much.
    next_flood: Option<Flooded>,
}

/// The most that one port's copies of the frames of a flood cost, unless these are one frame. A receiver then
/// gets several frames in one poll. With one in each, most of the time goes to loads from memory that its
/// guest has just written: 750 ns for a frame of 64 bytes, instead of 76
/// (256 ports, `cargo bench -p kickless-tests --bench scale -- switch`).
const FLOOD_COST: u32 = 1;

/// The answer to an offer of frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The number of frames that the receiver has taken.
    pub(crate) taken: u32,
    /// The cost of the look at the frames, if not all were taken ([`crate::ring::cost`]).
    pub(crate) cost: u32,
}

const _: () = assert!(HEADER + HEAD_LEN <= PARCEL_HEAD_LEN, "the head of a parcel's frame is too short");

/// Returns the second of a clock that is some milliseconds late, and that is read faster than others.
fn seconds() -> i64 {
    clock_gettime(ClockId::MonotonicCoarse).tv_sec
}

impl Switch {
    /// Returns the switch with this name, which is made if there is none.
    fn named(name: &str) -> Arc<Self> {
        let mut switches = lock(&SWITCHES);
        switches.retain(|(_, switch)| switch.strong_count() > 0);
        let known = switches.iter().find(|(known, _)| known == name);
        known.and_then(|(_, switch)| switch.upgrade()).unwrap_or_else(|| {
            let switch = Arc::new(Self { state: Mutex::default(), start: seconds() });
            switches.push((name.to_owned(), Arc::downgrade(&switch)));
            switch
        })
    }

    /// Returns the seconds since the switch was made.
    fn now(&self) -> u32 {
        // Lossless for 136 years.
        (seconds() - self.start) as u32
    }
}

impl SwitchPort {
    /// Adds a port to the switch `name`, for a card with this number of pairs.
    pub(crate) fn join(name: &str, rule: Rule, pairs: u16) -> Self {
        Self::join_as(name, rule, pairs, false)
    }

    /// Adds a trunk with one inbox that leads to another network. The addresses there are as many as a port
    /// can have, and guests cannot take their room.
    pub(crate) fn join_uplink(name: &str) -> Self {
        Self::join_as(name, Rule::default(), 1, true)
    }

    fn join_as(name: &str, rule: Rule, pairs: u16, is_uplink: bool) -> Self {
        let switch = Switch::named(name);
        let inboxes = (0..pairs).map(|_| LoopQueue::default()).collect();
        let member = Arc::new(Member { rule, inboxes, pairs: AtomicU16::new(u16::MAX) });
        let mut state = lock(&switch.state);
        let (members, number) = state.members.with(member.clone());
        let before = std::mem::replace(&mut state.members, Arc::new(members));
        state.table.join(number, if is_uplink { PORT_ADDRESSES_MAX } else { RESERVE });
        state.uplinks.extend(is_uplink.then_some(number));
        let place = rule.address.map(|address| state.fixed.add(address, number, rule));
        drop(state);
        drop(before);
        Self { switch, number, member, place }
    }

    /// Returns the inbox of a receive ring.
    pub(crate) fn inbox(&self, pair: u16) -> Option<&LoopQueue> {
        self.member.inboxes.get(usize::from(pair))
    }

    /// Sets the number of pairs that the driver uses. Others get no frames.
    pub(crate) fn set_pairs(&self, pairs: u16) {
        self.member.pairs.store(pairs, Ordering::Relaxed);
    }

    /// Passes on the frames that the transmit ring of `pair` has sent, and empties the batch. Returns the
    /// number of frames that it drops. Never waits for a receive ring.
    ///
    /// Frames that cost more than `limit` wait in the forwarder, for [`SwitchPort::resume`]. Until they are
    /// gone, there must be no other batch. The first frame always goes to one port at least.
    pub(crate) fn forward(
        &self,
        pair: u16,
        frames: &mut Batch,
        forwarder: &mut Forwarder,
        limit: u32,
    ) -> Forwarded {
        debug_assert!(!forwarder.has_waiting());
        if frames.len() == 0 {
            return Forwarded::default();
        }
        let mut at = Position::default();
        let (forwarded, is_over) = self.forward_from(pair, frames, &mut at, forwarder, limit);
        if is_over {
            frames.clear();
        } else {
            std::mem::swap(frames, &mut forwarder.waiting);
            forwarder.at = at;
        }
        forwarded
    }

    /// Passes on frames that wait since an earlier call, as [`SwitchPort::forward`] does.
    #[cold]
    pub(crate) fn resume(&self, pair: u16, forwarder: &mut Forwarder, limit: u32) -> Forwarded {
        let mut frames = std::mem::take(&mut forwarder.waiting);
        let mut at = forwarder.at;
        let (forwarded, is_over) = self.forward_from(pair, &mut frames, &mut at, forwarder, limit);
        if is_over {
            frames.clear();
        }
        (forwarder.waiting, forwarder.at) = (frames, at);
        forwarded
    }

    /// Passes on the frames from `at` on until they cost `limit`. Returns whether these were all.
    fn forward_from(
        &self,
        pair: u16,
        frames: &mut Batch,
        at: &mut Position,
        forwarder: &mut Forwarder,
        limit: u32,
    ) -> (Forwarded, bool) {
        let (mut forwarded, count) = (Forwarded::default(), frames.len());
        let mut work = BatchCost::new(limit.max(1), false);
        loop {
            let decisions = if let Some(flooded) = at.flooded {
                forwarder.runs.clear();
                forwarder.runs.push(Run::flooded(flooded));
                Decisions { members: lock(&self.switch.state).members.clone(), next_flood: None }
            } else {
                let whole = frames.frames(at.next, at.start);
                self.decide(whole, false, work, &mut forwarder.runs, &mut forwarded)
            };
            let from = From { number: self.number, pair, members: &decisions.members };
            forwarder.deliver(frames, at, &from, &mut work, &mut forwarded);
            // A flood that was cut comes first.
            at.flooded = at.flooded.or(decisions.next_flood);
            let is_over = at.next == count;
            if is_over || work.is_used_up() {
                forwarded.copied = work.cost();
                return (forwarded, is_over);
            }
        }
    }

    /// Passes frames to `offer` that are still in the transmit ring of `pair`, if they all go as they are to
    /// one receive ring of the worker that runs it. `offer` gets the address of the inbox and the number of
    /// the task, and returns the number of frames that this has taken.
    ///
    /// Each frame is its header and at least the first [`HEAD_LEN`] bytes behind that. The frames that are
    /// not taken have to be decided about again.
    pub(crate) fn offer<'f>(
        &self,
        pair: u16,
        frames: impl Iterator<Item = &'f [u8]>,
        forwarder: &mut Forwarder,
        offer: impl FnOnce(usize, u32) -> u32,
    ) -> Answer {
        // A frame that the switch refuses is counted when it is decided about again.
        let mut forwarded = Forwarded::default();
        let mut work = BatchCost::new(u32::MAX, false);
        let Decisions { members, .. } = self.decide(frames, true, work, &mut forwarder.runs, &mut forwarded);
        // Each head was read too, in the time of a frame of a batch. Lossless, because these are few.
        let heads = forwarder.runs.iter().map(|run| run.frames).sum::<usize>() as u32;
        work.add_all(0, RUN_FRAMES * forwarder.runs.len() as u32);
        let inbox = only_member(&forwarder.runs, &members).and_then(|member| member.open_inbox(pair));
        let task = inbox.and_then(|inbox| forwarder.near.task_of(inbox));
        let (taken, cost) = match (inbox, task) {
            (Some(inbox), Some(task)) => (offer(inbox.address(), task), inbox.take_refusal_cost()),
            _ => (0, 0),
        };
        work.add_all(0, heads.saturating_sub(taken));
        Answer { taken, cost: work.cost().saturating_add(cost) }
    }

    /// Decides about frames of a batch, and learns their sources. Decides about the first frame, and then
    /// about others until all of them would cost more than `work` has left, or until there are [`RUNS_MAX`]
    /// decisions. A later frame for all ports that costs more is the next flood, and is delivered by
    /// itself. More frames like the first one, or like the next flood, belong to its flood, up to
    /// [`FLOOD_COST`].
    ///
    /// Each frame is behind its header. If `are_heads`, it may be only its first [`HEAD_LEN`] bytes. Where
    /// these are not enough, the decisions end with a frame that goes nowhere. They also end with one that
    /// does not go where the first one goes.
    fn decide<'f>(
        &self,
        frames: impl Iterator<Item = &'f [u8]>,
        are_heads: bool,
        mut work: BatchCost,
        runs: &mut Vec<Run>,
        forwarded: &mut Forwarded,
    ) -> Decisions {
        runs.clear();
        let (rule, now) = (self.member.rule, self.switch.now());
        // The header of the last frame, if that alone has decided.
        let mut known: Option<EthernetHeader> = None;
        let (mut state, mut next_flood) = (lock(&self.switch.state), None::<Flooded>);
        let mut flood = BatchCost::new(FLOOD_COST, false);
        for with_header in frames {
            let frame = &with_header[HEADER..];
            // Most frames go where the one before goes.
            if known.as_ref().is_some_and(|known| frame.starts_with(known))
                && let Some(run) = runs.last_mut()
            {
                run.frames += 1;
                continue;
            }
            known = rule.decides_by_header(frame);
            if are_heads && known.is_none() && rule.reads_far(frame) {
                runs.push(Run::new(Route::Nowhere, None));
                break;
            }
            let judged = rule.judge(frame);
            if let Some(Flooded { head, frames }) = &mut next_flood {
                if judged != Ok(*head) || flood.is_used_up() {
                    break;
                }
                (*frames, known) = (*frames + 1, None);
                flood.add_packet(frame.len() as u64, segments_max(with_header));
                continue;
            }
            let has_room = runs.len() < RUNS_MAX;
            match (&judged, runs.last_mut()) {
                (Ok(head), Some(run)) if run.head == Some(*head) => run.frames += 1,
                _ if !has_room || work.is_used_up() => break,
                _ => {
                    runs.push(self.begin_run(&mut state, judged, now, forwarded));
                    work.add_all(0, RUN_FRAMES);
                }
            }
            let is_first = runs.len() == 1;
            match runs.last_mut() {
                Some(Run { route: Route::Flood, head: Some(head), frames, .. }) => {
                    // Each frame has to be looked at, because each costs as many copies.
                    known = None;
                    // Lossless, because a process has fewer devices than that.
                    let ports = state.members.carriers_len(head.vlan).saturating_sub(1) as u32;
                    work.add_all(frame.len() as u64, ports);
                    work.add_all(0, if *frames == 1 { TARGET_FRAMES * ports } else { 0 });
                    flood.add_packet(frame.len() as u64, segments_max(with_header));
                    if is_first && !flood.is_used_up() {
                        continue;
                    }
                    if work.is_used_up() && !is_first {
                        next_flood = Some(Flooded { head: *head, frames: 1 });
                        *frames -= 1;
                        flood = BatchCost::new(FLOOD_COST, false);
                        flood.add_packet(frame.len() as u64, segments_max(with_header));
                        continue;
                    }
                }
                Some(Run { head: None, .. }) => known = None,
                _ => {}
            }
            let goes_elsewhere = || runs.first().map(|run| run.route) != runs.last().map(|run| run.route);
            if work.is_used_up() || (are_heads && goes_elsewhere()) {
                break;
            }
        }
        runs.pop_if(|run| run.frames == 0);
        Decisions { members: state.members.clone(), next_flood }
    }

    /// Returns the decision about a frame that has been judged, and counts it if it is refused.
    fn begin_run(
        &self,
        state: &mut State,
        judged: Result<Head, Refusal>,
        now: u32,
        forwarded: &mut Forwarded,
    ) -> Run {
        let routed = judged.and_then(|head| self.route(state, &head, now).map(|route| (route, head)));
        match routed {
            Ok((route, head)) => Run::new(route, Some(head)),
            Err(refused) => {
                match refused {
                    Refusal::Spoofed => forwarded.spoofed += 1,
                    Refusal::Tagged => forwarded.tagged += 1,
                    Refusal::LinkLocal => forwarded.unforwarded += 1,
                }
                Run::new(Route::Nowhere, None)
            }
        }
    }

    /// Returns the destination of a frame with this head that came from this port, and learns its source.
    ///
    /// An address that a port has as its only source is never learned, so what is in the table decides about
    /// other addresses only. While no such port receives, the address is behind the uplink: a guest is on
    /// another host until its migration ends, or has gone there.
    fn route(&self, state: &mut State, head: &Head, now: u32) -> Result<Route, Refusal> {
        let State { table, members, fixed, uplinks } = state;
        let receives = |number: u16| {
            number == self.number || members.get(number).is_some_and(|member| member.open_inbox(0).is_some())
        };
        // A port with a rule sends from its own address only.
        if let Some(place) = self.place {
            fixed.sent(head.vlan, place, self.number);
        } else if let Some(owner) = fixed.find(head.vlan, head.source, receives) {
            if receives(owner) || !uplinks.contains(&self.number) {
                return Err(Refusal::Spoofed);
            }
        } else {
            table.learn(head.vlan, head.source, self.number, now);
        }
        if head.is_for_many() {
            return Ok(Route::Flood);
        }
        let to = match fixed.find(head.vlan, head.destination, receives) {
            Some(owner) if receives(owner) => Some(owner),
            // A frame from an uplink does not go back, to no other one either.
            Some(_) if uplinks.contains(&self.number) => Some(self.number),
            Some(owner) => Some(uplinks.first().copied().unwrap_or(owner)),
            None => table.find(head.vlan, head.destination, now),
        };
        Ok(match to {
            Some(to) if to == self.number => Route::Nowhere,
            Some(to) => Route::Port(to),
            None => Route::Flood,
        })
    }
}

impl Drop for SwitchPort {
    fn drop(&mut self) {
        let mut state = lock(&self.switch.state);
        let members = Arc::new(state.members.without(self.number));
        let before = std::mem::replace(&mut state.members, members);
        state.table.leave(self.number);
        state.uplinks.retain(|number| *number != self.number);
        if let Some(address) = self.member.rule.address {
            state.fixed.remove(address, self.number);
        }
        drop(state);
        drop(before);
    }
}

#[cfg(test)]
mod tests;
