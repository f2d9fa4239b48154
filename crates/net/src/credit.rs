//! Receive buffers that were popped before there is a frame for them.

use kickless_device::Vring;
use kickless_virtqueue::Chain;
use std::collections::VecDeque;

/// The chains of a ring's credit ([`Vring::pop_credit`]), oldest first.
pub(crate) struct Credit {
    chains: VecDeque<Chain>,
    /// Chains to pop into, so that a pop allocates nothing.
    spare: Vec<Chain>,
    /// Writable bytes of all.
    bytes: u64,
    /// Descriptors of all.
    descriptors: u32,
    size: u16,
}

impl Credit {
    /// Makes the credit of a ring of this size.
    pub(crate) fn new(size: u16) -> Self {
        let spare = (0..size).map(|_| Chain::default()).collect();
        Self { chains: VecDeque::with_capacity(size.into()), spare, bytes: 0, descriptors: 0, size }
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

    /// Whether the driver's ring cannot hold more than it has, as far as that can be told.
    pub(crate) fn is_full(&self) -> bool {
        self.descriptors >= self.size.into() || self.chains.len() >= self.size.into()
    }

    /// Pops one more chain. Returns its descriptors; `None`: the ring has no more now.
    pub(crate) fn pop(&mut self, vring: &mut Vring) -> Option<u16> {
        let mut chain = self.spare.pop()?;
        if !vring.pop_credit(&mut chain) {
            self.spare.push(chain);
            return None;
        }
        let descriptors = chain.descriptors();
        self.bytes += chain.writable_len();
        self.descriptors += u32::from(descriptors);
        self.chains.push_back(chain);
        Some(descriptors)
    }

    /// Forgets the oldest `count`, which have been used.
    pub(crate) fn take_oldest(&mut self, count: usize) {
        for _ in 0..count {
            let chain = self.chains.pop_front();
            self.forget(chain);
        }
    }

    /// Forgets the newest chains that the ring has taken back by itself.
    pub(crate) fn keep_oldest(&mut self, count: usize) {
        while self.chains.len() > count {
            let chain = self.chains.pop_back();
            self.forget(chain);
        }
    }

    /// Returns all to the ring.
    pub(crate) fn give_back(&mut self, vring: &mut Vring) {
        vring.unpop(vring.credit());
        self.keep_oldest(0);
    }

    fn forget(&mut self, chain: Option<Chain>) {
        if let Some(chain) = chain {
            self.bytes -= chain.writable_len();
            self.descriptors -= u32::from(chain.descriptors());
            self.spare.push(chain);
        }
    }
}
