//! Sends the frames of a transmit ring over a stream socket.
//!
//! The peer knows no offloads, so the card completes checksums and segments packets. A frame is copied, and
//! its chain completed, while less than the longest frame waits for the peer. So no chain waits for a peer
//! that stops reading: the frames behind stay in the ring, and a stop takes none with it.
//!
//! A packet is segmented at once, and its segments wait for the peer together. They have at most twice the
//! bytes of the longest frame ([`SEGMENTED_BYTES_MAX`](crate::offload::SEGMENTED_BYTES_MAX)), so at most
//! three times as many wait in all.

use crate::frame::header::InvalidFrame;
use crate::offload::{Segments, Undo, complete_checksum, undo};
use crate::ports::port_poll::PORT_INTERVAL;
use crate::ring::cost;
use crate::ring::immediate::{self, ImmediateRing};
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Context, Event, Interest, Next, Polled, QueueTask, Vring};
use kickless_net_port::{Outgoing, StreamSender};
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use kickless_virtqueue::Chain;
use std::os::fd::AsFd;
use std::time::Duration;

const HEADER: usize = size_of::<Header>();
/// The most frames of one turn, so that the peer gets them while later ones are copied.
const FRAMES_MAX: u32 = 256;

/// The task of a transmit ring.
pub(crate) struct StreamTransmitTask {
    ring: TransmitRing,
    sender: StreamSender,
    /// Space for a frame behind its header, and for a segment of it.
    copy: Box<[u8]>,
    segment: Box<[u8]>,
    /// Frames wait for the peer.
    is_waiting: bool,
}

/// The end of a frame that the driver sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// So many segments of the packet have passed, none of which is longer than `len_max`.
    Segmented {
        count: usize,
        len_max: usize,
    },
    /// The packet is not what its header says, or would become too many segments.
    Refused,
    /// There is no connection.
    Down,
}

impl StreamTransmitTask {
    pub(crate) fn new(ring: TransmitRing, sender: StreamSender) -> Self {
        let space = || vec![0; FRAME_MAX].into_boxed_slice();
        Self { ring, sender, copy: space(), segment: space(), is_waiting: false }
    }

    /// Sends or drops the frame in the popped chain. Returns its cost.
    fn send_frame(&mut self) -> u32 {
        let cost = cost::of_frame(self.ring.chain.readable_len());
        let Some((header, frame)) = self.ring.parse() else { return cost };
        // Both lengths were checked.
        let (header_len, len) = (self.ring.format.header_len, frame.len as usize);
        if self.ring.read(&mut self.copy[HEADER - header_len..HEADER + len]).is_err() {
            self.ring.count_invalid(InvalidFrame::Short);
            return cost;
        }
        if !self.ring.vring.is_intact() {
            // Zeroes may be in the place of its bytes.
            return cost;
        }
        let bytes = &mut self.copy[HEADER..HEADER + len];
        self.ring.capture(bytes);
        match push(&mut self.sender.turn(), &header, bytes, &mut self.segment) {
            Outcome::Passed => self.ring.count_sent(1, frame.len.into()),
            Outcome::Segmented { count, len_max } => {
                self.ring.count_segmented(frame.len.into(), count);
                return cost.max(cost::of_segments(count, len_max));
            }
            Outcome::Refused => self.ring.counters().sent_refused.add(1),
            Outcome::Down => self.ring.counters().sent_down.add(1),
        }
        cost
    }

    /// Returns whether another frame may be copied. Makes room if the peer takes what waits.
    fn has_room(&self) -> bool {
        let mut outgoing = self.sender.turn();
        if !outgoing.has_room() {
            outgoing.flush();
        }
        outgoing.has_room()
    }

    fn flush(&mut self) {
        let mut outgoing = self.sender.turn();
        outgoing.flush();
        self.is_waiting = outgoing.is_waiting();
    }
}

/// Passes a frame on without offloads.
fn push(outgoing: &mut Outgoing<'_>, header: &Header, frame: &mut [u8], segment: &mut [u8]) -> Outcome {
    if !outgoing.is_connected() {
        return Outcome::Down;
    }
    match undo(header, frame, NetFeatures::empty()) {
        Undo::Nothing => {}
        Undo::Checksum(at) if complete_checksum(frame, at) => {}
        Undo::Checksum(_) => return Outcome::Refused,
        Undo::Segments => {
            let Some(mut segments) = Segments::of(header, frame) else { return Outcome::Refused };
            let (count, len_max) = (segments.count(frame), segments.len_max(frame));
            while let Some(len) = segments.write_next(frame, segment) {
                outgoing.push(&segment[..len]);
            }
            return Outcome::Segmented { count, len_max };
        }
    }
    outgoing.push(frame);
    Outcome::Passed
}

impl ImmediateRing for StreamTransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.ring.vring, &mut self.ring.chain)
    }

    fn serve(&mut self) -> u32 {
        let cost = if self.has_room() {
            self.send_frame()
        } else {
            // Only a ring that stops is served without room.
            self.ring.counters().dropped_late.add(1);
            1
        };
        self.ring.vring.push(self.ring.chain.id, 0);
        cost
    }

    fn pauses(&mut self, served: u32) -> Option<Next> {
        if served >= FRAMES_MAX {
            return Some(Next::More);
        }
        (!self.has_room()).then_some(Next::Quiet)
    }
}

impl QueueTask for StreamTransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        let mut polled = immediate::poll(self, budget);
        self.flush();
        if polled.next == Next::Quiet && !self.is_waiting {
            // The peer has taken all since the last look, so no event comes.
            polled.next = Next::More;
        }
        polled
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let interest = if self.is_waiting { Interest::Readable } else { Interest::None };
        Some(Event { fd: self.sender.as_fd(), interest })
    }

    fn far_side_interval(&self) -> Duration {
        PORT_INTERVAL
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.ring.is_enabled = is_enabled;
    }
}
