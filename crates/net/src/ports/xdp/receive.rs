//! Takes the frames of a queue of an interface, which have no offloads.

use crate::frame::held::HeldFrame;
use crate::ports::port_poll::Taken;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_net_port::XdpQueue;
use kickless_spec::net::{Header, NetFeatures};
use std::os::fd::{AsFd, BorrowedFd};

const HEADER: usize = size_of::<Header>();

/// Receives the frames of a queue.
pub(crate) struct XdpSource(XdpQueue);

impl XdpSource {
    /// Takes the queue. Discards the frames that came before, which were for no driver, or for an earlier
    /// one.
    pub(crate) fn new(queue: XdpQueue) -> Self {
        queue.turn().discard();
        Self(queue)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Delivers the next frame from the memory that the kernel has written. Holds a copy of it if it has
    /// to wait for chains, so that the kernel gets its memory back. A look costs no call.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::pop_credit`].
    pub(crate) fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame) -> Result<Taken, Next> {
        let taken = self.0.turn().receive(|bytes| deliver(ring, held, bytes));
        taken.unwrap_or(Ok(Taken::Nothing))
    }
}

/// Delivers a frame that has space for a header before it.
fn deliver(ring: &mut ReceiveRing, held: &mut HeldFrame, bytes: &mut [u8]) -> Result<Taken, Next> {
    if !ring.takes(&bytes[HEADER..]) {
        return Ok(Taken::Dropped);
    }
    let header_len = ring.format.header_len;
    let with_header = &mut bytes[HEADER - header_len..];
    with_header[..header_len].fill(0);
    match ring.deliver(with_header) {
        Ok(true) => Ok(Taken::Delivered(1)),
        Ok(false) => Ok(Taken::Dropped),
        Err(next) => {
            // The ring has dropped a frame that is longer than the driver takes, so this one fits.
            let frame = &bytes[HEADER..];
            held.space()[..frame.len()].copy_from_slice(frame);
            // A header without offloads describes each frame.
            let _ = held.hold(&Header::default(), frame.len(), NetFeatures::empty());
            Err(next)
        }
    }
}
