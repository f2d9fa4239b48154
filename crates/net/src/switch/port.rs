//! The switch and its ports.

use super::rule::{EthernetHeader, HEAD_LEN, Head, Refusal, Rule};
use super::table::Table;
use super::tag::Change;
use crate::cost::BatchCost;
use crate::counters::RingCounters;
use crate::filter::Address;
use crate::frame::segments_max;
use crate::loop_queue::{Batch, HEADER, LoopQueue};
use kickless_device::PARCEL_HEAD_LEN;
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The switches of this process, by their names. A switch ends with its last port.
static SWITCHES: Mutex<Vec<(String, Weak<Switch>)>> = Mutex::new(Vec::new());

/// A switch.
///
/// Lock order: none. Each lock is held alone, for one batch at most, and never while a task waits.
#[derive(Debug)]
struct Switch {
    state: Mutex<State>,
    /// The second in which the switch was made.
    start: i64,
}

#[derive(Debug, Default)]
struct State {
    table: Table,
    /// The ports, each at the index that is its number. Replaced when one comes or goes, so that a sender
    /// keeps the list that it has decided with.
    members: Arc<[Option<Arc<Member>>]>,
    /// The addresses that ports have as their only source, with the number of these ports. A guest that moves
    /// between two cards of one process has two for a while.
    fixed: HashMap<Address, u32>,
}

/// A port, as the others see it.
#[derive(Debug)]
struct Member {
    rule: Rule,
    /// An inbox for each receive ring.
    inboxes: Vec<LoopQueue>,
    /// The pairs of rings that the driver uses, from the first on.
    pairs: AtomicU16,
}

/// A port of a switch. Dropping it removes the port.
#[derive(Debug)]
pub(crate) struct SwitchPort {
    switch: Arc<Switch>,
    number: u16,
    member: Arc<Member>,
}

/// The frames of a batch that the switch has not passed on, by reasons, and its work for the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) spoofed: u64,
    pub(crate) tagged: u64,
    /// Frames that no other port carries.
    pub(crate) unforwarded: u64,
    /// Copies for receive rings with a full inbox.
    pub(crate) late: u64,
    /// The cost of all copies, dropped or not ([`crate::cost`]).
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

const _: () = assert!(HEADER + HEAD_LEN <= PARCEL_HEAD_LEN, "the head of a parcel's frame is too short");

/// The destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// The frame is dropped.
    Nowhere,
    /// One port.
    Port(u16),
    /// All other ports of the VLAN.
    Flood,
}

/// The decision about frames of a batch that follow one another.
#[derive(Clone, Copy, Debug)]
struct Run {
    route: Route,
    /// The parts that decide about a tag. `None` if the frames are refused.
    head: Option<Head>,
    frames: usize,
}

impl Run {
    /// Returns whether the frames go to the port `number`, which has this rule.
    fn goes_to(&self, number: u16, rule: &Rule) -> bool {
        match (self.route, self.head) {
            (Route::Port(to), _) => to == number,
            (Route::Flood, Some(head)) => rule.carries(head.vlan),
            _ => false,
        }
    }
}

/// Space for the decisions about one batch. It belongs to a transmit ring, and keeps its memory.
#[derive(Debug, Default)]
pub(crate) struct Forwarder {
    /// The frames in their order. Most batches are one run.
    runs: Vec<Run>,
    /// Frames for one port.
    copies: Batch,
    /// The worker that runs the ring, while that is known.
    pub(crate) worker_id: Option<u32>,
    /// The last batch went as it was to a receive ring of the same worker.
    pub(crate) is_near: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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
        let switch = Switch::named(name);
        let inboxes = (0..pairs).map(|_| LoopQueue::default()).collect();
        let member = Arc::new(Member { rule, inboxes, pairs: AtomicU16::new(u16::MAX) });
        let mut state = lock(&switch.state);
        let mut members = state.members.to_vec();
        let free = members.iter().position(Option::is_none).unwrap_or(members.len());
        if free == members.len() {
            members.push(None);
        }
        members[free] = Some(member.clone());
        state.members = members.into();
        if let Some(address) = rule.address {
            *state.fixed.entry(address).or_default() += 1;
        }
        drop(state);
        // A process has fewer devices than that.
        Self { switch, number: free as u16, member }
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
    pub(crate) fn forward(&self, pair: u16, frames: &mut Batch, forwarder: &mut Forwarder) -> Forwarded {
        let mut forwarded = Forwarded::default();
        if frames.len() == 0 {
            return forwarded;
        }
        let whole = frames.frames(0, 0).map(|frame| &frame[HEADER..]);
        let members = self.decide(whole, false, &mut forwarder.runs, &mut forwarded);
        self.deliver(pair, frames, forwarder, &members, &mut forwarded);
        frames.clear();
        forwarded
    }

    /// Passes frames to `offer` that are still in the transmit ring of `pair`, if they all go as they are to
    /// one receive ring of the worker that runs it. `offer` gets the address of the inbox and the number of
    /// the task, and returns the number of frames that this has taken. Returns that number.
    ///
    /// Each frame is at least the first [`HEAD_LEN`] bytes of it. The frames that are not taken have to be
    /// decided about again.
    pub(crate) fn offer<'f>(
        &self,
        pair: u16,
        frames: impl Iterator<Item = &'f [u8]>,
        forwarder: &mut Forwarder,
        offer: impl FnOnce(usize, u32) -> u32,
    ) -> u32 {
        // A frame that the switch refuses is counted when it is decided about again.
        let mut forwarded = Forwarded::default();
        let members = self.decide(frames, true, &mut forwarder.runs, &mut forwarded);
        let inbox = only_member(&forwarder.runs, &members).and_then(|member| member.open_inbox(pair));
        let task = inbox.zip(forwarder.worker_id).and_then(|(inbox, worker_id)| inbox.task_on(worker_id));
        let (Some(inbox), Some(task)) = (inbox, task) else { return 0 };
        offer(inbox.address(), task)
    }

    /// Decides about each frame of a batch, and learns their sources. Returns the ports that the decisions
    /// name. If `are_heads`, a frame may be only its first [`HEAD_LEN`] bytes. Where these are not enough,
    /// the decisions end with a frame that goes nowhere.
    fn decide<'f>(
        &self,
        frames: impl Iterator<Item = &'f [u8]>,
        are_heads: bool,
        runs: &mut Vec<Run>,
        forwarded: &mut Forwarded,
    ) -> Arc<[Option<Arc<Member>>]> {
        runs.clear();
        let (rule, now) = (self.member.rule, self.switch.now());
        // The header of the last frame, if that alone has decided.
        let mut known: Option<EthernetHeader> = None;
        let mut state = lock(&self.switch.state);
        for frame in frames {
            // Most frames go where the one before goes.
            if known.as_ref().is_some_and(|known| frame.starts_with(known))
                && let Some(run) = runs.last_mut()
            {
                run.frames += 1;
                continue;
            }
            known = rule.decides_by_header(frame);
            if are_heads && known.is_none() && rule.reads_far(frame) {
                runs.push(Run { route: Route::Nowhere, head: None, frames: 1 });
                break;
            }
            let judged = rule.judge(frame);
            if let (Ok(head), Some(run)) = (&judged, runs.last_mut())
                && run.head == Some(*head)
            {
                run.frames += 1;
                continue;
            }
            let routed = judged
                .and_then(|head| state.route(self.number, &rule, &head, now).map(|route| (route, head)));
            let (route, head) = match routed {
                Ok((route, head)) => (route, Some(head)),
                Err(refused) => {
                    known = None;
                    match refused {
                        Refusal::Spoofed => forwarded.spoofed += 1,
                        Refusal::Tagged => forwarded.tagged += 1,
                        Refusal::LinkLocal => forwarded.unforwarded += 1,
                    }
                    (Route::Nowhere, None)
                }
            };
            runs.push(Run { route, head, frames: 1 });
        }
        state.members.clone()
    }

    /// Copies the frames into the inboxes of their destinations.
    fn deliver(
        &self,
        pair: u16,
        frames: &mut Batch,
        forwarder: &mut Forwarder,
        members: &[Option<Arc<Member>>],
        forwarded: &mut Forwarded,
    ) {
        let Forwarder { runs, copies, worker_id, is_near } = forwarder;
        let mut copied = BatchCost::new(u32::MAX, false);
        *is_near = false;
        if let Some(member) = only_member(runs, members) {
            let Some(inbox) = member.open_inbox(pair) else {
                forwarded.late += frames.len() as u64;
                return;
            };
            *is_near = worker_id.is_some_and(|worker_id| inbox.task_on(worker_id).is_some());
            // The whole batch becomes the inbox's, without a copy if that is empty.
            forwarded.late += inbox.send(frames) as u64;
            return;
        }
        for (number, member) in members.iter().enumerate() {
            let Some(member) = member else { continue };
            // Lossless, as in `join`.
            let number = number as u16;
            if number == self.number || !runs.iter().any(|run| run.goes_to(number, &member.rule)) {
                continue;
            }
            let Some(inbox) = member.open_inbox(pair) else {
                // A card without a driver misses nothing that was for all.
                let missed = runs.iter().filter(|run| run.route == Route::Port(number));
                forwarded.late += missed.map(|run| run.frames as u64).sum::<u64>();
                continue;
            };
            let mut left = frames.frames(0, 0);
            for run in runs.iter() {
                let of_run = left.by_ref().take(run.frames);
                let (true, Some(head)) = (run.goes_to(number, &member.rule), &run.head) else {
                    of_run.for_each(drop);
                    continue;
                };
                let change = Change::between(head, &member.rule);
                for frame in of_run {
                    let len = change.len(frame.len());
                    if !copies.has_room(len, 1) {
                        forwarded.late += inbox.send(copies) as u64;
                    }
                    change.copy(frame, copies.push(len));
                    copied.add_packet(len as u64, segments_max(frame));
                }
            }
            forwarded.late += inbox.send(copies) as u64;
        }
        forwarded.copied = copied.cost();
        let has_others = |head: &Head| {
            members.iter().enumerate().any(|(number, member)| {
                number != usize::from(self.number)
                    && member.as_ref().is_some_and(|member| member.rule.carries(head.vlan))
            })
        };
        let lost = runs.iter().filter(|run| match (run.route, run.head) {
            (Route::Nowhere, Some(_)) => true,
            (Route::Flood, Some(head)) => !has_others(&head),
            _ => false,
        });
        forwarded.unforwarded += lost.map(|run| run.frames as u64).sum::<u64>();
    }
}

impl Drop for SwitchPort {
    fn drop(&mut self) {
        let mut state = lock(&self.switch.state);
        let mut members = state.members.to_vec();
        members[usize::from(self.number)] = None;
        state.members = members.into();
        state.table.forget(self.number);
        if let Some(address) = self.member.rule.address {
            let count = state.fixed.entry(address).or_default();
            *count -= 1;
            if *count == 0 {
                state.fixed.remove(&address);
            }
        }
    }
}

impl State {
    /// Returns the destination of a frame with this head that came from `port`, and learns its source.
    fn route(&mut self, port: u16, rule: &Rule, head: &Head, now: u32) -> Result<Route, Refusal> {
        // A port with a rule sends from its own address only.
        if rule.address.is_none() && self.fixed.contains_key(&head.source) {
            return Err(Refusal::Spoofed);
        }
        self.table.learn(head.vlan, head.source, port, now);
        if head.is_for_many() {
            return Ok(Route::Flood);
        }
        Ok(match self.table.find(head.vlan, head.destination, now) {
            Some(to) if to == port => Route::Nowhere,
            Some(to) => Route::Port(to),
            None => Route::Flood,
        })
    }
}

fn member(members: &[Option<Arc<Member>>], number: u16) -> Option<&Arc<Member>> {
    members.get(usize::from(number))?.as_ref()
}

/// Returns the port that gets all frames of a batch, if it gets them as they are.
fn only_member<'m>(runs: &[Run], members: &'m [Option<Arc<Member>>]) -> Option<&'m Member> {
    let [Run { route: Route::Port(to), head: Some(head), .. }, rest @ ..] = runs else { return None };
    let is_same = |run: &Run| {
        run.route == Route::Port(*to) && run.head.is_some_and(|other| other.is_tagged == head.is_tagged)
    };
    let member = member(members, *to).filter(|_| rest.iter().all(is_same))?;
    (Change::between(head, &member.rule) == Change::Nothing).then_some(&**member)
}

impl Member {
    /// Returns the inbox for frames of the sender's transmit ring `pair`: always the same while the receive
    /// rings stay, so that the frames of a connection stay in order. `None` if no receive ring runs.
    fn open_inbox(&self, pair: u16) -> Option<&LoopQueue> {
        let pairs = usize::from(self.pairs.load(Ordering::Relaxed)).clamp(1, self.inboxes.len().max(1));
        let used = self.inboxes.get(..pairs)?;
        let (before, from) = used.split_at(usize::from(pair) % pairs);
        from.iter().chain(before).find(|inbox| inbox.is_open())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_io::Waker;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::atomic::AtomicUsize;

    /// Returns a name that no other test has.
    fn name() -> String {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        format!("test {}", NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn address(number: u8) -> Address {
        [2, 0, 0, 0, 0, number]
    }

    fn frame(to: Address, from: Address, tag: Option<u16>, body: u64) -> Vec<u8> {
        let mut frame = vec![0; HEADER];
        frame.extend(to);
        frame.extend(from);
        if let Some(vlan) = tag {
            frame.extend([0x81, 0]);
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend([0x88, 0xb5]);
        frame.extend(body.to_be_bytes());
        frame
    }

    fn open(port: &SwitchPort) {
        for inbox in &port.member.inboxes {
            inbox.set_receiver(Some(Waker::new().unwrap()));
        }
    }

    fn send(port: &SwitchPort, frames: &[Vec<u8>]) -> Forwarded {
        let mut batch = Batch::default();
        for frame in frames {
            batch.push(frame.len()).copy_from_slice(frame);
        }
        let forwarded = port.forward(0, &mut batch, &mut Forwarder::default());
        Forwarded { copied: 0, ..forwarded }
    }

    /// Returns the frames in the inbox of a pair.
    fn take(port: &SwitchPort, pair: u16) -> Vec<Vec<u8>> {
        let mut batch = Batch::default();
        port.inbox(pair).unwrap().receive(&mut batch);
        let mut start = 0;
        (0..batch.len())
            .map(|number| {
                let frame = batch.frame(number, start).unwrap().to_vec();
                start += frame.len();
                frame
            })
            .collect()
    }

    /// A frame for all costs its sender as much as one to each port.
    #[test]
    fn a_flood_is_charged_for_each_copy() {
        let name = name();
        let ports = [0, 1, 2, 3].map(|_| SwitchPort::join(&name, Rule::default(), 1));
        ports.iter().for_each(open);
        let charged = |frames: &[Vec<u8>]| {
            let mut batch = Batch::default();
            for frame in frames {
                batch.push(frame.len()).copy_from_slice(frame);
            }
            ports[0].forward(0, &mut batch, &mut Forwarder::default()).copied
        };
        let (all, short) = ([0xff; 6], frame([0xff; 6], address(1), None, 0));
        let long = [&short[..], &[0; 9000]].concat();
        // As much as frames of the sender's batch.
        let cost_of = |lens: &[(usize, usize)]| {
            let mut cost = BatchCost::new(u32::MAX, false);
            for (count, len) in lens {
                (0..*count).for_each(|_| cost.add(*len as u64));
            }
            cost.cost()
        };
        assert_eq!(charged(std::slice::from_ref(&short)), 1);
        assert_eq!(charged(&[long.clone(), short.clone()]), cost_of(&[(3, long.len()), (3, short.len())]));
        // A full inbox does not make it cheaper.
        let many = vec![short.clone(); 1000];
        charged(&many);
        assert_eq!(charged(&many), cost_of(&[(3000, short.len())]));
        assert_eq!(charged(&many), 3000u32.div_ceil(16));
        // One destination costs the frames alone, and several cost one copy of each.
        for number in [1, 2] {
            send(&ports[usize::from(number)], &[frame(all, address(1 + number), None, 0)]);
        }
        let frames = |peers: u8| -> Vec<_> {
            (0..64).map(|n| frame(address(2 + n % peers), address(1), None, 0)).collect()
        };
        assert_eq!([1, 2].map(|peers| charged(&frames(peers))), [0, 4]);
    }

    #[test]
    fn a_known_address_gets_its_frames_alone() {
        let name = name();
        let ports = [0, 1, 2].map(|_| SwitchPort::join(&name, Rule::default(), 1));
        ports.iter().for_each(open);
        let [a, b] = [1, 2].map(address);
        let first = frame(b, a, None, 1);
        assert_eq!(send(&ports[0], std::slice::from_ref(&first)), Forwarded::default());
        assert_eq!((take(&ports[1], 0), take(&ports[2], 0)), (vec![first.clone()], vec![first]));
        let answer = frame(a, b, None, 2);
        send(&ports[1], std::slice::from_ref(&answer));
        assert_eq!((take(&ports[0], 0), take(&ports[2], 0)), (vec![answer], Vec::new()));
        // To its own port, and in a batch of several destinations.
        let own = frame(a, a, None, 3);
        let all = frame([0xff; 6], a, None, 4);
        let drops = send(&ports[0], &[own, all.clone(), frame(b, a, None, 5)]);
        assert_eq!(drops, Forwarded { unforwarded: 1, ..Forwarded::default() });
        assert_eq!((take(&ports[0], 0), take(&ports[1], 0).len()), (Vec::new(), 2));
        assert_eq!(take(&ports[2], 0), [all]);
        // A card that is gone is forgotten.
        let [first, second, third] = ports;
        drop(second);
        send(&first, &[frame(b, a, None, 6)]);
        assert_eq!(take(&third, 0).len(), 1);
        drop(third);
        assert_eq!(
            send(&first, &[frame(b, a, None, 7)]),
            Forwarded { unforwarded: 1, ..Forwarded::default() }
        );
    }

    #[test]
    fn an_address_of_a_port_is_taken_from_nobody_else() {
        let name = name();
        let fixed = Rule { address: Some(address(1)), vlan: None };
        let (owner, other) = (SwitchPort::join(&name, fixed, 1), SwitchPort::join(&name, Rule::default(), 1));
        [&owner, &other].into_iter().for_each(open);
        let spoofed = Forwarded { spoofed: 1, ..Forwarded::default() };
        assert_eq!(send(&other, &[frame(address(9), address(1), None, 1)]), spoofed);
        assert_eq!(send(&owner, &[frame(address(9), address(2), None, 1)]), spoofed);
        assert_eq!(send(&owner, &[frame(address(9), address(1), None, 1)]), Forwarded::default());
        // The destination of a move has the same address.
        let moved = SwitchPort::join(&name, fixed, 1);
        open(&moved);
        assert_eq!(send(&moved, &[frame([0xff; 6], address(1), None, 2)]), Forwarded::default());
        take(&other, 0);
        send(&other, &[frame(address(1), address(3), None, 3)]);
        assert_eq!((take(&owner, 0).len(), take(&moved, 0).len()), (1, 1));
        drop((owner, moved));
        assert_eq!(send(&other, &[frame(address(9), address(1), None, 1)]).spoofed, 0);
    }

    #[test]
    fn a_full_inbox_costs_others_nothing() {
        let name = name();
        let ports = [0, 1, 2].map(|_| SwitchPort::join(&name, Rule::default(), 1));
        ports.iter().for_each(open);
        for port in [1, 2] {
            send(&ports[usize::from(port)], &[frame([0xff; 6], address(port), None, 0)]);
        }
        let mut late = 0;
        for number in 0..3000 {
            late += send(&ports[0], &[frame(address(1), address(0x10), None, number)]).late;
            assert_eq!(
                send(&ports[0], &[frame(address(2), address(0x10), None, number)]),
                Forwarded::default()
            );
            assert_eq!(take(&ports[2], 0).last(), Some(&frame(address(2), address(0x10), None, number)));
        }
        let kept = take(&ports[1], 0).len();
        assert!(late > 1000 && kept as u64 + late >= 3000, "{late} {kept}");
    }

    #[test]
    fn pairs_that_the_driver_does_not_use_get_nothing() {
        let name = name();
        let (sender, receiver) =
            (SwitchPort::join(&name, Rule::default(), 4), SwitchPort::join(&name, Rule::default(), 4));
        open(&receiver);
        let to = |pair: u16| {
            let mut batch = Batch::default();
            let frame = frame([0xff; 6], address(1), None, 0);
            batch.push(frame.len()).copy_from_slice(&frame);
            sender.forward(pair, &mut batch, &mut Forwarder::default());
            (0..4).filter(|pair| !take(&receiver, *pair).is_empty()).collect::<Vec<_>>()
        };
        assert_eq!([0, 3, 5].map(to), [[0], [3], [1]]);
        receiver.set_pairs(2);
        assert_eq!([0, 3].map(to), [[0], [1]]);
        receiver.inbox(1).unwrap().set_receiver(None);
        assert_eq!(to(3), [0]);
    }

    /// One step of a run: a port sends frames, or its card comes or goes.
    #[derive(Clone, Debug)]
    enum Step {
        Send { port: usize, frames: Vec<(u8, u8, Option<u16>)> },
        Replace { port: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let tag = proptest::option::weighted(0.3, 0u16..3);
        let frames = proptest::collection::vec((0u8..9, 0u8..9, tag), 1..6);
        prop_oneof![
            8 => (0usize..5, frames).prop_map(|(port, frames)| Step::Send { port, frames }),
            1 => (0usize..5).prop_map(|port| Step::Replace { port }),
        ]
    }

    /// The switch as one map and one loop.
    #[derive(Default)]
    struct Model(BTreeMap<(u16, u8), usize>);

    impl Model {
        /// Returns the ports that get a frame, with its tag there, or `None` if it is refused.
        fn targets(
            &mut self,
            rules: &[Rule],
            from: usize,
            frame: (u8, u8, Option<u16>),
        ) -> Option<BTreeSet<(usize, u16)>> {
            let (to, source, tag) = frame;
            let own = rules[from].address;
            let is_others = own.is_none() && rules.iter().any(|rule| rule.address == Some(address(source)));
            if own.is_some_and(|own| own != address(source))
                || is_others
                || (tag.is_some() && rules[from].vlan.is_some())
            {
                return None;
            }
            let vlan = rules[from].vlan.or(tag).unwrap_or(0);
            self.0.insert((vlan, source), from);
            let known = self.0.get(&(vlan, to)).copied().filter(|_| to != 0);
            Some(
                (0..rules.len())
                    .filter(|port| {
                        *port != from
                            && known.is_none_or(|known| known == *port)
                            && rules[*port].carries(vlan)
                    })
                    .map(|port| (port, if rules[port].vlan.is_some() { 0 } else { vlan }))
                    .collect(),
            )
        }
    }

    proptest! {
        /// Frames with any bytes behind their addresses, also VLAN tags at the end of the frame.
        #[test]
        fn a_frame_keeps_the_length_of_a_header(
            from_trunk: bool,
            tag in prop_oneof![Just([0x81, 0]), Just([8, 6]), any::<[u8; 2]>()],
            rest in proptest::collection::vec(any::<u8>(), 0..40)
        ) {
            let name = name();
            let rules = [Rule::default(), Rule { vlan: Some(5), address: Some(address(1)) }];
            let ports = [0, usize::from(!from_trunk), usize::from(from_trunk)]
                .map(|rule| SwitchPort::join(&name, rules[rule], 1));
            ports.iter().for_each(open);
            let mut sent = vec![0; HEADER];
            for part in [&[0xff; 6][..], &address(1 + u8::from(from_trunk)), &tag, &rest] {
                sent.extend(part);
            }
            let drops = send(&ports[1], std::slice::from_ref(&sent));
            let arrived: Vec<_> = [&ports[0], &ports[2]].iter().flat_map(|port| take(port, 0)).collect();
            prop_assert!(arrived.iter().all(|frame| frame.len() >= HEADER + 14));
            prop_assert_eq!(arrived.is_empty(), drops != Forwarded::default());
        }

        /// Ports 0 and 1 are trunks, 2 and 3 access ports, and 4 has an address. Address 0 is everybody.
        #[test]
        fn frames_go_where_the_model_says(steps in proptest::collection::vec(step(), 1..60)) {
            let rules = [
                Rule::default(),
                Rule::default(),
                Rule { vlan: Some(1), address: None },
                Rule { vlan: Some(2), address: None },
                Rule { vlan: None, address: Some(address(8)) },
            ];
            let destination = |to: u8| if to == 0 { [0xff; 6] } else { address(to) };
            let name = name();
            let join = |port: usize| {
                let port = SwitchPort::join(&name, rules[port], 1);
                open(&port);
                port
            };
            let mut ports: Vec<_> = (0..rules.len()).map(join).collect();
            let (mut model, mut body) = (Model::default(), 0u64);
            for step in steps {
                let (port, frames) = match step {
                    Step::Send { port, frames } => (port, frames),
                    Step::Replace { port } => {
                        let old = std::mem::replace(&mut ports[port], join(port));
                        // The new port has another number for a moment.
                        drop(old);
                        model.0.retain(|_, known| *known != port);
                        continue;
                    }
                };
                let (mut sent, mut expected, mut refused) = (Vec::new(), vec![Vec::new(); rules.len()], 0);
                for (to, from, tag) in frames {
                    // The address 0 is no source.
                    let from = from.max(1);
                    body += 1;
                    sent.push(frame(destination(to), address(from), tag, body));
                    match model.targets(&rules, port, (to, from, tag)) {
                        None => refused += 1,
                        Some(targets) => {
                            for (target, vlan) in targets {
                                // A tag of VLAN 0 stays as it is.
                                let tag = if vlan == 0 { tag.filter(|tag| *tag == 0) } else { Some(vlan) };
                                expected[target].push(frame(destination(to), address(from), tag, body));
                            }
                        }
                    }
                }
                let drops = send(&ports[port], &sent);
                prop_assert_eq!((drops.spoofed + drops.tagged, drops.late), (refused, 0));
                for (port, expected) in ports.iter().zip(expected) {
                    prop_assert_eq!(take(port, 0), expected);
                }
            }
        }
    }
}
