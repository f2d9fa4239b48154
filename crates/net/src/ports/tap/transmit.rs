//! Sends frames to a TAP (`docs/adr/0012-a-frame-is-read-whole.md`).

use super::state::TapState;
use crate::frame::loop_queue::HEADER;
use crate::ports::transmit::{Put, PutError, Transmit};
use kickless_device::{Event, Interest};
use kickless_memory::Iov;
use kickless_net_port::{SendError, TapQueue};
use kickless_spec::net::{FRAME_MAX, HEADER_NUM_BUFFERS, Header, NetFeatures};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Sends frames to one queue of a TAP.
pub(crate) struct TapTransmit {
    tap: Arc<TapState>,
    queue: TapQueue,
    /// Space for a frame behind its header.
    copy: Box<[u8]>,
    accepts: NetFeatures,
}

impl TapTransmit {
    /// Takes the queue of a pair.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub(crate) fn new(tap: Arc<TapState>, pair: u16) -> io::Result<Self> {
        let queue = tap.tap.queue(pair)?;
        let mut accepts = NetFeatures::GUEST_OFFLOADS;
        accepts.set(NetFeatures::GUEST_USO4 | NetFeatures::GUEST_USO6, tap.tap.segments_udp());
        Ok(Self { tap, queue, copy: vec![0; FRAME_MAX].into_boxed_slice(), accepts })
    }

    /// Returns the reason for which a frame was not put.
    #[cold]
    #[inline(never)]
    fn failure(&self, error: SendError) -> PutError {
        match error {
            SendError::Full => PutError::Full,
            SendError::Refused(_) => PutError::Refused,
            SendError::Down => PutError::Down,
            SendError::Gone => {
                self.tap.report_gone();
                PutError::Down
            }
        }
    }
}

impl Transmit for TapTransmit {
    const BATCHED_LEN_MAX: usize = HEADER + TapQueue::COPIED_MAX;
    /// Each is a system call, of up to some microseconds.
    const FRAMES_MAX: u32 = 64;
    const MAY_REFUSE: bool = true;
    const PIECES_LEN_MIN: Option<u32> = Some(TapQueue::COPIED_MAX as u32 + 1);

    #[inline]
    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        let frame = &mut self.copy[..len];
        write(frame)?;
        if self.tap.is_gone() {
            return Err(PutError::Down);
        }
        // It has no meaning in a sent frame.
        frame[HEADER_NUM_BUFFERS..HEADER].fill(0);
        self.queue.send_whole(frame).map_err(|error| self.failure(error))
    }

    fn put_pieces(&mut self, header: &Header, frame: &Iov) -> Option<Put> {
        if TapQueue::is_too_scattered(frame) {
            return None;
        }
        if self.tap.is_gone() {
            return Some(Err(PutError::Down));
        }
        let sent = self.queue.send(header, frame);
        Some(sent.map_err(|error| self.failure(error)))
    }

    fn accepts(&self) -> NetFeatures {
        self.accepts
    }

    fn event(&self, is_refused: bool) -> Option<Event<'_>> {
        let interest = if is_refused { Interest::Writable } else { Interest::None };
        Some(Event { fd: self.queue.as_fd(), interest })
    }
}
