//! Delivers a frame into several chains, without credit.

use super::{CHAINS_MAX, HEADER_LEN, ReceiveRing};
use crate::frame::gathered::GatheredFrame;
use crate::ring::cost;
use kickless_virtqueue::device;

impl ReceiveRing {
    /// Delivers a frame into as many chains of a single descriptor as it needs, without credit, and returns
    /// `true`. Completes the number of buffers in its header. Returns `false`, and shows the driver nothing,
    /// if the frame must be delivered by [`ReceiveRing::deliver`]. The ring takes batches
    /// ([`ReceiveRing::takes_batches`]).
    pub(crate) fn deliver_in_singles(&mut self, frame: &mut impl GatheredFrame) -> bool {
        let len = frame.len();
        if len > self.format.len_max || self.budget.is_used_up() {
            return false;
        }
        let Some(count) = self.peek_for(len) else { return false };
        // Lossless, because there are at most `CHAINS_MAX`.
        frame.set_num_buffers(count as u16);
        let Self { vring, chains, .. } = self;
        let (view, marks) = vring.memory();
        let mut left = len;
        for chain in &mut chains[..count] {
            let here = left.min(chain.buffer.len as usize);
            if frame.write_next(view, chain.buffer.addr, here, marks).is_err() {
                // The bytes up to here are copied again.
                self.budget.charge(cost::of_frame((len - left) as u64));
                return false;
            }
            // Lossless, because the buffer is as long.
            chain.written = here as u32;
            left -= here;
        }
        vring.complete_peeked(&chains[..count]);
        // Shorter frames in between lower the guess slowly, because one that is too low costs a second peek.
        self.chains_of_frame = count.max(self.chains_of_frame - 1);
        self.budget.charge_descriptors(count as u32);
        self.budget.charge(cost::of_frame((len - HEADER_LEN) as u64));
        self.count_received(len);
        true
    }

    /// Peeks the chains for a frame of `len` bytes, each of a single descriptor. Returns their number, or
    /// `None` if there are too few, or if the first has no room for a header.
    fn peek_for(&mut self, len: usize) -> Option<usize> {
        let most = if self.format.merges_chains() { CHAINS_MAX } else { 1 };
        for wanted in [self.chains_of_frame.min(most), most] {
            let peeked = self.vring.peek(device::Direction::Writable, &mut self.chains[..wanted]);
            // Lossless, because there are at most `CHAINS_MAX`.
            self.budget.charge_descriptors(peeked as u32);
            let chains = &self.chains[..peeked];
            if (chains.first()?.buffer.len as usize) < HEADER_LEN {
                return None;
            }
            let mut room = 0;
            for (before, chain) in chains.iter().enumerate() {
                room += u64::from(chain.buffer.len);
                if room >= len as u64 {
                    return Some(before + 1);
                }
            }
            if peeked < wanted || wanted == most {
                return None;
            }
        }
        None
    }
}
