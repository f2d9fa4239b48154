//! Counts of the requests that may still use an old mapping.
//!
//! A request holds a [`Pin`] from look-up to the end of its I/O. A cluster that lost its mapping in an epoch
//! is left alone until that epoch is over: then no request that has seen the mapping is left.
//!
//! A pin counts in its shard under the parity of the epoch that it has seen, and the epoch moves from `e` to
//! `e + 1` only if no pin of `e - 1` is left. So an epoch is over when the current one is at least 2 later.

use kickless_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// The number of shards. Each queue normally has its own.
const SHARDS: usize = if cfg!(loom) { 1 } else { 64 };

/// A number that grows while pins come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Epoch(u64);

/// The pins of one image.
#[derive(Debug)]
pub(crate) struct Pins {
    epoch: AtomicU64,
    shards: Box<[Arc<Shard>]>,
}

/// The numbers of pins of even and odd epochs, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Shard([AtomicU32; 2]);

/// The promise that the request's clusters are not reused. Dropping it ends the promise.
#[derive(Debug)]
pub(crate) struct Pin {
    shard: Arc<Shard>,
    parity: usize,
}

impl Pins {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Arc::default()).collect();
        Self { epoch: AtomicU64::new(0), shards }
    }

    /// Enters the current epoch. Any shard is right; a queue's own one is fast.
    pub(crate) fn enter(&self, shard: u32) -> Pin {
        let shard = &self.shards[shard as usize % SHARDS];
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let parity = (epoch % 2) as usize;
            shard.0[parity].fetch_add(1, Ordering::SeqCst);
            fence();
            // Pairs with the loads of `advance`: either they see the pin, or this load sees the newer epoch.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return Pin { shard: Arc::clone(shard), parity };
            }
            shard.0[parity].fetch_sub(1, Ordering::Release);
        }
    }

    pub(crate) fn current(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::SeqCst))
    }

    /// Moves to the next epoch if all pins of the previous one have left. One thread at a time calls it.
    pub(crate) fn advance(&self) -> Epoch {
        let epoch = self.epoch.load(Ordering::SeqCst);
        fence();
        let previous = ((epoch + 1) % 2) as usize;
        if self.shards.iter().any(|shard| shard.0[previous].load(Ordering::SeqCst) != 0) {
            return Epoch(epoch);
        }
        self.epoch.store(epoch + 1, Ordering::SeqCst);
        Epoch(epoch + 1)
    }

    /// Returns whether all pins of `epoch` and before have left.
    pub(crate) fn is_over(&self, epoch: Epoch) -> bool {
        self.current().0 >= epoch.0 + 2
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.shard.0[self.parity].fetch_sub(1, Ordering::Release);
    }
}

/// Orders accesses with `SeqCst` under loom, which treats them as weaker ones.
fn fence() {
    #[cfg(loom)]
    kickless_sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_over_when_its_pins_have_left() {
        let pins = Pins::new();
        let seen = pins.current();
        let pin = pins.enter(3);
        pins.advance();
        pins.advance();
        pins.advance();
        assert!(!pins.is_over(seen));
        let later = pins.enter(3);
        drop(pin);
        pins.advance();
        assert!(pins.is_over(seen));
        drop(later);
    }
}

#[cfg(all(test, loom))]
mod model {
    //! `RUSTFLAGS="--cfg loom" cargo test -p kickless-disk --release --lib pins::model`

    use super::*;
    use kickless_sync::loom::{self, cell::UnsafeCell, thread};

    /// A request reads a mapping under a pin and uses its cluster. The owner unmaps the cluster, and reuses
    /// it when the epoch is over. loom checks that the two uses exclude each other.
    #[test]
    fn a_cluster_is_reused_after_its_requests() {
        loom::model(|| {
            let pins = Arc::new(Pins::new());
            let mapped = Arc::new(AtomicU32::new(1));
            let cluster = Arc::new(UnsafeCell::new(0));
            let request = {
                let (pins, mapped, cluster) = (pins.clone(), mapped.clone(), cluster.clone());
                thread::spawn(move || {
                    let pin = pins.enter(0);
                    if mapped.load(Ordering::Relaxed) == 1 {
                        cluster.with(|_| ());
                    }
                    drop(pin);
                })
            };
            mapped.store(0, Ordering::Relaxed);
            let retired = pins.current();
            for _ in 0..2 {
                pins.advance();
            }
            if pins.is_over(retired) {
                cluster.with_mut(|_| ());
            }
            request.join().unwrap();
        });
    }
}
