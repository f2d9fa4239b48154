//! A receive ring: pops chains ahead, as *credit*, and delivers frames into them.
//!
//! There is enough credit when the chains hold the longest frame that the driver must be able to receive. If
//! a frame cannot span several chains, one chain is enough. The ring stops popping earlier if the driver has
//! offered no more chains.
//!
//! Stops and updates do not wait for credit. The vring unpops all credit before it stops, and before its
//! memory, addresses or translations change. The next poll removes these chains from [`Credit`].

mod gather;

use crate::card::counters::RingCounters;
use crate::card::filter::{Filter, Modes};
use crate::card::state::CardState;
use crate::frame::gathered::Pieces;
use crate::frame::header::set_num_buffers as set_buffers;
use crate::frame::whole::{DirectFrame, WholeFrame};
use crate::offload::passes_as_is;
use crate::ring::buffers;
use crate::ring::cost::{self, BatchCost, Budget};
use crate::ring::credit::Credit;
use crate::ring::immediate::ImmediateRing;
use kickless_device::{Next, Offered, PARCEL_HEAD_LEN, Parcel, ShowAfter, Vring};
use kickless_net_port::Direction;
use kickless_spec::net::{ETHERNET_HEADER_LEN, HEADER_NUM_BUFFERS, Header, NetFeatures};
use kickless_virtqueue::device::{self, SingleChain};
use kickless_virtqueue::{Chain, ChainId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most buffers of a chain that are looked up before a frame is read. Drivers give buffers of a page or
/// more, so this many hold each frame of usual length, and a look-up takes some nanoseconds.
const LOOKED_UP_MAX: usize = 4;

/// The most frames whose chains are read together. So many lines can be on their way from the driver's core
/// at the same time.
const BATCH: usize = 32;
/// The fewest frames that are shown to the driver together, unless a batch has fewer: the used elements in a
/// cache line of a split ring.
const SHOWN_MIN: usize = 8;
/// The most frames of a packed ring that are shown to the driver together.
const SHOWN_MAX: usize = BATCH / 2;
/// The descriptors in a cache line of a packed ring.
const DESCRIPTORS_PER_LINE: usize = 4;
/// The most chains of a frame that is delivered without credit: as many as the longest frame takes in buffers
/// of 1536 bytes, the shortest that Linux gives, and some more.
const CHAINS_MAX: usize = 48;
const HEADER_LEN: usize = size_of::<Header>();

/// The format of the frames that a driver receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameFormat {
    /// The features in force.
    pub(crate) features: NetFeatures,
    /// Length of the header of each frame.
    pub(crate) header_len: usize,
    /// Length of the longest frame, header included.
    pub(crate) len_max: usize,
}

impl FrameFormat {
    /// Returns whether one frame may span several chains.
    pub(crate) fn merges_chains(&self) -> bool {
        self.features.contains(NetFeatures::MRG_RXBUF)
    }
}

/// A receive ring with its credit.
pub(crate) struct ReceiveRing {
    pub(crate) vring: Vring,
    pub(crate) card: Arc<CardState>,
    pub(crate) pair: u16,
    pub(crate) format: FrameFormat,
    pub(crate) credit: Credit,
    /// The budget of the current poll.
    pub(crate) budget: Budget,
    /// Completions of the chains of one frame. Has capacity for all chains of the ring.
    group: Vec<(ChainId, u32)>,
    /// Space for the chains of a batch, or of a long frame.
    chains: Box<[SingleChain; CHAINS_MAX]>,
    /// The number of chains that the last long frame took, as a guess for the next one.
    chains_of_frame: usize,
    /// Space for a chain that an earlier process popped.
    chain: Chain,
    /// The frames that the driver wants, unless it wants all.
    filter: Option<Arc<Filter>>,
    /// The number of changes of the card's filter that `filter` has.
    filter_changes: u64,
}

impl ReceiveRing {
    pub(crate) fn new(mut vring: Vring, card: Arc<CardState>, pair: u16, format: FrameFormat) -> Self {
        vring.show_after(ShowAfter::Early);
        let size = vring.size();
        Self {
            vring,
            card,
            pair,
            format,
            credit: Credit::new(size, format.len_max),
            budget: Budget::default(),
            group: Vec::with_capacity(size.into()),
            chains: Box::new([SingleChain::default(); CHAINS_MAX]),
            chains_of_frame: 1,
            chain: Chain::default(),
            filter: None,
            filter_changes: 0,
        }
    }

    pub(crate) fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Returns whether the driver is known not to use this pair of rings.
    ///
    /// Only a driver with these features tells the card how many pairs it uses. It tells a front-end that
    /// serves the control ring itself, and not the card.
    pub(crate) fn is_unused(&self) -> bool {
        self.format.features.contains(NetFeatures::CTRL_VQ | NetFeatures::MQ)
            && self.card.has_control_ring.load(Ordering::Relaxed)
            && self.pair >= self.card.pairs.load(Ordering::Relaxed)
    }

    /// Begins a poll with this budget.
    pub(crate) fn begin(&mut self, budget: u32) {
        self.budget.begin(budget);
        let changes = self.card.filter_changes.load(Ordering::Relaxed);
        if changes != self.filter_changes {
            self.filter_changes = changes;
            self.update_filter();
        }
    }

    /// Takes the present filter of the card, which only a driver with this feature sets.
    #[cold]
    fn update_filter(&mut self) {
        let filter = self.card.filter();
        let is_needed =
            self.format.features.contains(NetFeatures::CTRL_RX) && !filter.modes.contains(Modes::PROMISC);
        self.filter = is_needed.then_some(filter);
    }

    /// Returns whether the driver wants only some frames.
    pub(crate) fn is_filtering(&self) -> bool {
        self.filter.is_some()
    }

    /// Returns whether the driver wants the frame that begins with these bytes.
    pub(crate) fn wants(&self, head: &[u8]) -> bool {
        let filters_vlans = self.format.features.contains(NetFeatures::CTRL_VLAN);
        self.filter.as_ref().is_none_or(|filter| filter.accepts(head, filters_vlans))
    }

    /// Returns whether the driver is to get a whole frame of the port. Otherwise drops and counts it.
    pub(crate) fn takes(&mut self, frame: &[u8]) -> bool {
        if frame.len() < ETHERNET_HEADER_LEN {
            self.drop_frame(|counters| counters.dropped_unread.add(1));
        } else if self.is_unused() {
            self.drop_frame(|counters| counters.dropped_unused.add(1));
        } else if !self.wants(frame) {
            self.drop_frame(|counters| counters.dropped_filtered.add(1));
        } else {
            return true;
        }
        false
    }

    /// Returns the offloads of frames that the driver accepts now.
    pub(crate) fn accepted_offloads(&self) -> NetFeatures {
        self.format.features & self.card.offloads()
    }

    /// Returns whether the ring needs no more credit: the chains have room for the longest frame, or the ring
    /// can hold no more of them. If a frame cannot span several chains, one chain is enough.
    fn has_enough_credit(&self) -> bool {
        match self.format.merges_chains() {
            true => self.credit.bytes() >= self.format.len_max as u64 || self.credit.is_full(),
            false => !self.credit.is_empty(),
        }
    }

    /// Pops one more chain as credit.
    ///
    /// # Errors
    /// Returns [`Next::Idle`] if the driver has offered no more chains. Returns [`Next::More`] if the budget
    /// is used up, or if the ring has read only a part of the next chain so far.
    pub(crate) fn pop_credit(&mut self) -> Result<(), Next> {
        if self.budget.is_used_up() {
            return Err(Next::More);
        }
        let popped = self.credit.pop(&mut self.vring);
        if self.vring.has_cost() {
            self.budget.charge(self.vring.take_cost());
        }
        match popped {
            Some(descriptors) => {
                self.budget.charge_chain(descriptors);
                Ok(())
            }
            None if self.vring.take_unfinished() => Err(Next::More),
            None => Err(Next::Idle),
        }
    }

    /// Pops credit ahead, for the next frames. Returns [`Next::Quiet`] if the next frame may come.
    pub(crate) fn refill(&mut self) -> Next {
        while !self.has_enough_credit() {
            match self.pop_credit() {
                Ok(()) => {}
                Err(Next::More) => return Next::More,
                // The next frame may be short enough for the present credit.
                Err(_) => break,
            }
        }
        Next::Quiet
    }

    /// Tells the ring that the oldest chains of the credit are in use from now on.
    ///
    /// # Errors
    /// The ring refuses it. Returns all credit and [`Next::Idle`] then.
    pub(crate) fn use_credit(&mut self, chains: usize) -> Result<(), Next> {
        // The cast is lossless, because a ring has at most 32768 entries.
        if self.vring.use_credit(chains as u16) {
            return Ok(());
        }
        self.return_credit();
        Err(Next::Idle)
    }

    pub(crate) fn return_credit(&mut self) {
        self.credit.unpop_all(&mut self.vring);
    }

    /// Forgets chains that the vring has unpopped.
    pub(crate) fn forget_returned(&mut self) {
        self.credit.truncate(self.vring.credit().into());
    }

    /// Completes the oldest chain without a frame.
    ///
    /// # Errors
    /// As [`ReceiveRing::use_credit`].
    pub(crate) fn refuse_oldest(&mut self) -> Result<(), Next> {
        let Some(id) = self.credit.oldest().map(|chain| chain.id) else { return Ok(()) };
        self.use_credit(1)?;
        self.budget.charge_chain(0);
        self.credit.remove_oldest(1);
        self.vring.push(id, 0);
        self.vring.counters().errors.add(1);
        Ok(())
    }

    /// Makes the oldest chain one that can hold the header of a frame. Completes shorter chains without a
    /// frame.
    ///
    /// # Errors
    /// As [`ReceiveRing::pop_credit`].
    #[inline]
    pub(crate) fn skip_chains_without_header_room(&mut self) -> Result<(), Next> {
        loop {
            let Some(oldest) = self.credit.oldest() else {
                self.pop_credit()?;
                continue;
            };
            if oldest.writable_len() >= self.format.header_len as u64 {
                return Ok(());
            }
            if self.budget.is_used_up() {
                return Err(Next::More);
            }
            self.refuse_oldest()?;
        }
    }

    /// Returns whether the oldest chain has few buffers, and all of them are in guest memory.
    pub(crate) fn oldest_is_in_memory(&self) -> bool {
        let view = self.vring.view();
        self.credit.oldest().is_some_and(|oldest| {
            let buffers = oldest.writable();
            buffers.len() <= LOOKED_UP_MAX
                && buffers.iter().all(|buffer| view.contains(buffer.addr, buffer.len.into()))
        })
    }

    /// Returns the number of the oldest chains that together hold `len` bytes. Pops more chains if needed.
    /// Returns `None` if the frame must be dropped. A ring of chains like these never has room for it, or a
    /// frame cannot span several chains and the oldest one is too short.
    ///
    /// # Errors
    /// As [`ReceiveRing::pop_credit`].
    fn chains_for(&mut self, len: u64) -> Result<Option<usize>, Next> {
        self.skip_chains_without_header_room()?;
        if !self.format.merges_chains() {
            return Ok(self.credit.oldest().filter(|chain| chain.writable_len() >= len).map(|_| 1));
        }
        while self.credit.bytes() < len {
            match self.pop_credit() {
                Ok(()) => {}
                Err(Next::Idle) if self.credit.is_full() => return Ok(None),
                Err(next) => return Err(next),
            }
        }
        Ok(Some(self.oldest_with(len)))
    }

    /// Returns the number of the oldest chains that together hold `len` bytes, or of all chains.
    pub(crate) fn oldest_with(&self, len: u64) -> usize {
        let (mut bytes, mut chains) = (0, 0);
        for chain in self.credit.chains() {
            if bytes >= len {
                break;
            }
            bytes += chain.writable_len();
            chains += 1;
        }
        chains
    }

    /// Delivers a frame, whose header it completes, and returns `true`. Drops and counts the frame and
    /// returns `false` if the driver has no room for it even when its ring is full.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::pop_credit`].
    pub(crate) fn deliver(&mut self, frame: &mut [u8]) -> Result<bool, Next> {
        match self.room_for(frame.len())? {
            Some(chains) => self.deliver_into(frame, chains),
            None => Ok(false),
        }
    }

    /// Returns the number of chains for a frame of `len` bytes, header included. Drops and counts the frame
    /// and returns `None` if the driver has no room for it even when its ring is full.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::pop_credit`].
    pub(crate) fn room_for(&mut self, len: usize) -> Result<Option<usize>, Next> {
        let chains = match len <= self.format.len_max {
            true => self.chains_for(len as u64)?,
            false => None,
        };
        if chains.is_none() {
            self.drop_frame(|counters| counters.dropped_long.add(1));
        }
        Ok(chains)
    }

    /// Delivers a frame into the oldest `chains` chains, which have room for it. Returns whether it was
    /// written.
    ///
    /// # Errors
    /// The ring refuses the chains, as in [`ReceiveRing::use_credit`].
    pub(crate) fn deliver_into(&mut self, frame: &mut [u8], chains: usize) -> Result<bool, Next> {
        let len = frame.len();
        self.use_credit(chains)?;
        set_num_buffers(frame, self.format.header_len, chains);
        let is_written = self.write_frame(frame, chains);
        self.complete(len, chains);
        if !is_written {
            self.vring.counters().errors.add(1);
            return Ok(false);
        }
        self.count_received(len);
        let frame = &frame[self.format.header_len..];
        self.card.capture(Direction::Inbound, self.pair, frame.len(), |into| {
            into.copy_from_slice(&frame[..into.len()]);
        });
        Ok(true)
    }

    /// Returns whether frames that the driver takes as they are may be delivered by
    /// [`ReceiveRing::deliver_whole`].
    pub(crate) fn takes_batches(&self) -> bool {
        self.filter.is_none()
            && self.credit.is_empty()
            && self.format.header_len == HEADER_LEN
            && !self.is_unused()
            && !self.card.capture.is_on()
    }

    /// Delivers frames of another ring whose bytes are still in the memory of their sender, as
    /// [`ReceiveRing::deliver_whole`] does. The sender is charged, and has a limit, so this is outside of a
    /// poll and has no budget. Returns the number of delivered frames.
    pub(crate) fn deliver_parcel(&mut self, parcel: &Parcel<'_>) -> u32 {
        self.forget_returned();
        self.begin(u32::MAX);
        if !self.takes_batches() {
            return 0;
        }
        let accepted = self.accepted_offloads();
        match parcel.frames {
            Offered::Singles(chains) => {
                let frames = DirectFrame::all(parcel, chains);
                let accepted_ones = frames.take_while(|frame| passes_as_is(frame.head(), accepted));
                self.deliver_whole(chains.len(), accepted_ones)
            }
            Offered::Pieces { buffers, len } => match parcel.heads {
                [head] if passes_as_is(&head[..PARCEL_HEAD_LEN.min(len as usize)], accepted) => {
                    let mut frame = Pieces::new(head, parcel.view, buffers, len);
                    self.deliver_in_singles(&mut frame).into()
                }
                _ => 0,
            },
        }
    }

    /// Delivers frames that each fit into a chain of a single descriptor, one to a chain, until the budget is
    /// used up. They have complete headers. Returns the number of delivered frames. Stops early at a frame
    /// that must be delivered by [`ReceiveRing::deliver`].
    ///
    /// The ring takes batches ([`ReceiveRing::takes_batches`]), and there are `count` frames.
    #[inline]
    pub(crate) fn deliver_whole<F: WholeFrame>(
        &mut self,
        count: usize,
        mut frames_left: impl Iterator<Item = F>,
    ) -> u32 {
        let Self { vring, budget, format, chains, .. } = self;
        let wanted = count.min(BATCH);
        let count = vring.peek(device::Direction::Writable, &mut chains[..wanted]);
        let len_max = format.len_max;
        let (mut frames, mut bytes, mut cost) = (0, 0, BatchCost::new(budget.left(), vring.is_limited()));
        let shown = if vring.is_packed() { shown_together(count) } else { SHOWN_MIN };
        for group in chains[..count].chunks_mut(shown) {
            let (view, marks) = vring.memory();
            let mut written = 0;
            for number in 0..group.len() {
                if cost.is_used_up() {
                    break;
                }
                let Some(frame) = frames_left.next() else { break };
                if let Some(next) = group.get(number + 1) {
                    frame.prefetch_next(view, next.buffer);
                }
                let chain = &mut group[number];
                let is_short = frame.len() <= len_max && frame.len() <= chain.buffer.len as usize;
                if !is_short || frame.write(view, chain.buffer.addr, marks).is_err() {
                    break;
                }
                // Lossless, because the buffer is as long.
                chain.written = frame.len() as u32;
                let len = (frame.len() - HEADER_LEN) as u64;
                cost.add(len);
                (written, bytes) = (written + 1, bytes + len);
            }
            vring.complete_peeked(&group[..written]);
            frames += written;
            if written < group.len() {
                break;
            }
        }
        budget.charge(cost.cost());
        self.count(frames as u64, bytes);
        frames as u32
    }

    /// Counts a frame that is dropped, and charges it.
    pub(crate) fn drop_frame(&mut self, count: impl FnOnce(&RingCounters)) {
        count(self.counters());
        self.budget.charge(1);
    }

    /// Counts delivered frames with this number of bytes in all, without headers.
    #[inline]
    fn count(&self, frames: u64, bytes: u64) {
        self.counters().received_frames.add(frames);
        self.counters().received_bytes.add(bytes);
        self.vring.charge(kickless_device::Direction::Read, frames, bytes);
    }

    fn count_received(&self, len: usize) {
        self.count(1, (len - self.format.header_len) as u64);
    }

    /// Shows the driver a frame of `len` bytes, header included, that is in the oldest chains.
    fn complete(&mut self, len: usize, chains: usize) {
        self.credit.remove_oldest(chains);
        self.vring.push_group(&self.group);
        self.budget.charge(cost::of_frame((len - self.format.header_len) as u64));
    }

    /// Writes the frame into the oldest chains, and puts the completion of each into `self.group`. If a
    /// buffer is not in guest memory, returns `false`, and the completions tell the driver that no bytes were
    /// written.
    fn write_frame(&mut self, frame: &[u8], chains: usize) -> bool {
        self.group.clear();
        let (view, marks) = self.vring.memory();
        let mut rest = frame;
        let mut is_written = true;
        for chain in self.credit.chains().take(chains) {
            let here = rest.len().min(usize::try_from(chain.writable_len()).unwrap_or(usize::MAX));
            let (part, more) = rest.split_at(here);
            match buffers::write(chain.writable(), view, marks, part) {
                // Lossless, because each buffer holds a byte of the frame.
                Ok(buffers) => self.budget.charge_descriptors(buffers as u32),
                Err(_) => is_written = false,
            }
            rest = more;
            self.group.push((chain.id, part.len() as u32));
        }
        if !is_written {
            self.group.iter_mut().for_each(|(_, written)| *written = 0);
        }
        is_written
    }

    /// Delivers a frame of `len` bytes, header included, whose bytes behind the header are in the oldest
    /// chains already, which have room for all of it. Adds the header. Returns whether the header was
    /// written.
    ///
    /// # Errors
    /// The ring refuses it. All credit is returned, and the frame is lost.
    pub(crate) fn deliver_in_place(&mut self, header: &Header, len: usize) -> Result<bool, Next> {
        let chains = self.oldest_with(len as u64);
        self.use_credit(chains)?;
        let mut bytes = zerocopy::transmute!(*header);
        let bytes: &mut [u8; size_of::<Header>()] = &mut bytes;
        let head = &mut bytes[..self.format.header_len];
        set_num_buffers(head, self.format.header_len, chains);
        let (view, marks) = self.vring.memory();
        let is_written = self
            .credit
            .oldest()
            .is_some_and(|oldest| buffers::write(oldest.writable(), view, marks, head).is_ok());
        self.group.clear();
        let mut rest = len as u64;
        for chain in self.credit.chains().take(chains) {
            let here = rest.min(chain.writable_len());
            rest -= here;
            // Lossless, because a frame is no longer than that.
            self.group.push((chain.id, if is_written { here as u32 } else { 0 }));
        }
        self.complete(len, chains);
        match is_written {
            true => self.count_received(len),
            false => self.vring.counters().errors.add(1),
        }
        Ok(is_written)
    }
}

/// Returns the number of frames of a batch of `count` that are shown to the driver of a packed ring together:
/// half of them, in whole lines of descriptors. The driver takes the first half while the card delivers the
/// second one.
///
/// A driver that polls has the line of the next used descriptor. The card waits for this line in each group,
/// so there are no more groups than two.
#[inline]
fn shown_together(count: usize) -> usize {
    count.div_ceil(2).next_multiple_of(DESCRIPTORS_PER_LINE).clamp(SHOWN_MIN, SHOWN_MAX)
}

/// Sets the number of buffers in the header at the beginning of a frame, unless the header has no such field.
fn set_num_buffers(frame: &mut [u8], header_len: usize, chains: usize) {
    if header_len > HEADER_NUM_BUFFERS {
        // Lossless, because a ring has fewer chains.
        set_buffers(frame, chains as u16);
    }
}

/// Serves a ring that stops: completes the chains that an earlier process used when it was killed.
impl ImmediateRing for ReceiveRing {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    /// Completes the chain without a frame, because it is unknown whether the earlier process wrote the
    /// frame.
    fn serve(&mut self) -> u32 {
        self.vring.push(self.chain.id, 0);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_of_a_packed_ring_gets_a_batch_in_two_groups() {
        let expected = [(1, 8), (8, 8), (9, 8), (16, 8), (17, 12), (24, 12), (25, 16), (31, 16), (32, 16)];
        for (count, shown) in expected {
            assert_eq!(shown_together(count), shown, "{count}");
        }
        assert!((SHOWN_MIN + 1..=BATCH).all(|count| count.div_ceil(shown_together(count)) == 2));
    }
}
