//! Carries the frames of a loop port from the transmit ring of a pair to its receive ring.
//!
//! Both rings collect frames in a batch of their own. They exchange batches under a lock: once for each poll,
//! not for each frame. A transmit ring never waits for the receive ring. If the queue in between is full, or
//! if no receive ring runs, it drops its frames.
//!
//! A batch passes whole or not at all. So beside a sender that floods in large batches, there is often room
//! left for one with few frames.

use kickless_device::{Neighbours, TaskLocation};
use kickless_io::Waker;
use kickless_spec::net::{FRAME_MAX, Header};
use kickless_sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use kickless_sync::{Mutex, MutexGuard, lock};
use std::collections::VecDeque;

/// The most frames in a batch, and in a queue.
const FRAMES_MAX: usize = 1024;
/// The most batches of a queue: with them, it holds 4.2 MB, if they are full. That is what a TCP connection
/// of Linux has at most on its way to a guest that is slower, 4 MiB (the default of `tcp_wmem`). Frames that
/// do not fit into the last batch begin another one. So any two neighbours together have more than the bytes
/// of one, and a queue with only half of its bytes can be full.
const BATCHES_MAX: usize = 8;
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
    /// The location of the task that receives ([`pack`]), or 0.
    location: AtomicU64,
    /// The cost of the receiver's look at a parcel that it has refused, until the sender asks for it. Both
    /// are on one worker.
    refusal_cost: AtomicU32,
}

/// The result of [`LoopQueue::send_from`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// The number of frames that are dropped.
    pub(crate) dropped: usize,
    /// The wake of a receiver that slept.
    pub(crate) wake: Wake,
}

/// The way in which a receiver is woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wake {
    /// It does not sleep, or is woken already.
    #[default]
    None,
    /// Its worker is told at the end of the sender's poll ([`Near`]).
    Near,
    /// It was signalled, which is a system call.
    Signal,
}

/// The worker of a sender, and the receivers there that have to be woken at the end of its poll.
#[derive(Debug, Default)]
pub(crate) struct Near {
    /// The worker, while that is known.
    pub(crate) worker_id: Option<u32>,
    /// The number and the waker of each receive task.
    woken: Vec<(u32, Waker)>,
}

impl Near {
    /// Returns the number of the task that receives from an inbox, if it is on the worker of the sender.
    #[inline]
    pub(crate) fn task_of(&self, inbox: &LoopQueue) -> Option<u32> {
        self.worker_id.and_then(|worker_id| inbox.task_on(worker_id))
    }

    /// Wakes the receivers. An executor without neighbours has them signalled.
    #[inline]
    pub(crate) fn wake(&mut self, neighbours: Option<&mut (dyn Neighbours + '_)>) {
        if !self.woken.is_empty() {
            self.wake_all(neighbours);
        }
    }

    #[inline(never)]
    fn wake_all(&mut self, mut neighbours: Option<&mut (dyn Neighbours + '_)>) {
        for (task, waker) in self.woken.drain(..) {
            match neighbours.as_deref_mut() {
                Some(neighbours) => neighbours.wake(task),
                None => waker.wake(),
            }
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// The batches that wait, and the number of their frames. New frames are added to the last batch.
    batches: VecDeque<Batch>,
    frames: usize,
    /// Empty batches that keep their memory. There are at most [`BATCHES_MAX`] together with those that wait:
    /// a batch is made only if none is empty.
    empty: Vec<Batch>,
    /// Wakes the receive ring. `None` while none runs.
    receiver: Option<Waker>,
    /// The receive ring sleeps, or is about to.
    is_waiting: bool,
    /// The waker was signalled, or is about to be, since the receiver asked last.
    is_signalled: bool,
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

    /// Adds a frame of `len` bytes, header included, that `write` writes. Takes it back if that fails. The
    /// batch has room for it.
    #[inline]
    pub(crate) fn push_with<E>(
        &mut self,
        len: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let written = write(self.push(len));
        if written.is_err() {
            self.pop();
        }
        written
    }

    /// The vectors keep their memory, so this allocates only until the batch was full once.
    #[cold]
    fn grow(&mut self, end: usize) {
        self.space.resize(end.next_power_of_two().min(BYTES_MAX), 0);
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

    /// Returns the address, which is the name of the queue in a [`Parcel`](kickless_device::Parcel).
    pub(crate) fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Shows senders where the receive task is: called by the worker that gets it, and by the one that gives
    /// it away.
    pub(crate) fn set_location(&self, location: Option<TaskLocation>) {
        self.location.store(location.map_or(0, pack), Ordering::Relaxed);
    }

    /// Returns the number of the receive task on the worker that asks, if it is there.
    ///
    /// Relaxed: only the worker itself stores a location that names it, when the task comes, and removes it
    /// when the task goes. So the worker never sees one of its own that is out of date.
    #[inline]
    pub(crate) fn task_on(&self, worker_id: u32) -> Option<u32> {
        let packed = self.location.load(Ordering::Relaxed);
        // The low half of a packed location is the number of the task.
        (packed >> 32 == u64::from(worker_id) + 1).then_some(packed as u32)
    }

    /// Returns whether frames wait. A sender on the receiver's worker sees all that it has sent.
    pub(crate) fn has_frames(&self) -> bool {
        self.has_frames.load(Ordering::Relaxed)
    }

    /// Starts or ends a receive ring. Returns the number of frames for an earlier one, which are dropped.
    pub(crate) fn set_receiver(&self, receiver: Option<Waker>) -> usize {
        let mut shared = self.lock();
        let dropped = std::mem::take(&mut shared.frames);
        let unused = (std::mem::take(&mut shared.batches), std::mem::take(&mut shared.empty));
        self.has_frames.store(false, Ordering::Relaxed);
        (shared.is_waiting, shared.is_signalled) = (false, false);
        self.is_open.store(receiver.is_some(), Ordering::Relaxed);
        let earlier = std::mem::replace(&mut shared.receiver, receiver);
        // Senders do not wait until the memory is given back, and the descriptor of the waker is closed.
        drop(shared);
        drop((unused, earlier));
        dropped
    }

    /// Returns whether a receive ring runs, or has run a moment ago. [`LoopQueue::send`] decides under the
    /// lock.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Notes the cost of the receiver's look at a parcel that it has refused.
    pub(crate) fn set_refusal_cost(&self, cost: u32) {
        self.refusal_cost.store(cost, Ordering::Relaxed);
    }

    /// Returns the cost of the receiver's look at the last parcel, if it has refused all of it.
    pub(crate) fn take_refusal_cost(&self) -> u32 {
        let cost = self.refusal_cost.load(Ordering::Relaxed);
        if cost > 0 {
            self.refusal_cost.store(0, Ordering::Relaxed);
        }
        cost
    }

    /// Passes frames on, and empties the batch. Returns the number of frames that are dropped.
    pub(crate) fn send(&self, batch: &mut Batch) -> usize {
        self.send_from(&mut Near::default(), batch).dropped
    }

    /// Does the same as [`LoopQueue::send`] during a poll of the sender, which calls [`Near::wake`] at the
    /// end.
    pub(crate) fn send_from(&self, near: &mut Near, batch: &mut Batch) -> Sent {
        if batch.len() == 0 {
            return Sent::default();
        }
        let mut shared = self.lock();
        if shared.receiver.is_none() || !shared.add(batch) {
            drop(shared);
            let dropped = batch.len();
            batch.clear();
            return Sent { dropped, wake: Wake::None };
        }
        // Relaxed: the lock orders the frames.
        self.has_frames.store(true, Ordering::Relaxed);
        let is_waiting = std::mem::take(&mut shared.is_waiting);
        let Some(receiver) = shared.receiver.as_ref().filter(|_| is_waiting).cloned() else {
            return Sent::default();
        };
        let task = near.task_of(self);
        shared.is_signalled |= task.is_none();
        drop(shared);
        let wake = match task {
            Some(task) => {
                near.woken.push((task, receiver));
                Wake::Near
            }
            None => {
                receiver.wake();
                Wake::Signal
            }
        };
        Sent { dropped: 0, wake }
    }

    /// Takes the oldest frames in exchange for an empty batch: all, or as many as a batch holds. Returns
    /// whether the waker was signalled, or is about to be, since the last frames were taken.
    pub(crate) fn receive(&self, batch: &mut Batch) -> bool {
        batch.clear();
        // A frame that is missed here is found by the next poll, or by `wake_receiver`.
        if !self.has_frames.load(Ordering::Relaxed) {
            return false;
        }
        let mut shared = self.lock();
        shared.take(batch);
        self.has_frames.store(shared.frames > 0, Ordering::Relaxed);
        std::mem::take(&mut shared.is_signalled)
    }

    /// Has the receive ring woken by the next frames, or now if there are some. A queue without frames gives
    /// back the memory of one batch, until it has two. So the memory of a burst is given back within a few of
    /// these calls, and the frames that follow one another fast find memory.
    pub(crate) fn wake_receiver(&self) {
        let mut shared = self.lock();
        shared.is_waiting = shared.frames == 0;
        if !shared.is_waiting {
            shared.is_signalled = true;
            if let Some(receiver) = &shared.receiver {
                receiver.wake();
            }
            return;
        }
        let unused = if shared.empty.len() > 2 { shared.empty.pop() } else { None };
        drop(shared);
        drop(unused);
    }
}

/// Returns a location as a number other than 0.
fn pack(TaskLocation { worker_id, task }: TaskLocation) -> u64 {
    (u64::from(worker_id) + 1) << 32 | u64::from(task)
}

impl Shared {
    /// Takes the frames out of `batch`. Returns `false`, and takes none, if there is no room for all of them.
    fn add(&mut self, batch: &mut Batch) -> bool {
        let frames = self.frames + batch.len();
        if frames > FRAMES_MAX {
            return false;
        }
        if let Some(last) = self.batches.back_mut().filter(|last| last.has_room(batch.len, batch.len())) {
            last.append(batch);
            batch.clear();
        } else if self.batches.len() < BATCHES_MAX {
            self.batches.push_back(std::mem::replace(batch, self.empty.pop().unwrap_or_default()));
        } else {
            return false;
        }
        self.frames = frames;
        true
    }

    /// Exchanges `batch`, which is empty, for the oldest frames.
    fn take(&mut self, batch: &mut Batch) {
        if let Some(oldest) = self.batches.pop_front() {
            self.frames -= oldest.len();
            self.empty.push(std::mem::replace(batch, oldest));
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
    use proptest::prelude::*;

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
        // A sender on the same worker signals nothing, and the receiver has no signal to clear.
        queue.set_location(Some(TaskLocation { worker_id: 4, task: 2 }));
        for (worker_id, wake) in [(4, Wake::Near), (5, Wake::Signal)] {
            queue.wake_receiver();
            let mut near = Near { worker_id: Some(worker_id), ..Near::default() };
            assert_eq!(queue.send_from(&mut near, &mut batch(1, 60)), Sent { dropped: 0, wake });
            assert_eq!(queue.receive(&mut taken), wake == Wake::Signal);
            assert_eq!(waker.clear(), wake == Wake::Signal);
            assert_eq!(near.woken.len(), usize::from(wake == Wake::Near));
        }
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

    #[test]
    fn the_memory_of_a_burst_is_given_back() {
        let (queue, mut taken) = (LoopQueue::default(), Batch::default());
        queue.set_receiver(Some(Waker::new().unwrap()));
        for _ in 0..BATCHES_MAX {
            assert_eq!(queue.send(&mut batch(8, FRAME_MAX)), 0);
        }
        assert_eq!(queue.send(&mut batch(1, 60)), 1);
        for _ in 0..BATCHES_MAX {
            queue.receive(&mut taken);
            assert_eq!(taken.len(), 8);
        }
        queue.receive(&mut taken);
        assert_eq!((taken.len(), queue.lock().empty.len()), (0, BATCHES_MAX));
        (0..BATCHES_MAX).for_each(|_| queue.wake_receiver());
        assert_eq!(queue.lock().empty.len(), 2);
        assert_eq!((queue.send(&mut batch(3, 60)), queue.set_receiver(None)), (0, 3));
        assert_eq!(queue.lock().empty.len(), 0);
    }

    /// Returns the bytes of memory of the queue.
    fn memory(queue: &LoopQueue) -> usize {
        let shared = queue.lock();
        shared.batches.iter().chain(&shared.empty).map(|batch| batch.space.len()).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn batches_pass_whole_and_in_order(
            steps in prop::collection::vec(
                prop_oneof![
                    3 => (1usize..9, prop::sample::select(vec![60, 9000, FRAME_MAX])).prop_map(Some),
                    1 => (1usize..400).prop_map(|frames| Some((frames, 60))),
                    2 => Just(None),
                ],
                1..100,
            )
        ) {
            let (queue, mut taken, mut number) = (LoopQueue::default(), Batch::default(), 0u32);
            queue.set_receiver(Some(Waker::new().unwrap()));
            let mut waiting: VecDeque<(u32, usize)> = VecDeque::new();
            // At the end, everything is taken.
            let ends = std::iter::repeat_n(None, BATCHES_MAX);
            for step in steps.into_iter().chain(ends) {
                let Some((frames, len)) = step else {
                    queue.receive(&mut taken);
                    prop_assert!(taken.len() > 0 || waiting.is_empty());
                    for frame in taken.frames(0, 0) {
                        let number = u32::from_le_bytes(*frame.first_chunk().unwrap());
                        prop_assert_eq!(Some((number, frame.len())), waiting.pop_front());
                    }
                    continue;
                };
                let mut batch = Batch::default();
                for number in number..number + frames as u32 {
                    batch.push(len)[..4].copy_from_slice(&number.to_le_bytes());
                }
                let bytes = batch.len + waiting.iter().map(|(_, len)| len).sum::<usize>();
                let dropped = queue.send(&mut batch);
                prop_assert_eq!(batch.len(), 0);
                if dropped == 0 {
                    waiting.extend((number..number + frames as u32).map(|number| (number, len)));
                } else {
                    let is_full = waiting.len() + frames > FRAMES_MAX || bytes > BATCHES_MAX * BYTES_MAX / 2;
                    prop_assert!(dropped == frames && is_full);
                }
                number += frames as u32;
                prop_assert!(waiting.len() <= FRAMES_MAX && memory(&queue) <= BATCHES_MAX * BYTES_MAX);
            }
            prop_assert!(waiting.is_empty());
        }
    }
}
