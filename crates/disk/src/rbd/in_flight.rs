//! The requests that the library has, and their end if the cluster does not answer.
//!
//! The library cannot cancel a request. If one must end, it is answered without the library, which keeps the
//! buffer until it is done. When there are [`LOST_MAX`] of these, no more requests are submitted.

use crate::IoError;
use crate::offload::{Flushes, OffloadKind, OffloadOp, WakeBatch};
use kickless_io::{AlignedBuf, Errno};
use kickless_sync::lock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The largest number of answered requests that the library still has: 64 MiB of buffers at most.
const LOST_MAX: usize = 256;

/// The data of a request in the library: its slot, and its buffer, which the library uses meanwhile.
#[derive(Debug)]
pub(super) struct Submission {
    slot: u32,
    pub(super) buffer: Option<AlignedBuf>,
    in_flight: Arc<InFlight>,
}

impl Submission {
    /// Completes the request. `returned` is the number of bytes read, or 0, or a negative error.
    pub(super) fn complete(self, returned: isize) {
        let Self { slot, buffer, in_flight } = self;
        in_flight.complete(slot, returned, buffer);
    }
}

/// All requests in flight of an image. No other lock is taken under its lock.
#[derive(Debug)]
pub(super) struct InFlight {
    state: Mutex<InFlightState>,
    /// Signalled for a new deadline, or when the clock thread must stop.
    changed: Condvar,
    stop_timeout: Duration,
}

#[derive(Debug, Default)]
struct InFlightState {
    slots: Vec<Entry>,
    free: Vec<u32>,
    /// The number of the next request.
    next: u64,
    /// The number of requests that were answered without the library.
    lost: usize,
    /// Requests with smaller numbers must end by this time.
    stop_deadline: Option<(u64, Instant)>,
    /// The flushes that the library has, and the successful ones whose answer is held, with their numbers.
    flushes: Flushes<(u64, OffloadOp)>,
    /// The number of writes that succeeded, and of those that a flush is known to have covered.
    writes: u64,
    flushed: u64,
    /// A wait has timed out, and the cluster has not answered since.
    silent: bool,
    end: bool,
}

#[derive(Debug)]
enum Entry {
    Free,
    /// `flush` is the number among the flushes, if it is one. Before it, `writes` had succeeded.
    Taken {
        number: u64,
        op: OffloadOp,
        flush: Option<u64>,
        writes: u64,
    },
    /// Answered without the library.
    Lost {
        was_flush: bool,
    },
}

impl InFlight {
    pub(super) fn new(stop_timeout: Duration) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), stop_timeout }
    }

    /// Adds an operation. Returns its submission with its buffer. Returns `None` if too many are lost; then
    /// the operation has failed.
    pub(super) fn insert(self: &Arc<Self>, mut op: OffloadOp) -> Option<Box<Submission>> {
        let buffer = op.buffer.take();
        let mut state = lock(&self.state);
        if state.lost >= LOST_MAX {
            drop(state);
            op.buffer = buffer;
            op.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut WakeBatch::default());
            return None;
        }
        let number = state.next;
        state.next += 1;
        let flush = (op.kind == OffloadKind::Flush).then(|| state.flushes.begin());
        let taken = Entry::Taken { number, op, flush, writes: state.writes };
        let slot = match state.free.pop() {
            Some(slot) => {
                state.slots[slot as usize] = taken;
                slot
            }
            None => {
                state.slots.push(taken);
                (state.slots.len() - 1) as u32
            }
        };
        drop(state);
        Some(Box::new(Submission { slot, buffer, in_flight: self.clone() }))
    }

    fn complete(&self, slot: u32, returned: isize, buffer: Option<AlignedBuf>) {
        let mut state = lock(&self.state);
        let was = std::mem::replace(&mut state.slots[slot as usize], Entry::Free);
        state.free.push(slot);
        state.silent = false;
        // The answer comes after the lock is dropped.
        let mut answered = None;
        match was {
            Entry::Free => {}
            Entry::Lost { was_flush } => {
                state.lost -= 1;
                if was_flush && returned < 0 {
                    state.flushes.count_loss();
                }
            }
            Entry::Taken { number, mut op, flush, writes } => {
                op.buffer = buffer;
                let result = outcome(&op, returned);
                if flush.is_none() && op.kind != OffloadKind::Read && result.is_ok() {
                    state.writes += 1;
                }
                match (flush, result) {
                    (Some(flush), Ok(())) => {
                        state.flushed = state.flushed.max(writes);
                        state.flushes.succeed(flush, (number, op));
                    }
                    (Some(flush), Err(_)) => {
                        state.flushes.fail(flush);
                        answered = Some((op, result));
                    }
                    (None, _) => answered = Some((op, result)),
                }
            }
        }
        let (due, lost_writes) = state.due();
        drop(state);
        let mut wakes = WakeBatch::default();
        for (mut op, result) in answered.into_iter().chain(due.into_iter().map(|op| (op, Ok(())))) {
            op.lost_writes = lost_writes;
            op.answer(result, &mut wakes);
        }
    }

    /// Returns the number of writes that succeeded, if no flush is known to have covered all of them.
    pub(super) fn unflushed(&self) -> Option<u64> {
        let state = lock(&self.state);
        (state.flushed < state.writes).then_some(state.writes)
    }

    /// Records a flush that covered these writes.
    pub(super) fn record_flush(&self, writes: u64) {
        let mut state = lock(&self.state);
        state.flushed = state.flushed.max(writes);
    }

    /// Ends all requests in flight within the stop timeout, or at once if the cluster is silent.
    pub(super) fn limit_remote_waits(&self) {
        let mut state = lock(&self.state);
        if state.stop_deadline.is_none() {
            let within = if state.silent { Duration::ZERO } else { self.stop_timeout };
            state.stop_deadline = Some((state.next, Instant::now() + within));
            self.changed.notify_one();
        }
    }

    /// Returns the time to wait for the cluster at a stop.
    pub(super) fn stop_wait(&self) -> Duration {
        if lock(&self.state).silent { Duration::ZERO } else { self.stop_timeout }
    }

    /// Records that another wait has timed out.
    pub(super) fn mark_silent(&self) {
        lock(&self.state).silent = true;
    }

    /// Records that the cluster has answered, or that a new user begins, so that the next wait has its full
    /// time.
    pub(super) fn clear_silence(&self) {
        lock(&self.state).silent = false;
    }

    /// Stops the clock thread.
    pub(super) fn end(&self) {
        lock(&self.state).end = true;
        self.changed.notify_one();
    }

    /// Runs the clock thread, which ends requests at their deadline.
    pub(super) fn run_clock(&self) {
        let mut state = lock(&self.state);
        while !state.end {
            let Some((before, then)) = state.stop_deadline else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let now = Instant::now();
            if now < then {
                let waited = self.changed.wait_timeout(state, then - now);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.stop_deadline = None;
            let (late, due, lost_writes) = state.take_before(before);
            for mut op in due {
                op.lost_writes = lost_writes;
                op.answer(Ok(()), &mut WakeBatch::default());
            }
            if late.is_empty() {
                continue;
            }
            state.silent = true;
            drop(state);
            tracing::error!(
                requests = late.len(),
                "the disk stops and the Ceph cluster does not answer: its requests fail"
            );
            let mut wakes = WakeBatch::default();
            for op in late {
                op.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut wakes);
            }
            drop(wakes);
            state = lock(&self.state);
        }
    }
}

impl InFlightState {
    /// Takes the flushes that can be answered as successful, and the count of lost writes for them.
    fn due(&mut self) -> (Vec<OffloadOp>, u64) {
        let due = std::iter::from_fn(|| self.flushes.due()).map(|(_, op)| op).collect();
        (due, self.flushes.lost_writes())
    }

    /// Takes the operations with smaller numbers; their buffers stay with the library. Also takes flushes
    /// that waited for one of them, as [`InFlightState::due`].
    fn take_before(&mut self, before: u64) -> (Vec<OffloadOp>, Vec<OffloadOp>, u64) {
        let mut late = Vec::new();
        for slot in &mut self.slots {
            if !matches!(slot, Entry::Taken { number, .. } if *number < before) {
                continue;
            }
            let lost = Entry::Lost { was_flush: matches!(slot, Entry::Taken { flush: Some(_), .. }) };
            if let Entry::Taken { op, flush, .. } = std::mem::replace(slot, lost) {
                // The library may never complete it.
                if let Some(flush) = flush {
                    self.flushes.forget(flush);
                }
                late.push(op);
            }
        }
        self.lost += late.len();
        let (due, lost_writes) = self.due();
        let held = || self.flushes.take_if(|_, (number, _)| *number < before);
        late.extend(std::iter::from_fn(held).map(|(_, op)| op));
        (late, due, lost_writes)
    }
}

/// Returns the result of an operation, given the library's result.
fn outcome(op: &OffloadOp, returned: isize) -> Result<(), IoError> {
    match (op.kind, returned) {
        (_, error) if error < 0 => Err(IoError::Os(Errno::from_raw_os_error(-error as i32))),
        // The image has become shorter.
        (OffloadKind::Read, bytes) if bytes as u64 != op.len => Err(IoError::Shrunk),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::AnswerSlot;
    use kickless_io::Waker;
    use std::thread;

    const LEN: u64 = 4096;
    const GONE: Result<(), IoError> = Err(IoError::Os(Errno::TIMEDOUT));

    struct Request {
        slot: Arc<AnswerSlot>,
        submission: Option<Box<Submission>>,
    }

    fn read(in_flight: &Arc<InFlight>) -> Request {
        insert(in_flight, OffloadKind::Read)
    }

    fn insert(in_flight: &Arc<InFlight>, kind: OffloadKind) -> Request {
        let slot = Arc::new(AnswerSlot::default());
        let buffer = (kind == OffloadKind::Read).then(|| AlignedBuf::new(LEN as usize, 512).unwrap());
        let op = slot.op(kind, (0, LEN), buffer, &Waker::new().unwrap());
        let submission = in_flight.insert(op);
        Request { slot, submission }
    }

    fn answer(request: &Request) -> Option<(Result<(), IoError>, bool)> {
        request.slot.take().map(|answer| (answer.result, answer.buffer.is_some()))
    }

    #[test]
    fn a_flush_covers_the_writes_that_had_succeeded() {
        let in_flight = Arc::new(InFlight::new(Duration::ZERO));
        let done = |request: &mut Request, returned| request.submission.take().unwrap().complete(returned);
        let begin = |kind| insert(&in_flight, kind);
        let (mut reads, mut fails) = (begin(OffloadKind::Read), begin(OffloadKind::Write { durable: false }));
        done(&mut reads, LEN as isize);
        done(&mut fails, -5);
        assert_eq!(in_flight.unflushed(), None);
        let (mut early, mut late) =
            (begin(OffloadKind::Write { durable: false }), begin(OffloadKind::Write { durable: false }));
        done(&mut early, 0);
        let mut flush = begin(OffloadKind::Flush);
        done(&mut late, 0);
        done(&mut flush, 0);
        assert_eq!(in_flight.unflushed(), Some(2));
        let mut flush = begin(OffloadKind::Flush);
        done(&mut flush, -5);
        assert_eq!(in_flight.unflushed(), Some(2));
        in_flight.record_flush(2);
        assert_eq!(in_flight.unflushed(), None);
    }

    /// Stops the thread even if the test fails.
    struct Ends<'a>(&'a InFlight);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.end();
        }
    }

    /// Runs `check` on requests with a clock thread.
    fn with_clock(stop_timeout: Duration, check: impl FnOnce(&Arc<InFlight>)) {
        time(&Arc::new(InFlight::new(stop_timeout)), check);
    }

    fn time(in_flight: &Arc<InFlight>, check: impl FnOnce(&Arc<InFlight>)) {
        thread::scope(|scope| {
            let _ends = Ends(in_flight);
            scope.spawn(|| in_flight.run_clock());
            check(in_flight);
        });
    }

    fn wait_for(request: &Request) -> (Result<(), IoError>, bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match answer(request) {
                Some(answer) => return answer,
                None => assert!(Instant::now() < deadline, "it is not answered"),
            }
            thread::yield_now();
        }
    }

    #[test]
    fn results_of_the_library_are_converted() {
        let in_flight = Arc::new(InFlight::new(Duration::MAX));
        for (returned, result) in [
            (LEN as isize, Ok(())),
            (512, Err(IoError::Shrunk)),
            (-(Errno::ROFS.raw_os_error() as isize), Err(IoError::Os(Errno::ROFS))),
        ] {
            let mut request = read(&in_flight);
            assert_eq!(answer(&request), None);
            request.submission.take().unwrap().complete(returned);
            assert_eq!(answer(&request), Some((result, true)));
        }
        assert_eq!(lock(&in_flight.state).slots.len(), 1);
    }

    /// The library reports lost writes to one flush. The others have the new count from then on.
    #[test]
    fn a_failed_flush_counts_for_concurrent_flushes() {
        let in_flight = Arc::new(InFlight::new(Duration::MAX));
        let answer = |request: &Request| request.slot.take().map(|a| (a.result, a.lost_writes));
        let complete =
            |request: &mut Request, returned| request.submission.take().unwrap().complete(returned);
        let [mut failing, mut concurrent, mut write] =
            [OffloadKind::Flush, OffloadKind::Flush, OffloadKind::Write { durable: false }]
                .map(|kind| insert(&in_flight, kind));
        complete(&mut write, 0);
        assert_eq!(answer(&write), Some((Ok(()), 0)));
        complete(&mut concurrent, 0);
        assert_eq!(answer(&concurrent), None, "the other flush may have failed");
        complete(&mut failing, -(Errno::IO.raw_os_error() as isize));
        assert_eq!(answer(&failing), Some((Err(IoError::Os(Errno::IO)), 1)));
        assert_eq!(answer(&concurrent), Some((Ok(()), 1)));
        let mut after = insert(&in_flight, OffloadKind::Flush);
        complete(&mut after, 0);
        assert_eq!(answer(&after), Some((Ok(()), 1)));
    }

    /// A held flush does not wait for a flush that was given up.
    #[test]
    fn a_wait_limit_ends_held_flushes() {
        with_clock(Duration::from_millis(1), |in_flight| {
            let mut requests = [(); 3].map(|()| insert(in_flight, OffloadKind::Flush));
            requests[1].submission.take().unwrap().complete(0);
            assert_eq!(answer(&requests[1]), None);
            in_flight.limit_remote_waits();
            assert_eq!([0, 2].map(|at| wait_for(&requests[at]).0), [GONE; 2]);
            assert_eq!(wait_for(&requests[1]).0, Ok(()));
            let mut after = insert(in_flight, OffloadKind::Flush);
            after.submission.take().unwrap().complete(0);
            assert_eq!(answer(&after), Some((Ok(()), false)));
            for request in [0, 2] {
                requests[request].submission.take().unwrap().complete(0);
            }
        });
    }

    #[test]
    fn a_wait_limit_ends_only_existing_requests() {
        with_clock(Duration::from_millis(1), |in_flight| {
            let mut before = read(in_flight);
            in_flight.limit_remote_waits();
            assert_eq!(wait_for(&before), (GONE, false));
            let mut after = read(in_flight);
            // The library completes it after its request has ended. Its buffer is freed then.
            before.submission.take().unwrap().complete(LEN as isize);
            assert_eq!(answer(&before), None);
            after.submission.take().unwrap().complete(LEN as isize);
            assert_eq!(answer(&after), Some((Ok(()), true)));
        });
    }

    #[test]
    fn a_wait_limit_does_not_end_later_requests() {
        let in_flight = Arc::new(InFlight::new(Duration::from_millis(1)));
        let before = read(&in_flight);
        in_flight.limit_remote_waits();
        let mut after = read(&in_flight);
        time(&in_flight, |_| {
            assert_eq!(wait_for(&before), (GONE, false));
            after.submission.take().unwrap().complete(LEN as isize);
            assert_eq!(answer(&after), Some((Ok(()), true)));
        });
    }

    /// A second call does not restart the time.
    #[test]
    fn a_wait_limit_ends_at_once_if_the_cluster_is_silent() {
        with_clock(Duration::from_secs(3600), |in_flight| {
            in_flight.limit_remote_waits();
            let stop_deadline = lock(&in_flight.state).stop_deadline;
            in_flight.limit_remote_waits();
            assert_eq!(lock(&in_flight.state).stop_deadline, stop_deadline);
            lock(&in_flight.state).stop_deadline = None;
            in_flight.mark_silent();
            let request = read(in_flight);
            in_flight.limit_remote_waits();
            assert_eq!(wait_for(&request), (GONE, false));
            request.submission.unwrap().complete(0);
        });
    }

    #[test]
    fn after_a_timeout_waits_are_zero_until_the_cluster_answers() {
        with_clock(Duration::from_millis(1), |in_flight| {
            let first = read(in_flight);
            in_flight.limit_remote_waits();
            assert_eq!(wait_for(&first), (GONE, false));
            assert_eq!(in_flight.stop_wait(), Duration::ZERO);
            first.submission.unwrap().complete(0);
            assert_eq!(in_flight.stop_wait(), Duration::from_millis(1));
            in_flight.mark_silent();
            assert_eq!(in_flight.stop_wait(), Duration::ZERO);
            in_flight.clear_silence();
            assert_eq!(in_flight.stop_wait(), Duration::from_millis(1));
        });
    }

    #[test]
    fn too_many_lost_requests_stop_submissions() {
        with_clock(Duration::from_millis(1), |in_flight| {
            let lost: Vec<_> = (0..LOST_MAX).map(|_| read(in_flight)).collect();
            in_flight.limit_remote_waits();
            lost.iter().for_each(|request| assert_eq!(wait_for(request), (GONE, false)));
            let refused = read(in_flight);
            assert!(refused.submission.is_none());
            assert_eq!(answer(&refused), Some((GONE, true)));
            lost.into_iter().for_each(|request| request.submission.unwrap().complete(0));
            assert!(read(in_flight).submission.is_some());
        });
    }
}
