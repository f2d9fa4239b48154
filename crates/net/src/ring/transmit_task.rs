//! Takes the frames of a transmit ring for a port that takes each at once: the null port, the loop port and
//! the switch.

use crate::frame::header::{Frame, InvalidFrame, has_no_offload, pass_header, segments_max, set_header};
use crate::frame::loop_queue::{Batch, HEADER};
use crate::ports::card_port::CardPort;
use crate::ports::switch::Forwarder;
use crate::ports::switch::direct::{self, Direct};
use crate::ring::cost::{self, BatchCost};
use crate::ring::immediate::{self, Beside, ImmediateRing, Served};
use crate::ring::transmit_ring::{BATCH, TransmitRing};
use kickless_device::{Context, LEAVING_COST, Neighbours, Next, Polled, QueueTask, TaskLocation, Vring};
use kickless_net_port::Direction;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header, NetFeatures};
use kickless_virtqueue::device::{self, SingleChain};
use kickless_virtqueue::{Buffer, Chain};

/// The task of a transmit ring.
pub(crate) struct TransmitTask {
    ring: TransmitRing,
    /// Space for the chains of a batch.
    chains: Box<[SingleChain; BATCH]>,
    /// Frames for a loop port or a switch, until the end of the poll.
    batch: Batch,
    forwarder: Forwarder,
    direct: Direct,
    /// The cost of the work of this poll beyond that of its frames: copies that the switch made, and offers
    /// that were refused.
    copied: u32,
    /// The most that this poll may cost.
    limit: u32,
}

impl TransmitTask {
    pub(crate) fn new(ring: TransmitRing) -> Self {
        let (batch, forwarder, direct) = (Batch::default(), Forwarder::default(), Direct::default());
        Self { ring, chains: Box::default(), batch, forwarder, direct, copied: 0, limit: 0 }
    }

    /// Checks and counts the frame in the popped chain, passes it on, and completes the chain.
    fn take_frame(&mut self, neighbours: Beside<'_, '_>) -> Served {
        let (mut shares, mut segments) = (1, 0);
        if let Some((header, frame)) = self.ring.parse() {
            if let Some(neighbours) = neighbours
                && frame.len >= direct::LEN_MIN_POPPED
                && self.send_popped_directly(neighbours, &header, frame.len)
            {
                shares = direct::SHARES;
            } else {
                // The receiver may not accept the packet as it is.
                segments = frame.segments_max();
                match self.pass_on(&header, frame) {
                    Ok(()) => self.ring.count_sent(1, frame.len.into()),
                    Err(error) => self.ring.count_invalid(error),
                }
            }
        }
        self.ring.vring.push(self.ring.chain.id, 0);
        let cost = shares * cost::of_packet(self.ring.chain.readable_len(), segments);
        Served { chains: 1, cost, frames: shares }
    }

    /// Copies the frame for a loop port or a switch.
    fn pass_on(&mut self, header: &Header, frame: Frame) -> Result<(), InvalidFrame> {
        if !self.ring.card.collects_frames() {
            return Ok(());
        }
        // Lossless, because a frame is no longer than that.
        let (header_len, len) = (self.ring.format.header_len, frame.len as usize);
        if !self.batch.has_room(HEADER + len, 1) {
            // No other frames wait, because `pauses` was asked before the chain was popped. A ring that stops
            // has few frames.
            self.send_batch(0);
        }
        let space = self.batch.push(HEADER + len);
        let read = self.ring.read(&mut space[HEADER - header_len..]);
        set_header(space, header);
        if read.is_err() {
            self.batch.pop();
        }
        read.map(|_| ())
    }

    /// Checks the frame in a buffer, passes it on, and adds its cost. Returns `false`, and changes nothing,
    /// if the chain has to be popped to find out what is wrong.
    #[inline]
    fn take_single(&mut self, buffer: Buffer, collects: bool, cost: &mut BatchCost) -> bool {
        let len = buffer.len as usize;
        if !(HEADER + ETHERNET_HEADER_LEN..=FRAME_MAX).contains(&len) {
            return false;
        }
        if !collects {
            let header = self.ring.vring.view().read_obj::<Header>(buffer.addr);
            let features = self.ring.format.features;
            let is_passed = header.is_ok_and(|header| is_valid(&header, buffer.len, features));
            if is_passed {
                cost.add(len as u64);
            }
            return is_passed;
        }
        if !self.batch.has_room(len, 1) {
            if self.forwarder.has_waiting() {
                return false;
            }
            self.send_batch(0);
        }
        let space = self.batch.push(len);
        let read = self.ring.vring.view().read(buffer.addr, space);
        // From here on, only the copy counts.
        let is_passed = read.is_ok() && pass_header(space, len, self.ring.format.features);
        if is_passed {
            cost.add_packet(len as u64, segments_max(space));
        } else {
            self.batch.pop();
        }
        is_passed
    }

    /// Serves chains of a single descriptor together, until they cost `budget`.
    #[inline]
    fn take_batch(&mut self, neighbours: Beside<'_, '_>, budget: u32) -> Served {
        if !self.ring.is_enabled || self.ring.format.header_len != HEADER {
            return Served::default();
        }
        let count = self.ring.vring.peek(device::Direction::Readable, &mut *self.chains);
        if count == 0 {
            return Served::default();
        }
        if self.chains[0].buffer.len >= direct::LEN_MIN
            && let Some(neighbours) = neighbours
        {
            let served = self.send_directly(neighbours, count, budget);
            if served.chains > 0 {
                return served;
            }
        }
        let collects = self.ring.card.collects_frames();
        let has_limits = self.ring.card.limiter.is_on();
        let (mut frames, mut bytes, mut cost) = (0, 0, BatchCost::new(budget, has_limits));
        while frames < count && !cost.is_used_up() {
            let buffer = self.chains[frames].buffer;
            if !self.take_single(buffer, collects, &mut cost) {
                break;
            }
            let len = u64::from(buffer.len);
            (frames, bytes) = (frames + 1, bytes + len - HEADER as u64);
        }
        self.ring.vring.complete_peeked(&self.chains[..frames]);
        self.ring.count_sent(frames as u64, bytes);
        let frames = frames as u32;
        Served { chains: frames, cost: cost.cost(), frames }
    }

    /// Offers the peeked chains to a receiver on the same worker, if this is a port of a switch. Completes
    /// those that it has taken.
    #[inline(never)]
    fn send_directly(&mut self, neighbours: &mut dyn Neighbours, count: usize, budget: u32) -> Served {
        if !self.may_send_directly() {
            return Served::default();
        }
        let Self { ring, chains, forwarder, direct, copied, .. } = self;
        let CardPort::Switch(port) = &ring.card.port else { return Served::default() };
        let answer = direct.offer(port, ring, &chains[..count], forwarder, neighbours, budget);
        *copied = copied.saturating_add(answer.cost);
        let taken = answer.taken as usize;
        let (mut bytes, mut cost) = (0, BatchCost::new(u32::MAX, false));
        for chain in &chains[..taken] {
            let len = u64::from(chain.buffer.len);
            cost.add(len);
            bytes += len - HEADER as u64;
        }
        ring.vring.complete_peeked(&chains[..taken]);
        ring.count_sent(taken as u64, bytes);
        ring.counters().sent_directly.add(taken as u64);
        // Lossless, because a batch has few frames.
        let frames = taken as u32;
        Served { chains: frames, cost: direct::SHARES * cost.cost(), frames: direct::SHARES * frames }
    }

    /// Offers the frame in the popped chain, of `len` bytes and with this header to pass on, to a receiver on
    /// the same worker. Returns whether this has taken it, and counts it then.
    #[inline(never)]
    fn send_popped_directly(&mut self, neighbours: &mut dyn Neighbours, header: &Header, len: u32) -> bool {
        if !self.may_send_directly() {
            return false;
        }
        let Self { ring, forwarder, direct, copied, .. } = self;
        let CardPort::Switch(port) = &ring.card.port else { return false };
        let answer = direct.offer_popped(port, ring, header, len, forwarder, neighbours);
        *copied = copied.saturating_add(answer.cost);
        let is_taken = answer.taken > 0;
        if is_taken {
            ring.count_sent(1, len.into());
            ring.counters().sent_directly.add(1);
        }
        is_taken
    }

    /// Returns whether the next frame may be offered. Earlier frames go first, and a capture or a limiter
    /// needs all of them in a batch.
    fn may_send_directly(&self) -> bool {
        let card = &self.ring.card;
        self.batch.len() == 0
            && !self.forwarder.has_waiting()
            && !card.capture.is_on()
            && !card.limiter.is_on()
    }

    /// Passes on the frames of the batch, after others of this poll that cost so much.
    fn send_batch(&mut self, cost: u32) {
        let Self { ring, batch, forwarder, copied, limit, .. } = self;
        if !ring.vring.is_intact() {
            // Zeroes may be in the place of their bytes.
            return batch.clear();
        }
        if ring.card.capture.is_on() {
            capture_batch(ring, batch);
        }
        match &ring.card.port {
            CardPort::Switch(port) => {
                let left = limit.saturating_sub(copied.saturating_add(cost));
                let forwarded = port.forward(ring.pair, batch, forwarder, left);
                forwarded.count(ring.counters());
                *copied = copied.saturating_add(forwarded.copied);
            }
            _ => {
                if let Some(queue) = ring.card.loop_queue(ring.pair) {
                    let dropped = queue.send(batch) as u64;
                    ring.counters().dropped_late.add(dropped);
                }
                // The frames of a null port were collected for a capture.
                batch.clear();
            }
        }
    }

    /// Passes on frames that the switch had no time for in an earlier poll.
    #[cold]
    fn send_waiting(&mut self) {
        let Self { ring, forwarder, copied, limit, .. } = self;
        if let CardPort::Switch(port) = &ring.card.port {
            let forwarded = port.resume(ring.pair, forwarder, *limit);
            forwarded.count(ring.counters());
            *copied = copied.saturating_add(forwarded.copied);
        }
    }
}

#[cold]
fn capture_batch(ring: &TransmitRing, batch: &Batch) {
    let frames = batch.frames(0, 0).map(|frame| {
        let frame = &frame[HEADER..];
        (frame.len(), |into: &mut [u8]| into.copy_from_slice(&frame[..into.len()]))
    });
    ring.card.capture.add(Direction::Outbound, ring.pair, frames);
}

impl ImmediateRing for TransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.ring.vring, &mut self.ring.chain)
    }

    fn serve(&mut self) -> u32 {
        self.take_frame(None).cost
    }

    fn serve_beside(&mut self, neighbours: Beside<'_, '_>) -> Served {
        self.take_frame(neighbours)
    }

    /// The frames of an earlier batch go first.
    fn pauses(&mut self, _served: u32) -> Option<Next> {
        self.forwarder.has_waiting().then_some(Next::More)
    }

    #[inline]
    fn serve_batch(&mut self, neighbours: Beside<'_, '_>, budget: u32) -> Served {
        self.take_batch(neighbours, budget)
    }
}

/// Returns whether the header of a frame of `len` bytes, header included, is valid.
#[inline]
fn is_valid(header: &Header, len: u32, features: NetFeatures) -> bool {
    has_no_offload(header) || Frame::parse(header, HEADER, len.into(), features).is_ok()
}

impl QueueTask for TransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.limit = if budget == 0 { LEAVING_COST } else { budget };
        let mut left = budget;
        if self.forwarder.has_waiting() {
            self.send_waiting();
            if self.forwarder.has_waiting() || self.copied >= self.limit {
                return Polled { served: 0, cost: std::mem::take(&mut self.copied), next: Next::More };
            }
            left = budget.saturating_sub(self.copied);
        }
        let mut polled = immediate::poll_beside(self, left, context.neighbours.as_deref_mut());
        if self.batch.len() > 0 && !self.forwarder.has_waiting() {
            self.send_batch(polled.cost);
        }
        polled.cost = polled.cost.saturating_add(std::mem::take(&mut self.copied));
        if self.forwarder.has_waiting() {
            polled.next = Next::More;
        }
        polled
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.forwarder.worker_id = location.map(|location| location.worker_id);
        self.forwarder.is_near = false;
    }

    fn offers_parcels(&self) -> bool {
        matches!(self.ring.card.port, CardPort::Switch(_))
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.ring.is_enabled = is_enabled;
    }
}
