//! Passes the frames of a transmit ring to other cards of the switch.

use super::delivery::Forwarder;
use super::direct::{self, Direct};
use super::port::SwitchPort;
use crate::frame::loop_queue::Batch;
use crate::ports::transmit::{Put, Transmit};
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{LEAVING_COST, Neighbours, Next, Polled, TaskLocation};
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::device::SingleChain;
use std::sync::Arc;
use std::time::Duration;

/// Passes frames to other cards.
pub(super) struct SwitchTransmit {
    port: Arc<SwitchPort>,
    /// The frames of a turn.
    batch: Batch,
    forwarder: Forwarder,
    direct: Direct,
    /// The cost of the work of this turn beyond that of its frames: copies that the switch made, and offers
    /// that were refused.
    copied: u32,
    /// The most that this turn may cost.
    limit: u32,
}

impl SwitchTransmit {
    pub(super) fn new(port: Arc<SwitchPort>) -> Self {
        let (batch, forwarder, direct) = (Batch::default(), Forwarder::default(), Direct::default());
        Self { port, batch, forwarder, direct, copied: 0, limit: 0 }
    }

    /// Passes on the frames of the batch, after others of this turn that cost so much.
    #[inline(never)]
    fn send_batch(&mut self, ring: &mut TransmitRing, cost: u32) {
        if !ring.keeps_batch(&mut self.batch) {
            return;
        }
        let left = self.limit.saturating_sub(self.copied.saturating_add(cost));
        let forwarded = self.port.forward(ring.pair, &mut self.batch, &mut self.forwarder, left);
        forwarded.count(ring.counters());
        self.copied = self.copied.saturating_add(forwarded.copied);
    }

    /// Makes room for a frame that the batch has no room for.
    #[cold]
    fn make_more_room(&mut self, ring: &mut TransmitRing) -> Result<(), Next> {
        if self.forwarder.has_waiting() {
            return Err(Next::More);
        }
        self.send_batch(ring, 0);
        Ok(())
    }

    /// Passes on frames that the switch had no time for in an earlier turn.
    #[cold]
    fn send_waiting(&mut self, ring: &TransmitRing) {
        let forwarded = self.port.resume(ring.pair, &mut self.forwarder, self.limit);
        forwarded.count(ring.counters());
        self.copied = self.copied.saturating_add(forwarded.copied);
    }

    /// Returns whether the next frame may be offered. Earlier frames go first, and a capture needs all of
    /// them in a batch.
    fn may_offer(&self, ring: &TransmitRing) -> bool {
        self.batch.len() == 0 && !self.forwarder.has_waiting() && !ring.card.capture.is_on()
    }
}

impl Transmit for SwitchTransmit {
    const AT_ONCE: bool = false;
    const OFFERED_LEN_MIN: Option<[u32; 2]> = Some([direct::LEN_MIN, direct::LEN_MIN_POPPED]);
    const INTERVAL: Duration = Duration::ZERO;

    #[inline]
    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        self.batch.push_with(len, write)
    }

    #[inline]
    fn accepts(&self) -> NetFeatures {
        NetFeatures::GUEST_OFFLOADS
    }

    /// The frames of an earlier turn go first.
    fn begin(&mut self, ring: &mut TransmitRing, budget: u32) -> Result<u32, Next> {
        self.limit = if budget == 0 { LEAVING_COST } else { budget };
        if self.forwarder.has_waiting() {
            self.send_waiting(ring);
            if self.forwarder.has_waiting() || self.copied >= self.limit {
                return Err(Next::More);
            }
        }
        Ok(budget.saturating_sub(self.copied))
    }

    #[inline]
    fn make_room(&mut self, ring: &mut TransmitRing, len: usize) -> Result<(), Next> {
        match len {
            // The batch gets room when the length is known.
            0 if self.forwarder.has_waiting() => Err(Next::More),
            0 => Ok(()),
            len if self.batch.has_room(len, 1) => Ok(()),
            _ => self.make_more_room(ring),
        }
    }

    #[inline]
    fn offer(
        &mut self,
        ring: &TransmitRing,
        chains: &[SingleChain],
        neighbours: &mut dyn Neighbours,
        budget: u32,
    ) -> u32 {
        if !self.may_offer(ring) {
            return 0;
        }
        let Self { port, forwarder, direct, copied, .. } = self;
        let answer = direct.offer(port, ring, chains, forwarder, neighbours, budget);
        *copied = copied.saturating_add(answer.cost);
        answer.taken
    }

    #[inline(never)]
    fn offer_popped(
        &mut self,
        ring: &TransmitRing,
        header: &Header,
        len: u32,
        neighbours: &mut dyn Neighbours,
    ) -> bool {
        if !self.may_offer(ring) {
            return false;
        }
        let Self { port, forwarder, direct, copied, .. } = self;
        let answer = direct.offer_popped(port, ring, header, len, forwarder, neighbours);
        *copied = copied.saturating_add(answer.cost);
        answer.taken > 0
    }

    fn end(&mut self, ring: &mut TransmitRing, polled: &mut Polled, _far_side_due: bool) {
        if self.batch.len() > 0 && !self.forwarder.has_waiting() {
            self.send_batch(ring, polled.cost);
        }
        polled.cost = polled.cost.saturating_add(std::mem::take(&mut self.copied));
        if self.forwarder.has_waiting() {
            polled.next = Next::More;
        }
    }

    #[inline]
    fn wake_receivers(&mut self, neighbours: Option<&mut (dyn Neighbours + '_)>) {
        self.forwarder.near.wake(neighbours);
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.forwarder.near.worker_id = location.map(|location| location.worker_id);
        self.forwarder.is_near = false;
    }
}
