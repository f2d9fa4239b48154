//! Takes the frames of a stream socket, which have no offloads.

use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::ports::receive::Receive;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_net_port::{Received, StreamReceiver};
use kickless_spec::net::Header;
use std::os::fd::{AsFd, BorrowedFd};

const HEADER: usize = size_of::<Header>();

/// Receives the frames of a stream.
pub(crate) struct StreamReceive(pub(super) StreamReceiver);

impl Receive for StreamReceive {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    /// Reads from the socket only if the port `is_due`.
    fn take(&mut self, ring: &mut ReceiveRing, _: &mut HeldFrame, is_due: bool) -> Result<Taken, Next> {
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
