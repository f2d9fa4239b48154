//! The frames of a TAP (`docs/adr/0012-a-frame-is-read-whole.md`).
//!
//! A read has three parts: the header, in memory of the card; the driver's oldest chains; and the memory of
//! the held frame behind them, so that no frame is cut. A frame that ends within the chains is delivered in
//! place. Any other is copied together and held. While frames are short, a read has one part, the memory of
//! the held frame, because a copy is cheaper than the kernel's work for several.

use super::state::TapState;
use crate::card::state::CardState;
use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::offload::{Undo, received_header, undo};
use crate::ports::receive::Receive;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_memory::Iov;
use kickless_net_port::{Direction, ReceiveError, TapQueue};
use kickless_spec::net::{
    ETHERNET_HEADER_LEN, FRAME_MAX, GSO_NONE, HDR_F_NEEDS_CSUM, Header, NetFeatures, VLAN_TAG_LEN,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The length of the longest frame, without its header.
const LEN_MAX: usize = FRAME_MAX - size_of::<Header>();
/// Bytes at the beginning of a frame that tell how to undo its offloads: two tags, and one byte of IP.
const HEAD: usize = ETHERNET_HEADER_LEN + 2 * VLAN_TAG_LEN + 1;

/// Reads one queue of a TAP.
pub(crate) struct TapReceive {
    queue: TapQueue,
    tap: Arc<TapState>,
    card: Arc<CardState>,
    pair: u16,
    /// The parts of the driver's chains that a read fills.
    credit: Iov,
    /// The length of the last frame. The next one is expected to be as long.
    expected: usize,
    is_gone: bool,
}

impl TapReceive {
    /// Takes a queue, which receives frames from now on.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub(crate) fn new(tap: Arc<TapState>, card: Arc<CardState>, pair: u16) -> io::Result<Self> {
        let queue = tap.tap.queue(pair)?;
        card.receive_started(pair);
        tap.changed();
        Ok(Self { queue, tap, card, pair, credit: Iov::default(), expected: 0, is_gone: false })
    }

    /// Puts the driver's oldest chains into `self.credit`, as many as the next frame is expected to need. The
    /// kernel pays for each piece, so there are few of them while frames are short.
    fn collect_credit(&mut self, ring: &mut ReceiveRing) -> Result<(), Next> {
        let header_len = ring.format.header_len;
        loop {
            ring.skip_chains_without_header_room()?;
            let wanted = (header_len + self.expected.min(LEN_MAX)) as u64;
            while ring.format.merges_chains() && ring.credit.bytes() < wanted {
                match ring.pop_credit() {
                    Ok(()) => {}
                    Err(Next::More) => return Err(Next::More),
                    Err(_) => break,
                }
            }
            let chains = if ring.format.merges_chains() { ring.oldest_with(wanted) } else { 1 };
            self.push_chains(ring, chains);
            if !self.credit.is_empty()
                || ring.credit.oldest().is_some_and(|oldest| oldest.writable_len() == header_len as u64)
            {
                return Ok(());
            }
            // The oldest chain begins outside of guest memory.
            if ring.budget.is_used_up() {
                return Err(Next::More);
            }
            ring.refuse_oldest()?;
        }
    }

    /// Adds the buffers of the oldest `chains` chains behind the header, up to one that is not in memory.
    fn push_chains(&mut self, ring: &mut ReceiveRing, chains: usize) {
        let mut header_left = ring.format.header_len as u64;
        let mut left = LEN_MAX as u64;
        let view = ring.vring.view();
        for buffer in ring.credit.chains().take(chains).flat_map(|chain| chain.writable()) {
            let skipped = header_left.min(buffer.len.into());
            header_left -= skipped;
            // Both are lossless, because a buffer has at most 2^32 - 1 bytes.
            let len = left.min(u64::from(buffer.len) - skipped) as u32;
            let Some(addr) = buffer.addr.checked_add(skipped) else { return };
            if len == 0 {
                continue;
            }
            let is_scattered = self.credit.segments().len() >= TapQueue::CREDIT_SEGMENTS_MAX;
            if is_scattered || self.credit.push(view, addr, len).is_err() {
                return;
            }
            left -= u64::from(len);
        }
    }

    /// Handles a received frame of `len` bytes, of which the first `room` are in the credit.
    fn received(
        &mut self,
        ring: &mut ReceiveRing,
        held: &mut HeldFrame,
        header: &Header,
        room: usize,
        len: usize,
    ) -> Result<Taken, Next> {
        let header_len = ring.format.header_len;
        // A longer frame fills the space to its end, and the kernel has cut it.
        if len > LEN_MAX {
            ring.drop_frame(|counters| counters.dropped_long.add(1));
            return Ok(Taken::Dropped);
        }
        if ring.is_unused() {
            ring.drop_frame(|counters| counters.dropped_unused.add(1));
            return Ok(Taken::Dropped);
        }
        if ring.is_filtering() && !ring.wants(&self.head(held, room)) {
            ring.drop_frame(|counters| counters.dropped_filtered.add(1));
            return Ok(Taken::Dropped);
        }
        let accepted = ring.accepted_offloads();
        let fits = len <= room && header_len + len <= ring.format.len_max;
        if fits && self.needs_nothing(header, accepted) {
            // The driver may change the frame as soon as it sees it.
            ring.card.capture(Direction::Inbound, ring.pair, len, |into| {
                self.credit.read(0, into);
            });
            let (_, marks) = ring.vring.memory();
            self.credit.advance(len as u64, marks);
            self.credit.seal();
            let is_delivered = ring.deliver_in_place(&received_header(header, accepted), header_len + len)?;
            return Ok(if is_delivered { Taken::Delivered(1) } else { Taken::Dropped });
        }
        let in_credit = len.min(room);
        self.credit.read(0, &mut held.space()[..in_credit]);
        Ok(match held.hold(header, len, accepted) {
            Ok(()) => Taken::Held,
            Err(refusal) => refusal.drop(ring),
        })
    }

    /// Returns the first bytes of a received frame, of which the first `room` are in the credit. Bytes behind
    /// the end of the frame have any value.
    fn head(&self, held: &mut HeldFrame, room: usize) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let len = self.credit.read(0, &mut head);
        head[len..].copy_from_slice(&held.space()[room..][..HEAD - len]);
        head
    }

    /// Returns whether the driver accepts all offloads of a frame that is in the credit.
    fn needs_nothing(&self, header: &Header, accepted: NetFeatures) -> bool {
        if header.gso_type == GSO_NONE && header.flags & HDR_F_NEEDS_CSUM == 0 {
            return true;
        }
        let mut head = [0; HEAD];
        let len = self.credit.read(0, &mut head);
        undo(header, &head[..len], accepted) == Undo::Nothing
    }
}

impl Receive for TapReceive {
    const HAS_OFFLOADS: bool = true;

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.queue.as_fd())
    }

    fn memory_changed(&mut self, ring: &mut ReceiveRing) {
        let (_, marks) = ring.vring.memory();
        self.credit.release(marks);
    }

    fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame, is_due: bool) -> Result<Taken, Next> {
        if !is_due || self.is_gone {
            return Ok(Taken::Nothing);
        }
        // A driver without chains gets no frame, which the host's queue holds meanwhile.
        ring.skip_chains_without_header_room()?;
        let is_copied = self.expected <= TapQueue::COPIED_MAX && ring.oldest_is_in_memory();
        if !is_copied {
            self.collect_credit(ring)?;
        }
        let room = self.credit.len() as usize;
        let mut header = Header::default();
        let received = if is_copied {
            let received = self.queue.receive_copy(held.space_with_header());
            header.as_mut_bytes().copy_from_slice(&held.space_with_header()[..size_of::<Header>()]);
            received
        } else {
            self.queue.receive(&mut header, &mut self.credit, &mut held.space()[room..])
        };
        let taken = match received {
            Ok(len) => {
                self.expected = len;
                self.received(ring, held, &header, room, len)
            }
            Err(ReceiveError::Empty) => Ok(Taken::Nothing),
            Err(ReceiveError::Gone) => {
                self.is_gone = true;
                self.tap.report_gone();
                Ok(Taken::Nothing)
            }
            Err(ReceiveError::Failed(error)) => {
                self.tap.report_failed_read(&error);
                ring.drop_frame(|counters| counters.dropped_unread.add(1));
                // An error that stays would cost a read in each turn. The next frame ends the wait.
                Ok(Taken::Nothing)
            }
        };
        // Bytes that the kernel wrote and that are not part of a delivered frame are marked here.
        let (_, marks) = ring.vring.memory();
        self.credit.clear(marks);
        taken
    }

    fn is_gone(&self) -> bool {
        self.tap.is_gone()
    }
}

impl Drop for TapReceive {
    fn drop(&mut self) {
        self.card.receive_ended(self.pair);
        self.tap.changed();
    }
}
