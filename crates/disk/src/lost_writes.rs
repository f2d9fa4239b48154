//! Reports lost writes to each queue, by flushes that fail.
//!
//! A server that goes takes with it the writes that it has acknowledged and not flushed. A library whose flush fails may have lost
//! what it had acknowledged as well, and may say so once. The guest hears of that by a flush that fails. A driver with several queues looks at the result of its own flush alone, so one failed flush of the disk is not enough.
//!
//! # The rule
//! Each library counts the times that acknowledged writes may have been lost, and puts the count into each answer. Connections to an
//! NBD server count on from the one before; an answer has the count of the connection that it came from. A queue keeps the count that it has
//! been told of ([`LostWritesSeen`]). A request compares the count of its flush's answer with the count that it started from:
//!
//! - A flush of the guest starts from what its queue had been told of when the flush was posted. If the answer has more, the flush
//!   fails, and the queue has been told.
//! - A durable write whose library has none is a write and a hidden flush. It starts from the least count in the answers of its
//!   own writes. If the flush's answer has more, these writes may be lost, and the request fails.
//!
//! # Why nothing is missed
//! Let a write of any queue be acknowledged on one connection and lost with it. Then that connection was dirty, and each later one
//! has a higher count.
//! - A flush that is posted later, is in flight, or is sent again on a later connection, gets the higher count. It fails unless
//!   its queue was told before the flush was posted. So several flushes in flight of one queue all fail, and each queue has at least
//!   one that fails.
//! - A flush that the lost connection has answered was sent to a server that still had the write, if that was acknowledged before.
//!   Its answer has the old count, and it succeeds rightly, however late its worker looks at the answer.
//! - A hidden flush tells nobody but its own request: it changes no queue's count.
//! - A flush that the library itself failed counts as a loss, and tells its own queue. [`crate::offload::Flushes`] holds the answers of
//!   others that ran beside it until they have its count.
//! - A flush that fails because the server stays away has no count. It has told nothing, and a later one fails once more.
//!
//! The count in a queue only moves to one that an answer of the same disk had. One thread owns the queue, one thread owns the
//! connection, and the answer is handed over under the lock of its slot, so there is nothing to order between them.
//!
//! # A queue that starts
//! A queue stops and starts again under the same driver: its front-end reconnects, the machine is paused, the driver resets the
//! device. The queue then goes on from the count that it was told of itself. Another queue may have been told of more, but the
//! driver looks at each result apart, so each queue needs its own failed flush. A queue that was told of nothing yet, and starts
//! for the first time or again, goes on from the count that its driver began with.
//!
//! A driver that is known to be fresh ([`crate::Disk::new_driver`]) has written nothing before. All its queues start from the
//! highest count that any queue was told of. So one machine is not told of what another machine was told of. A loss that no
//! queue was told of, because none has flushed since, is told to the next machine: it may read what is lost.
//!
//! A guest that reboots is not always known to be a fresh driver. Its first flush of a queue may then fail for a loss that only other
//! queues were told of. That is the safe error of the two.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// How many losses of acknowledged writes a queue has been told of. One for each queue, from [`crate::Disk::lost_writes_seen`].
#[derive(Debug, Default)]
pub struct LostWritesSeen {
    queue: u16,
    count: u64,
}

impl LostWritesSeen {
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

/// What the queues of a disk have been told of. Locked when a queue starts and when a flush fails.
#[derive(Debug, Default)]
pub(crate) struct LostWritesTold(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// What the driver began with: no queue of it need be told of these.
    before: u64,
    /// The counts of the queues that were told of more.
    by_queue: BTreeMap<u16, u64>,
}

impl LostWritesTold {
    /// Returns what a queue that starts need not be told of.
    pub(crate) fn seen(&self, queue: u16) -> LostWritesSeen {
        let count = self.with(|told| told.by_queue.get(&queue).copied().unwrap_or(told.before));
        LostWritesSeen { queue, count }
    }

    /// Tells a queue, by a flush that fails, of all losses up to this count.
    pub(crate) fn tell(&self, to: &mut LostWritesSeen, count: u64) {
        if count > to.count {
            to.count = count;
            self.with(|told| told.by_queue.insert(to.queue, count));
        }
    }

    /// Begins with a fresh driver, while no queue runs.
    pub(crate) fn new_driver(&self) {
        self.with(|told| {
            let told_of = std::mem::take(&mut told.by_queue).into_values();
            told.before = told_of.fold(told.before, u64::max);
        });
    }

    fn with<T>(&self, f: impl FnOnce(&mut Told) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use crate::offload::{Offload, OffloadKind, OffloadOp, WakeBatch};
    use crate::{Io, IoError, Lane, Limits, Request, Step};
    use kickless_io::{Engine, EngineKind, Errno, Waker};
    use kickless_memory::{Gpa, Marks};
    use kickless_testing::guest_memory;

    use std::cell::RefCell;

    const FAILED: Step = Step::Done(Err(IoError::Os(Errno::IO)));
    const OK: Step = Step::Done(Ok(()));

    /// Runs a request on one page of a disk that cannot write durably. `counts` are what the answers to its calls have.
    fn run(offload: &Offload, seen: &mut super::LostWritesSeen, request: Request, counts: &[u64]) -> Step {
        let view = guest_memory(4096, 0);
        let (mut io, mut engine) = (Io::default(), Engine::open(EngineKind::Threads, 1).unwrap());
        if request != Request::Flush {
            io.buffers_mut().push(&view, Gpa(0), 4096).unwrap();
        }
        let (waker, mut marks) = (Waker::new().unwrap(), Marks::off());
        let mut lane = Lane {
            engine: &mut engine,
            source: 0,
            slot: 0,
            file: None,
            waker: &waker,
            lost_writes: seen,
            marks: &mut marks,
        };
        let out: RefCell<Option<OffloadOp>> = RefCell::default();
        let submit = |op| assert!(out.replace(Some(op)).is_none());
        let (buffers, state) = (&mut io.buffers, io.state.offload());
        let mut step = offload.start(&mut lane, buffers, state, request, submit);
        let mut calls = Vec::new();
        for &count in counts {
            assert_eq!(step, Step::Busy);
            let mut op = out.take().unwrap();
            calls.push(op.kind);
            op.lost_writes = count;
            op.answer(Ok(()), &mut WakeBatch::default());
            step = offload.drive(&mut lane, buffers, state, submit);
        }
        assert_eq!(calls.last(), Some(&OffloadKind::Flush));
        step
    }

    #[test]
    fn a_flush_fails_once_for_each_queue_that_was_not_told() {
        let offload = Offload::new(Limits::plain(false), 4096, false);
        let [mut one, mut two] = [0, 1].map(|queue| offload.lost_writes_seen(queue));
        let write = Request::Write { offset: 0, durable: true };
        assert_eq!(run(&offload, &mut one, Request::Flush, &[0]), OK);
        // The write was acknowledged before the loss, and the flush behind it. It is lost, and another queue hears nothing of it.
        assert_eq!(run(&offload, &mut one, write, &[0, 1]), FAILED);
        // Both came after it.
        assert_eq!(run(&offload, &mut one, write, &[1, 1]), OK);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[1]), FAILED);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[1]), OK);
        assert_eq!(run(&offload, &mut two, Request::Flush, &[2]), FAILED);
        // An answer from before the loss that it was told of.
        assert_eq!(run(&offload, &mut two, Request::Flush, &[1]), OK);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[2]), FAILED);
    }

    #[test]
    fn a_queue_that_starts_again_goes_on_from_what_it_was_told() {
        let offload = Offload::new(Limits::plain(false), 4096, false);
        let flush =
            |queue, count| run(&offload, &mut offload.lost_writes_seen(queue), Request::Flush, &[count]);
        assert_eq!([flush(0, 1), flush(0, 1)], [FAILED, OK]);
        assert_eq!([flush(1, 1), flush(1, 1)], [FAILED, OK], "another queue was told, and this one was not");
        assert_eq!([flush(1, 2), flush(1, 2)], [FAILED, OK]);
        offload.new_driver();
        // Queue 0 of the driver before was told of one, queue 2 of none.
        assert_eq!([0, 1, 2].map(|queue| flush(queue, 2)), [OK; 3]);
        assert_eq!([0, 2, 0, 2].map(|queue| flush(queue, 3)), [FAILED, FAILED, OK, OK]);
        offload.new_driver();
        assert_eq!([0, 1, 2].map(|queue| flush(queue, 3)), [OK; 3]);
        offload.new_driver();
        assert_eq!(flush(1, 4), FAILED, "no machine was told of it");
    }
}
