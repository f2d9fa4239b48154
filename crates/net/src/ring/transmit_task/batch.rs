//! Takes frames of one buffer each in batches, while their chains stay in the ring.

use super::{ALL, Beside, Served, TransmitTask};
use crate::frame::header::{Frame, has_no_offload, pass_header, segments_max};
use crate::frame::loop_queue::HEADER;
use crate::offload::{Undo, undo};
use crate::ports::transmit::{Put, PutError, Transmit};
use crate::ring::cost::{BatchCost, DIRECT_SHARES};
use crate::ring::transmit_ring::BATCH;
use kickless_device::Neighbours;
use kickless_spec::net::{ETHERNET_HEADER_LEN, Header, NetFeatures};
use kickless_virtqueue::device::{self, SingleChain};
use zerocopy::FromBytes;

impl<P: Transmit> TransmitTask<P> {
    /// Serves chains of a single descriptor together, until they cost `budget`. There were `before` frames in
    /// this turn. Returns nothing if the next chain has to be popped.
    #[inline]
    pub(super) fn take_batch(&mut self, neighbours: Beside<'_, '_>, before: u32, budget: u32) -> Served {
        let Self { ring, chains, .. } = self;
        if !ring.is_enabled || ring.format.header_len != HEADER || P::AT_ONCE && ring.card.capture.is_on() {
            return Served::default();
        }
        let max = if P::AT_ONCE { BATCH.min((P::FRAMES_MAX - before) as usize) } else { BATCH };
        let count = ring.vring.peek(device::Direction::Readable, &mut chains[..max]);
        if count == 0 {
            return Served::default();
        }
        if let Some([len_min, _]) = P::OFFERED_LEN_MIN
            && chains[0].buffer.len >= len_min
            && let Some(neighbours) = neighbours
        {
            let served = self.send_directly(neighbours, count, budget);
            if served.chains > 0 {
                return served;
            }
        }
        self.put_batch(count, budget)
    }

    /// Puts frames of the peeked chains.
    #[inline]
    fn put_batch(&mut self, count: usize, budget: u32) -> Served {
        let pays_each = P::AT_ONCE && !P::DISCARDS || self.ring.vring.is_limited();
        let (mut frames, mut sent, mut bytes) = (0, 0, 0);
        let mut cost = BatchCost::new(budget, pays_each);
        while frames < count && !cost.is_used_up() {
            let len = self.chains[frames].buffer.len as usize;
            if !(HEADER + ETHERNET_HEADER_LEN..=P::BATCHED_LEN_MAX).contains(&len) {
                break;
            }
            let put = match P::DISCARDS {
                true => self.check_single(frames).map(|()| 0),
                false => self.put_single(frames, count, len),
            };
            match put {
                Ok(segments) => {
                    (sent, bytes) = (sent + 1, bytes + (len - HEADER) as u64);
                    cost.add_packet(len as u64, segments);
                }
                Err(error @ (PutError::Refused | PutError::Down)) => {
                    self.count_failure(error);
                    cost.add(len as u64);
                }
                Err(_) => break,
            }
            frames += 1;
        }
        self.ring.vring.complete_peeked(&self.chains[..frames]);
        self.ring.count_sent(sent, bytes);
        let frames = frames as u32;
        Served { chains: frames, cost: cost.cost(), frames }
    }

    /// Puts the frame of a peeked chain, of `len` bytes, header included. Returns the most segments that it
    /// can become. Changes nothing if the chain has to be popped to find out what is wrong.
    #[inline]
    fn put_single(&mut self, number: usize, count: usize, len: usize) -> Result<u32, PutError> {
        let Self { ring, port, chains, .. } = self;
        port.make_room(ring, len).map_err(|_| PutError::Unbatched)?;
        let (addr, features, accepts) = (chains[number].buffer.addr, ring.format.features, port.accepts());
        let mut segments = 0;
        port.put(len, |space| {
            let is_read = ring.vring.view().read(addr, space).is_ok();
            // From here on, only the copy counts.
            let is_valid = is_read && pass_header(space, len, features);
            if !is_valid
                || !accepts.contains(ALL) && !is_accepted(space, accepts)
                || P::AT_ONCE && !ring.vring.is_intact()
            {
                return Err(PutError::Unbatched);
            }
            segments = segments_max(space);
            // The lines of the next frame come from the driver's processor during a system call.
            if P::AT_ONCE
                && let Some(SingleChain { buffer, .. }) = chains[..count].get(number + 1)
            {
                let len = P::BATCHED_LEN_MAX.min(buffer.len as usize);
                ring.vring.view().prefetch_rest(buffer.addr, len);
            }
            Ok(())
        })?;
        Ok(segments)
    }

    /// Checks the frame of a peeked chain, which goes nowhere.
    #[inline]
    fn check_single(&mut self, number: usize) -> Put {
        let buffer = self.chains[number].buffer;
        let header = self.ring.vring.view().read_obj::<Header>(buffer.addr);
        let features = self.ring.format.features;
        match header.is_ok_and(|header| is_valid(&header, buffer.len, features)) {
            true => Ok(()),
            false => Err(PutError::Unbatched),
        }
    }

    /// Offers the peeked chains to a receiver on the same worker. Completes those that it has taken.
    #[inline(never)]
    fn send_directly(&mut self, neighbours: &mut dyn Neighbours, count: usize, budget: u32) -> Served {
        let Self { ring, port, chains, .. } = self;
        let taken = port.offer(ring, &chains[..count], neighbours, budget) as usize;
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
        Served { chains: frames, cost: DIRECT_SHARES * cost.cost(), frames: DIRECT_SHARES * frames }
    }
}

/// Returns whether a port that accepts these offloads takes the frame behind its header as it is.
#[inline]
fn is_accepted(frame: &[u8], accepts: NetFeatures) -> bool {
    Header::read_from_prefix(frame).is_ok_and(|(header, frame)| {
        has_no_offload(&header) || undo(&header, frame, accepts) == Undo::Nothing
    })
}

/// Returns whether the header of a frame of `len` bytes, header included, is valid.
#[inline]
fn is_valid(header: &Header, len: u32, features: NetFeatures) -> bool {
    has_no_offload(header) || Frame::parse(header, HEADER, len.into(), features).is_ok()
}
