//! Aligned buffers for what O_DIRECT cannot take, and not more of them than the host can bear.

use kickless_io::{AlignedBuf, Waker};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of each buffer; a longer transfer goes piece by piece.
pub(crate) const BUFFER_BYTES: usize = 256 << 10;

/// Buffers of one disk in use at a time, so 16 MiB. A guest whose buffers are all misaligned gets slower, not
/// us larger.
const IN_USE_MAX: usize = 64;

/// Buffers that are kept for the next one.
const KEPT_MAX: usize = 4;

/// What the buffers of a pool are, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    /// Bytes of each.
    pub(crate) bytes: usize,
    /// They begin at multiples of this.
    pub(crate) align: usize,
    /// In use at a time.
    pub(crate) in_use_max: usize,
    /// Kept for the next one.
    pub(crate) kept_max: usize,
}

/// The bounce buffers of one disk. Locked for short; nothing is locked inside.
#[derive(Debug)]
pub(crate) struct BufferPool {
    limits: PoolLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    kept: Vec<AlignedBuf>,
    in_use: usize,
    /// Who comes next, by number. The first so many of them as buffers are free have been signalled.
    queue: VecDeque<(u64, Waker)>,
    next: u64,
}

impl State {
    /// Where in the queue this number is. They are in order.
    fn place(&self, number: u64) -> Option<usize> {
        self.queue.binary_search_by_key(&number, |&(number, _)| number).ok()
    }

    fn free(&self, limits: PoolLimits) -> usize {
        limits.in_use_max - self.in_use
    }

    /// To be called when more are free, or fewer are before somebody in the queue.
    fn wake(&self, limits: PoolLimits) {
        for (_, waker) in self.queue.iter().take(self.free(limits)) {
            waker.wake();
        }
    }
}

/// A place in the queue, until this is dropped.
#[derive(Debug)]
pub(crate) struct BufferWait {
    pool: Arc<BufferPool>,
    number: u64,
}

/// The right to one buffer, until this is dropped.
#[derive(Debug)]
pub(crate) struct BufferPermit {
    pool: Arc<BufferPool>,
    /// Away while an engine has it.
    pub(crate) buffer: Option<AlignedBuf>,
}

impl BufferPool {
    /// Buffers of [`BUFFER_BYTES`] at multiples of `align`.
    pub(crate) fn new(align: usize) -> Self {
        Self::of(PoolLimits { bytes: BUFFER_BYTES, align, in_use_max: IN_USE_MAX, kept_max: KEPT_MAX })
    }

    /// Buffers of this kind.
    pub(crate) fn of(limits: PoolLimits) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// Bytes of each buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.limits.bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer, if one is free and nobody is before us. Otherwise `waiting` is a place in the queue, and
    /// `waker` is signalled when it is worth trying again.
    pub(crate) fn take(
        self: &Arc<Self>,
        waiting: &mut Option<BufferWait>,
        waker: &Waker,
    ) -> io::Result<Option<BufferPermit>> {
        let mut state = self.lock();
        let place = waiting.as_ref().and_then(|waiting| state.place(waiting.number));
        if state.free(self.limits) <= place.unwrap_or(state.queue.len()) {
            if place.is_none() {
                let number = state.next;
                state.next += 1;
                state.queue.push_back((number, waker.clone()));
                *waiting = Some(BufferWait { pool: self.clone(), number });
            }
            return Ok(None);
        }
        let buffer = match state.kept.pop() {
            Some(buffer) => buffer,
            None => AlignedBuf::new(self.limits.bytes, self.limits.align)?,
        };
        if let Some(place) = place {
            state.queue.remove(place);
        }
        state.in_use += 1;
        drop(state);
        *waiting = None;
        Ok(Some(BufferPermit { pool: self.clone(), buffer: Some(buffer) }))
    }
}

impl Drop for BufferWait {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        if let Some(place) = state.place(self.number) {
            state.queue.remove(place);
            state.wake(self.pool.limits);
        }
    }
}

impl Drop for BufferPermit {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
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
        pool.take(waiting, waker).unwrap()
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

        // Who gives up makes way for the next.
        permits.pop();
        assert!(waker.clear());
        drop(second);
        assert!(waker.clear());
        permits.push(take(&pool, &mut late, &waker).unwrap());
        drop(permits);
        assert_eq!(pool.lock().kept.len(), KEPT_MAX);
    }
}
