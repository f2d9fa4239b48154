//! Counts of the requests that may still use an old mapping.
//!
//! A request holds a [`Pin`] from look-up to the end of its I/O. A cluster that lost its mapping in an epoch
//! is left alone until that epoch is over: then no request that has seen the mapping is left.
//!
//! A pin counts in its shard under the parity of the epoch that it has seen, and the epoch moves from `e` to
//! `e + 1` only if no pin of `e - 1` is left. So an epoch is over when the current one is at least 2 later.

use super::runtime::Runtime;
use super::wakers::Wakers;
use kickless_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use kickless_sync::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The number of shards. Each queue normally has its own.
const SHARDS: usize = if cfg!(loom) { 1 } else { 64 };

/// A number that grows while pins come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Epoch(u64);

/// The pins of one image.
#[derive(Debug)]
pub struct Pins<R: Runtime> {
    epoch: AtomicU64,
    shards: Box<[Arc<Shard<R>>]>,
    common: Arc<Common<R>>,
}

/// The numbers of pins, on a cache line of their own.
#[derive(Debug)]
#[repr(align(64))]
struct Shard<R: Runtime> {
    /// The pins of even and odd epochs.
    counts: [AtomicU32; 2],
    /// Not 0: requests wait for the pins of the parity that this is, less 1. The last of them wakes.
    awaited: AtomicU32,
    common: Arc<Common<R>>,
}

/// The rarely used part of all shards.
#[derive(Debug)]
struct Common<R: Runtime> {
    /// The requests that wait for clusters, among others.
    wakers: Wakers<R>,
    /// Bytes of the file that a transfer without a request may still change.
    lost: Mutex<Vec<Range<u64>>>,
    has_lost: AtomicU32,
}

/// The promise that the clusters that a request has found are not used for anything else. Dropping it ends
/// the promise.
#[derive(Debug)]
pub struct Pin<R: Runtime> {
    shard: Arc<Shard<R>>,
    parity: usize,
}

impl<R: Runtime> Pins<R> {
    /// Makes the pins of an image. There are none.
    pub fn new() -> Self {
        let (lost, has_lost) = (Mutex::default(), AtomicU32::new(0));
        let common = Arc::new(Common { wakers: Wakers::new(), lost, has_lost });
        let shard = |_| {
            let counts = [AtomicU32::new(0), AtomicU32::new(0)];
            Arc::new(Shard { counts, awaited: AtomicU32::new(0), common: Arc::clone(&common) })
        };
        Self { epoch: AtomicU64::new(0), shards: (0..SHARDS).map(shard).collect(), common }
    }

    /// Returns the list of the requests that wait.
    pub(crate) fn wakers(&self) -> &Wakers<R> {
        &self.common.wakers
    }

    /// Asks for a wake when the pins have left that [`advance`](Self::advance) waits for. Returns whether
    /// they may have left since the last such wake was asked for: then the caller calls `advance` once more
    /// before it waits. The thread that calls `advance` calls this.
    ///
    /// Pins of the current epoch do not wake. So a request that enters, finds that it has to wait, and leaves
    /// does not wake itself.
    pub(crate) fn await_leaving(&self) -> bool {
        let previous = (self.epoch.load(Ordering::SeqCst) + 1) % 2;
        let mut is_new = false;
        for shard in &self.shards {
            // Pairs with the load of `Shard::leave`: either it sees this, or `advance` sees the lower count.
            is_new |= shard.awaited.swap(previous as u32 + 1, Ordering::SeqCst) != previous as u32 + 1;
        }
        fence();
        is_new
    }

    /// Returns whether a transfer without a request may still change some of these bytes of the file.
    pub(crate) fn is_lost(&self, bytes: &Range<u64>) -> bool {
        // The end of the pin's epoch orders this after `Pin::lose`.
        if self.common.has_lost.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let lost = lock(&self.common.lost);
        lost.iter().any(|lost| lost.start < bytes.end && bytes.start < lost.end)
    }

    /// Enters the current epoch. Any shard is right; a queue's own one is fast.
    pub fn enter(&self, shard: u32) -> Pin<R> {
        let shard = &self.shards[shard as usize % SHARDS];
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let parity = (epoch % 2) as usize;
            shard.counts[parity].fetch_add(1, Ordering::SeqCst);
            fence();
            // Pairs with the loads of `advance`: either they see the pin, or this load sees the newer epoch.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return Pin { shard: Arc::clone(shard), parity };
            }
            // `advance` may have seen it, so it leaves as a pin does.
            shard.leave(parity);
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
        if self.shards.iter().any(|shard| shard.counts[previous].load(Ordering::SeqCst) != 0) {
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

impl<R: Runtime> Default for Pins<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Runtime> Pin<R> {
    /// Ends the promise although a transfer to these bytes of the file is in flight. Their clusters are never
    /// freed.
    #[cold]
    pub fn lose(self, bytes: Range<u64>) {
        let common = &self.shard.common;
        lock(&common.lost).push(bytes);
        common.has_lost.store(1, Ordering::Relaxed);
    }
}

impl<R: Runtime> Drop for Pin<R> {
    fn drop(&mut self) {
        self.shard.leave(self.parity);
    }
}

impl<R: Runtime> Shard<R> {
    /// Ends a pin. The last one of an awaited epoch wakes those who wait.
    #[inline]
    fn leave(&self, parity: usize) {
        // Release, for `advance`. SeqCst, for `await_leaving`.
        let before = self.counts[parity].fetch_sub(1, Ordering::SeqCst);
        fence();
        let awaited = parity as u32 + 1;
        if before == 1 && self.awaited.load(Ordering::SeqCst) == awaited {
            self.wake(awaited);
        }
    }

    /// Wakes those who wait for pins.
    #[cold]
    fn wake(&self, awaited: u32) {
        if self.awaited.compare_exchange(awaited, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.common.wakers.wake();
        }
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
    use crate::sim::runtime::{SimRuntime, SimWaker};

    #[test]
    fn an_epoch_is_over_when_its_pins_have_left() {
        let pins = Pins::<SimRuntime>::new();
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

    #[test]
    fn the_last_pin_that_is_awaited_wakes_once() {
        let (pins, waker) = (Pins::<SimRuntime>::new(), SimWaker::default());
        drop(pins.enter(0));
        let (first, second) = (pins.enter(1), pins.enter(1));
        pins.advance();
        pins.advance();
        pins.wakers().add(&waker);
        assert!(pins.await_leaving());
        assert!(!pins.await_leaving());
        drop(first);
        assert!(!waker.clear());
        drop(second);
        assert!(waker.clear());
        assert!(pins.await_leaving());
    }

    /// A request that waits looks again and again. That wakes nobody, or it would never sleep.
    #[test]
    fn pins_of_the_current_epoch_do_not_wake() {
        let (pins, waker) = (Pins::<SimRuntime>::new(), SimWaker::default());
        let awaited = pins.enter(0);
        pins.advance();
        pins.advance();
        pins.wakers().add(&waker);
        pins.await_leaving();
        for shard in 0..3 {
            drop(pins.enter(shard));
        }
        assert!(!waker.clear());
        drop(awaited);
        assert!(waker.clear());
    }

    #[test]
    fn a_lost_transfer_keeps_its_bytes_only() {
        let pins = Pins::<SimRuntime>::new();
        let seen = pins.current();
        assert!(!pins.is_lost(&(0..1 << 40)));
        pins.enter(2).lose(4096..8192);
        pins.advance();
        pins.advance();
        assert!(pins.is_over(seen));
        assert!(pins.is_lost(&(0..4097)) && pins.is_lost(&(8191..8192)));
        assert!(!pins.is_lost(&(0..4096)) && !pins.is_lost(&(8192..9000)));
    }
}

#[cfg(all(test, loom))]
mod model {
    //! `RUSTFLAGS="--cfg loom" cargo test -p kickless-qcow2 --release --lib pins::model`

    use super::*;
    use crate::sim::runtime::SimRuntime;
    use kickless_sync::loom::{self, cell::UnsafeCell, thread};

    /// A request reads a mapping under a pin and uses its cluster. The owner unmaps the cluster, and reuses
    /// it when the epoch is over. loom checks that the two uses exclude each other.
    #[test]
    fn a_cluster_is_reused_after_its_requests() {
        loom::model(|| {
            let pins = Arc::new(Pins::<SimRuntime>::new());
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

    /// The owner finds that pins have to leave, and asks for a wake as `Tables` does. Then the last of them
    /// sees that it is asked for. `comes` is a request that comes meanwhile.
    fn awaited(comes: bool) {
        let pins = Arc::new(Pins::<SimRuntime>::new());
        let pin = pins.enter(0);
        let seen = pins.current();
        let mut threads = vec![thread::spawn(move || drop(pin))];
        if comes {
            let pins = pins.clone();
            threads.push(thread::spawn(move || drop(pins.enter(0))));
        }
        let is_over = loop {
            pins.advance();
            pins.advance();
            if pins.is_over(seen) || !pins.await_leaving() {
                break pins.is_over(seen);
            }
        };
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // The wake resets the flag.
        assert!(is_over || pins.shards[0].awaited.load(Ordering::SeqCst) == 0);
    }

    #[test]
    fn a_pin_that_is_awaited_wakes() {
        loom::model(|| awaited(false));
    }

    /// A request that comes while the epoch moves may count in the old one for a moment, and the owner may
    /// see that.
    #[test]
    fn a_request_that_comes_too_late_wakes() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| awaited(true));
    }
}
