//! Reports lost writes to each queue of a disk, by flushes that fail.
//!
//! A server that goes away loses the writes that it has acknowledged and not flushed. A library whose flush
//! fails may also have lost acknowledged writes, and may report this only once. The guest learns of a loss
//! from a failed flush. A driver with several queues considers the flushes of each queue apart. So a flush of
//! each queue must fail.
//!
//! # The rule
//! Each library has a *loss count*: the number of times when acknowledged writes may have been lost. Each
//! answer contains the count of its moment. An NBD connection continues the count of the previous one. Each
//! queue keeps the count that it has *reported* to the guest ([`LostWritesSeen`]).
//!
//! - **A flush of the guest** fails if its answer has a higher count than its queue had reported when the
//!   flush was submitted. The queue has then reported this higher count.
//! - **A durable write**, in a library without durable operations, is a write and a *hidden flush*. It fails
//!   if the hidden flush's answer has a higher count than an answer of its own writes. Then these writes may
//!   be lost.
//!
//! # Why no loss is missed
//! Assume that connection C acknowledged a write of any queue, and that the server lost it with C. Then C had
//! acknowledged writes that no flush covered, and so each later connection has a higher count than C.
//!
//! - A flush that a later connection answers gets the higher count. It may be submitted later, or be in
//!   flight when C is lost and be sent again. It fails unless its queue has reported this count before. So
//!   all flushes of a queue that are in flight together fail, and each queue has a flush that fails.
//! - A flush that C answered succeeds with the old count, even if the worker reads the answer after the loss.
//!   This is right: writes that were acknowledged before this flush was sent are on stable storage.
//! - A hidden flush affects only its own request. It changes no queue's count.
//! - A flush that the server itself fails counts as a loss, and its own queue reports it.
//!   [`crate::offload::Flushes`] holds the answers of concurrent flushes until they have the new count.
//! - A server without flushes makes nothing durable. So each of its connections that acknowledged a write and
//!   was lost counts, whatever flushes came in between.
//! - A flush that fails because the server stays away gets no answer of the server, so it has no count. It
//!   reports no loss, and a later flush of the queue fails as well.
//!
//! A queue takes only counts from answers of the same disk. One thread owns the queue, one thread owns the
//! connection, and the answer is passed under the lock of its slot. So no further ordering is needed.
//!
//! # A queue that starts
//! A queue stops and starts again under the same driver when its front-end reconnects, the machine is paused,
//! or the driver resets the device. The queue then continues from the count that it has reported itself.
//! A higher count that another queue has reported does not matter. A queue that has reported nothing yet
//! starts from the count with which its driver began.
//!
//! A fresh driver ([`crate::Disk::new_driver`]) has written nothing before. All its queues start from the
//! highest count that any queue has reported. So the next machine does not get reports that the previous one
//! has got. It gets the report of a loss after which no queue has flushed yet, because it may read the lost
//! data.
//!
//! # A disk that changes hands
//! The next owner of the disk is another process. It starts with a count of its own, so it cannot report a
//! loss of this one. So [`crate::DiskControl::write_back`] of an NBD disk fails while no queue of the current
//! driver has reported a loss. One report is enough: a guest rarely flushes on all its queues, and it must be
//! able to move after it has reacted. What the other queues have not reported stays in this process.
//!
//! The next process of the same host goes on with all these counts ([`crate::DiskHandOver`]).
//!
//! # A reboot
//! The disk does not always learn that a guest has rebooted. Then the first flush of a queue may fail for a
//! loss that only other queues have reported. This error is the safer one.

use kickless_sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The loss count that a queue has reported. Each queue gets its own from [`crate::Disk::lost_writes_seen`].
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

/// The loss counts that the queues of a disk have reported. Locked when a queue starts and when a flush
/// fails.
#[derive(Debug, Default)]
pub(crate) struct LostWritesReported(Mutex<ReportedCounts>);

#[derive(Debug, Default)]
struct ReportedCounts {
    /// The count with which the driver began. Its queues need not report these losses.
    at_driver_start: u64,
    /// The counts that the queues of the driver have reported, from the start of each.
    by_queue: BTreeMap<u16, u64>,
}

impl LostWritesReported {
    /// Returns the count that a starting queue need not report.
    pub(crate) fn seen(&self, queue: u16) -> LostWritesSeen {
        let count = self.with(|counts| {
            let start = counts.at_driver_start;
            *counts.by_queue.entry(queue).or_insert(start)
        });
        LostWritesSeen { queue, count }
    }

    /// Returns the highest count that a queue of the current driver has reported.
    pub(crate) fn by_any_queue(&self) -> u64 {
        self.with(|counts| counts.by_queue.values().copied().max().unwrap_or(counts.at_driver_start))
    }

    /// Records that a queue has reported all losses up to this count, by a flush that fails.
    pub(crate) fn report(&self, seen: &mut LostWritesSeen, count: u64) {
        if count > seen.count {
            seen.count = count;
            self.with(|counts| counts.by_queue.insert(seen.queue, count));
        }
    }

    /// Returns the count with which the driver began, and those that its queues have reported.
    pub(crate) fn counts(&self) -> (u64, Vec<Option<u64>>) {
        self.with(|counts| {
            let queues = counts.by_queue.last_key_value().map_or(0, |(last, _)| last + 1);
            let reported = (0..queues).map(|queue| counts.by_queue.get(&queue).copied());
            (counts.at_driver_start, reported.collect())
        })
    }

    /// Goes on with the counts of another process, while no queue runs.
    pub(crate) fn set_counts(&self, at_driver_start: u64, reported: &[Option<u64>]) {
        let by_queue = (0..).zip(reported).filter_map(|(queue, count)| Some((queue, (*count)?))).collect();
        self.with(|counts| *counts = ReportedCounts { at_driver_start, by_queue });
    }

    /// Begins with a fresh driver, while no queue runs.
    pub(crate) fn new_driver(&self) {
        self.with(|counts| {
            let reported = std::mem::take(&mut counts.by_queue).into_values();
            counts.at_driver_start = reported.fold(counts.at_driver_start, u64::max);
        });
    }

    fn with<T>(&self, f: impl FnOnce(&mut ReportedCounts) -> T) -> T {
        f(&mut lock(&self.0))
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
