//! Carries the frames of a loop port from the transmit ring of a pair to its receive ring.
//!
//! Both rings collect frames in a batch of their own. They exchange batches under a lock: once for each poll,
//! not for each frame. A transmit ring never waits for the receive ring. If the batch in between is full, or
//! if no receive ring runs, it drops its frames.

use kickless_io::Waker;
use kickless_spec::net::{FRAME_MAX, Header};
use kickless_sync::atomic::{AtomicBool, Ordering};
use kickless_sync::{Mutex, MutexGuard, lock};

/// The most frames in a batch.
const FRAMES_MAX: usize = 1024;
/// The most bytes in a batch: as many as eight frames of the greatest length. It stays in a processor's cache
/// of the second level.
const BYTES_MAX: usize = 8 * FRAME_MAX;

/// The queue of one pair.
#[derive(Debug, Default)]
pub(crate) struct LoopQueue {
    shared: Mutex<Shared>,
    /// Whether there are frames. A receive ring that polls reads this without the lock.
    has_frames: AtomicBool,
    /// Whether a receive ring runs. A sender that chooses among queues reads this without the lock.
    is_open: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    batch: Batch,
    /// Wakes the receive ring. `None` while none runs.
    receiver: Option<Waker>,
    /// The receive ring sleeps, or is about to.
    is_waiting: bool,
}

/// Frames, each behind its header.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Space for the bytes of the frames, which are in the first `len` of it. It keeps its length, so that it
    /// is not zeroed for each frame.
    space: Vec<u8>,
    len: usize,
    /// The length of each frame, header included.
    lens: Vec<u32>,
}

impl Batch {
    /// Returns space for one more frame of `len` bytes, header included. Its content is unknown. The batch
    /// has room for it.
    #[inline]
    pub(crate) fn push(&mut self, len: usize) -> &mut [u8] {
        debug_assert!(self.has_room(len, 1));
        let end = self.len + len;
        if end > self.space.len() {
            self.grow(end);
        }
        let start = std::mem::replace(&mut self.len, end);
        self.lens.push(len as u32);
        &mut self.space[start..end]
    }

    /// The vectors keep their memory, so this allocates only until the batch was full once.
    #[cold]
    fn grow(&mut self, end: usize) {
        self.space.resize(end.next_power_of_two(), 0);
    }

    /// Makes the newest frame `len` bytes long, which is less than it was.
    pub(crate) fn shorten(&mut self, len: usize) {
        if let Some(before) = self.lens.last_mut() {
            self.len -= *before as usize - len;
            *before = len as u32;
        }
    }

    /// Takes back the newest frame.
    pub(crate) fn pop(&mut self) {
        if let Some(len) = self.lens.pop() {
            self.len -= len as usize;
        }
    }

    /// Returns whether the batch has room for this number of frames with `bytes` bytes in all, headers
    /// included. An empty batch has room for the longest frame.
    #[inline]
    pub(crate) fn has_room(&self, bytes: usize, frames: usize) -> bool {
        self.len + bytes <= BYTES_MAX && self.lens.len() + frames <= FRAMES_MAX
    }

    /// Adds the frames of another batch, for which there is room.
    fn append(&mut self, other: &Self) {
        let (start, end) = (self.len, self.len + other.len);
        if end > self.space.len() {
            self.grow(end);
        }
        self.space[start..end].copy_from_slice(&other.space[..other.len]);
        self.len = end;
        self.lens.extend_from_slice(&other.lens);
    }

    pub(crate) fn len(&self) -> usize {
        self.lens.len()
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.lens.clear();
    }

    /// Returns the length of the frame with this number, header included; 0 if there is none.
    #[inline]
    pub(crate) fn frame_len(&self, number: usize) -> usize {
        self.lens.get(number).map_or(0, |len| *len as usize)
    }

    /// Returns the frames from this number on, the first of which begins at `start`.
    #[inline]
    pub(crate) fn frames(&self, number: usize, start: usize) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.space.get(start..self.len).unwrap_or_default();
        self.lens.get(number..).unwrap_or_default().iter().map_while(move |len| {
            let (frame, more) = rest.split_at_checked(*len as usize)?;
            rest = more;
            Some(frame)
        })
    }

    /// Returns the frame with this number, which begins at `start`.
    #[inline]
    pub(crate) fn frame(&mut self, number: usize, start: usize) -> Option<&mut [u8]> {
        let len = *self.lens.get(number)? as usize;
        self.space.get_mut(start..start + len)
    }
}

impl LoopQueue {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    /// Starts or ends a receive ring. Frames of an earlier one are dropped.
    pub(crate) fn set_receiver(&self, receiver: Option<Waker>) {
        let mut shared = self.lock();
        shared.batch.clear();
        self.has_frames.store(false, Ordering::Relaxed);
        shared.is_waiting = false;
        self.is_open.store(receiver.is_some(), Ordering::Relaxed);
        shared.receiver = receiver;
    }

    /// Returns whether a receive ring runs, or has run a moment ago. [`LoopQueue::send`] decides under the
    /// lock.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Passes frames on, and empties the batch. Returns the number of frames that are dropped.
    pub(crate) fn send(&self, batch: &mut Batch) -> usize {
        if batch.len() == 0 {
            return 0;
        }
        let mut shared = self.lock();
        let has_room = shared.batch.has_room(batch.len, batch.len());
        if shared.receiver.is_none() || !has_room {
            drop(shared);
            let dropped = batch.len();
            batch.clear();
            return dropped;
        }
        if shared.batch.len() == 0 {
            std::mem::swap(&mut shared.batch, batch);
        } else {
            shared.batch.append(batch);
            batch.clear();
        }
        // Relaxed: the lock orders the frames.
        self.has_frames.store(true, Ordering::Relaxed);
        if std::mem::take(&mut shared.is_waiting) {
            let receiver = shared.receiver.clone();
            drop(shared);
            if let Some(receiver) = receiver {
                receiver.wake();
            }
        }
        0
    }

    /// Takes all frames in exchange for an empty batch.
    pub(crate) fn receive(&self, batch: &mut Batch) {
        batch.clear();
        // A frame that is missed here is found by the next poll, or by `wake_receiver`.
        if self.has_frames.load(Ordering::Relaxed) {
            let mut shared = self.lock();
            std::mem::swap(&mut shared.batch, batch);
            self.has_frames.store(false, Ordering::Relaxed);
        }
    }

    /// Has the receive ring woken by the next frames, or now if there are some.
    pub(crate) fn wake_receiver(&self) {
        let mut shared = self.lock();
        shared.is_waiting = shared.batch.len() == 0;
        if let Some(receiver) = shared.receiver.as_ref().filter(|_| !shared.is_waiting) {
            receiver.wake();
        }
    }
}

/// The length of the header before each frame of a batch.
pub(crate) const HEADER: usize = size_of::<Header>();

/// The header of a frame without offloads, as a driver receives it in one buffer.
pub(crate) const PLAIN: [u8; HEADER] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Returns whether this frame of a batch has no offload. Then its header is [`PLAIN`].
#[inline]
pub(crate) fn is_plain(frame: &[u8]) -> bool {
    frame.first_chunk() == Some(&PLAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(frames: usize, len: usize) -> Batch {
        let mut batch = Batch::default();
        for number in 0..frames {
            batch.push(len).fill(number as u8);
        }
        batch
    }

    #[test]
    fn frames_arrive_in_order_or_are_dropped() {
        let (queue, mut taken) = (LoopQueue::default(), Batch::default());
        assert_eq!(queue.send(&mut batch(3, 60)), 3, "no receive ring runs");
        let waker = Waker::new().unwrap();
        queue.set_receiver(Some(waker.clone()));
        queue.receive(&mut taken);
        assert_eq!(taken.len(), 0);
        queue.wake_receiver();
        assert!(!waker.clear());
        for frames in [3, 2] {
            assert_eq!(queue.send(&mut batch(frames, 60)), 0);
        }
        assert!(waker.clear());
        queue.wake_receiver();
        assert!(waker.clear(), "frames are waiting");
        queue.receive(&mut taken);
        assert_eq!(taken.len(), 5);
        let first = |batch: &mut Batch, number: usize| batch.frame(number, 60 * number).unwrap()[0];
        assert_eq!((0..5).map(|number| first(&mut taken, number)).collect::<Vec<_>>(), [0, 1, 2, 0, 1]);
        // The receiver does not sleep, so it is not woken.
        queue.receive(&mut taken);
        queue.send(&mut batch(1, 60));
        assert!(!waker.clear());
        assert_eq!(queue.send(&mut batch(FRAMES_MAX, 60)), FRAMES_MAX, "the batch is full");
        queue.set_receiver(None);
        queue.set_receiver(Some(waker));
        queue.receive(&mut taken);
        assert_eq!(taken.len(), 0, "frames for an earlier receive ring");
    }

    #[test]
    fn a_batch_is_bounded() {
        let mut batch = batch(8, FRAME_MAX);
        assert!(!batch.has_room(1, 1));
        batch.pop();
        assert!(batch.has_room(FRAME_MAX, 1));
        assert!(!self::batch(FRAMES_MAX, 60).has_room(60, 1));
    }
}
