//! The operations for a library, and their answers.

use crate::IoError;
use kickless_io::{AlignedBuf, Errno, Waker};
use kickless_sync::lock;
use std::sync::{Arc, Mutex};

/// The kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadKind {
    /// Read from the disk to the buffer.
    Read,
    /// Write from the buffer to the disk.
    Write {
        /// Complete only when the bytes are on stable storage.
        durable: bool,
    },
    /// Write all completed writes to stable storage.
    Flush,
    /// Discard the range.
    Discard {
        /// Complete only when the effect is on stable storage.
        durable: bool,
    },
    /// Make the range read as zeroes.
    Zeroes {
        /// The space may be freed.
        unmap: bool,
        /// Complete only when the effect is on stable storage.
        durable: bool,
    },
}

/// One operation for a library. It is answered exactly once: by [`OffloadOp::answer`], or as failed if it is
/// dropped.
#[derive(Debug)]
pub(crate) struct OffloadOp {
    pub(crate) kind: OffloadKind,
    /// The first byte on the disk; a multiple of 512.
    pub(crate) at: u64,
    /// The number of bytes; a multiple of 512. 0 for a flush.
    pub(crate) len: u64,
    /// The data of a read or write: the first `len` bytes.
    pub(crate) buffer: Option<AlignedBuf>,
    /// The number of times when the library may have lost acknowledged writes. Set before the answer: see
    /// [`crate::lost_writes`].
    pub(crate) lost_writes: u64,
    to: Option<(Arc<AnswerSlot>, Waker)>,
}

impl OffloadOp {
    /// Stores the answer for the request, and adds the worker to `wakes`.
    pub(crate) fn answer(mut self, result: Result<(), IoError>, wakes: &mut WakeBatch) {
        let buffer = self.buffer.take();
        if let Some((slot, waker)) = self.to.take() {
            slot.store(Answer { result, buffer, lost_writes: self.lost_writes });
            wakes.add(waker);
        }
    }

    /// Returns the bytes of a read or write.
    pub(crate) fn bytes(&self) -> &[u8] {
        let len = self.len as usize;
        self.buffer.as_ref().and_then(|buffer| buffer.get(..len)).unwrap_or_default()
    }

    /// Returns the bytes of a read.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len as usize;
        self.buffer.as_mut().and_then(|buffer| buffer.get_mut(..len)).unwrap_or_default()
    }
}

impl Drop for OffloadOp {
    fn drop(&mut self) {
        if let Some((slot, waker)) = self.to.take() {
            let (result, buffer) = (Err(IoError::Os(Errno::IO)), self.buffer.take());
            slot.store(Answer { result, buffer, lost_writes: self.lost_writes });
            waker.wake();
        }
    }
}

/// The tasks to wake, each once, after several answers.
#[derive(Debug, Default)]
pub(crate) struct WakeBatch(Vec<Waker>);

impl WakeBatch {
    fn add(&mut self, waker: Waker) {
        // A queue that spins sees its answer now, and not after all that were received together.
        waker.mark();
        if !self.0.iter().any(|known| known.is_same(&waker)) {
            self.0.push(waker);
        }
    }

    /// Wakes the tasks.
    pub(crate) fn wake(&mut self) {
        for waker in self.0.drain(..) {
            waker.wake();
        }
    }
}

impl Drop for WakeBatch {
    fn drop(&mut self) {
        self.wake();
    }
}

/// The place for the answers of one request, one operation after the other.
#[derive(Debug, Default)]
pub(crate) struct AnswerSlot(Mutex<Option<Answer>>);

/// The result of an operation, and its buffer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) result: Result<(), IoError>,
    pub(crate) buffer: Option<AlignedBuf>,
    pub(crate) lost_writes: u64,
}

impl AnswerSlot {
    fn store(&self, answer: Answer) {
        *lock(&self.0) = Some(answer);
    }

    /// Makes an operation with its answer here. There must be no other one in flight.
    pub(crate) fn op(
        self: &Arc<Self>,
        kind: OffloadKind,
        (at, len): (u64, u64),
        buffer: Option<AlignedBuf>,
        waker: &Waker,
    ) -> OffloadOp {
        OffloadOp { kind, at, len, buffer, lost_writes: 0, to: Some((self.clone(), waker.clone())) }
    }

    /// Takes the answer, if it is there.
    pub(crate) fn take(&self) -> Option<Answer> {
        lock(&self.0).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tasks of one worker share a descriptor.
    #[test]
    fn each_task_of_a_worker_is_woken() {
        let worker = Waker::of_worker().unwrap();
        let mut wakes = WakeBatch::default();
        [1, 2, 1].into_iter().for_each(|task| wakes.add(worker.of_task(task)));
        assert_eq!(wakes.0.len(), 2);
        wakes.wake();
        let mut woken = Vec::new();
        worker.take_woken(3, |task| woken.push(task));
        assert_eq!(woken, [1, 2]);
    }

    #[test]
    fn each_operation_has_one_answer() {
        let (slot, waker) = (Arc::new(AnswerSlot::default()), Waker::new().unwrap());
        let buffer = AlignedBuf::new(512, 512).unwrap();
        let mut op = slot.op(OffloadKind::Read, (0, 512), Some(buffer), &waker);
        op.bytes_mut().fill(7);
        assert!(slot.take().is_none() && !waker.clear());
        let mut wakes = WakeBatch::default();
        op.answer(Ok(()), &mut wakes);
        assert!(!waker.clear());
        wakes.wake();
        assert!(waker.clear());
        let answer = slot.take().unwrap();
        assert_eq!((answer.result, answer.buffer.map(|b| b[511])), (Ok(()), Some(7)));
        assert!(slot.take().is_none());

        // An operation that the library drops has failed.
        drop(slot.op(OffloadKind::Flush, (0, 0), None, &waker));
        assert!(waker.clear());
        assert_eq!(slot.take().unwrap().result, Err(IoError::Os(Errno::IO)));
    }

    #[test]
    fn each_worker_is_woken_once() {
        let (slot, waker) = (Arc::new(AnswerSlot::default()), Waker::new().unwrap());
        let mut wakes = WakeBatch::default();
        for _ in 0..3 {
            slot.op(OffloadKind::Flush, (0, 0), None, &waker).answer(Ok(()), &mut wakes);
        }
        assert_eq!(wakes.0.len(), 1);
    }
}
