//! Passes frames of a transmit ring to a receiver on the same worker without a copy in between.
//!
//! The frames stay in their ring until the receiver has copied them. So a refusal needs no undo, and the
//! frames go in a batch then. The sender pays for the look at them.
//! `docs/adr/0015-a-frame-may-go-directly.md` says why this is safe.

use super::delivery::Forwarder;
use super::port::{Answer, SwitchPort};
use crate::frame::header::{pass_header, set_header};
use crate::frame::loop_queue::HEADER;
use crate::ring::cost::{BatchCost, DIRECT_SHARES};
use crate::ring::transmit_ring::{BATCH, TransmitRing};
use kickless_device::{Neighbours, Offered, PARCEL_HEAD_LEN, Parcel};
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header};
use kickless_virtqueue::device::SingleChain;
use std::iter::{once, zip};

/// The length, header included, from which on a frame is worth it. The copy in between costs a shorter one
/// less than two looks at its head.
pub(crate) const LEN_MIN: u32 = 512;
/// The length, header excluded, from which on a frame in a popped chain is worth an offer of its own.
/// An estimate: an offer costs some 60 to 100 ns, and a second copy 18 to 30 ns for each KiB.
pub(crate) const LEN_MIN_POPPED: u32 = 4096;
/// The most buffers of a popped chain that is offered. The longest frame has fewer in Linux, and 32 if each
/// has 2048 bytes.
const PIECES_MAX: usize = 64;
/// The number of batches that go in the usual way after frames that were not taken.
const PAUSE: u32 = 7;
/// The number of popped frames that go in the usual way after one that was not taken. A look at one is cheap
/// beside its copy.
const PAUSE_POPPED: u32 = 1;

/// Space for the heads of a batch. It belongs to a transmit ring.
pub(crate) struct Direct {
    heads: Box<[[u8; PARCEL_HEAD_LEN]; BATCH]>,
    /// The number of batches, and of popped frames, to go in the usual way.
    pause: u32,
    pause_popped: u32,
}

impl Default for Direct {
    fn default() -> Self {
        Self { heads: Box::new([[0; PARCEL_HEAD_LEN]; BATCH]), pause: 0, pause_popped: 0 }
    }
}

impl Direct {
    /// Offers the frames of these chains, the oldest that were peeked, to the receiver to which they all go.
    /// Returns the number of those that it has taken, and the cost of the look at the others. Nothing has
    /// changed for these.
    #[inline]
    pub(crate) fn offer(
        &mut self,
        port: &SwitchPort,
        ring: &TransmitRing,
        chains: &[SingleChain],
        forwarder: &mut Forwarder,
        neighbours: &mut dyn Neighbours,
        budget: u32,
    ) -> Answer {
        if !forwarder.is_near || self.pause > 0 {
            self.pause = self.pause.saturating_sub(1);
            return Answer::default();
        }
        let (view, features) = (ring.vring.view(), ring.format.features);
        let mut cost = BatchCost::new(budget.div_ceil(DIRECT_SHARES), false);
        let mut offered = 0;
        for (chain, head) in zip(chains, &mut *self.heads) {
            let len = chain.buffer.len as usize;
            let head = &mut head[..len.min(PARCEL_HEAD_LEN)];
            if cost.is_used_up()
                || !(HEADER + ETHERNET_HEADER_LEN..=FRAME_MAX).contains(&len)
                || view.read(chain.buffer.addr, head).is_err()
                || !pass_header(head, len, features)
            {
                break;
            }
            cost.add(len as u64);
            offered += 1;
        }
        if offered == 0 {
            self.pause = PAUSE;
            return Answer::default();
        }
        let (chains, heads) = (&chains[..offered], &self.heads[..offered]);
        let bytes =
            zip(chains, heads).map(|(chain, head)| &head[..PARCEL_HEAD_LEN.min(chain.buffer.len as usize)]);
        let frames = Offered::Singles(chains);
        let mut answer = port.offer(ring.pair, bytes, forwarder, |to, task| {
            neighbours.offer(task, &Parcel { to, view, heads, frames })
        });
        // A receiver takes no more frames than it was offered. Lossless, because a batch has few.
        let offered = offered as u32;
        answer.taken = answer.taken.min(offered);
        if answer.taken < offered {
            self.pause = PAUSE;
        } else {
            answer.cost = 0;
        }
        answer
    }

    /// Offers the frame in the popped chain, of `len` bytes without its header, to the receiver to which it
    /// goes. `header` is the one to pass on. Returns 1 frame if the receiver has taken it, and the cost of
    /// the look at it if not. Nothing has changed then.
    pub(crate) fn offer_popped(
        &mut self,
        port: &SwitchPort,
        ring: &TransmitRing,
        header: &Header,
        len: u32,
        forwarder: &mut Forwarder,
        neighbours: &mut dyn Neighbours,
    ) -> Answer {
        if !forwarder.is_near || self.pause_popped > 0 {
            self.pause_popped = self.pause_popped.saturating_sub(1);
            return Answer::default();
        }
        // Unless the receiver takes this one.
        self.pause_popped = PAUSE_POPPED;
        let len = HEADER as u32 + len;
        let (view, buffers) = (ring.vring.view(), ring.chain.readable());
        if ring.format.header_len != HEADER || buffers.len() > PIECES_MAX {
            return Answer::default();
        }
        let head = &mut self.heads[0][..PARCEL_HEAD_LEN.min(len as usize)];
        if ring.read(head).is_err() {
            return Answer::default();
        }
        // From here on, only the copy counts, with the header that was judged.
        set_header(head, header);
        let heads = &self.heads[..1];
        let bytes = once(&heads[0][..PARCEL_HEAD_LEN.min(len as usize)]);
        let frames = Offered::Pieces { buffers, len };
        let mut answer = port.offer(ring.pair, bytes, forwarder, |to, task| {
            neighbours.offer(task, &Parcel { to, view, heads, frames })
        });
        if answer.taken > 0 {
            (self.pause_popped, answer.cost) = (0, 0);
        }
        answer
    }
}
