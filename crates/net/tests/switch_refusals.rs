//! Frames that a receiver on the same worker must not take directly, and the limits of those that it takes.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, Limit, Limits, Next, Operate, Rate};
use kickless_memory::{Gpa, Marks};
use kickless_net::Net;
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::driver::Buffer;
use rig::switch::{FIRST_TASK, RECEIVE, TRANSMIT, ethernet, mac};
use rig::{Beside, Kind, Rig, counter, switch, without};
use std::sync::Arc;
use zerocopy::IntoBytes;

const KIND: Kind = Kind { packed: true, event_idx: true, in_order: false };
const HEADER: usize = size_of::<Header>();
const CONTROL: u16 = 2;
const SIZE: u16 = 256;
/// The number of batches after a refusal that are not offered.
const PAUSE: usize = 7;

fn frame(to: usize, from: usize, len: usize, number: u8) -> Vec<u8> {
    let mut frame = ethernet(to, from);
    frame.resize(HEADER + len, number);
    frame
}

/// Returns a frame whose sender has left the checksum to others.
fn frame_without_checksum(len: usize) -> Vec<u8> {
    let mut frame = frame(1, 0, len, 1);
    let header = Header { flags: 1, csum_start: 14.into(), csum_offset: 2.into(), ..Header::default() };
    frame[..HEADER].copy_from_slice(header.as_bytes());
    frame
}

struct Member {
    card: Arc<Net>,
    receive: Rig,
    transmit: Rig,
}

/// Cards of a switch, each with its only address. The first one sends to the second one.
struct Lan<const CARDS: usize>([Member; CARDS]);

impl<const CARDS: usize> Lan<CARDS> {
    fn new(missing: NetFeatures) -> Self {
        let name = switch::name();
        let mut lan = Self(std::array::from_fn(|number| {
            let card = rig::card_with(Some(mac(number)), 1, switch::open(&name));
            let features = without(&card, missing);
            let mut rings = [RECEIVE, TRANSMIT].map(|index| Rig::start(&card, index, KIND, SIZE, features));
            rings[0].set_location(Some((0, FIRST_TASK + number as u32)));
            rings[1].set_location(Some((0, 0)));
            let [receive, transmit] = rings;
            Member { card, receive, transmit }
        }));
        lan.meet();
        lan
    }

    /// Has the switch learn where the first two cards are, and the first one find the second one near.
    fn meet(&mut self) {
        for from in [1, 0] {
            let transmit = &mut self.0[from].transmit;
            transmit.send(&frame(1 - from, from, 60, 0), 4096).unwrap();
            transmit.poll_once(1000);
            transmit.take().unwrap();
            self.refill(1 - from);
            self.receive();
        }
    }

    fn refill(&mut self, card: usize) {
        while self.0[card].receive.offer(&[2048], true).is_some() {}
    }

    /// Polls the receive rings. Returns the frames of the second card.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        for member in &mut self.0 {
            member.receive.poll_once(1000);
        }
        self.take()
    }

    fn take(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.0[1].receive.receive(HEADER).map(|(_, frame)| frame)).collect()
    }

    fn sent_directly(&self) -> u64 {
        counter(&self.0[0].card, "sent_directly")
    }

    /// Polls the transmit ring of the first card beside all receive rings. Returns the number of frames that
    /// went directly.
    fn poll(&mut self, budget: u32) -> u64 {
        let before = self.sent_directly();
        let (mut receivers, mut sender) = (Vec::new(), None);
        for (number, Member { receive, transmit, .. }) in self.0.iter_mut().enumerate() {
            receivers.push((FIRST_TASK + number as u32, receive));
            sender = sender.or(Some(transmit));
        }
        sender.unwrap().poll_beside(budget, Beside(receivers));
        while self.0[0].transmit.take().is_some() {}
        self.sent_directly() - before
    }

    fn send(&mut self, frame: &[u8]) {
        self.0[0].transmit.send(frame, 4096).unwrap();
    }

    /// Sends a frame to the second card, which gets it. Returns whether it went directly.
    fn passes_directly(&mut self) -> bool {
        let sent = frame(1, 0, 1514, 7);
        self.refill(1);
        self.send(&sent);
        let direct = self.poll(1000);
        let mut received = self.take();
        received.extend(self.receive());
        assert_eq!(received, [&sent[HEADER..]]);
        direct == 1
    }

    /// Ends the pause after a refusal.
    fn end_pause(&mut self) {
        for _ in 0..PAUSE {
            assert!(!self.passes_directly());
        }
        assert!(self.passes_directly());
    }
}

#[test]
fn a_refusal_is_followed_by_a_pause() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    assert!(lan.passes_directly());
    // The receiver is another task's neighbour.
    lan.0[1].receive.set_location(Some((0, 99)));
    assert!(!lan.passes_directly());
    lan.0[1].receive.set_location(Some((0, FIRST_TASK + 1)));
    lan.end_pause();
    // The header of the first frame is invalid.
    let mut sent = frame_without_checksum(1000);
    sent[7] = 9;
    lan.send(&sent);
    assert_eq!(lan.poll(1000), 0);
    assert_eq!((lan.receive().len(), counter(&lan.0[0].card, "sent_invalid")), (0, 1));
    lan.end_pause();
}

/// The driver of the receiver does not accept checksums, or it has switched them off. A frame before the
/// first one with a checksum goes directly.
#[test]
fn a_receiver_takes_only_offloads_that_it_accepts() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    let mut control = Rig::start(&lan.0[1].card, CONTROL, KIND, SIZE, lan.0[1].card.features());
    let mut set = |offloads: NetFeatures| {
        control.command(&[&[5, 0][..], &offloads.bits().to_le_bytes()].concat());
        control.poll();
        control.take().unwrap();
    };
    let pass = |lan: &mut Lan<2>| {
        lan.refill(1);
        lan.send(&frame(1, 0, 1000, 5));
        lan.send(&frame_without_checksum(1000));
        lan.send(&frame(1, 0, 1000, 6));
        let direct = lan.poll(1000);
        let receive = &mut lan.0[1].receive;
        let mut received: Vec<_> = std::iter::from_fn(|| receive.receive(HEADER)).collect();
        receive.poll_once(1000);
        received.extend(std::iter::from_fn(|| receive.receive(HEADER)));
        assert_eq!(received.iter().map(|(_, frame)| frame[500]).collect::<Vec<_>>(), [5, 1, 6]);
        let header = received[1].0;
        assert_eq!(header.num_buffers.get(), 1);
        // The checksum is in the frame, or still to be made.
        assert_eq!(received[1].1[16..18] == [1, 1], header.flags == 1);
        assert_eq!([received[0].0.flags, received[2].0.flags], [0; 2]);
        while !lan.passes_directly() {}
        (direct, header.flags)
    };
    assert_eq!(pass(&mut lan), (3, 1));
    set(NetFeatures::empty());
    assert_eq!(pass(&mut lan), (1, 0));
    set(NetFeatures::GUEST_CSUM);
    assert_eq!(pass(&mut lan), (3, 1));
    assert_eq!(pass(&mut Lan::new(NetFeatures::GUEST_OFFLOADS)), (1, 0));
}

#[test]
fn a_capture_on_either_side_sees_all_frames() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    for card in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let path = &dir.path().join("capture");
        assert!(lan.passes_directly());
        let capture = CaptureTo { path, device: "card", len_max: 100 };
        lan.0[card].card.set_capture(Some(&capture)).unwrap();
        assert!(!lan.passes_directly(), "{card}");
        lan.0[card].card.set_capture(None).unwrap();
        while !lan.passes_directly() {}
    }
}

#[test]
fn limits_on_either_side_charge_all_frames() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    for card in [0, 1] {
        assert!(lan.passes_directly());
        let limit = Limit { sustained: Rate { per_second: 1_000_000, burst: 1000 }, peak: Rate::default() };
        let limiter = if card == 0 { &lan.0[0].transmit.limiter } else { &lan.0[1].receive.limiter }.clone();
        limiter.set(&Limits { requests: [limit; 3], ..Limits::default() });
        assert!(!lan.passes_directly(), "{card}");
        limiter.set(&Limits::default());
        while !lan.passes_directly() {}
    }
}

/// The filter is in force from the next frame on, although the receive ring is not polled in between.
#[test]
fn a_receiver_that_filters_takes_no_frame_directly() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    assert!(lan.passes_directly());
    let card = lan.0[1].card.clone();
    let mut control = Rig::start(&card, CONTROL, KIND, SIZE, card.features());
    for (is_promiscuous, expected) in [(1, true), (0, false)] {
        control.command(&[0, 0, is_promiscuous]);
        control.poll();
        control.take().unwrap();
        assert_eq!(lan.passes_directly(), expected);
    }
}

#[test]
fn another_task_with_the_number_of_the_receiver_takes_nothing() {
    let mut lan = Lan::<3>::new(NetFeatures::empty());
    lan.refill(2);
    // The first frame of all went to every card.
    lan.receive();
    let before = counter(&lan.0[2].card, "received_frames");
    lan.0[1].receive.set_location(Some((0, FIRST_TASK + 2)));
    assert!(!lan.passes_directly());
    assert_eq!(counter(&lan.0[2].card, "received_frames"), before);
}

/// The receiver has taken frames from its inbox, and waits for buffers with the rest of them.
#[test]
fn a_frame_does_not_overtake_those_that_wait_for_buffers() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    while lan.0[1].receive.with_device() > 0 {
        lan.send(&frame(1, 0, 60, 0));
        lan.poll(1000);
        lan.receive();
    }
    (1..=3).for_each(|number| lan.send(&frame(1, 0, 60, number)));
    lan.poll(1000);
    assert_eq!(lan.receive().len(), 0);
    lan.refill(1);
    lan.send(&frame(1, 0, 1514, 4));
    assert_eq!(lan.poll(1000), 0);
    let numbers: Vec<_> = lan.receive().iter().map(|frame| frame[20]).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
}

/// The receiver completes the checksum of a frame, and holds it until there are buffers.
#[test]
fn a_frame_does_not_overtake_one_that_is_held() {
    let mut lan = Lan::<2>::new(NetFeatures::GUEST_OFFLOADS);
    while lan.0[1].receive.with_device() > 0 {
        lan.send(&frame(1, 0, 60, 0));
        lan.poll(1000);
        lan.receive();
    }
    lan.send(&frame_without_checksum(100));
    lan.poll(1000);
    assert_eq!(lan.receive().len(), 0);
    lan.refill(1);
    lan.send(&frame(1, 0, 1514, 4));
    assert_eq!(lan.poll(1000), 0);
    assert_eq!(lan.receive().iter().map(Vec::len).collect::<Vec<_>>(), [100, 1514]);
}

/// The sender is charged for both sides, so its polls end after half as many frames.
#[test]
fn frames_that_go_directly_are_charged_twice() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    lan.refill(1);
    (0..200).for_each(|number| lan.send(&frame(1, 0, 1514, number)));
    assert_eq!((lan.poll(2), lan.0[0].transmit.last), (16, Next::More));
    assert_eq!((lan.poll(4), lan.0[0].transmit.last), (32, Next::More));
    assert_eq!((lan.poll(1000), lan.0[0].transmit.last), (128, Next::More));
    assert_eq!(lan.take().len(), 16 + 32 + 128);
}

/// Neighbour discovery that names another card's address, behind an extension header that fills the copied
/// head.
#[test]
fn a_forged_message_behind_the_head_is_refused() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    assert!(lan.passes_directly());
    for tag in [&[][..], &[0x81, 0, 0, 5]] {
        let mut sent = [Header::default().as_bytes(), &mac(1), &mac(0), tag, &[0x86, 0xdd]].concat();
        let packet = sent.len();
        sent.resize(HEADER + 1514, 0);
        sent[packet] = 0x60;
        // The extension header has 256 bytes. ICMPv6 is behind it: an advertisement with its target's
        // address.
        sent[packet + 40..packet + 42].copy_from_slice(&[58, 31]);
        sent[packet + 296] = 136;
        sent[packet + 320..packet + 328].copy_from_slice(&[2, 1, 2, 0, 0, 0, 0, 9]);
        lan.refill(1);
        let refused = counter(&lan.0[0].card, "sent_spoofed");
        lan.send(&sent);
        assert_eq!((lan.poll(1000), lan.receive().len()), (0, 0));
        assert_eq!(counter(&lan.0[0].card, "sent_spoofed"), refused + 1);
        while !lan.passes_directly() {}
    }
}

/// The fixed header of IPv6 decides about packets of TCP and UDP, of cards with an address too. A message of
/// ICMPv6 may be long, so it goes in a batch.
#[test]
fn ipv6_of_a_card_with_an_address_goes_directly() {
    let mut lan = Lan::<2>::new(NetFeatures::empty());
    for (protocol, expected) in [(6, 1), (17, 1), (58, 0), (60, 0)] {
        assert!(lan.passes_directly());
        let mut sent = frame(1, 0, 1514, 7);
        sent[HEADER + 12..HEADER + 14].copy_from_slice(&[0x86, 0xdd]);
        sent[HEADER + 20] = protocol;
        lan.refill(1);
        lan.send(&sent);
        assert_eq!(lan.poll(1000), expected, "{protocol}");
        let mut received = lan.take();
        received.extend(lan.receive());
        assert_eq!(received, [&sent[HEADER..]]);
        while !lan.passes_directly() {}
    }
}

/// The second frame, or the second buffer, begins in memory and ends outside of it.
#[test]
fn a_frame_that_leaves_memory_is_lost_alone() {
    let outside = |writable| vec![Buffer { addr: rig::MEMORY - 256, len: 1600, writable }];
    for card in [0, 1] {
        let mut lan = Lan::<2>::new(NetFeatures::empty());
        while lan.0[1].receive.with_device() > 0 {
            lan.send(&frame(1, 0, 60, 0));
            lan.poll(1000);
            lan.receive();
        }
        if card == 1 {
            let receive = &mut lan.0[1].receive;
            receive.offer(&[2048], true).unwrap();
            let id = receive.next_id().unwrap();
            receive.add(id, outside(true)).unwrap();
        }
        lan.refill(1);
        lan.send(&frame(1, 0, 1514, 1));
        if card == 0 {
            let transmit = &mut lan.0[0].transmit;
            transmit.view.write(Gpa(rig::MEMORY - 256), &frame(1, 0, 200, 2), &mut Marks::off()).unwrap();
            let id = transmit.next_id().unwrap();
            transmit.add(id, outside(false)).unwrap();
        } else {
            lan.send(&frame(1, 0, 1514, 2));
        }
        lan.send(&frame(1, 0, 1514, 3));
        assert_eq!(lan.poll(1000), 1);
        // The completion of the buffer that is not in memory has no frame.
        let mut lens = Vec::new();
        for _ in 0..2 {
            let receive = &mut lan.0[1].receive;
            lens.extend(std::iter::from_fn(|| receive.take().map(|(_, _, len)| len)));
            receive.poll_once(1000);
        }
        lens.extend(std::iter::from_fn(|| lan.0[1].receive.take().map(|(_, _, len)| len)));
        assert_eq!(lens, if card == 0 { vec![1526, 1526] } else { vec![1526, 0, 1526] });
        assert_eq!(counter(&lan.0[0].card, "sent_invalid"), u64::from(card == 0));
        assert!(lan.0.iter_mut().all(|member| !member.receive.task.vring().is_broken()));
        assert!(!lan.0[0].transmit.task.vring().is_broken());
        assert_eq!(lan.0[0].transmit.with_device(), 0);
    }
}
