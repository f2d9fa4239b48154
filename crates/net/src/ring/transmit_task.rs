//! Takes the frames of a transmit ring for a port.
//!
//! Frames of one buffer are copied in batches, while their chains stay in the ring (`docs/adr/0015`). Others
//! are popped one by one. A port that may refuse a frame gets them as credit: the task then holds the chain
//! and waits for the port alone. A stop or new memory returns the chain to the ring, and its frame is sent
//! later.
//!
//! A packet whose segmentation the port does not take is copied, and its chain completed. The segments for
//! which the port has no room wait in memory of the card, of one packet at most.

mod batch;

use super::cost::{self, DESCRIPTORS_PER_COST, DIRECT_SHARES};
use super::transmit_ring::{BATCH, TransmitRing};
use crate::frame::header::{Frame, InvalidFrame, Protocol, set_header};
use crate::frame::loop_queue::{HEADER, PLAIN};
use crate::offload::{Segments, complete_checksum};
use crate::ports::transmit::{Put, PutError, Transmit};
use kickless_device::{
    Context, Event, LEAVING_COST, Neighbours, Next, Polled, QueueTask, TaskLocation, Traffic, Vring,
};
use kickless_memory::Iov;
use kickless_net_port::Direction;
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use kickless_virtqueue::device::SingleChain;
use std::time::Duration;

/// The offloads of a port that takes all of them.
const ALL: NetFeatures = NetFeatures::GUEST_OFFLOADS;
/// Number of chains that are popped one by one before the next batch is tried. If few chains can be served in
/// a batch, their descriptors are read twice for this part of the chains only.
const POPS: u32 = 8;

/// The other tasks of the worker, if the ring may offer them parcels.
type Beside<'n, 'p> = Option<&'n mut (dyn Neighbours + 'p)>;

/// The chains that were served in a turn, or together.
#[derive(Clone, Copy, Debug, Default)]
struct Served {
    chains: u32,
    cost: u32,
    /// The frames that count towards [`Transmit::FRAMES_MAX`]: more than there are, if each takes longer than
    /// usual.
    frames: u32,
}

impl Served {
    /// Adds chains that were served together.
    #[inline]
    fn add(&mut self, batch: Self) {
        self.chains += batch.chains;
        self.frames += batch.frames;
        self.cost = self.cost.saturating_add(batch.cost);
    }

    /// Adds the cost of a popped chain, and its share of the frames.
    #[inline]
    fn add_one(&mut self, frames: u32, cost: u32) {
        self.frames += frames;
        self.cost = self.cost.saturating_add(cost);
    }
}

/// The task of a transmit ring.
pub(crate) struct TransmitTask<P> {
    ring: TransmitRing,
    port: P,
    /// Space for the chains of a batch.
    chains: Box<[SingleChain; BATCH]>,
    /// The port had no room for the frame in the ring's chain, which is credit.
    is_refused: bool,
    /// The pieces of a frame that the port takes from guest memory.
    pieces: Iov,
    /// Space for a packet to segment, behind its header.
    packet: Box<[u8]>,
    /// The length of the packet, and its segments that the port has not taken.
    segments: Option<(usize, Segments)>,
}

impl<P: Transmit> TransmitTask<P> {
    /// Makes the task of a ring whose frames go to this port.
    pub(crate) fn boxed(ring: TransmitRing, port: P) -> Box<dyn QueueTask> {
        let passes_all = P::LEN_MAX >= FRAME_MAX - HEADER && port.accepts().contains(ALL);
        let packet = if passes_all { Box::default() } else { vec![0; FRAME_MAX].into_boxed_slice() };
        Box::new(Self {
            ring,
            port,
            chains: Box::default(),
            is_refused: false,
            pieces: Iov::default(),
            packet,
            segments: None,
        })
    }

    /// Sends frames until they cost `budget`.
    fn serve(&mut self, budget: u32, is_due: bool, neighbours: Beside<'_, '_>) -> Polled {
        let is_leaving = budget == 0;
        let mut neighbours = if is_leaving { None } else { neighbours };
        let limit = if is_leaving { LEAVING_COST } else { budget };
        let mut sum = Served::default();
        let mut pops = 0;
        let next = loop {
            if (self.is_refused() || self.segments.is_some()) && !is_due && !is_leaving {
                break Next::Quiet;
            }
            if sum.cost >= limit || sum.frames >= P::FRAMES_MAX {
                break Next::More;
            }
            if self.segments.is_some() {
                if self.put_segments(&mut sum.cost) {
                    continue;
                }
                if !is_leaving {
                    break Next::Quiet;
                }
                let dropped = self.drop_segments();
                sum.cost = sum.cost.saturating_add(dropped);
            }
            if pops == 0 && !is_leaving && !self.is_refused() {
                let batch = self.take_batch(neighbours.as_deref_mut(), sum.frames, limit - sum.cost);
                if batch.chains > 0 {
                    sum.add(batch);
                    continue;
                }
                pops = POPS;
            }
            pops = pops.saturating_sub(1);
            if !self.is_refused()
                && let Err(next) = self.pop(is_leaving, &mut sum.cost)
            {
                break next;
            }
            let is_taken = self.take_popped(neighbours.as_deref_mut(), is_leaving, &mut sum);
            self.is_refused = !is_taken;
            if !is_taken {
                break Next::Quiet;
            }
            if !self.complete(is_leaving) {
                break Next::Idle;
            }
            sum.chains += 1;
        };
        self.ring.vring.publish();
        Polled { served: sum.chains, cost: sum.cost, next }
    }

    /// Returns whether the port has refused the frame in the ring's chain.
    #[inline]
    fn is_refused(&self) -> bool {
        P::MAY_REFUSE && self.is_refused
    }

    /// Pops the next chain, and adds the cost of that.
    ///
    /// # Errors
    /// There is none, or no room for its frame.
    #[inline]
    fn pop(&mut self, is_leaving: bool, cost: &mut u32) -> Result<(), Next> {
        if !is_leaving {
            self.port.make_room(&mut self.ring, 0)?;
        }
        let TransmitRing { vring, chain, .. } = &mut self.ring;
        if is_leaving && vring.resubmissions() == 0 {
            return Err(Next::Idle);
        }
        let popped = if P::MAY_REFUSE && !is_leaving { vring.pop_credit(chain) } else { vring.pop(chain) };
        if vring.has_cost() {
            *cost = cost.saturating_add(vring.take_cost());
        }
        match popped {
            true => Ok(()),
            false if vring.take_unfinished() => Err(Next::More),
            false => Err(Next::Idle),
        }
    }

    /// Completes the popped chain, whose frame is gone. Returns `false` if the ring does not accept this now.
    #[inline]
    fn complete(&mut self, is_leaving: bool) -> bool {
        if P::MAY_REFUSE && !is_leaving && !self.ring.vring.use_credit(1) {
            self.return_credit();
            return false;
        }
        self.ring.vring.push(self.ring.chain.id, 0);
        true
    }

    /// Checks and counts the frame in the popped chain, and puts it. Adds its cost and its share of the
    /// frames of a turn. Returns `false` if the port has no room for it.
    fn take_popped(&mut self, neighbours: Beside<'_, '_>, is_leaving: bool, sum: &mut Served) -> bool {
        let len = self.ring.chain.readable_len();
        let descriptors = self.ring.chain.descriptors() / DESCRIPTORS_PER_COST;
        sum.cost = sum.cost.saturating_add(descriptors.into());
        let Some((header, frame)) = self.ring.parse() else {
            sum.add_one(1, cost::of_frame(len));
            return true;
        };
        if let Some([_, len_min]) = P::OFFERED_LEN_MIN
            && frame.len >= len_min
            && let Some(neighbours) = neighbours
            && self.port.offer_popped(&self.ring, &header, frame.len, neighbours)
        {
            self.ring.count_sent(1, frame.len.into());
            self.ring.counters().sent_directly.add(1);
            sum.add_one(DIRECT_SHARES, DIRECT_SHARES * cost::of_packet(len, 0));
            return true;
        }
        if frame.len as usize > P::LEN_MAX || !segments_are_taken(&frame, self.port.accepts()) {
            match self.copy_packet(&header, frame, is_leaving) {
                // It is counted, and paid, with its segments.
                Ok(()) => sum.add_one(1, 0),
                Err(error) => {
                    sum.add_one(1, cost::of_frame(len));
                    self.count_failure(error);
                }
            }
            return true;
        }
        sum.add_one(1, cost::of_packet(len, frame.segments_max()));
        match self.pass(&header, frame, is_leaving) {
            Ok(()) => self.ring.count_sent(1, frame.len.into()),
            Err(PutError::Full) if P::MAY_REFUSE && !is_leaving => return false,
            Err(error) => self.count_failure(error),
        }
        true
    }

    /// Puts the frame in the popped chain as it is, or with its checksum completed.
    #[inline]
    fn pass(&mut self, header: &Header, frame: Frame, is_leaving: bool) -> Put {
        if P::DISCARDS && !self.ring.card.capture.is_on() {
            return Ok(());
        }
        // A frame that may be refused is captured when it is sent, and so is not copied before.
        let is_captured_late = P::MAY_REFUSE && self.ring.card.capture.is_on();
        if P::PIECES_LEN_MIN.is_some_and(|len_min| is_captured_late || frame.len >= len_min)
            && let Some(passed) = self.pass_pieces(header, frame)
        {
            return passed;
        }
        let is_first_attempt = !self.is_refused();
        let Self { ring, port, .. } = self;
        // Lossless, because a frame is no longer than that.
        let (header_len, len) = (ring.format.header_len, frame.len as usize);
        if (is_leaving || !P::AT_ONCE) && port.make_room(ring, HEADER + len).is_err() {
            // Only a ring that stops is served without room.
            return Err(PutError::Full);
        }
        let accepts = port.accepts();
        port.put(HEADER + len, |space| {
            let read = ring.read(&mut space[HEADER - header_len..]);
            set_header(space, header);
            read.map_err(PutError::Invalid)?;
            if P::AT_ONCE && !ring.vring.is_intact() {
                return Err(PutError::Lost);
            }
            // From here on, only the copy counts.
            let (head, bytes) = space.split_at_mut(HEADER);
            if P::AT_ONCE && is_first_attempt {
                ring.capture(bytes);
            }
            if !accepts.contains(NetFeatures::GUEST_CSUM)
                && let Some(at) = frame.checksum
            {
                head.copy_from_slice(&PLAIN);
                return complete_checksum(bytes, at).then_some(()).ok_or(PutError::Refused);
            }
            Ok(())
        })
    }

    /// Puts the frame in the popped chain from guest memory. Returns `None` if it has too many pieces.
    fn pass_pieces(&mut self, header: &Header, frame: Frame) -> Option<Put> {
        let passed = match self.collect(frame) {
            Err(error) => Some(Err(PutError::Invalid(error))),
            Ok(()) if !self.ring.vring.is_intact() => Some(Err(PutError::Lost)),
            Ok(()) => self.port.put_pieces(header, &self.pieces),
        };
        if let Some(Ok(()) | Err(PutError::Refused | PutError::Down)) = passed {
            self.ring.card.capture(Direction::Outbound, self.ring.pair, frame.len as usize, |into| {
                self.pieces.read(0, into);
            });
        }
        let (_, marks) = self.ring.vring.memory();
        self.pieces.clear(marks);
        passed
    }

    /// Puts the buffers of the frame, without its header, into `self.pieces`.
    fn collect(&mut self, frame: Frame) -> Result<(), InvalidFrame> {
        let (mut header_left, mut left) = (self.ring.format.header_len as u64, u64::from(frame.len));
        for buffer in self.ring.chain.readable() {
            let skipped = header_left.min(buffer.len.into());
            header_left -= skipped;
            // Lossless, because a buffer has at most 2^32 - 1 bytes.
            let len = left.min(u64::from(buffer.len) - skipped) as u32;
            left -= u64::from(len);
            let addr = buffer.addr.checked_add(skipped).ok_or(InvalidFrame::Short)?;
            self.pieces.push(self.ring.vring.view(), addr, len).map_err(|_| InvalidFrame::Short)?;
        }
        Ok(())
    }

    /// Copies the packet in the popped chain, to segment it. Refuses one that the port does not carry in
    /// segments either.
    #[cold]
    fn copy_packet(&mut self, header: &Header, frame: Frame, is_leaving: bool) -> Put {
        let Self { ring, port, packet, .. } = self;
        if is_leaving && port.make_room(ring, 0).is_err() {
            // Only a ring that stops is served without room.
            return Err(PutError::Full);
        }
        let (header_len, len) = (ring.format.header_len, frame.len as usize);
        ring.read(&mut packet[HEADER - header_len..HEADER + len]).map_err(PutError::Invalid)?;
        if !ring.vring.is_intact() {
            return Err(PutError::Lost);
        }
        // From here on, only the copy counts.
        let packet = &packet[HEADER..HEADER + len];
        ring.capture(packet);
        let segments = Segments::of(header, packet).filter(|all| all.len_max(packet) <= P::LEN_MAX);
        self.segments = Some((len, segments.ok_or(PutError::Refused)?));
        Ok(())
    }

    /// Puts segments of the packet, and adds their cost. Returns `false` if the port has no room for the next
    /// one.
    #[inline(never)]
    fn put_segments(&mut self, cost: &mut u32) -> bool {
        let Self { ring, port, packet, segments: waiting, .. } = self;
        let Some((len, mut segments)) = *waiting else { return true };
        let packet = &packet[HEADER..HEADER + len];
        let failure = loop {
            let Some(next_len) = segments.next_len(packet) else { break None };
            let mut rest = segments;
            let put = port.put(HEADER + next_len, |space| {
                space[..HEADER].copy_from_slice(&PLAIN);
                rest.write_next(packet, &mut space[HEADER..]);
                Ok(())
            });
            match put {
                Ok(()) => segments = rest,
                Err(PutError::Full) => {
                    *waiting = Some((len, segments));
                    return false;
                }
                Err(error) => break Some(error),
            }
            *cost = cost.saturating_add(cost::of_frame(next_len as u64));
        };
        *waiting = None;
        match failure {
            None => ring.count_segmented(len as u64, segments.made()),
            Some(error) => {
                // The packet was copied, whatever became of its segments.
                *cost = cost.saturating_add(cost::of_frame(len as u64));
                self.count_failure(error);
            }
        }
        true
    }

    /// Drops the packet whose segments wait, and counts it. Returns the cost of its copy.
    fn drop_segments(&mut self) -> u32 {
        let Some((len, _)) = self.segments.take() else { return 0 };
        self.ring.counters().dropped_late.add(1);
        cost::of_frame(len as u64)
    }

    /// Counts a frame that was not put.
    #[inline(never)]
    fn count_failure(&self, error: PutError) {
        let counters = self.ring.counters();
        match error {
            PutError::Refused => counters.sent_refused.add(1),
            PutError::Down => counters.sent_down.add(1),
            PutError::Full => counters.dropped_late.add(1),
            PutError::Invalid(error) => self.ring.count_invalid(error),
            // The ring is broken.
            PutError::Lost | PutError::Unbatched => {}
        }
    }
}

/// Returns whether a port that accepts these offloads takes the segmentation of a frame.
#[inline]
fn segments_are_taken(frame: &Frame, accepts: NetFeatures) -> bool {
    accepts.contains(ALL)
        || frame.segmentation.is_none_or(|segmentation| {
            let needs = match segmentation.protocol {
                Protocol::TcpV4 => NetFeatures::GUEST_TSO4,
                Protocol::TcpV6 => NetFeatures::GUEST_TSO6,
                Protocol::Udp => NetFeatures::GUEST_USO4 | NetFeatures::GUEST_USO6,
            };
            accepts.contains(needs) && (!segmentation.ecn || accepts.contains(NetFeatures::GUEST_ECN))
        })
}

impl<P: Transmit> QueueTask for TransmitTask<P> {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        if P::MAY_REFUSE {
            // The ring may have returned the chain itself.
            self.is_refused &= self.ring.vring.credit() > 0;
            if budget == 0 {
                self.return_credit();
            }
        }
        if budget == 0 {
            self.drop_segments();
        }
        let due = context.far_side_due;
        let mut polled = match self.port.begin(&mut self.ring, budget) {
            Ok(left) => self.serve(left, due, context.neighbours.as_deref_mut()),
            Err(next) => Polled { served: 0, cost: 0, next },
        };
        self.port.end(&mut self.ring, &mut polled, due);
        self.port.wake_receivers(context.neighbours.as_deref_mut());
        polled
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        self.port.event(self.is_refused() || self.segments.is_some())
    }

    fn far_side_interval(&self) -> Duration {
        P::INTERVAL
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.port.set_location(location);
    }

    fn offers_parcels(&self) -> bool {
        P::OFFERED_LEN_MIN.is_some()
    }

    fn return_credit(&mut self) {
        self.ring.vring.unpop(self.ring.vring.credit());
        self.is_refused = false;
    }

    fn traffic(&self) -> Option<Traffic> {
        self.ring.traffic()
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.ring.is_enabled = is_enabled;
    }

    fn memory_changed(&mut self) {
        let (_, marks) = self.ring.vring.memory();
        self.pieces.release(marks);
    }
}
