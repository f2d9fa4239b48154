//! Takes the frames of a queue of an interface, which have no offloads.

use super::queues::XdpQueues;
use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::ports::receive::Receive;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_net_port::XdpQueue;
use kickless_spec::net::{Header, NetFeatures};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

const HEADER: usize = size_of::<Header>();

/// Receives the frames of a queue.
pub(super) struct XdpReceive {
    queues: Arc<XdpQueues>,
    queue: XdpQueue,
}

impl XdpReceive {
    /// Takes the queue of a pair. Discards the frames that came before, which were for no driver, or for an
    /// earlier one.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub(super) fn new(queues: Arc<XdpQueues>, pair: u16) -> io::Result<Self> {
        let queue = queues.queues.queue(pair)?;
        queue.turn().discard();
        Ok(Self { queues, queue })
    }
}

impl Receive for XdpReceive {
    /// Delivers the frame from the memory that the kernel has written. Holds a copy of it if it has to wait
    /// for chains, so that the kernel gets its memory back. A look costs no call.
    fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame, _is_due: bool) -> Result<Taken, Next> {
        let taken = self.queue.turn().receive(|bytes| deliver(ring, held, bytes));
        taken.unwrap_or(Ok(Taken::Nothing))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.queue.as_fd())
    }

    fn is_gone(&self) -> bool {
        self.queues.is_gone()
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
