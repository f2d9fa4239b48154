//! Credit: receive chains that a task pops before a frame for them exists.

use kickless_device::Vring;
use kickless_virtqueue::Chain;
use std::collections::VecDeque;

/// Buffers that an unused [`Chain`] keeps memory for. The longest frame takes 17 pages.
const BUFFERS_KEPT: usize = 32;

/// The chains of a ring's credit ([`Vring::pop_credit`]), oldest first.
///
/// The credit keeps only the writable buffers of a chain, and only as many as the longest frame can use. So a
/// guest cannot make it keep more than 2 * `frame_len_max` buffers, in a ring of any size:
/// - The task pops only while the credit holds less than the longest frame. Each buffer has at least one
///   byte, so the credit then has fewer than `frame_len_max` buffers.
/// - The popped chain adds at most `frame_len_max` buffers.
///
/// A frame has at most 65 562 bytes, and a buffer takes 16. A chain can have memory for twice its buffers. So
/// the credit takes at most 4 MiB, and 64 bytes for each entry of the ring.
pub(crate) struct Credit {
    chains: VecDeque<Chain>,
    /// Unused chains. A pop takes one of them and allocates nothing.
    spare: Vec<Chain>,
    /// Writable bytes in all chains.
    bytes: u64,
    /// Entries of the ring that all chains occupy.
    places: u32,
    ring_size: u16,
    frame_len_max: u64,
}

impl Credit {
    /// Makes an empty credit for a ring of this size. The longest frame has `frame_len_max` bytes, header
    /// included.
    pub(crate) fn new(ring_size: u16, frame_len_max: usize) -> Self {
        let spare = (0..ring_size).map(|_| Chain::default()).collect();
        let chains = VecDeque::with_capacity(ring_size.into());
        Self { chains, spare, bytes: 0, places: 0, ring_size, frame_len_max: frame_len_max as u64 }
    }

    /// Returns the oldest chain.
    pub(crate) fn oldest(&self) -> Option<&Chain> {
        self.chains.front()
    }

    /// Returns the chains, oldest first.
    pub(crate) fn chains(&self) -> impl Iterator<Item = &Chain> {
        self.chains.iter()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Returns whether the ring has no room for one more chain that is as long as the newest. The driver
    /// could still have room for a shorter chain, but the card cannot know whether it will offer one.
    pub(crate) fn is_full(&self) -> bool {
        self.chains.back().is_some_and(|newest| {
            self.places + u32::from(newest.ring_descriptors()) > u32::from(self.ring_size)
        })
    }

    /// Pops one more chain. Returns the number of its descriptors, or `None` if the ring has no chain to pop
    /// now.
    #[inline]
    pub(crate) fn pop(&mut self, vring: &mut Vring) -> Option<u16> {
        let mut chain = self.spare.pop()?;
        if !vring.pop_credit(&mut chain) {
            self.spare.push(chain);
            return None;
        }
        let descriptors = chain.descriptors();
        chain.keep_writable(self.frame_len_max);
        self.bytes += chain.writable_len();
        self.places += u32::from(chain.ring_descriptors());
        self.chains.push_back(chain);
        Some(descriptors)
    }

    /// Removes the oldest `count` chains, which the task has used.
    pub(crate) fn remove_oldest(&mut self, count: usize) {
        for _ in 0..count {
            let chain = self.chains.pop_front();
            self.recycle(chain);
        }
    }

    /// Removes all chains but the oldest `count`. The ring has unpopped the others already.
    pub(crate) fn truncate(&mut self, count: usize) {
        while self.chains.len() > count {
            let chain = self.chains.pop_back();
            self.recycle(chain);
        }
    }

    /// Returns all chains to the ring.
    pub(crate) fn unpop_all(&mut self, vring: &mut Vring) {
        vring.unpop(vring.credit());
        self.truncate(0);
    }

    fn recycle(&mut self, chain: Option<Chain>) {
        if let Some(mut chain) = chain {
            self.bytes -= chain.writable_len();
            self.places -= u32::from(chain.ring_descriptors());
            chain.clear(BUFFERS_KEPT);
            self.spare.push(chain);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_device::{Areas, Counters, VringParts};
    use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
    use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
    use kickless_virtqueue::device::{Addresses, Options};
    use std::sync::Arc;

    const AVAIL: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const TABLE: u64 = 0x4000;
    const LEN: u64 = 0x1_0000;
    /// Descriptors in the indirect table.
    const TABLE_DESCRIPTORS: u16 = 1000;

    /// Returns a ring of size 4 with two chains: one of a single buffer, and one of many buffers in an
    /// indirect table. The last `writable` buffers of the table are writable.
    fn ring(writable: u16) -> Vring {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, LEN).unwrap();
        let slot = Slot::map(&file, 0, Gpa(0), UserAddr(LEN), LEN).unwrap();
        let map = Map::new(vec![slot]).unwrap();
        let desc = |at: u64, addr: u64, len: u32, flags: u16, next: u16| {
            let desc = Desc { addr: addr.into(), len: len.into(), flags: flags.into(), next: next.into() };
            map.write_obj(Gpa(at), &desc).unwrap();
        };
        desc(0, 0x8000, 16, DESC_F_WRITE, 0);
        desc(16, TABLE, 16 * u32::from(TABLE_DESCRIPTORS), DESC_F_INDIRECT, 0);
        for nth in 0..TABLE_DESCRIPTORS {
            let next = if nth + 1 < TABLE_DESCRIPTORS { DESC_F_NEXT } else { 0 };
            let write = if nth < TABLE_DESCRIPTORS - writable { 0 } else { DESC_F_WRITE };
            desc(TABLE + 16 * u64::from(nth), 0x8000, 1, write | next, nth + 1);
        }
        map.write_obj(Gpa(AVAIL), &[0u16, 2, 0, 1].map(u16::to_le)).unwrap();
        let [desc, avail, used] = [0, AVAIL, USED].map(|at| UserAddr(LEN + at));
        Vring::new(VringParts {
            index: 0,
            options: Options::new(4, false, true).unwrap(),
            areas: Areas::User(Addresses { desc, avail, used, log: None }),
            iommu: None,
            next_avail: 0,
            is_unconfirmed: false,
            unpublished: Vec::new(),
            inflight: None,
            view: Arc::new(View::new(map)),
            kick: None,
            call: None,
            err: None,
            logged: None,
            counters: Arc::new(Counters::default()),
        })
        .unwrap()
    }

    #[test]
    fn unused_chains_keep_little_memory() {
        let mut vring = ring(TABLE_DESCRIPTORS);
        let mut credit = Credit::new(4, 65_562);
        for remove_all in [Credit::unpop_all, |credit: &mut Credit, _: &mut Vring| credit.remove_oldest(2)] {
            let descriptors = (credit.pop(&mut vring), credit.pop(&mut vring));
            assert_eq!(descriptors, (Some(1), Some(TABLE_DESCRIPTORS)));
            assert_eq!((credit.bytes(), credit.places, credit.is_full()), (1016, 2, false));
            remove_all(&mut credit, &mut vring);
            assert_eq!((credit.bytes(), credit.places, credit.is_empty()), (0, 0, true));
            assert_eq!(credit.spare.len(), 4);
            assert!(credit.spare.iter().all(|chain| chain.capacity() <= BUFFERS_KEPT));
        }
    }

    #[test]
    fn credit_keeps_only_buffers_that_a_frame_can_use() {
        // No buffer is writable, some are, and more are than the longest frame has bytes.
        for (writable, kept) in [(0, 0), (70, 70), (TABLE_DESCRIPTORS, 100)] {
            let mut vring = ring(writable);
            let mut credit = Credit::new(4, 100);
            let descriptors = (credit.pop(&mut vring), credit.pop(&mut vring));
            assert_eq!(descriptors, (Some(1), Some(TABLE_DESCRIPTORS)));
            let newest = credit.chains().last().unwrap();
            assert_eq!((newest.readable().len(), newest.writable().len()), (0, kept));
            assert_eq!((newest.writable_len(), credit.bytes()), (kept as u64, 16 + kept as u64));
            assert!(newest.capacity() <= 2 * kept, "{} for {kept} buffers", newest.capacity());
            credit.unpop_all(&mut vring);
            assert_eq!((credit.bytes(), vring.credit()), (0, 0));
        }
    }
}
