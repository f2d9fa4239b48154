//! Reports lost writes to each queue, by flushes that fail.
//!
//! A server that goes away loses the writes that it has acknowledged and not flushed. A library whose flush
//! fails may also have lost acknowledged writes, and may report that only once. The guest learns of the loss
//! by a failed flush. A driver with several queues considers only the result of its own flush, so one failed
//! flush of the disk is not enough.
//!
//! # The rule
//! Each library counts the times when acknowledged writes may have been lost, and puts the count into each
//! answer. An NBD connection continues the count of the one before. An answer has the count of the connection
//! that it came from. A queue keeps the count that it has reported ([`LostWritesSeen`]). A request compares
//! the count in the answer of its flush with the count that it started from:
//!
//! - A flush of the guest starts from the count that its queue had reported when the flush was submitted. If
//!   the answer has a higher count, the flush fails, and the queue has reported that count.
//! - A durable write of a library without durable operations is a write and a hidden flush. It starts from
//!   the smallest count in the answers of its own writes. If the flush's answer has a higher count, these
//!   writes may be lost, and the request fails.
//!
//! # Why no loss is missed
//! Let a write of any queue be acknowledged on one connection and lost with it. Then that connection was
//! dirty, and each later one has a higher count.
//! - A flush that is submitted later, is in flight, or is sent again on a later connection gets the higher
//!   count. It fails unless its queue had reported that count before. So all flushes in flight of one queue
//!   fail, and each queue has at least one that fails.
//! - A flush that the lost connection has answered was sent to a server that still had the write, if the
//!   write was acknowledged before. Its answer has the old count, and it rightly succeeds, even if its worker
//!   reads the answer late.
//! - A hidden flush affects only its own request: it changes no queue's count.
//! - A flush that the library itself failed counts as a loss, and its own queue reports it.
//!   [`crate::offload::Flushes`] holds the answers of concurrent flushes until they have its count.
//! - A flush that fails because the server stays away has no count. It reports no loss, and a later one fails
//!   again.
//!
//! A queue takes only counts that an answer of the same disk had. One thread owns the queue, one thread owns
//! the connection, and the answer is passed under the lock of its slot. So no further ordering is needed.
//!
//! # A queue that starts
//! A queue stops and starts again under the same driver when its front-end reconnects, the machine is paused,
//! or the driver resets the device. The queue then continues from the count that it has reported itself.
//! Another queue may have reported more, but the driver considers each result separately, so each queue needs
//! its own failed flush. A queue that has reported nothing yet continues from the count with which its driver
//! began.
//!
//! A fresh driver ([`crate::Disk::new_driver`]) has written nothing before. All its queues start from the
//! highest count that any queue has reported. So a machine does not report losses again that the previous
//! machine has reported. A loss that no queue has reported, because none has flushed since, is reported to
//! the next machine, which may read the lost data.
//!
//! A guest that reboots is not always known to be a fresh driver. Its first flush of a queue may then fail
//! for a loss that only other queues have reported. That is the safer error.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The number of losses of acknowledged writes that a queue has reported. One for each queue, from
/// [`crate::Disk::lost_writes_seen`].
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

/// The counts that the queues of a disk have reported. Locked when a queue starts and when a flush fails.
#[derive(Debug, Default)]
pub(crate) struct LostWritesReported(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// The count with which the driver began. Its queues need not report these losses.
    before: u64,
    /// The counts of the queues that have reported more.
    by_queue: BTreeMap<u16, u64>,
}

impl LostWritesReported {
    /// Returns the count that a starting queue need not report.
    pub(crate) fn seen(&self, queue: u16) -> LostWritesSeen {
        let count = self.with(|told| told.by_queue.get(&queue).copied().unwrap_or(told.before));
        LostWritesSeen { queue, count }
    }

    /// Records that a queue has reported all losses up to this count, by a flush that fails.
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
    use crate::{Attached, Io, IoContext, IoError, Limits, Request, Step};
    use kickless_io::{Engine, EngineKind, Errno, Waker};
    use kickless_memory::{Gpa, Marks};
    use kickless_testing::guest_memory;

    use std::cell::RefCell;

    const FAILED: Step = Step::Done(Err(IoError::Os(Errno::IO)));
    const OK: Step = Step::Done(Ok(()));

    /// Runs a request on one page of a disk that cannot write durably. `counts` are the counts in the answers
    /// to its operations.
    fn run(offload: &Offload, seen: &mut super::LostWritesSeen, request: Request, counts: &[u64]) -> Step {
        let view = guest_memory(4096, 0);
        let (mut io, mut engine) = (Io::default(), Engine::open(EngineKind::Threads, 1).unwrap());
        if request != Request::Flush {
            io.buffers_mut().push(&view, Gpa(0), 4096).unwrap();
        }
        let (waker, mut marks) = (Waker::new().unwrap(), Marks::off());
        let mut context = IoContext {
            engine: &mut engine,
            task: 0,
            slot: 0,
            attached: &mut Attached::default(),
            waker: &waker,
            lost_writes: seen,
            marks: &mut marks,
        };
        let out: RefCell<Option<OffloadOp>> = RefCell::default();
        let submit = |op| assert!(out.replace(Some(op)).is_none());
        let (buffers, state) = (&mut io.buffers, io.state.offload());
        let mut step = offload.start(&mut context, buffers, state, request, submit);
        let mut calls = Vec::new();
        for &count in counts {
            assert_eq!(step, Step::Busy);
            let mut op = out.take().unwrap();
            calls.push(op.kind);
            op.lost_writes = count;
            op.answer(Ok(()), &mut WakeBatch::default());
            step = offload.drive(&mut context, buffers, state, submit);
        }
        assert_eq!(calls.last(), Some(&OffloadKind::Flush));
        step
    }

    #[test]
    fn a_flush_fails_once_on_each_queue_for_a_loss() {
        let offload = Offload::new(Limits::plain(false), 4096, false);
        let [mut one, mut two] = [0, 1].map(|queue| offload.lost_writes_seen(queue));
        let write = Request::Write { offset: 0, durable: true };
        assert_eq!(run(&offload, &mut one, Request::Flush, &[0]), OK);
        // The write was acknowledged before the loss, and its flush after it. The write is lost, and no other
        // queue reports that.
        assert_eq!(run(&offload, &mut one, write, &[0, 1]), FAILED);
        // Both were acknowledged after the loss.
        assert_eq!(run(&offload, &mut one, write, &[1, 1]), OK);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[1]), FAILED);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[1]), OK);
        assert_eq!(run(&offload, &mut two, Request::Flush, &[2]), FAILED);
        // This answer is older than the loss that the queue has reported.
        assert_eq!(run(&offload, &mut two, Request::Flush, &[1]), OK);
        assert_eq!(run(&offload, &mut one, Request::Flush, &[2]), FAILED);
    }

    #[test]
    fn a_restarted_queue_continues_from_its_count() {
        let offload = Offload::new(Limits::plain(false), 4096, false);
        let flush =
            |queue, count| run(&offload, &mut offload.lost_writes_seen(queue), Request::Flush, &[count]);
        assert_eq!([flush(0, 1), flush(0, 1)], [FAILED, OK]);
        assert_eq!([flush(1, 1), flush(1, 1)], [FAILED, OK], "only another queue has reported it");
        assert_eq!([flush(1, 2), flush(1, 2)], [FAILED, OK]);
        offload.new_driver();
        // Queue 0 of the previous driver has reported one loss, queue 2 none.
        assert_eq!([0, 1, 2].map(|queue| flush(queue, 2)), [OK; 3]);
        assert_eq!([0, 2, 0, 2].map(|queue| flush(queue, 3)), [FAILED, FAILED, OK, OK]);
        offload.new_driver();
        assert_eq!([0, 1, 2].map(|queue| flush(queue, 3)), [OK; 3]);
        offload.new_driver();
        assert_eq!(flush(1, 4), FAILED, "no machine has reported it");
    }
}
