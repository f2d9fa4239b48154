//! Tests of the switch.

mod floods;

use super::super::delivery::NEAR_FRAMES;
use super::*;
use crate::card::filter::Address;
use kickless_io::Waker;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::slice;
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
    let forwarded = port.forward(0, &mut batch, &mut Forwarder::default(), u32::MAX);
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

/// Passes frames on. Returns what is left to do, and the cost.
fn forward(port: &SwitchPort, frames: &[Vec<u8>], forwarder: &mut Forwarder, limit: u32) -> Forwarded {
    let mut batch = Batch::default();
    for frame in frames {
        batch.push(frame.len()).copy_from_slice(frame);
    }
    port.forward(0, &mut batch, forwarder, limit)
}

/// Returns the cost of frames of a batch, each with its number and length.
fn cost_of(lens: &[(u32, usize)]) -> u32 {
    let mut cost = BatchCost::new(u32::MAX, false);
    for (count, len) in lens {
        (0..*count).for_each(|_| cost.add(*len as u64));
    }
    cost.cost()
}

/// The work and the charge do not grow with ports that get no frame.
#[test]
fn only_ports_that_get_a_frame_cost_something() {
    let work = |idle: u16| {
        let name = name();
        let sender = SwitchPort::join(&name, Rule::default(), 1);
        let join = |vlan: u16| SwitchPort::join(&name, Rule { vlan: Some(vlan), address: None }, 1);
        let ports: Vec<_> = (1..=8 + idle).map(join).collect();
        ports.iter().for_each(open);
        // The VLAN changes with each frame.
        let frames: Vec<_> =
            (0..64).map(|number| frame([0xff; 6], address(1), Some(1 + number % 8), 0)).collect();
        let mut forwarder = Forwarder::default();
        let forwarded = forward(&sender, &frames, &mut forwarder, u32::MAX);
        assert!(ports[..8].iter().all(|port| take(port, 0).len() == 8));
        (forwarded, forwarder.target_count())
    };
    let (forwarded, targets) = work(0);
    assert_eq!(targets, 64);
    assert_eq!(work(240), (forwarded, targets));
    assert_eq!(forwarded.copied, cost_of(&[(64 + 63 * RUN_FRAMES + 64 / 4 + 8 * TARGET_FRAMES, 60)]));
}

/// Frames that no other port carries are counted, however many of them are one flood.
#[test]
fn each_frame_of_a_flood_to_no_port_is_counted() {
    let sender = SwitchPort::join(&name(), Rule::default(), 1);
    let frames = vec![frame([0xff; 6], address(1), None, 0); 20];
    assert_eq!(send(&sender, &frames), Forwarded { unforwarded: 20, ..Forwarded::default() });
}

/// Many decisions are made in parts, so that no other sender waits for all of them.
#[test]
fn a_batch_with_many_decisions_passes_in_order() {
    let name = name();
    let ports = [0, 1, 2].map(|_| SwitchPort::join(&name, Rule::default(), 1));
    ports.iter().for_each(open);
    for number in [1, 2] {
        send(&ports[usize::from(number)], &[frame([0xff; 6], address(number), None, 0)]);
        ports.iter().for_each(|port| drop(take(port, 0)));
    }
    let frames: Vec<_> =
        (0..500).map(|body| frame(address(1 + (body % 3 == 0) as u8), address(9), None, body)).collect();
    let mut forwarder = Forwarder::default();
    forward(&ports[0], &frames, &mut forwarder, u32::MAX);
    assert_eq!(forwarder.runs.capacity().next_power_of_two(), RUNS_MAX);
    assert!(!forwarder.has_waiting());
    for (number, is_second) in [(1, false), (2, true)] {
        let expected: Vec<_> =
            (0..500).filter(|body| (body % 3 == 0) == is_second).map(|body| frames[body].clone()).collect();
        assert_eq!(take(&ports[number], 0), expected);
    }
}

/// Two cards without an address fill the table with all that they can, and then see nothing of what two cards
/// with addresses send to each other.
#[test]
fn a_full_table_shows_no_frames_for_fixed_addresses() {
    let name = name();
    let fixed = |number| SwitchPort::join(&name, Rule { vlan: None, address: Some(address(number)) }, 1);
    let cards = [1, 2].map(fixed);
    let others = [(); 6].map(|()| SwitchPort::join(&name, Rule::default(), 1));
    cards.iter().chain(&others).for_each(open);
    for (number, other) in (0u8..).zip(&others) {
        let source = |at: u16| [2, 1, number, 0, (at >> 8) as u8, at as u8];
        let frames: Vec<_> = (0..2000).map(|at| frame(address(1), source(at), None, 0)).collect();
        for frames in frames.chunks(500) {
            send(other, frames);
        }
    }
    cards.iter().chain(&others).for_each(|port| drop(take(port, 0)));
    // The second card has not sent anything yet.
    for body in 0..20 {
        assert_eq!(send(&cards[0], &[frame(address(2), address(1), None, body)]), Forwarded::default());
        assert_eq!(send(&cards[1], &[frame(address(1), address(2), None, body)]), Forwarded::default());
    }
    assert_eq!(cards.each_ref().map(|card| take(card, 0).len()), [20, 20]);
    assert!(others.iter().all(|other| take(other, 0).is_empty()), "others see frames of the cards");
    // A card that has come late has room for its addresses.
    let late = SwitchPort::join(&name, Rule::default(), 1);
    open(&late);
    send(&late, &[frame(address(1), address(9), None, 0)]);
    send(&cards[0], &[frame(address(9), address(1), None, 0)]);
    assert_eq!(take(&late, 0).len(), 1);
    assert!(others.iter().all(|other| take(other, 0).is_empty()));
    // A card without a driver gets nothing, and nobody else does.
    cards[1].inbox(0).unwrap().set_receiver(None);
    let late = Forwarded { late: 1, ..Forwarded::default() };
    assert_eq!(send(&cards[0], &[frame(address(2), address(1), None, 0)]), late);
    assert!(others.iter().all(|other| take(other, 0).is_empty()));
}

/// A guest that comes from another host by a migration is reached there until it has started here.
#[test]
fn a_guest_is_behind_the_uplink_while_its_card_has_no_driver() {
    let name = name();
    let guest = SwitchPort::join(&name, Rule { vlan: None, address: Some(address(1)) }, 1);
    let uplink = SwitchPort::join_uplink(&name);
    let others = [(); 2].map(|()| SwitchPort::join(&name, Rule::default(), 1));
    others.iter().chain([&uplink]).for_each(open);
    let (to, from) = (frame(address(1), address(2), None, 0), frame(address(2), address(1), None, 0));
    let spoofed = Forwarded { spoofed: 1, ..Forwarded::default() };
    let send_both = || {
        let sent = (send(&others[0], slice::from_ref(&to)), send(&uplink, slice::from_ref(&from)));
        (sent, [&guest, &uplink, &others[0], &others[1]].map(|port| take(port, 0).len()))
    };
    let away = ((Forwarded::default(), Forwarded::default()), [0, 1, 1, 0]);
    assert_eq!(send_both(), away);
    // Only an uplink has the address then. It gets no frame back that came from it.
    assert_eq!(send(&others[1], slice::from_ref(&from)), spoofed);
    send(&uplink, &[frame(address(1), address(3), None, 0)]);
    assert_eq!(take(&uplink, 0).len(), 0);
    // The guest starts, and leaves.
    open(&guest);
    assert_eq!(send_both(), ((Forwarded::default(), spoofed), [1, 0, 0, 0]));
    guest.inbox(0).unwrap().set_receiver(None);
    assert_eq!(send_both(), away);
    // Without an uplink, nobody gets its frames.
    drop(uplink);
    let late = Forwarded { late: 1, ..Forwarded::default() };
    assert_eq!(send(&others[0], &[to]), late);
    assert!(others.iter().all(|other| take(other, 0).is_empty()));
}

/// The address of an access port is its own in its VLAN. In others it is an address like any.
#[test]
fn a_fixed_address_counts_in_the_vlans_of_its_port() {
    let name = name();
    let join = |vlan, address| SwitchPort::join(&name, Rule { vlan, address }, 1);
    let (owner, trunk) = (join(Some(5), Some(address(1))), join(None, None));
    let (near, far) = (join(Some(5), None), join(Some(7), None));
    [&owner, &trunk, &near, &far].into_iter().for_each(open);
    let spoofed = Forwarded { spoofed: 1, ..Forwarded::default() };
    assert_eq!(send(&near, &[frame(address(9), address(1), None, 0)]), spoofed);
    assert_eq!(send(&trunk, &[frame(address(9), address(1), Some(5), 0)]), spoofed);
    assert_eq!(send(&trunk, &[frame(address(9), address(1), Some(7), 0)]), Forwarded::default());
    assert_eq!((take(&far, 0).len(), take(&near, 0).len()), (1, 0));
    // In VLAN 7, the address is behind the trunk.
    send(&far, &[frame(address(1), address(3), None, 0)]);
    assert_eq!((take(&trunk, 0).len(), take(&owner, 0).len()), (1, 0));
    send(&near, &[frame(address(1), address(3), None, 0)]);
    assert_eq!((take(&trunk, 0).len(), take(&owner, 0).len()), (0, 1));
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
    assert_eq!(send(&first, &[frame(b, a, None, 7)]), Forwarded { unforwarded: 1, ..Forwarded::default() });
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
    // The card that the guest has left stops, or the guest goes back.
    for (stopped, running) in [(&owner, &moved), (&moved, &owner)] {
        stopped.inbox(0).unwrap().set_receiver(None);
        assert_eq!(send(&other, &[frame(address(1), address(3), None, 4)]), Forwarded::default());
        assert_eq!(take(running, 0).len(), 1);
        open(stopped);
    }
    assert!(take(&other, 0).is_empty());
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
        assert_eq!(send(&ports[0], &[frame(address(2), address(0x10), None, number)]), Forwarded::default());
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
        sender.forward(pair, &mut batch, &mut Forwarder::default(), u32::MAX);
        (0..4).filter(|pair| !take(&receiver, *pair).is_empty()).collect::<Vec<_>>()
    };
    assert_eq!([0, 3, 5].map(to), [[0], [3], [1]]);
    receiver.set_pairs(2);
    assert_eq!([0, 3].map(to), [[0], [1]]);
    receiver.inbox(1).unwrap().set_receiver(None);
    assert_eq!(to(3), [0]);
}

/// A frame, by the numbers of its destination and its source, with its tag.
type Sent = (u8, u8, Option<u16>);

/// One step of a run: a port sends frames, its card comes or goes, or it learns as many addresses as it can.
/// While frames wait because of a limit, other ports send answers, one in each pause.
#[derive(Clone, Debug)]
enum Step {
    Send { port: usize, frames: Vec<Sent>, limit: u32, answers: Vec<(usize, Sent)> },
    Replace { port: usize },
    Fill { ports: usize },
}

/// The ports: trunks, access ports, and some with an address. Ports 4 and 5 are those of a guest that moves.
const RULES: [Rule; 12] = {
    const fn rule(vlan: Option<u16>, address: Option<u8>) -> Rule {
        let address = match address {
            Some(number) => Some([2, 0, 0, 0, 0, number]),
            None => None,
        };
        Rule { vlan, address }
    }
    [
        rule(None, None),
        rule(None, None),
        rule(Some(1), None),
        rule(Some(2), None),
        rule(None, Some(8)),
        rule(None, Some(8)),
        rule(Some(1), Some(7)),
        rule(Some(2), Some(7)),
        rule(Some(1), Some(6)),
        rule(None, None),
        rule(None, None),
        rule(None, None),
    ]
};

fn step() -> impl Strategy<Value = Step> {
    let tag = proptest::option::weighted(0.3, 0u16..3);
    let sent = (0u8..10, 0u8..10, tag);
    let frames = proptest::collection::vec(sent.clone(), 1..6);
    let answers = proptest::collection::vec((0usize..RULES.len(), sent), 0..4);
    let limit = prop_oneof![Just(u32::MAX), 1u32..6];
    prop_oneof![
        16 => (0usize..RULES.len(), frames, limit, answers)
            .prop_map(|(port, frames, limit, answers)| Step::Send { port, frames, limit, answers }),
        2 => (0usize..RULES.len()).prop_map(|port| Step::Replace { port }),
        1 => (1usize..=RULES.len()).prop_map(|ports| Step::Fill { ports }),
    ]
}

/// A frame with its own body.
type Numbered = (Address, Address, Option<u16>, u64);

fn encoded(&(to, from, tag, body): &Numbered) -> Vec<u8> {
    frame(to, from, tag, body)
}

fn body_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(*frame.last_chunk().unwrap())
}

/// The switch as maps and loops.
#[derive(Default)]
struct Model {
    learned: BTreeMap<(u16, Address), usize>,
    counts: [usize; RULES.len()],
    /// The ports with an address, the last one that sent first.
    fixed: Vec<usize>,
}

impl Model {
    fn new() -> Self {
        let fixed = (0..RULES.len()).filter(|port| RULES[*port].address.is_some()).collect();
        Self { fixed, ..Self::default() }
    }

    /// Returns the port with this address in a VLAN.
    fn owner(&self, vlan: u16, address: Address) -> Option<usize> {
        let mut fixed = self.fixed.iter().copied();
        fixed.find(|port| RULES[*port].address == Some(address) && RULES[*port].carries(vlan))
    }

    fn learn(&mut self, vlan: u16, address: Address, port: usize) {
        let known = self.learned.get(&(vlan, address)).copied();
        let shared: usize = self.counts.iter().map(|count| count.saturating_sub(16)).sum();
        let has_room = self.counts[port] < 16 || (self.counts[port] < 1024 && shared < 4096);
        if known != Some(port) && has_room {
            self.learned.insert((vlan, address), port);
            self.counts[port] += 1;
            known.into_iter().for_each(|known| self.counts[known] -= 1);
        }
    }

    fn replace(&mut self, port: usize) {
        self.learned.retain(|_, known| *known != port);
        self.counts[port] = 0;
        if RULES[port].address.is_some() {
            self.fixed.retain(|known| *known != port);
            self.fixed.push(port);
        }
    }

    /// Returns the ports that get a frame, with its tag there, or `None` if it is refused.
    fn targets(
        &mut self,
        from: usize,
        destination: Address,
        source: Address,
        tag: Option<u16>,
    ) -> Option<BTreeSet<(usize, u16)>> {
        let Rule { vlan, address: own } = RULES[from];
        let is_tagged = tag.is_some() && vlan.is_some();
        let vlan = vlan.or(tag).unwrap_or(0);
        let is_others = own.is_none() && self.owner(vlan, source).is_some();
        if own.is_some_and(|own| own != source) || is_others || is_tagged {
            return None;
        }
        if own.is_some() {
            self.fixed.retain(|known| *known != from);
            self.fixed.insert(0, from);
        } else {
            self.learn(vlan, source, from);
        }
        let known = self.owner(vlan, destination).or(self.learned.get(&(vlan, destination)).copied());
        Some(
            (0..RULES.len())
                .filter(|port| {
                    *port != from && known.is_none_or(|known| known == *port) && RULES[*port].carries(vlan)
                })
                .map(|port| (port, if RULES[port].vlan.is_some() { 0 } else { vlan }))
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

    /// The destination 0 is everybody.
    #[test]
    fn frames_go_where_the_model_says(steps in proptest::collection::vec(step(), 1..60)) {
        let destination = |to: u8| if to == 0 { [0xff; 6] } else { address(to) };
        let name = name();
        let join = |port: usize| {
            let port = SwitchPort::join(&name, RULES[port], 1);
            open(&port);
            port
        };
        let mut ports: Vec<_> = (0..RULES.len()).map(join).collect();
        let (mut model, mut body) = (Model::new(), 0u64);
        for step in steps {
            let (port, frames, limit, answers) = match step {
                Step::Send { port, frames, limit, answers } => (port, frames, limit, answers),
                Step::Replace { port } => {
                    let old = std::mem::replace(&mut ports[port], join(port));
                    // The new port has another number for a moment.
                    drop(old);
                    model.replace(port);
                    continue;
                }
                Step::Fill { ports: count } => {
                    for port in (0..count).filter(|port| RULES[*port].address.is_none()) {
                        let vlan = RULES[port].vlan.unwrap_or(2);
                        let mut state = lock(&ports[port].switch.state);
                        for at in 0..1100u16 {
                            let [high, low] = at.to_be_bytes();
                            let address = [2, 1, 0, port as u8, high, low];
                            state.table.learn(vlan, address, ports[port].number, 0);
                            model.learn(vlan, address, port);
                        }
                    }
                    continue;
                }
            };
            let mut expected = vec![Vec::new(); RULES.len()];
            // Returns whether the frame is refused.
            let mut decide = |port: usize, frame: &Numbered| {
                let (to, from, tag, body) = *frame;
                let Some(targets) = model.targets(port, to, from, tag) else { return true };
                for (target, vlan) in targets {
                    // A tag of VLAN 0 stays as it is.
                    let tag = if vlan == 0 { tag.filter(|tag| *tag == 0) } else { Some(vlan) };
                    expected[target].push(encoded(&(to, from, tag, body)));
                }
                false
            };
            let mut numbered = |(to, from, tag): Sent| {
                body += 1;
                // The address 0 is no source.
                (destination(to), address(from.max(1)), tag, body)
            };
            let numbers: Vec<_> = frames.into_iter().map(&mut numbered).collect();
            let sent: Vec<_> = numbers.iter().map(encoded).collect();
            let (mut forwarder, mut decided, mut refused) = (Forwarder::default(), 0, 0);
            let mut answers = answers.into_iter().filter(|(from, _)| *from != port);
            let mut drops = forward(&ports[port], &sent, &mut forwarder, limit);
            loop {
                let is_over = !forwarder.has_waiting();
                let begun = forwarder.at.next + forwarder.at.flooded.map_or(0, |flooded| flooded.frames);
                let until = if is_over { numbers.len() } else { begun };
                refused += numbers[decided..until].iter().filter(|frame| decide(port, frame)).count() as u64;
                decided = until;
                prop_assert_eq!(drops.late, 0);
                refused -= drops.spoofed + drops.tagged;
                if is_over {
                    break;
                }
                if let Some((from, answer)) = answers.next() {
                    let answer = numbered(answer);
                    let is_refused = decide(from, &answer);
                    let drops = send(&ports[from], &[encoded(&answer)]);
                    prop_assert_eq!(drops.spoofed + drops.tagged, u64::from(is_refused));
                }
                drops = ports[port].resume(0, &mut forwarder, limit);
            }
            prop_assert_eq!(refused, 0);
            // Frames of two senders come in any order.
            for (port, mut expected) in ports.iter().zip(expected) {
                let mut taken = take(port, 0);
                let is_answer = |frame: &Vec<u8>| numbers.iter().all(|number| number.3 != body_of(frame));
                taken.sort_by_key(is_answer);
                expected.sort_by_key(is_answer);
                prop_assert_eq!(taken, expected);
            }
        }
    }
}
