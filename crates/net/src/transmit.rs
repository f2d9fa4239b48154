//! Takes the frames of a transmit ring for a port that takes each at once: the null port, the loop port and
//! the switch.

use crate::buffers;
use crate::card_port::CardPort;
use crate::card_state::CardState;
use crate::cost::{self, BatchCost};
use crate::counters::RingCounters;
use crate::frame::{Frame, InvalidFrame};
use crate::immediate_ring::{self, ImmediateRing};
use crate::loop_queue::{Batch, HEADER, PLAIN};
use crate::switch::Forwarder;
use kickless_device::{Context, Polled, QueueTask, ShowAfter, Vring};
use kickless_memory::View;
use kickless_net_port::Direction;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, GSO_NONE, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_virtqueue::device::{self, SingleChain};
use kickless_virtqueue::{Buffer, Chain};
use std::sync::Arc;
use tracing::debug;
use zerocopy::{FromBytes, IntoBytes};

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
    /// Space for the chains of a batch.
    chains: Box<[SingleChain; BATCH]>,
    /// Frames for a loop port or a switch, until the end of the poll.
    batch: Batch,
    forwarder: Forwarder,
    /// The cost of copies that the switch made in this poll.
    copied: u32,
}

impl TransmitTask {
    pub(crate) fn new(mut vring: Vring, card: Arc<CardState>, pair: u16, format: TransmitFormat) -> Self {
        // A driver does not wait for sent frames. It collects their used elements when it needs room in the
        // ring.
        vring.show_after(ShowAfter::Publish);
        let (chain, batch, forwarder) = (Chain::default(), Batch::default(), Forwarder::default());
        let chains = Box::default();
        Self { vring, card, pair, format, is_enabled: true, chain, chains, batch, forwarder, copied: 0 }
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

    /// Copies the frame for a loop port or a switch.
    fn pass_on(&mut self, header: &Header, frame: Frame) -> Result<(), InvalidFrame> {
        if !self.card.collects_frames() {
            return Ok(());
        }
        // Lossless, because a frame is no longer than that.
        let (header_len, len) = (self.format.header_len, frame.len as usize);
        if !self.batch.has_room(HEADER + len, 1) {
            self.send_batch();
        }
        let space = self.batch.push(HEADER + len);
        let read = buffers::read(self.chain.readable(), self.vring.view(), &mut space[HEADER - header_len..]);
        set_header(space, header);
        if read.is_err() {
            self.batch.pop();
            return Err(InvalidFrame::Short);
        }
        Ok(())
    }

    /// Checks the frame in a buffer and passes it on. Returns `false`, and changes nothing, if the chain has
    /// to be popped to find out what is wrong.
    #[inline]
    fn take_single(&mut self, buffer: Buffer, collects: bool) -> bool {
        let len = buffer.len as usize;
        if !(HEADER + ETHERNET_HEADER_LEN..=FRAME_MAX).contains(&len) {
            return false;
        }
        if !collects {
            let header = self.vring.view().read_obj::<Header>(buffer.addr);
            return header.is_ok_and(|header| is_valid(&header, buffer.len, self.format.features));
        }
        if !self.batch.has_room(len, 1) {
            self.send_batch();
        }
        let space = self.batch.push(len);
        let read = self.vring.view().read(buffer.addr, space);
        // From here on, only the copy counts.
        let is_passed = read.is_ok() && pass_header(space, self.format.features);
        if !is_passed {
            self.batch.pop();
        }
        is_passed
    }

    fn send_batch(&mut self) {
        if self.batch.len() > 0 && self.card.capture.is_on() {
            self.capture_batch();
        }
        match &self.card.port {
            CardPort::Switch(port) => {
                let forwarded = port.forward(self.pair, &mut self.batch, &mut self.forwarder);
                forwarded.count(self.counters());
                self.copied = self.copied.saturating_add(forwarded.copied);
            }
            CardPort::Peer(port) => {
                let is_down = !port.queues.outbox.is_open();
                let dropped = port.queues.outbox.send(&mut self.batch) as u64;
                let counters = self.counters();
                if is_down { counters.sent_down.add(dropped) } else { counters.dropped_late.add(dropped) }
            }
            _ => {
                if let Some(queue) = self.card.loop_queue(self.pair) {
                    let dropped = queue.send(&mut self.batch) as u64;
                    self.counters().dropped_late.add(dropped);
                }
                // The frames of a null port were collected for a capture.
                self.batch.clear();
            }
        }
    }

    #[cold]
    fn capture_batch(&self) {
        let frames = self.batch.frames(0, 0).map(|frame| {
            let frame = &frame[HEADER..];
            (frame.len(), |into: &mut [u8]| into.copy_from_slice(&frame[..into.len()]))
        });
        self.card.capture.add(Direction::Outbound, self.pair, frames);
    }
}

impl ImmediateRing for TransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.take_frame()
    }

    fn serve_batch(&mut self, budget: u32) -> (u32, u32) {
        if !self.is_enabled || self.format.header_len != HEADER {
            return (0, 0);
        }
        let count = self.vring.peek(device::Direction::Readable, &mut *self.chains);
        if count == 0 {
            return (0, 0);
        }
        let collects = self.card.collects_frames();
        let (mut frames, mut bytes, mut cost) = (0, 0, BatchCost::new(budget, self.card.limiter.is_on()));
        while frames < count && !cost.is_used_up() {
            let buffer = self.chains[frames].buffer;
            if !self.take_single(buffer, collects) {
                break;
            }
            let len = u64::from(buffer.len);
            cost.add(len);
            (frames, bytes) = (frames + 1, bytes + len - HEADER as u64);
        }
        self.vring.complete_peeked(&self.chains[..frames]);
        self.counters().sent_frames.add(frames as u64);
        self.counters().sent_bytes.add(bytes);
        (frames as u32, cost.cost())
    }
}

/// Sets the header of a frame of a batch.
fn set_header(frame: &mut [u8], header: &Header) {
    let header = Header { num_buffers: 1.into(), ..*header };
    frame[..HEADER].copy_from_slice(header.as_bytes());
}

/// Returns whether a header has no offload.
fn is_plain(header: &Header) -> bool {
    header.flags & HDR_F_NEEDS_CSUM == 0 && header.gso_type == GSO_NONE
}

/// Returns whether the header of a frame of `len` bytes, header included, is valid.
#[inline]
fn is_valid(header: &Header, len: u32, features: NetFeatures) -> bool {
    is_plain(header) || Frame::parse(header, HEADER, len.into(), features).is_ok()
}

/// Replaces the driver's header of a frame by the one to pass on. Returns `false` if the header is invalid.
#[inline]
pub(crate) fn pass_header(frame: &mut [u8], features: NetFeatures) -> bool {
    let Ok((header, _)) = Header::read_from_prefix(frame) else { return false };
    if is_plain(&header) {
        frame[..HEADER].copy_from_slice(&PLAIN);
        return true;
    }
    let parsed = Frame::parse(&header, HEADER, frame.len() as u64, features);
    parsed.map(|parsed| set_header(frame, &parsed.header(&header))).is_ok()
}

impl QueueTask for TransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        let mut polled = immediate_ring::poll(self, budget);
        self.send_batch();
        polled.cost = polled.cost.saturating_add(std::mem::take(&mut self.copied));
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
