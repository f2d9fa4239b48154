//! Exchanges frames between cards of one switch while their rings stop, start, change and die. Each head
//! comes back exactly once, and no frame arrives where it does not belong.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_net::Net;
use kickless_spec::net::{Header, NetFeatures};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rig::switch::{RECEIVE, TRANSMIT};
use rig::{Beside, Guest, Kind, Rig, counter, switch, without};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

const HEADER: usize = 12;
const CARDS: usize = 4;
/// The VLAN of each card's access port. The first two cards are trunks, and the second has an address.
const VLANS: [Option<u8>; CARDS] = [None, None, Some(5), Some(6)];
const WITH_ADDRESS: usize = 1;
/// The offset of the addresses' end, and the length of a tag.
const ETHERTYPE: usize = 12;
const TAG: usize = 4;
/// The length from which on the frames of a burst are in several buffers.
const LONG: usize = 4096;

fn mac(number: usize) -> [u8; 6] {
    if number == CARDS { [0xff; 6] } else { switch::mac(number) }
}

/// A frame that a driver has sent.
#[derive(Clone, Debug)]
struct Sent {
    to: usize,
    /// The number of the source address, which is forged if it is not the sender's.
    source: usize,
    vlan: Option<u8>,
    len: usize,
    /// The sender leaves the checksum to others.
    has_checksum: bool,
}

/// Returns the header of a frame whose sender leaves the checksum to others.
fn without_checksum() -> Header {
    Header { flags: 1, csum_start: 14.into(), csum_offset: 2.into(), ..Header::default() }
}

impl Sent {
    /// Returns the bytes, with the tag of a VLAN.
    fn bytes(&self, sender: usize, number: usize, tag: Option<u8>) -> Vec<u8> {
        let mut bytes = [mac(self.to), mac(self.source)].concat();
        bytes.extend(tag.into_iter().flat_map(|vlan| [0x81, 0, 0, vlan]));
        bytes.extend([0x88, 0xb5, sender as u8]);
        bytes.extend((number as u32).to_le_bytes());
        bytes.extend((0..self.len).map(|n| (n * 7 + number) as u8));
        bytes
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send {
        card: usize,
        frame: Sent,
        cut: usize,
    },
    /// So many times, frames of one length from one trunk to the other, which has buffers for most. Short
    /// ones are in one buffer each, and long ones in several.
    Burst {
        card: usize,
        times: usize,
        count: usize,
        len: usize,
    },
    Refill {
        card: usize,
        len: u32,
    },
    Poll {
        card: usize,
        ring: u16,
        budget: u32,
        /// The task may offer its frames to others of its worker.
        beside: bool,
    },
    /// The task moves to another worker, or comes back.
    Move {
        card: usize,
        ring: u16,
        worker_id: u32,
    },
    Memory {
        card: usize,
        ring: u16,
    },
    Restart {
        card: usize,
        ring: u16,
    },
    /// The process of the guest dies, and another guest comes.
    Kill {
        card: usize,
    },
    /// The card is removed, and added again.
    Replace {
        card: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (card, ring) = (0..CARDS, 0..2u16);
    let len = prop_oneof![4 => 40..100usize, 2 => 1000..1500usize, 1 => 3000..9000usize];
    let vlan = proptest::option::weighted(0.2, 5..8u8);
    // Some sources are forged.
    let frame = (0..=CARDS, 0..12usize, vlan, len, any::<bool>());
    let send = (card.clone(), frame, 64..3000usize).prop_map(|(card, frame, cut)| {
        let (to, source, vlan, len, has_checksum) = frame;
        let source = if source < CARDS { source } else { card };
        Step::Send { card, frame: Sent { to, source, vlan, len, has_checksum }, cut }
    });
    prop_oneof![
        12 => send,
        4 => (0..2usize, 1..6usize, 1..8usize, prop_oneof![480..1500usize, 4096..12_000usize])
            .prop_map(|(card, times, count, len)| Step::Burst { card, times, count, len }),
        4 => (card.clone(), 100..2000u32).prop_map(|(card, len)| Step::Refill { card, len }),
        12 => (card.clone(), ring.clone(), 1..40u32, proptest::bool::weighted(0.9))
            .prop_map(|(card, ring, budget, beside)| Step::Poll { card, ring, budget, beside }),
        1 => (card.clone(), ring.clone(), 0..2u32)
            .prop_map(|(card, ring, worker_id)| Step::Move { card, ring, worker_id }),
        1 => (card.clone(), ring.clone()).prop_map(|(card, ring)| Step::Memory { card, ring }),
        2 => (card.clone(), ring).prop_map(|(card, ring)| Step::Restart { card, ring }),
        1 => card.clone().prop_map(|card| Step::Kill { card }),
        1 => card.prop_map(|card| Step::Replace { card }),
    ]
}

/// Returns the number of a task on its worker.
fn number_of(card: usize, ring: u32) -> u32 {
    2 * card as u32 + ring
}

/// The frames of all cases that receivers have taken directly, and those of long bursts.
static DIRECT: AtomicU64 = AtomicU64::new(0);
static DIRECT_CHAINS: AtomicU64 = AtomicU64::new(0);

/// A card with its rings.
struct Member {
    card: Arc<Net>,
    rings: [Option<Rig>; 2],
    /// The workers of the tasks.
    workers: [u32; 2],
    sent: Vec<Sent>,
    /// The number of the next frame that may arrive from each card.
    next: [usize; CARDS],
}

struct Lan {
    name: String,
    kind: Kind,
    merges: bool,
    members: Vec<Member>,
}

impl Lan {
    fn new(kind: Kind, merges: bool) -> Self {
        let name = switch::name();
        let mut lan = Self { name, kind, merges, members: Vec::new() };
        for number in 0..CARDS {
            let card = lan.join(number);
            let rings = lan.start(&card);
            lan.members.push(Member { card, rings, workers: [0; 2], sent: Vec::new(), next: [0; CARDS] });
            lan.locate(number);
        }
        lan
    }

    fn join(&self, number: usize) -> Arc<Net> {
        let vlan = VLANS[number].map(|vlan| format!(",vlan={vlan}")).unwrap_or_default();
        let port = switch::open(&format!("{}{vlan}", self.name));
        rig::card_with((number == WITH_ADDRESS).then(|| mac(number)), 1, port)
    }

    fn features(&self, card: &Net) -> kickless_spec::features::Features {
        without(card, if self.merges { NetFeatures::empty() } else { NetFeatures::MRG_RXBUF })
    }

    fn start(&self, card: &Arc<Net>) -> [Option<Rig>; 2] {
        let features = self.features(card);
        [RECEIVE, TRANSMIT].map(|index| Some(Rig::start(card, index, self.kind, 16, features)))
    }

    /// Tells the tasks of a card where they are.
    fn locate(&mut self, card: usize) {
        let Member { rings, workers, .. } = &mut self.members[card];
        for ((ring, worker_id), index) in rings.iter_mut().zip(workers).zip(0..) {
            let ring = ring.as_mut().unwrap();
            ring.set_location(Some((*worker_id, number_of(card, index))));
        }
    }

    /// Polls a ring beside the others of its worker.
    fn poll_beside(&mut self, card: usize, ring: u16, budget: u32) {
        let index = usize::from(ring);
        let worker_id = self.members[card].workers[index];
        let mut polled = self.members[card].rings[index].take().unwrap();
        let others = (0..).zip(&mut self.members).flat_map(|(card, member)| {
            let rings = member.rings.iter_mut().zip(member.workers).zip(0..);
            rings.filter_map(move |((ring, worker), index)| {
                Some((number_of(card, index), ring.as_mut().filter(|_| worker == worker_id)?))
            })
        });
        polled.poll_beside(budget, Beside(others.collect()));
        self.members[card].rings[index] = Some(polled);
        (0..CARDS).for_each(|card| self.take(card));
    }

    fn ring(&mut self, card: usize, ring: u16) -> &mut Rig {
        self.members[card].rings[usize::from(ring)].as_mut().unwrap()
    }

    fn send(&mut self, card: usize, frame: &Sent, cut: usize) {
        let member = &mut self.members[card];
        let bytes = frame.bytes(card, member.sent.len(), frame.vlan);
        let header = if frame.has_checksum { without_checksum() } else { Header::default() };
        let bytes = [header.as_bytes(), &bytes].concat();
        let ring = member.rings[usize::from(TRANSMIT)].as_mut().unwrap();
        if ring.send(&bytes, cut.max(bytes.len().div_ceil(8))).is_some() {
            member.sent.push(frame.clone());
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Send { card, ref frame, cut } => self.send(card, frame, cut),
            Step::Burst { card, times, count, len } => {
                for time in 0..times {
                    let has_checksum = time % 2 == 1;
                    let frame = Sent { to: 1 - card, source: card, vlan: None, len, has_checksum };
                    self.step(&Step::Refill { card: 1 - card, len: 1500 });
                    self.poll_beside(1 - card, RECEIVE, 1000);
                    let cut = if len < LONG { usize::MAX } else { 1 };
                    (0..count).for_each(|_| self.send(card, &frame, cut));
                    let before = counter(&self.members[card].card, "sent_directly");
                    self.poll_beside(card, TRANSMIT, 1000);
                    let direct = counter(&self.members[card].card, "sent_directly") - before;
                    if len >= LONG {
                        DIRECT_CHAINS.fetch_add(direct, Ordering::Relaxed);
                    }
                }
            }
            Step::Refill { card, len } => while self.ring(card, RECEIVE).offer(&[len], true).is_some() {},
            Step::Poll { card, ring, budget, beside: true } => self.poll_beside(card, ring, budget),
            Step::Poll { card, ring, budget, beside: false } => {
                self.ring(card, ring).poll_once(budget);
                self.take(card);
            }
            Step::Move { card, ring, worker_id } => {
                self.ring(card, ring).set_location(None);
                self.members[card].workers[usize::from(ring)] = worker_id;
                self.locate(card);
            }
            Step::Memory { card, ring } => drop(self.ring(card, ring).change_memory()),
            Step::Restart { card, ring } => {
                let features = self.features(&self.members[card].card);
                let member = &mut self.members[card];
                let (next_avail, guest) = member.rings[usize::from(ring)].take().unwrap().stop_task();
                let vring = guest.vring(ring, next_avail, None);
                let rig = Rig::start_on(&member.card, guest, vring, features);
                member.rings[usize::from(ring)] = Some(rig);
                self.locate(card);
                self.take(card);
            }
            Step::Kill { card } => {
                let features = self.features(&self.members[card].card);
                let member = &mut self.members[card];
                for (index, ring) in (0..).zip(&mut member.rings) {
                    let guest = Guest::with_new_driver(ring.take().unwrap().kill());
                    let vring = guest.vring(index, guest.first_avail(), None);
                    *ring = Some(Rig::start_on(&member.card, guest, vring, features));
                }
                self.locate(card);
            }
            Step::Replace { card } => {
                self.stop(card);
                // The old card leaves the switch before the new one comes.
                self.members[card].card = rig::card(1, Default::default());
                let new = self.join(card);
                self.members[card].rings = self.start(&new);
                self.members[card].card = new;
                self.locate(card);
            }
        }
    }

    /// Takes what the device has completed. [`Guest::take`] checks that each head comes back once.
    fn take(&mut self, card: usize) {
        while self.ring(card, TRANSMIT).take().is_some() {}
        while let Some((header, bytes)) = self.ring(card, RECEIVE).receive(HEADER) {
            let tag = (bytes[ETHERTYPE..ETHERTYPE + 2] == [0x81, 0]).then(|| bytes[ETHERTYPE + 3]);
            let at = ETHERTYPE + 2 + if tag.is_some() { TAG } else { 0 };
            let sender = usize::from(bytes[at]);
            let number = u32::from_le_bytes(bytes[at + 1..at + 5].try_into().unwrap()) as usize;
            let sent = self.members[sender].sent[number].clone();
            assert!(bytes == sent.bytes(sender, number, tag), "a frame was changed");
            assert_eq!(header.flags, u8::from(sent.has_checksum), "another header");
            let vlan = VLANS[sender].or(sent.vlan);
            let is_access = VLANS[card].is_some();
            assert_eq!(tag, if is_access { None } else { vlan }, "a wrong tag");
            assert!(
                sender != card && (!is_access || VLANS[card] == vlan),
                "a frame where it does not belong"
            );
            assert!(sent.source != WITH_ADDRESS || sender == WITH_ADDRESS, "a forged source");
            assert!(sender != WITH_ADDRESS || sent.source == WITH_ADDRESS, "a forged source");
            assert!(VLANS[sender].is_none() || sent.vlan.is_none(), "a tag on an access port");
            let next = &mut self.members[card].next[sender];
            assert!(*next <= number, "out of order, or twice");
            *next = number + 1;
        }
    }

    /// Stops the rings of a card. Each head is back or with the ring.
    fn stop(&mut self, card: usize) {
        for ring in [TRANSMIT, RECEIVE] {
            // Chains that were completed before the stop count.
            self.take(card);
            let rig = self.members[card].rings[usize::from(ring)].take().unwrap();
            let (next_avail, guest) = rig.stop_task();
            let vring = guest.vring(ring, next_avail, None);
            let features = self.features(&self.members[card].card);
            let rig = Rig::start_on(&self.members[card].card, guest, vring, features);
            self.members[card].rings[usize::from(ring)] = Some(rig);
        }
        self.take(card);
        for ring in self.members[card].rings.each_mut() {
            let rig = ring.take().unwrap();
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
    }
}

#[test]
fn each_head_comes_back_once_and_no_frame_goes_astray() {
    let steps = (0..16u8, proptest::collection::vec(step(), 1..150));
    let mut runner = TestRunner::new(ProptestConfig::with_cases(150));
    let result = runner.run(&steps, |(bits, steps)| {
        let is = |bit: u8| bits & 1 << bit != 0;
        let mut lan = Lan::new(Kind { packed: is(0), event_idx: is(1), in_order: is(2) }, is(3));
        for step in &steps {
            lan.step(step);
        }
        // All that can be delivered is.
        for _ in 0..40 {
            for card in 0..CARDS {
                lan.step(&Step::Refill { card, len: 1600 });
                for ring in [TRANSMIT, RECEIVE] {
                    lan.step(&Step::Poll { card, ring, budget: 1000, beside: true });
                }
            }
        }
        for card in 0..CARDS {
            DIRECT.fetch_add(counter(&lan.members[card].card, "sent_directly"), Ordering::Relaxed);
            prop_assert_eq!(lan.ring(card, TRANSMIT).with_device(), 0);
            prop_assert_eq!(counter(&lan.members[card].card, "sent_invalid"), 0);
            lan.stop(card);
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let [direct, chains] = [&DIRECT, &DIRECT_CHAINS].map(|count| count.load(Ordering::Relaxed));
    assert!(direct > 100 && chains > 50, "only {direct} frames went directly, {chains} in several buffers");
}
