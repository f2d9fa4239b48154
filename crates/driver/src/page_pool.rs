//! The allocator of the disk's own shared memory.

use kickless_sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The unit of allocation. It suits O_DIRECT and DMA engines.
const PAGE: u64 = 4096;
/// The number of sizes with a free list: one page, two, four and so on up to 1 MiB.
const CLASSES: usize = 9;
/// The largest number of free pieces of each size.
const READY_MAX: usize = 64;

/// An allocator of pages. It keeps freed pieces by size, and reuses them without a search.
#[derive(Debug)]
pub(crate) struct PagePool {
    free: Mutex<Free>,
    given_back: Condvar,
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct Free {
    ready: [Vec<u64>; CLASSES],
    /// Start and length of the other free ranges; neighbours are joined.
    ranges: BTreeMap<u64, u64>,
}

impl PagePool {
    /// Makes an allocator of `len` bytes from `start` on, both multiples of a page.
    pub(crate) fn new(start: u64, len: u64) -> Self {
        let ready = std::array::from_fn(|_| Vec::with_capacity(READY_MAX));
        let free = Free { ready, ranges: BTreeMap::from([(start, len)]) };
        Self { free: Mutex::new(free), given_back: Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Allocates `len` bytes in one piece. Returns their start.
    pub(crate) fn take(&self, len: u64) -> Option<u64> {
        lock(&self.free).take(rounded(len)?)
    }

    /// Allocates as [`PagePool::take`], but waits up to `limit` until memory is freed.
    pub(crate) fn take_or_wait(&self, len: u64, limit: Duration) -> Option<u64> {
        let len = rounded(len)?;
        let mut free = lock(&self.free);
        if let Some(at) = free.take(len) {
            return Some(at);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut taken = None;
        let waited = self.given_back.wait_timeout_while(free, limit, |free| {
            taken = free.take(len);
            taken.is_none()
        });
        drop(waited);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        taken
    }

    /// Frees `len` bytes that [`PagePool::take`] returned.
    pub(crate) fn give_back(&self, at: u64, len: u64) {
        let Some(len) = rounded(len) else { return };
        let mut free = lock(&self.free);
        free.give_back(at, len);
        // A waiting thread holds this lock except while it sleeps, so this sees it.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.given_back.notify_all();
        }
    }
}

/// Returns the size of the piece for `len` bytes: a power of two of pages, up to the largest size with a free
/// list.
fn rounded(len: u64) -> Option<u64> {
    let len = len.max(1).checked_next_multiple_of(PAGE)?;
    if len <= PAGE << (CLASSES - 1) { Some(len.next_power_of_two()) } else { Some(len) }
}

/// Returns the size class of a rounded length.
fn class(len: u64) -> Option<usize> {
    let class = (len / PAGE).trailing_zeros() as usize;
    (len == PAGE << class && class < CLASSES).then_some(class)
}

impl Free {
    fn take(&mut self, len: u64) -> Option<u64> {
        if let Some(at) = class(len).and_then(|class| self.ready.get_mut(class)?.pop()) {
            return Some(at);
        }
        self.cut(len).or_else(|| {
            self.join();
            self.cut(len)
        })
    }

    /// Allocates from the first range that is long enough.
    fn cut(&mut self, len: u64) -> Option<u64> {
        let (at, has) = self.ranges.iter().map(|(at, has)| (*at, *has)).find(|(_, has)| *has >= len)?;
        self.ranges.remove(&at);
        if has > len {
            self.ranges.insert(at + len, has - len);
        }
        Some(at)
    }

    /// Moves all free pieces back to the ranges.
    fn join(&mut self) {
        for class in 0..CLASSES {
            while let Some(at) = self.ready.get_mut(class).and_then(Vec::pop) {
                self.insert(at, PAGE << class);
            }
        }
    }

    fn give_back(&mut self, at: u64, len: u64) {
        let ready = class(len).and_then(|class| self.ready.get_mut(class));
        match ready {
            Some(ready) if ready.len() < READY_MAX => ready.push(at),
            _ => self.insert(at, len),
        }
    }

    fn insert(&mut self, mut at: u64, mut len: u64) {
        if let Some((before, has)) = self.ranges.range(..at).next_back().map(|(at, len)| (*at, *len))
            && before + has == at
        {
            self.ranges.remove(&before);
            (at, len) = (before, len + has);
        }
        if let Some(has) = self.ranges.remove(&(at + len)) {
            len += has;
        }
        self.ranges.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_can_be_allocated_again() {
        let pool = PagePool::new(4096, 16 << 20);
        for round in 0..3u64 {
            let mut taken = Vec::new();
            let mut len = 1 + round * 5000;
            while let Some(at) = pool.take(len) {
                taken.push((at, len));
                len = (len * 7 + 513) % (3 << 20) + 1;
            }
            assert!(taken.len() > 3);
            let mut sorted: Vec<_> = taken.iter().map(|(at, len)| (*at, rounded(*len).unwrap())).collect();
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "no two overlap");
            taken.iter().for_each(|(at, len)| pool.give_back(*at, *len));
            let whole = pool.take(16 << 20).expect("nothing is lost");
            assert_eq!(whole, 4096);
            pool.give_back(whole, 16 << 20);
        }
        assert_eq!(pool.take(u64::MAX), None);
    }

    #[test]
    fn a_waiting_thread_gets_freed_memory() {
        let pool = PagePool::new(0, 8192);
        let at = pool.take(8192).unwrap();
        assert_eq!(pool.take_or_wait(1, Duration::from_millis(1)), None);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.take_or_wait(4096, Duration::from_secs(30)));
            while pool.waiting.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            pool.give_back(at, 8192);
            assert_eq!(waiter.join().unwrap(), Some(0));
        });
    }
}
