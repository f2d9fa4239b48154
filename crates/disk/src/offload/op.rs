//! What is posted to a library, and how its answer comes back.

use crate::IoError;
use kickless_io::{AlignedBuf, Errno, Waker};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadKind {
    /// Disk to buffer.
    Read,
    /// Buffer to disk.
    Write {
        /// Done only when the bytes are on stable storage.
        durable: bool,
    },
    /// All writes that are done go to stable storage.
    Flush,
    /// The range need not keep what it holds.
    Discard {
        /// Done only when that is so on stable storage.
        durable: bool,
    },
    /// The range reads as zeroes from now on.
    Zeroes {
        /// Its space may be given back.
        unmap: bool,
        /// Done only when that is so on stable storage.
        durable: bool,
    },
}

/// One operation for a library. It is answered exactly once: by [`OffloadOp::answer`], or as failed where it is dropped.
#[derive(Debug)]
pub(crate) struct OffloadOp {
    /// What to do.
    pub(crate) kind: OffloadKind,
    /// First byte on the disk; a multiple of 512.
    pub(crate) at: u64,
    /// Bytes; a multiple of 512. 0 for a flush.
    pub(crate) len: u64,
    /// The bytes of a read or write: the first `len` of it.
    pub(crate) buffer: Option<AlignedBuf>,
    /// How often the library may have lost writes that it had acknowledged, to be set before the answer: see
    /// [`crate::lost_writes`].
    pub(crate) lost_writes: u64,
    to: Option<(Arc<AnswerSlot>, Waker)>,
}

impl OffloadOp {
    /// Puts the answer where the request looks for it; `wakes` has the worker that is to be woken then.
    pub(crate) fn answer(mut self, result: Result<(), IoError>, wakes: &mut WakeBatch) {
        let buffer = self.buffer.take();
        if let Some((slot, waker)) = self.to.take() {
            slot.settle(Answer { result, buffer, lost_writes: self.lost_writes });
            wakes.add(waker);
        }
    }

    /// The bytes of a read or write.
    pub(crate) fn bytes(&self) -> &[u8] {
        let len = self.len as usize;
        self.buffer.as_ref().and_then(|buffer| buffer.get(..len)).unwrap_or_default()
    }

    /// The bytes of a read.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len as usize;
        self.buffer.as_mut().and_then(|buffer| buffer.get_mut(..len)).unwrap_or_default()
    }
}

impl Drop for OffloadOp {
    fn drop(&mut self) {
        if let Some((slot, waker)) = self.to.take() {
            let (result, buffer) = (Err(IoError::Os(Errno::IO)), self.buffer.take());
            slot.settle(Answer { result, buffer, lost_writes: self.lost_writes });
            waker.wake();
        }
    }
}

/// Workers that are to be woken, each once, when several operations have been answered.
#[derive(Debug, Default)]
pub(crate) struct WakeBatch(Vec<Waker>);

impl WakeBatch {
    fn add(&mut self, waker: Waker) {
        let fd = waker.as_fd().as_raw_fd();
        if !self.0.iter().any(|other| other.as_fd().as_raw_fd() == fd) {
            self.0.push(waker);
        }
    }

    /// Wakes them.
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

/// Where one request's answers come, one operation after the other.
#[derive(Debug, Default)]
pub(crate) struct AnswerSlot(Mutex<Option<Answer>>);

/// How an operation ended, and its buffer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) result: Result<(), IoError>,
    pub(crate) buffer: Option<AlignedBuf>,
    pub(crate) lost_writes: u64,
}

impl AnswerSlot {
    fn lock(&self) -> MutexGuard<'_, Option<Answer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, answer: Answer) {
        *self.lock() = Some(answer);
    }

    /// An operation that is answered here. Only when there is none on its way.
    pub(crate) fn op(
        self: &Arc<Self>,
        kind: OffloadKind,
        (at, len): (u64, u64),
        buffer: Option<AlignedBuf>,
        waker: &Waker,
    ) -> OffloadOp {
        OffloadOp { kind, at, len, buffer, lost_writes: 0, to: Some((self.clone(), waker.clone())) }
    }

    /// The answer, if it is there.
    pub(crate) fn take(&self) -> Option<Answer> {
        self.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answered_once_however_it_ends() {
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

        // One that a library loses has failed.
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
