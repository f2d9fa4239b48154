//! Passes frames of any lengths through buffers of any sizes, with a socket as the port: each datagram is a
//! frame with its header.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Interest, Next, Update};
use kickless_net::Net;
use kickless_net_port::Tap;
use kickless_spec::features::Features;
use kickless_spec::net::{GSO_UDP_L4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_testing::GuestRing;
use proptest::prelude::*;
use rig::packets::segments;
use rig::{Guest, Kind, Rig, SIZE_MAX, card_on, counter, kinds};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use zerocopy::IntoBytes;

const HEADER: usize = 12;
/// The longest frame, without its header.
const LEN_MAX: usize = 65_550;

fn socket_card(segments_udp: bool) -> (Arc<Net>, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
    (card_on(1, Tap::over_sockets(vec![ours], segments_udp)), peer)
}

/// Returns a frame that contains its number.
fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend(number.to_le_bytes());
    frame.extend((4..len).map(|n| (n as u32).wrapping_mul(7).wrapping_add(number) as u8));
    frame
}

#[derive(Clone, Debug)]
enum Step {
    /// The driver offers this many chains.
    Offer(usize),
    /// A frame of this length comes.
    Frame(usize),
    /// The worker polls with this budget.
    Poll(u32),
    ReturnCredit,
    Memory,
    Addresses,
    Restart,
    /// The vIOMMU takes all translations away, or gives them.
    Invalidate,
    Translate,
}

fn change() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::ReturnCredit),
        Just(Step::Memory),
        Just(Step::Addresses),
        Just(Step::Restart),
        Just(Step::Invalidate),
        Just(Step::Translate),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![4 => 14..100usize, 4 => 1000..3000usize, 2 => 14..LEN_MAX + 1];
    prop_oneof![
        5 => (1..40usize).prop_map(Step::Offer),
        6 => len.prop_map(Step::Frame),
        6 => (1..200u32).prop_map(Step::Poll),
        5 => change(),
    ]
}

/// Starts ring `index` of a card, behind a vIOMMU or not.
fn start(card: &Arc<Net>, index: u16, kind: Kind, size: u16, features: Features, is_behind: bool) -> Rig {
    let mut guest = Guest::prepare(kind, size);
    if is_behind {
        guest = guest.behind_iommu();
        guest.translate_all();
    }
    let vring = guest.vring(index, guest.first_avail(), None);
    Rig::start_on(card, guest, vring, features)
}

/// Changes something that a ring depends on. Nothing waits for its chains.
fn apply(rig: &mut Rig, card: &Arc<Net>, index: u16, features: Features, is_behind: bool, step: &Step) {
    match step {
        Step::ReturnCredit => rig.task.return_credit(),
        Step::Memory => assert_eq!(Arc::strong_count(&rig.change_memory()), 1, "old memory is kept"),
        Step::Addresses if !is_behind => rig.apply(Update::Addresses(GuestRing::addresses())),
        Step::Restart => {
            let placeholder = Rig::start(card, index, Kind::default(), 2, features);
            let (next_avail, guest) = std::mem::replace(rig, placeholder).stop_task();
            let vring = guest.vring(index, next_avail, None);
            *rig = Rig::start_on(card, guest, vring, features);
        }
        Step::Invalidate if is_behind => {
            let (update, done) = rig.invalidate_all();
            rig.apply(update);
            assert_eq!(done.try_recv(), Err(TryRecvError::Disconnected), "the invalidation waits");
            assert_eq!(rig.task.vring().credit(), 0);
        }
        Step::Translate if is_behind => {
            rig.translate_all();
            rig.apply(Update::Poll);
        }
        _ => {}
    }
    assert_eq!(rig.task.in_flight(), 0);
}

/// Returns the buffers of a chain that has room for a header.
fn shape() -> impl Strategy<Value = Vec<u32>> {
    let lens = prop::collection::vec(prop_oneof![1..20u32, 1..3000u32], 1..4);
    lens.prop_filter("no room for a header", |lens| lens.iter().sum::<u32>() >= HEADER as u32)
}

struct Run {
    rig: Rig,
    card: Arc<Net>,
    peer: OwnedFd,
    features: Features,
    is_behind: bool,
    shapes: Vec<Vec<u32>>,
    offered: usize,
    /// The lengths of all frames that came, and the number of the next one that may arrive.
    lens: Vec<usize>,
    next: usize,
}

impl Run {
    fn step(&mut self, step: &Step) {
        match *step {
            Step::Offer(chains) => {
                for _ in 0..chains {
                    let shape = &self.shapes[self.offered % self.shapes.len()];
                    if self.rig.offer(shape, true).is_some() {
                        self.offered += 1;
                    }
                }
            }
            Step::Frame(len) => {
                let number = self.lens.len() as u32;
                // A socket holds some frames only.
                if rustix::io::write(&self.peer, &frame(number, len)).is_ok() {
                    self.lens.push(len);
                }
            }
            Step::Poll(budget) => self.poll(budget),
            _ => apply(&mut self.rig, &self.card, 0, self.features, self.is_behind, step),
        }
        assert_eq!(self.rig.task.in_flight(), 0);
    }

    fn poll(&mut self, budget: u32) {
        let polled = self.rig.poll_once(budget);
        let mut frames = 0;
        while let Some((header, bytes)) = self.rig.receive(HEADER) {
            // Frames between may be dropped, and never come later.
            let number = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
            assert!((self.next..self.lens.len()).contains(&number));
            assert!(
                bytes == frame(number as u32, self.lens[number])[HEADER..],
                "frame {number} is not whole"
            );
            assert_eq!((header.flags, header.gso_type), (0, 0));
            (self.next, frames) = (number + 1, frames + 1);
        }
        assert_eq!(polled.served, frames);
        match polled.next {
            Next::Idle => assert_eq!(self.rig.interest(), Some(Interest::None)),
            Next::Quiet => assert_eq!(self.rig.interest(), Some(Interest::Readable)),
            next => assert_eq!(next, Next::More),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Each frame arrives whole and in order, or is counted. Chains that are not used stay in the ring.
    #[test]
    fn frames_of_any_length_arrive_in_buffers_of_any_size(
        bits in 0..32u8,
        order in 2..8u32,
        shapes in prop::collection::vec(shape(), 1..6),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let (card, peer) = socket_card(true);
        let features = if is(3) { card.features() } else { rig::without(&card, NetFeatures::MRG_RXBUF) };
        let is_behind = is(4);
        let rig = start(&card, 0, kind, 1 << order, features, is_behind);
        let mut run =
            Run { rig, card, peer, features, is_behind, shapes, offered: 0, lens: Vec::new(), next: 0 };
        for step in &steps {
            run.step(step);
        }
        // All frames end.
        run.step(&Step::Translate);
        for _ in 0..200 {
            run.step(&Step::Offer(128));
            run.step(&Step::Poll(1000));
        }
        // A frame that waits for a chain which the ring has no room for is dropped by the stop. Others may
        // wait behind it.
        let waits = run.rig.last == Next::Idle;
        run.step(&Step::Restart);
        run.step(&Step::Offer(128));
        let counted = ["received_frames", "dropped_long", "dropped_late"].map(|name| counter(&run.card, name));
        let errors = run.rig.counters.errors.get();
        prop_assert!(counted.iter().sum::<u64>() <= run.lens.len() as u64);
        prop_assert!(waits || counted.iter().sum::<u64>() == run.lens.len() as u64, "{:?}", counted);
        prop_assert_eq!(errors, 0);
        let offered = run.rig.with_device();
        prop_assert_eq!(run.rig.stop().1, offered);
    }

    /// Each frame reaches the port as the driver sent it.
    #[test]
    fn frames_in_buffers_of_any_size_are_sent(
        bits in 0..8u8,
        frames in prop::collection::vec((14..9000usize, 1..3000usize, any::<bool>()), 1..30),
    ) {
        let kind = Kind { packed: bits & 1 != 0, event_idx: bits & 2 != 0, in_order: bits & 4 != 0 };
        let (card, peer) = socket_card(true);
        let mut rig = Rig::start(&card, 1, kind, SIZE_MAX, card.features());
        for (number, (len, cut, is_indirect)) in (0..).zip(frames) {
            // A chain has as many descriptors as the ring has entries, or 1024 in a table.
            let pieces = if is_indirect { 1000 } else { 100 };
            let cut = cut.max((len + HEADER).div_ceil(pieces));
            let sent = frame(number, len);
            if is_indirect { rig.send_indirect(&sent, cut) } else { rig.send(&sent, cut) }.unwrap();
            prop_assert_eq!(rig.poll(), 1);
            prop_assert_eq!(rig.take().unwrap().2, 0);
            let mut bytes = vec![0; 70_000];
            let len = rustix::io::read(&peer, &mut bytes).unwrap();
            prop_assert!(bytes[..len] == sent);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Each frame reaches the port once and in order, whatever changes while frames are on their way and the
    /// port has no room. A frame of a step is one that the driver sends here.
    #[test]
    fn frames_are_sent_once_while_the_ring_changes(
        bits in 0..16u8,
        cut in 100..3000usize,
        steps in prop::collection::vec(
            prop_oneof![
                6 => (14..9000usize).prop_map(Step::Frame),
                4 => (1..200u32).prop_map(Step::Poll),
                2 => (1..20usize).prop_map(Step::Offer),
                4 => change(),
            ],
            1..80,
        ),
    ) {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let is_behind = is(3);
        let (card, peer) = socket_card(true);
        let features = card.features();
        let mut rig = start(&card, 1, kind, SIZE_MAX, features, is_behind);
        let (mut lens, mut seen) = (Vec::new(), 0);
        let read = |lens: &[usize], seen: &mut usize| {
            let mut bytes = vec![0; 70_000];
            let Ok(len) = rustix::io::read(&peer, &mut bytes) else { return false };
            assert!(bytes[..len] == frame(*seen as u32, lens[*seen]), "frame {seen} is not whole");
            *seen += 1;
            true
        };
        for step in &steps {
            match *step {
                Step::Frame(len) => {
                    if rig.send(&frame(lens.len() as u32, len), cut).is_some() {
                        lens.push(len);
                    }
                }
                Step::Poll(budget) => {
                    rig.poll_once(budget);
                    while rig.take().is_some() {}
                }
                // The peer reads some.
                Step::Offer(frames) => {
                    for _ in 0..frames {
                        read(&lens, &mut seen);
                    }
                }
                _ => apply(&mut rig, &card, 1, features, is_behind, step),
            }
        }
        apply(&mut rig, &card, 1, features, is_behind, &Step::Translate);
        let mut polls = 0;
        while seen < lens.len() || rig.with_device() > 0 {
            rig.poll_once(1000);
            while rig.take().is_some() {}
            while read(&lens, &mut seen) {}
            polls += 1;
            assert!(polls < 1000, "a frame is lost");
        }
        prop_assert_eq!((seen, rig.with_device()), (lens.len(), 0));
        prop_assert_eq!(counter(&card, "sent_frames"), lens.len() as u64);
        prop_assert_eq!(rig.counters.errors.get(), 0);
    }
}

/// The kernel takes at most 1024 pieces for a read, and a chain of the driver has as many.
#[test]
fn a_frame_arrives_in_chains_of_single_bytes() {
    for kind in kinds() {
        for merges in [true, false] {
            let (card, peer) = socket_card(true);
            let without = if merges { NetFeatures::empty() } else { NetFeatures::MRG_RXBUF };
            let mut rig = Rig::start(&card, 0, kind, 16, rig::without(&card, without));
            let lens = if merges { [60, 3000, 1012, 9000] } else { [60, 1000, 1012, 14] };
            // The first frame is copied. A frame after a long one is read into the driver's buffers.
            for (number, len) in (0..).zip(lens.into_iter().cycle().take(12)) {
                while rig.offer_indirect(&[1; 1024]).is_some() {}
                rustix::io::write(&peer, &frame(number, len)).unwrap();
                rig.poll();
                let (header, bytes) = rig.receive(HEADER).unwrap();
                assert!(bytes == frame(number, len)[HEADER..], "{kind:?}: frame {number} of {len} bytes");
                assert_eq!(usize::from(header.num_buffers.get()), (len + HEADER).div_ceil(1024));
            }
            assert_eq!(counter(&card, "received_frames"), 12);
        }
    }
}

#[test]
fn the_longest_chain_of_single_bytes_is_sent() {
    for kind in kinds() {
        let (card, peer) = socket_card(true);
        let mut rig = Rig::start(&card, 1, kind, SIZE_MAX, card.features());
        let sent = frame(1, 1024 - HEADER);
        rig.send_indirect(&sent, 1).unwrap();
        let polled = rig.poll_once(1);
        // The descriptors cost as much as 16 frames.
        assert_eq!((polled.served, polled.cost), (1, 17));
        rig.poll();
        rig.take().unwrap();
        let mut bytes = [0; 2000];
        let len = rustix::io::read(&peer, &mut bytes).unwrap();
        assert_eq!(bytes[..len], sent);
    }
}

#[test]
fn a_frame_longer_than_any_is_dropped_and_not_cut() {
    for features in [NetFeatures::empty(), NetFeatures::MRG_RXBUF] {
        let (card, peer) = socket_card(true);
        let mut rig = Rig::start(&card, 0, Kind::default(), SIZE_MAX, rig::without(&card, features));
        while rig.offer(&[1530], true).is_some() {}
        for len in [LEN_MAX + 1, LEN_MAX + 64, LEN_MAX + 1000, 100_000] {
            rustix::io::write(&peer, &frame(0, len)).unwrap();
            rustix::io::write(&peer, &frame(1, 60)).unwrap();
            assert_eq!(rig.poll(), 1);
            assert_eq!(rig.receive(HEADER).unwrap().1, frame(1, 60)[HEADER..]);
        }
        assert_eq!(counter(&card, "dropped_long"), 4);
    }
}

/// Chains outside of guest memory complete empty, at a cost, and the frame goes to the next chain.
#[test]
fn chains_outside_of_memory_are_skipped() {
    for features in [NetFeatures::empty(), NetFeatures::MRG_RXBUF] {
        let (card, peer) = socket_card(true);
        let mut rig = Rig::start(&card, 0, Kind::default(), SIZE_MAX, rig::without(&card, features));
        for _ in 0..100 {
            rig.offer_outside(2000);
        }
        rig.offer(&[2000], true).unwrap();
        rustix::io::write(&peer, &frame(0, 60)).unwrap();
        let mut polls = 0;
        while rig.poll_once(1).next == Next::More {
            polls += 1;
        }
        assert!(polls > 5, "{polls}");
        for _ in 0..100 {
            assert_eq!(rig.take().unwrap().2, 0);
        }
        assert_eq!(rig.receive(HEADER).unwrap().1, frame(0, 60)[HEADER..]);
        assert_eq!(rig.counters.errors.get(), 100);
    }
}

#[test]
fn a_driver_that_never_refills_is_not_read_for() {
    for kind in kinds() {
        let (card, peer) = socket_card(true);
        let mut rig = Rig::start(&card, 0, kind, SIZE_MAX, card.features());
        for _ in 0..3 {
            rig.offer(&[100], true).unwrap();
        }
        let mut sent = 0;
        while rustix::io::write(&peer, &frame(sent, 60)).is_ok() {
            sent += 1;
        }
        rig.poll();
        // It has no chain left, so the rest stays with the port, which drops what it cannot hold.
        assert_eq!((rig.last, rig.interest()), (Next::Idle, Some(Interest::None)));
        assert_eq!(counter(&card, "received_frames"), 3);
        assert_eq!(rig.poll(), 0);
        assert!(!rig.task.arm());
        // It never takes the used chains either, and offers one more.
        rig.kick_wanted = false;
        rig.offer(&[100], true).unwrap();
        assert!(rig.kick_wanted);
        rig.poll();
        assert_eq!(counter(&card, "received_frames"), 4);
        assert_eq!(rig.stop().1, 4);
    }
}

/// Returns a UDP packet of this many bytes of payload, and its header.
fn udp(payload: usize, size: u16) -> (Header, Vec<u8>) {
    let mut packet = vec![2; 12];
    packet.extend([8, 0, 0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend([0, 1, 0, 2, 0, 0, 0, 0]);
    packet.extend((0..payload).map(|n| n as u8));
    let header = Header {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        gso_size: size.into(),
        csum_start: 34.into(),
        csum_offset: 6.into(),
        ..Header::default()
    };
    (header, packet)
}

/// The card cuts UDP packets itself where the kernel does not, and goes on where the port had no room.
#[test]
fn udp_is_segmented_by_the_card_if_the_kernel_does_not() {
    for kind in kinds() {
        let (card, peer) = socket_card(false);
        let mut rig = Rig::start(&card, 1, kind, SIZE_MAX, card.features());
        let (header, packet) = udp(5000, 400);
        let segments = segments(&header, &packet);
        let expected: Vec<_> = segments.iter().map(|segment| [&[0; HEADER][..], segment].concat()).collect();
        assert_eq!(expected.len(), 13);
        const PACKETS: usize = 100;
        let (mut sent, mut seen, mut refused) = (0, 0, 0);
        let mut bytes = vec![0; 2000];
        while seen < PACKETS * expected.len() {
            while sent < PACKETS && rig.send(&[header.as_bytes(), &packet].concat(), 4096).is_some() {
                sent += 1;
            }
            rig.poll();
            refused += usize::from(rig.last == Next::Quiet);
            while let Ok(len) = rustix::io::read(&peer, &mut bytes) {
                assert!(bytes[..len] == expected[seen % expected.len()], "{kind:?} {seen}");
                seen += 1;
            }
            while rig.take().is_some() {}
        }
        assert!(refused > 0, "the socket is never full");
        // So many datagrams are refused.
        for (payload, size, is_sent) in [(128, 1, true), (129, 1, false)] {
            let (header, packet) = udp(payload, size);
            let before = counter(&card, "sent_refused");
            rig.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
            while rig.take().is_none() {
                rig.poll();
                while rustix::io::read(&peer, &mut bytes).is_ok() {}
            }
            assert_eq!(counter(&card, "sent_refused") - before, u64::from(!is_sent), "{payload}");
        }
        rig.stop();
    }
}
