//! Sends the frames of a transmit ring to a TAP (`docs/adr/0012-a-frame-is-read-whole.md`).
//!
//! Short frames of one buffer each are copied and sent in batches. Their chains stay in the ring meanwhile.
//!
//! The chain of another frame is credit until it was sent. If the TAP has no room for a frame, its chain is
//! credit, and the task waits for the TAP alone. A stop or new memory returns the chain to the ring, and its
//! frame is sent later.

use crate::frame::header::{
    Checksum, Frame, InvalidFrame, Protocol, Segmentation, pass_header, segments_max,
};
use crate::frame::loop_queue::HEADER;
use crate::offload::datagrams::Datagrams;
use crate::ports::card_port::{CardPort, TapPort};
use crate::ports::port_poll::PORT_INTERVAL;
use crate::ring::cost;
use crate::ring::immediate::{self, ImmediateRing, POPS};
use crate::ring::transmit_ring::{BATCH, TransmitRing};
use kickless_device::{Context, Event, Interest, Next, Polled, QueueTask, Vring};
use kickless_io::Engine;
use kickless_memory::Iov;
use kickless_net_port::{Direction, SendError, TapQueue};
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, GSO_UDP_L4, HEADER_NUM_BUFFERS, Header};
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::{self, SingleChain};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::Duration;
use zerocopy::FromBytes;

/// The most frames of one turn. Each is a system call, of up to some microseconds.
const FRAMES_MAX: u32 = 64;
const UDP_HEADER: usize = 8;

/// The task of a transmit ring.
pub(crate) struct TapTransmitTask {
    ring: TransmitRing,
    queue: TapQueue,
    /// The TAP had no room for the frame in the ring's chain, which is credit.
    is_refused: bool,
    frame: Iov,
    /// Space for a frame in more pieces than one call takes, and for one that the card segments.
    copy: Box<[u8]>,
    /// Space for the chains of a batch.
    chains: Box<[SingleChain; BATCH]>,
    /// The length of the frame in `copy`.
    copied: usize,
    /// The datagrams of the frame in `copy`. Only on kernels that do not segment UDP.
    datagrams: Option<Datagrams>,
}

impl TapTransmitTask {
    pub(crate) fn new(ring: TransmitRing, queue: TapQueue) -> Self {
        let segments_udp = match &ring.card.port {
            CardPort::Tap(port) => port.tap.segments_udp(),
            _ => true,
        };
        Self {
            ring,
            queue,
            is_refused: false,
            frame: Iov::default(),
            copy: vec![0; FRAME_MAX - size_of::<Header>()].into_boxed_slice(),
            chains: Box::default(),
            copied: 0,
            datagrams: (!segments_udp).then(Datagrams::new),
        }
    }

    fn port(&self) -> Option<&TapPort> {
        match &self.ring.card.port {
            CardPort::Tap(port) => Some(port),
            _ => None,
        }
    }

    /// Sends or drops the frame in the popped chain, and adds its cost. Returns `false` if the TAP has no
    /// room for it.
    fn send_frame(&mut self, cost: &mut u32) -> bool {
        let parsed = self.ring.parse();
        *cost = cost.saturating_add(self.cost_of(parsed.as_ref().map(|(_, frame)| frame)));
        let Some((header, frame)) = parsed else { return true };
        let sent = self.collect(frame).map(|()| self.send(&header));
        if sent.is_ok() && !matches!(sent, Ok(Err(SendError::Full))) {
            self.ring.card.capture(Direction::Outbound, self.ring.pair, frame.len as usize, |into| {
                self.frame.read(0, into);
            });
        }
        let (_, marks) = self.ring.vring.memory();
        self.frame.clear(marks);
        match sent {
            Ok(Ok(())) => {
                let datagrams = self.datagrams.as_ref().filter(|_| header.gso_type == GSO_UDP_L4);
                self.ring.count_segmented(frame.len.into(), datagrams.map_or(1, Datagrams::count));
            }
            Ok(Err(SendError::Full)) => return false,
            Ok(Err(error)) => self.count_failure(error),
            Err(error) => self.ring.count_invalid(error),
        }
        true
    }

    /// Returns the cost of the popped chain. The kernel may segment its packet while the card sends it. The
    /// card makes the datagrams of UDP itself if it has space for them.
    fn cost_of(&self, frame: Option<&Frame>) -> u32 {
        let chain = &self.ring.chain;
        let (len, segments) = (chain.readable_len(), frame.map_or(0, Frame::segments_max));
        let datagrams = match frame.map(|frame| (frame.segmentation, frame.checksum)) {
            Some((
                Some(Segmentation { protocol: Protocol::Udp, size, .. }),
                Some(Checksum { start, .. }),
            )) if self.datagrams.is_some() => {
                let headers = usize::from(start) + UDP_HEADER;
                cost::of_segments(segments as usize, (headers + usize::from(size)).min(FRAME_MAX))
            }
            _ => 0,
        };
        let of_frame = cost::of_packet(len, segments).max(datagrams);
        of_frame + u32::from(chain.descriptors() / cost::DESCRIPTORS_PER_COST)
    }

    /// Puts the buffers of the frame, without its header, into `self.frame`.
    fn collect(&mut self, frame: Frame) -> Result<(), InvalidFrame> {
        let (mut header_left, mut left) = (self.ring.format.header_len as u64, u64::from(frame.len));
        for buffer in self.ring.chain.readable() {
            let skipped = header_left.min(buffer.len.into());
            header_left -= skipped;
            // Lossless, because a buffer has at most 2^32 - 1 bytes.
            let len = left.min(u64::from(buffer.len) - skipped) as u32;
            left -= u64::from(len);
            let addr = buffer.addr.checked_add(skipped).ok_or(InvalidFrame::Short)?;
            self.frame.push(self.ring.vring.view(), addr, len).map_err(|_| InvalidFrame::Short)?;
        }
        Ok(())
    }

    fn send(&mut self, header: &Header) -> Result<(), SendError> {
        if self.port().is_none_or(TapPort::is_gone) {
            return Err(SendError::Gone);
        }
        let datagrams = self.datagrams.as_mut().filter(|_| header.gso_type == GSO_UDP_L4);
        let is_sending = datagrams.as_ref().is_some_and(|datagrams| datagrams.is_sending());
        let is_copied = datagrams.is_some() || TapQueue::is_too_scattered(&self.frame);
        if is_copied && !is_sending {
            self.copied = self.frame.read(0, &mut self.copy);
        }
        if !self.ring.vring.is_intact() {
            // As the kernel answers if it finds a lost page first. We have read zeroes in its place.
            return Err(SendError::Refused(Errno::FAULT));
        }
        let copy = &self.copy[..self.copied];
        match datagrams {
            Some(datagrams) => datagrams.send(&mut self.queue, header, copy),
            None if is_copied => self.queue.send_copy(header, copy),
            None => self.queue.send(header, &self.frame),
        }
    }

    /// Forgets the frame that the TAP had no room for. Its chain is in the ring again.
    fn forget_refused(&mut self) {
        self.is_refused = false;
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.forget();
        }
    }

    /// Sends short frames of one buffer each until they cost `budget`. Returns their number and their cost: 0
    /// and 0 if the next chain has to be popped.
    ///
    /// Their chains stay in the ring until the TAP has the frames.
    fn send_batch(&mut self, max: usize, budget: u32) -> (u32, u32) {
        let is_gone = self.port().is_none_or(TapPort::is_gone);
        let TransmitRing { vring, card, format, is_enabled, .. } = &mut self.ring;
        if !*is_enabled || format.header_len != HEADER || card.capture.is_on() || is_gone {
            return (0, 0);
        }
        let max = max.min(BATCH);
        let count = vring.peek(device::Direction::Readable, &mut self.chains[..max]);
        let features = self.ring.format.features;
        let (mut frames, mut sent, mut bytes, mut cost) = (0, 0, 0, 0);
        while frames < count && cost < budget {
            let buffer = self.chains[frames].buffer;
            let len = buffer.len as usize;
            if !(HEADER + ETHERNET_HEADER_LEN..=HEADER + TapQueue::COPIED_MAX).contains(&len) {
                break;
            }
            let copy = &mut self.copy[..len];
            let read = self.ring.vring.view().read(buffer.addr, copy);
            let is_valid = read.is_ok() && pass_header(copy, len, features);
            // Zeroes are in the place of bytes that memory has lost.
            if !is_valid
                || !self.ring.vring.is_intact()
                || (self.datagrams.is_some() && is_udp_segmentation(copy))
            {
                break;
            }
            let segments = segments_max(copy);
            // It has no meaning in a sent frame.
            copy[HEADER_NUM_BUFFERS..HEADER].fill(0);
            // The lines of the next frame come from the driver's processor during the system call.
            if let Some(SingleChain { buffer, .. }) = self.chains[..count].get(frames + 1) {
                let len = TapQueue::COPIED_MAX.min(buffer.len as usize);
                self.ring.vring.view().prefetch_rest(buffer.addr, len);
            }
            match self.queue.send_whole(copy) {
                Ok(()) => (sent, bytes) = (sent + 1, bytes + (len - HEADER) as u64),
                Err(SendError::Full) => break,
                Err(error) => self.count_failure(error),
            }
            (frames, cost) = (frames + 1, cost + cost::of_packet(len as u64, segments));
        }
        self.ring.vring.complete_peeked(&self.chains[..frames]);
        self.ring.count_sent(sent, bytes);
        (frames as u32, cost)
    }

    /// Counts a frame that the TAP has refused for good.
    fn count_failure(&self, error: SendError) {
        match error {
            SendError::Full => {}
            SendError::Refused(_) => self.ring.counters().sent_refused.add(1),
            SendError::Down => self.ring.counters().sent_down.add(1),
            SendError::Gone => {
                self.ring.counters().sent_down.add(1);
                self.ring.card.report_gone();
            }
        }
    }

    /// Completes the chain, whose frame is gone. Returns `false` if the ring does not accept this now.
    fn complete(&mut self) -> bool {
        if !self.ring.vring.use_credit(1) {
            self.return_credit();
            return false;
        }
        self.ring.vring.push(self.ring.chain.id, 0);
        true
    }

    /// Sends frames until they cost `budget`.
    fn send_frames(&mut self, is_due: bool, budget: u32) -> Polled {
        let (mut served, mut cost) = (0, 0u32);
        let mut pops = 0;
        let next = loop {
            if self.is_refused && !is_due {
                break Next::Quiet;
            }
            if cost >= budget || served >= FRAMES_MAX {
                break Next::More;
            }
            if !self.is_refused && pops == 0 {
                let (frames, batch_cost) = self.send_batch((FRAMES_MAX - served) as usize, budget - cost);
                if frames > 0 {
                    served += frames;
                    cost = cost.saturating_add(batch_cost);
                    continue;
                }
                pops = POPS;
            }
            pops = pops.saturating_sub(1);
            if !self.is_refused {
                let TransmitRing { vring, chain, .. } = &mut self.ring;
                let popped = vring.pop_credit(chain);
                if vring.has_cost() {
                    cost = cost.saturating_add(vring.take_cost());
                }
                if !popped {
                    break if vring.take_unfinished() { Next::More } else { Next::Idle };
                }
            }
            self.is_refused = !self.send_frame(&mut cost);
            if self.is_refused {
                break Next::Quiet;
            }
            self.forget_refused();
            if !self.complete() {
                break Next::Idle;
            }
            served += 1;
        };
        Polled { served, cost, next }
    }
}

/// Returns whether a header, with which the frame begins, asks for segmentation of UDP.
fn is_udp_segmentation(frame: &[u8]) -> bool {
    Header::read_from_prefix(frame).is_ok_and(|(header, _)| header.gso_type == GSO_UDP_L4)
}

/// Serves a ring that stops: sends the frames that an earlier process may have sent.
impl ImmediateRing for TapTransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.ring.vring, &mut self.ring.chain)
    }

    /// Drops the frame if the TAP has no room, because the chain is in flight.
    fn serve(&mut self) -> u32 {
        let mut cost = 0;
        if !self.send_frame(&mut cost) {
            self.ring.counters().dropped_late.add(1);
        }
        self.ring.vring.push(self.ring.chain.id, 0);
        cost
    }
}

impl QueueTask for TapTransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        // The ring may have returned the chain itself.
        if self.ring.vring.credit() == 0 {
            self.forget_refused();
        }
        if budget == 0 {
            self.return_credit();
            return immediate::poll(self, 0);
        }
        let polled = self.send_frames(context.far_side_due, budget);
        self.ring.vring.publish();
        polled
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let interest = if self.is_refused { Interest::Writable } else { Interest::None };
        Some(Event { fd: self.queue.as_fd(), interest })
    }

    fn far_side_interval(&self) -> Duration {
        PORT_INTERVAL
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn return_credit(&mut self) {
        self.ring.vring.unpop(self.ring.vring.credit());
        self.forget_refused();
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.ring.is_enabled = is_enabled;
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {
        let (_, marks) = self.ring.vring.memory();
        self.frame.release(marks);
    }
}
