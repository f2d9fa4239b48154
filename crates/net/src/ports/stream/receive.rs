//! Takes the frames of a stream socket, which have no offloads.

use crate::ports::port_poll::Taken;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_net_port::{Received, StreamReceiver};
use kickless_spec::net::Header;
use std::os::fd::{AsFd, BorrowedFd};

const HEADER: usize = size_of::<Header>();

/// Receives the frames of a stream.
pub(crate) struct StreamSource(StreamReceiver);

impl StreamSource {
    pub(crate) fn new(receiver: StreamReceiver) -> Self {
        Self(receiver)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Delivers the next frame. Reads from the socket only if the port `is_due`.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::pop_credit`], or the turn is over.
    pub(crate) fn take(&mut self, ring: &mut ReceiveRing, is_due: bool) -> Result<Taken, Next> {
        let mut incoming = self.0.turn();
        match incoming.find(is_due) {
            Received::Frame => {}
            Received::Nothing => return Ok(Taken::Nothing),
            Received::More => return Err(Next::More),
        }
        let bytes = incoming.frame();
        let taken = if !ring.takes(&bytes[HEADER..]) {
            Taken::Dropped
        } else {
            let header_len = ring.format.header_len;
            let bytes = &mut bytes[HEADER - header_len..];
            bytes[..header_len].fill(0);
            match ring.deliver(bytes)? {
                true => Taken::Delivered(1),
                false => Taken::Dropped,
            }
        };
        incoming.consume();
        Ok(taken)
    }
}
