//! Sends frames over a stream socket.
//!
//! The peer knows no offloads. A frame is copied while less than the longest frame waits for the peer. So no
//! chain waits for a peer that stops reading: the frames behind stay in the ring, and a stop takes none with
//! it.
//!
//! The segments of a packet wait for the peer together. They have at most twice the bytes of the longest
//! frame ([`SEGMENTED_BYTES_MAX`](crate::offload::SEGMENTED_BYTES_MAX)), so at most three times as many wait
//! in all.

use crate::frame::loop_queue::HEADER;
use crate::ports::transmit::{Put, PutError, Transmit};
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Event, Interest, Next, Polled};
use kickless_net_port::StreamSender;
use kickless_spec::net::FRAME_MAX;
use std::os::fd::AsFd;

/// Sends frames over a stream.
pub(crate) struct StreamTransmit {
    sender: StreamSender,
    /// Space for a frame behind its header.
    copy: Box<[u8]>,
    /// Frames wait for the peer.
    is_waiting: bool,
}

impl StreamTransmit {
    pub(crate) fn new(sender: StreamSender) -> Self {
        Self { sender, copy: vec![0; FRAME_MAX].into_boxed_slice(), is_waiting: false }
    }
}

impl Transmit for StreamTransmit {
    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        let frame = &mut self.copy[..len];
        write(frame)?;
        let mut outgoing = self.sender.turn();
        if !outgoing.is_connected() {
            return Err(PutError::Down);
        }
        outgoing.push(&frame[HEADER..]);
        Ok(())
    }

    /// The peer may take what waits.
    fn make_room(&mut self, _ring: &mut TransmitRing, _len: usize) -> Result<(), Next> {
        let mut outgoing = self.sender.turn();
        if !outgoing.has_room() {
            outgoing.flush();
        }
        if outgoing.has_room() { Ok(()) } else { Err(Next::Quiet) }
    }

    fn end(&mut self, _ring: &mut TransmitRing, polled: &mut Polled, _far_side_due: bool) {
        let mut outgoing = self.sender.turn();
        outgoing.flush();
        self.is_waiting = outgoing.is_waiting();
        if polled.next == Next::Quiet && !self.is_waiting {
            // The peer has taken all since the last look, so no event comes.
            polled.next = Next::More;
        }
    }

    fn event(&self, _is_refused: bool) -> Option<Event<'_>> {
        let interest = if self.is_waiting { Interest::Readable } else { Interest::None };
        Some(Event { fd: self.sender.as_fd(), interest })
    }
}
