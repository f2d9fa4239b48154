//! The state of the task of a transmit ring that does not depend on the port.

use crate::card::counters::RingCounters;
use crate::card::state::CardState;
use crate::frame::header::{Frame, InvalidFrame};
use crate::frame::loop_queue::{Batch, HEADER};
use crate::ring::buffers;
use kickless_device::{ShowAfter, Traffic, Vring};
use kickless_net_port::Direction;
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// The most frames that are taken together. So many lines can be on their way from the driver's core at the
/// same time.
pub(crate) const BATCH: usize = 32;

/// The properties of a transmit ring that do not change while it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransmitFormat {
    /// The features in force.
    pub(crate) features: NetFeatures,
    /// Length of the header of each frame.
    pub(crate) header_len: usize,
}

/// A transmit ring, its place in the card, and the chain that was popped last.
pub(crate) struct TransmitRing {
    pub(crate) vring: Vring,
    pub(crate) card: Arc<CardState>,
    pub(crate) pair: u16,
    pub(crate) format: TransmitFormat,
    /// Frames of a ring that is not enabled are discarded.
    pub(crate) is_enabled: bool,
    pub(crate) chain: Chain,
}

impl TransmitRing {
    pub(crate) fn new(mut vring: Vring, card: Arc<CardState>, pair: u16, format: TransmitFormat) -> Self {
        // A driver does not wait for sent frames. It collects their used elements when it needs room in the
        // ring.
        vring.show_after(ShowAfter::Publish);
        Self { vring, card, pair, format, is_enabled: true, chain: Chain::default() }
    }

    pub(crate) fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Checks the frame in the popped chain. Returns `None` if it is to be dropped, which it counts then: the
    /// ring is not enabled, or the frame is invalid.
    pub(crate) fn parse(&self) -> Option<(Header, Frame)> {
        if !self.is_enabled {
            self.counters().sent_disabled.add(1);
            return None;
        }
        self.parse_header().inspect_err(|error| self.count_invalid(*error)).ok()
    }

    /// Copies and checks the header of the frame.
    fn parse_header(&self) -> Result<(Header, Frame), InvalidFrame> {
        let (header_len, features) = (self.format.header_len, self.format.features);
        let mut header = Header::default();
        match self.read(&mut header.as_mut_bytes()[..header_len]) {
            Ok(len) if len == header_len => {
                let frame = Frame::parse(&header, header_len, self.chain.readable_len(), features)?;
                Ok((frame.header(&header), frame))
            }
            _ => Err(InvalidFrame::Short),
        }
    }

    /// Copies the first bytes of the popped chain, its header included. Returns their number.
    ///
    /// # Errors
    /// A buffer is not in guest memory.
    pub(crate) fn read(&self, into: &mut [u8]) -> Result<usize, InvalidFrame> {
        buffers::read(self.chain.readable(), self.vring.view(), into).map_err(|_| InvalidFrame::Short)
    }

    /// Adds a frame to the capture, if that is on.
    pub(crate) fn capture(&self, frame: &[u8]) {
        self.card.capture(Direction::Outbound, self.pair, frame.len(), |into| {
            into.copy_from_slice(&frame[..into.len()]);
        });
    }

    /// Returns the traffic that the limits of the card hold. Frames that are discarded have none.
    pub(crate) fn traffic(&self) -> Option<Traffic> {
        self.is_enabled.then_some(Traffic::Frames(kickless_device::Direction::Write))
    }

    /// Adds the frames of a batch to the capture, if that is on. Empties the batch and returns `false` if
    /// guest memory has lost pages: zeroes may be in the place of their bytes.
    pub(crate) fn keeps_batch(&mut self, batch: &mut Batch) -> bool {
        let is_intact = self.vring.is_intact();
        if !is_intact {
            batch.clear();
        } else if self.card.capture.is_on() {
            self.capture_batch(batch);
        }
        is_intact
    }

    #[cold]
    fn capture_batch(&self, batch: &Batch) {
        let frames = batch.frames(0, 0).map(|frame| {
            let frame = &frame[HEADER..];
            (frame.len(), |into: &mut [u8]| into.copy_from_slice(&frame[..into.len()]))
        });
        self.card.capture.add(Direction::Outbound, self.pair, frames);
    }

    /// Counts frames with this number of bytes in all that were passed on.
    #[inline]
    pub(crate) fn count_sent(&self, frames: u64, bytes: u64) {
        self.counters().sent_frames.add(frames);
        self.counters().sent_bytes.add(bytes);
        self.vring.charge(kickless_device::Direction::Write, frames, bytes);
    }

    /// Counts a packet of this length that was passed on as `segments` frames. Each counts for limits.
    pub(crate) fn count_segmented(&self, bytes: u64, segments: usize) {
        self.count_sent(1, bytes);
        let more = segments.saturating_sub(1) as u64;
        self.counters().sent_segments.add(more);
        self.vring.charge(kickless_device::Direction::Write, more, 0);
    }

    /// Counts a frame that the driver should not have sent, or that would become too many segments.
    pub(crate) fn count_invalid(&self, error: InvalidFrame) {
        debug!(queue = self.vring.index(), head = self.chain.id.head(), %error, "frame dropped");
        if error == InvalidFrame::Segments {
            // Its header is valid: the maximum segment size of a TCP connection may be that small.
            self.counters().sent_refused.add(1);
            return;
        }
        self.counters().sent_invalid.add(1);
        self.vring.counters().errors.add(1);
    }
}
