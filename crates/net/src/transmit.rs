//! Takes the frames of a transmit ring for a port that takes each at once: the null port and the loop port.

use crate::buffers;
use crate::card_state::CardState;
use crate::cost;
use crate::counters::RingCounters;
use crate::frame::{Frame, InvalidFrame};
use crate::immediate_ring::{self, ImmediateRing};
use crate::loop_queue::{Batch, HEADER};
use kickless_device::{Context, Polled, QueueTask, ShowAfter, Vring};
use kickless_memory::View;
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// The properties of a transmit ring that do not change while it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransmitFormat {
    /// The features in force.
    pub(crate) features: NetFeatures,
    /// Length of the header of each frame.
    pub(crate) header_len: usize,
}

impl TransmitFormat {
    /// Copies and checks the header of the frame in `chain`.
    pub(crate) fn parse(&self, chain: &Chain, view: &View) -> Result<(Header, Frame), InvalidFrame> {
        let mut header = Header::default();
        let bytes = &mut header.as_mut_bytes()[..self.header_len];
        match buffers::read(chain.readable(), view, bytes) {
            Ok(len) if len == self.header_len => {
                let frame = Frame::parse(&header, self.header_len, chain.readable_len(), self.features)?;
                Ok((frame.header(&header), frame))
            }
            _ => Err(InvalidFrame::Short),
        }
    }
}

/// Counts a frame that the driver should not have sent.
pub(crate) fn count_invalid(vring: &Vring, counters: &RingCounters, chain: &Chain, error: InvalidFrame) {
    debug!(queue = vring.index(), head = chain.id.head(), %error, "frame dropped");
    counters.sent_invalid.add(1);
    vring.counters().errors.add(1);
}

/// The task of a transmit ring.
pub(crate) struct TransmitTask {
    vring: Vring,
    card: Arc<CardState>,
    pair: u16,
    format: TransmitFormat,
    is_enabled: bool,
    chain: Chain,
    /// Frames for a loop port, until the end of the poll.
    batch: Batch,
}

impl TransmitTask {
    pub(crate) fn new(mut vring: Vring, card: Arc<CardState>, pair: u16, format: TransmitFormat) -> Self {
        // A driver does not wait for sent frames. It collects their used elements when it needs room in the
        // ring.
        vring.show_after(ShowAfter::PUBLISH);
        let (chain, batch) = (Chain::default(), Batch::default());
        Self { vring, card, pair, format, is_enabled: true, chain, batch }
    }

    fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Checks and counts the frame in the popped chain, passes it on, and completes the chain. Returns the
    /// cost of the frame.
    fn take_frame(&mut self) -> u32 {
        let len = self.chain.readable_len();
        if !self.is_enabled {
            self.counters().sent_disabled.add(1);
        } else {
            let passed = self.format.parse(&self.chain, self.vring.view());
            match passed.and_then(|(header, frame)| self.pass_on(&header, frame).map(|()| frame)) {
                Ok(frame) => {
                    self.counters().sent_frames.add(1);
                    self.counters().sent_bytes.add(frame.len.into());
                }
                Err(error) => count_invalid(&self.vring, self.counters(), &self.chain, error),
            }
        }
        self.vring.push(self.chain.id, 0);
        cost::of_frame(len)
    }

    /// Copies the frame for a loop port.
    fn pass_on(&mut self, header: &Header, frame: Frame) -> Result<(), InvalidFrame> {
        if self.card.loop_queue(self.pair).is_none() {
            return Ok(());
        }
        // Lossless, because a frame is no longer than that.
        let (header_len, len) = (self.format.header_len, frame.len as usize);
        if !self.batch.has_room(HEADER + len, 1) {
            self.send_batch();
        }
        let space = self.batch.push(HEADER + len);
        let read = buffers::read(self.chain.readable(), self.vring.view(), &mut space[HEADER - header_len..]);
        space[..HEADER].copy_from_slice(header.as_bytes());
        if read.is_err() {
            self.batch.pop();
            return Err(InvalidFrame::Short);
        }
        Ok(())
    }

    fn send_batch(&mut self) {
        if let Some(queue) = self.card.loop_queue(self.pair) {
            let dropped = queue.send(&mut self.batch) as u64;
            self.counters().dropped_late.add(dropped);
        }
    }
}

impl ImmediateRing for TransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.take_frame()
    }
}

impl QueueTask for TransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        let polled = immediate_ring::poll(self, budget);
        self.send_batch();
        polled
    }

    fn in_flight(&self) -> usize {
        self.vring.resubmissions().into()
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.pair.into())
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
    }
}
