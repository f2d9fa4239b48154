//! Aligned buffers for data that O_DIRECT cannot use in place, and a limit on their number.

use crate::{IoError, Step};
use kickless_io::{AlignedBuf, Errno, Waker};
use kickless_sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// The size of a buffer in bytes. A longer transfer goes piece by piece.
pub(crate) const BUFFER_BYTES: usize = 256 << 10;

/// The largest number of buffers of one disk in use, so 16 MiB. Misaligned buffers make their guest slower,
/// but do not make this process larger.
const IN_USE_MAX: usize = 64;

/// The largest number of buffers kept for reuse.
const KEPT_MAX: usize = 4;

/// The size and the number of the buffers of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    /// The bytes of each buffer.
    pub(crate) bytes: usize,
    /// The alignment of each buffer.
    pub(crate) align: usize,
    /// The largest number in use.
    pub(crate) in_use_max: usize,
    /// The largest number kept for reuse.
    pub(crate) kept_max: usize,
}

/// The bounce buffers of one disk. Its lock is held only briefly, and no other lock is taken under it.
#[derive(Debug)]
pub(crate) struct BufferPool {
    limits: PoolLimits,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    kept: Vec<AlignedBuf>,
    in_use: usize,
    /// The waiting requests in order, by number. As many of the first as buffers are free have been
    /// signalled.
    queue: VecDeque<(u64, Waker)>,
    next: u64,
}

impl PoolState {
    /// Returns the place of this number in the queue. Numbers are in order.
    fn place(&self, number: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&number, |&(number, _)| number).ok()
    }

    fn free(&self, limits: PoolLimits) -> usize {
        limits.in_use_max - self.in_use
    }

    /// Signals the requests that can have a buffer. Called when more buffers are free, or the queue becomes
    /// shorter.
    fn wake(&self, limits: PoolLimits) {
        for (_, waker) in self.queue.iter().take(self.free(limits)) {
            waker.wake();
        }
    }
}

/// A place in the queue of a pool. Dropping it gives up the place.
#[derive(Debug)]
pub(crate) struct BufferWait {
    pool: Arc<BufferPool>,
    number: u64,
}

/// The permission to use one buffer. Dropping it returns the buffer.
#[derive(Debug)]
pub(crate) struct BufferPermit {
    pool: Arc<BufferPool>,
    /// The buffer. `None` while an engine has it.
    pub(crate) buffer: Option<AlignedBuf>,
}

impl BufferPool {
    /// Makes a pool of buffers of [`BUFFER_BYTES`] with this alignment.
    pub(crate) fn new(align: usize) -> Self {
        Self::of(PoolLimits { bytes: BUFFER_BYTES, align, in_use_max: IN_USE_MAX, kept_max: KEPT_MAX })
    }

    /// Makes a pool with these limits.
    pub(crate) fn of(limits: PoolLimits) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// Returns the bytes of each buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.limits.bytes
    }

    /// Takes a buffer.
    ///
    /// # Errors
    /// [`Step::Busy`] if no buffer is free, or an earlier request waits for it. Then `waiting` is a place in
    /// the queue, and `waker` is signalled when another attempt makes sense. The end of the request if the
    /// host has no memory.
    pub(crate) fn take(
        self: &Arc<Self>,
        waiting: &mut Option<BufferWait>,
        waker: &Waker,
    ) -> Result<BufferPermit, Step> {
        let mut state = lock(&self.state);
        // The place does not matter then, and is searched for.
        if waiting.is_some() && state.free(self.limits) == 0 {
            return Err(Step::Busy);
        }
        let place = waiting.as_ref().and_then(|waiting| state.place(waiting.number));
        if state.free(self.limits) <= place.unwrap_or(state.queue.len()) {
            if place.is_none() {
                let number = state.next;
                state.next += 1;
                state.queue.push_back((number, waker.clone()));
                *waiting = Some(BufferWait { pool: self.clone(), number });
            }
            return Err(Step::Busy);
        }
        let buffer = match state.kept.pop() {
            Some(buffer) => buffer,
            None => AlignedBuf::new(self.limits.bytes, self.limits.align)
                .map_err(|_| Step::Done(Err(IoError::Os(Errno::NOMEM))))?,
        };
        if let Some(place) = place {
            state.queue.remove(place);
        }
        state.in_use += 1;
        drop(state);
        *waiting = None;
        Ok(BufferPermit { pool: self.clone(), buffer: Some(buffer) })
    }
}

impl Drop for BufferWait {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        if let Some(place) = state.place(self.number) {
            state.queue.remove(place);
            state.wake(self.pool.limits);
        }
    }
}

impl Drop for BufferPermit {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        state.in_use -= 1;
        if state.kept.len() < self.pool.limits.kept_max {
            state.kept.extend(self.buffer.take());
        }
        state.wake(self.pool.limits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &Arc<BufferPool>, waiting: &mut Option<BufferWait>, waker: &Waker) -> Option<BufferPermit> {
        pool.take(waiting, waker).ok()
    }

    #[test]
    fn bounded_and_first_come_first_served() {
        let (pool, waker) = (Arc::new(BufferPool::new(4096)), Waker::new().unwrap());
        let mut permits: Vec<_> = (0..IN_USE_MAX).map(|_| take(&pool, &mut None, &waker).unwrap()).collect();
        let (mut first, mut second, mut late) = (None, None, None);
        assert!(take(&pool, &mut first, &waker).is_none());
        assert!(take(&pool, &mut second, &waker).is_none());
        assert!(!waker.clear());

        permits.pop();
        assert!(waker.clear());
        assert!(take(&pool, &mut second, &waker).is_none());
        assert!(take(&pool, &mut late, &waker).is_none());
        permits.push(take(&pool, &mut first, &waker).unwrap());
        assert!(first.is_none());

        // A request that gives up makes way for the next.
        permits.pop();
        assert!(waker.clear());
        drop(second);
        assert!(waker.clear());
        permits.push(take(&pool, &mut late, &waker).unwrap());
        drop(permits);
        assert_eq!(lock(&pool.state).kept.len(), KEPT_MAX);
    }
}
