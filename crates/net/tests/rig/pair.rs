//! Two cards of a switch on one worker, of which the first one sends to the second one.

use super::switch::{FIRST_TASK, RECEIVE, TRANSMIT, ethernet, mac, name, open};
use super::{Beside, Guest, Kind, Rig, card_with, counter, without};
use kickless_net::Net;
use kickless_spec::net::{Header, NetFeatures};
use kickless_testing::tcp_segmentation;
use std::sync::Arc;
use zerocopy::IntoBytes;

pub const HEADER: usize = size_of::<Header>();
pub const SIZE: u16 = 64;
const CONTROL: u16 = 2;

pub struct Pair {
    pub cards: [Arc<Net>; 2],
    pub transmit: Rig,
    pub receive: Rig,
    control: Rig,
    /// The transmit ring of the second card.
    answers: Rig,
    /// The features of the second card's driver.
    negotiated: NetFeatures,
}

/// Returns a frame behind its header, without offloads.
pub fn plain(len: usize, number: usize) -> Vec<u8> {
    let mut frame = ethernet(1, 0);
    frame.extend((14..len).map(|n| (n * 7 + number) as u8));
    frame
}

/// Returns a packet of TCP to segment, behind its header.
pub fn packet(len: usize, number: usize) -> Vec<u8> {
    let mut frame = plain(len, number);
    frame[..HEADER].copy_from_slice(tcp_segmentation().as_bytes());
    let ip = HEADER + 14;
    frame[ip - 2..ip + 12].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0]);
    frame[ip + 20 + 12] = 0x50;
    frame
}

impl Pair {
    pub fn new(kind: Kind, missing: [NetFeatures; 2]) -> Self {
        Self::with_guests([0, 1].map(|_| Guest::prepare(kind, SIZE)), kind, missing)
    }

    /// The guests are those of the transmit ring and of the receive ring. The drivers lack these features.
    pub fn with_guests(guests: [Guest; 2], kind: Kind, missing: [NetFeatures; 2]) -> Self {
        let switch = name();
        let cards = [None, Some(mac(1))].map(|address| card_with(address, 1, open(&switch)));
        let features = [0, 1].map(|card| without(&cards[card], missing[card]));
        let [transmit, receive] = guests;
        let start = |card: usize, index: u16, guest: Guest| {
            let vring = guest.vring(index, guest.first_avail(), None);
            Rig::start_on(&cards[card], guest, vring, features[card])
        };
        let (transmit, receive) = (start(0, TRANSMIT, transmit), start(1, RECEIVE, receive));
        let [answers, control] =
            [TRANSMIT, CONTROL].map(|index| Rig::start(&cards[1], index, kind, SIZE, features[1]));
        let negotiated = NetFeatures::from_bits_truncate(features[1].bits());
        let mut pair = Self { cards, transmit, receive, control, answers, negotiated };
        pair.receive.set_location(Some((0, FIRST_TASK)));
        pair.transmit.set_location(Some((0, 0)));
        // The switch learns where the cards are, and the sender finds the receiver near.
        pair.answers.send(&[&ethernet(0, 1)[..], &[0; 46]].concat(), 4096).unwrap();
        pair.answers.poll_once(1000);
        pair.transmit.send(&plain(60, 0), 4096).unwrap();
        pair.transmit.poll_once(1000);
        pair.transmit.take().unwrap();
        pair.receive.offer(&[2048], true).unwrap();
        pair.receive.poll_once(1000);
        pair.receive.take().unwrap();
        pair
    }

    /// Sends a command of the receiver's driver.
    pub fn command(&mut self, command: &[u8]) {
        self.control.command(command);
        self.control.poll();
        self.control.take().unwrap();
    }

    /// Switches the offloads of received frames to those of these that the receiver's driver has negotiated.
    /// The card refuses it if one of them needs another that is missing.
    pub fn set_offloads(&mut self, offloads: NetFeatures) {
        let offloads = offloads & self.negotiated;
        self.command(&[&[5, 0][..], &offloads.bits().to_le_bytes()].concat());
    }

    /// Fills the receive ring with buffers of these lengths in turn.
    pub fn refill(&mut self, lens: &[u32]) {
        let mut lens = lens.iter().cycle();
        while self.receive.offer(&[*lens.next().unwrap()], true).is_some() {}
    }

    pub fn sent_directly(&self) -> u64 {
        counter(&self.cards[0], "sent_directly")
    }

    /// Polls the transmit ring beside the receive ring. Returns the number of frames that went directly.
    pub fn poll_beside(&mut self, budget: u32) -> u64 {
        let before = self.sent_directly();
        self.transmit.poll_beside(budget, Beside(vec![(FIRST_TASK, &mut self.receive)]));
        while self.transmit.take().is_some() {}
        self.sent_directly() - before
    }

    /// Returns the frames that the receiver's driver has got.
    pub fn take(&mut self) -> Vec<(Header, Vec<u8>)> {
        std::iter::from_fn(|| self.receive.receive(HEADER)).collect()
    }

    /// Polls the receive ring, and returns the frames that have come directly or now.
    pub fn receive(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut frames = self.take();
        self.receive.poll_once(1000);
        frames.extend(self.take());
        frames
    }

    /// Sends a packet of 20 000 bytes in buffers of 2048 bytes, which arrives. Returns whether it went
    /// directly.
    pub fn passes_directly(&mut self) -> bool {
        let sent = packet(20_000, 3);
        self.transmit.send_indirect(&sent, 2048).unwrap();
        let direct = self.poll_beside(1000);
        let received = self.receive();
        assert_eq!(received.len(), 1);
        assert!(received[0].1 == sent[HEADER..], "the packet has changed");
        self.refill(&[2048]);
        direct == 1
    }
}
