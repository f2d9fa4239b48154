//! Threads for a library with blocking calls.

use crate::IoError;
use crate::catch::catch;
use crate::offload::{OffloadOp, WakeBatch};
use kickless_io::Errno;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use tracing::Span;

/// The largest number of threads, as in an engine.
const THREADS_MAX: usize = 16;

/// Up to [`THREADS_MAX`] threads, started as needed. Dropping this stops them.
pub(crate) struct Threads {
    shared: Arc<ThreadsShared>,
    name: &'static str,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Runs an operation and waits for it.
type Perform = dyn Fn(&mut OffloadOp) -> Result<(), IoError> + Send + Sync;

struct ThreadsShared {
    perform: Box<Perform>,
    work: Mutex<Work>,
    more: Condvar,
    /// Identifies the disk in the log.
    span: Span,
}

#[derive(Default)]
struct Work {
    ops: VecDeque<OffloadOp>,
    /// The number of threads that wait for an operation.
    idle: usize,
    stop: bool,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Threads {
    /// Starts the first thread of this name, which runs operations with `perform`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(
        name: &'static str,
        perform: impl Fn(&mut OffloadOp) -> Result<(), IoError> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = ThreadsShared {
            perform: Box::new(perform),
            work: Mutex::default(),
            more: Condvar::new(),
            span: Span::current(),
        };
        let threads = Self { shared: Arc::new(shared), name, threads: Mutex::default() };
        threads.add()?;
        Ok(threads)
    }

    fn add(&self) -> io::Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.len() < THREADS_MAX {
            let shared = self.shared.clone();
            let name = format!("{}-{}", self.name, threads.len());
            threads.push(Builder::new().name(name).spawn(move || shared.span.in_scope(|| shared.run()))?);
        }
        Ok(())
    }

    /// Passes an operation to the threads.
    pub(crate) fn submit(&self, op: OffloadOp) {
        let (idle, waiting) = {
            let mut work = self.shared.lock();
            work.ops.push_back(op);
            (work.idle, work.ops.len())
        };
        self.shared.more.notify_one();
        if waiting > idle {
            // If the host refuses another thread, the existing ones do the work.
            let _ = self.add();
        }
    }
}

impl Drop for Threads {
    /// Completes operations that have begun. The others fail.
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.more.notify_all();
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl ThreadsShared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some(mut op) = self.next() {
            // An image can contain anything. A panic of the library about it fails only one request.
            let result = catch(|| (self.perform)(&mut op));
            op.answer(result.unwrap_or(Err(IoError::Os(Errno::IO))), &mut WakeBatch::default());
        }
    }

    /// Waits for an operation. Returns `None` when the threads must stop.
    fn next(&self) -> Option<OffloadOp> {
        let mut work = self.lock();
        loop {
            if work.stop {
                return None;
            }
            if let Some(op) = work.ops.pop_front() {
                return Some(op);
            }
            work.idle += 1;
            work = self.more.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::{AnswerSlot, OffloadKind};
    use kickless_io::Waker;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    #[test]
    fn starts_threads_as_needed_up_to_the_limit() {
        let (begun, begins) = channel();
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = gate.clone();
        let threads = Threads::start("test", move |op| {
            begun.send(op.at).unwrap();
            let open = theirs.0.lock().unwrap();
            drop(theirs.1.wait_while(open, |open| !*open).unwrap());
            Ok(())
        })
        .unwrap();
        let waker = Waker::new().unwrap();
        let slots: Vec<_> = (0..2 * THREADS_MAX).map(|_| Arc::new(AnswerSlot::default())).collect();
        for (at, slot) in (0..).zip(&slots) {
            threads.submit(slot.op(OffloadKind::Flush, (at, 0), None, &waker));
        }
        let count = threads.threads.lock().unwrap().len();
        let begin = || begins.recv_timeout(Duration::from_secs(60)).ok();
        let mut first: Vec<u64> = (0..THREADS_MAX).map_while(|_| begin()).collect();
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        drop(threads);
        assert_eq!(count, THREADS_MAX);
        // Each thread has one operation. They begin in order, but report in any order.
        first.sort_unstable();
        assert_eq!(first, (0..THREADS_MAX as u64).collect::<Vec<_>>());
        let results: Vec<_> = slots.iter().map(|slot| slot.take().unwrap().result).collect();
        assert!(results[..THREADS_MAX].iter().all(Result::is_ok));
        // Some of the others may have begun. All have an answer.
        assert!(results.iter().all(|result| [Ok(()), Err(IoError::Os(Errno::IO))].contains(result)));
    }

    #[test]
    fn a_panic_of_the_library_fails_one_request() {
        let threads = Threads::start("test", |op| {
            assert!(op.at != 0, "a mistake");
            Ok(())
        })
        .unwrap();
        let waker = Waker::new().unwrap();
        // These are more panics than threads, so a panic does not end a thread.
        for at in [0; THREADS_MAX + 1].into_iter().chain([1]) {
            let slot = Arc::new(AnswerSlot::default());
            threads.submit(slot.op(OffloadKind::Flush, (at, 0), None, &waker));
            let deadline = Instant::now() + Duration::from_secs(60);
            let answer = loop {
                match slot.take() {
                    Some(answer) => break answer,
                    None => assert!(Instant::now() < deadline, "no thread runs it"),
                }
                std::thread::yield_now();
            };
            assert_eq!(answer.result.is_ok(), at != 0);
        }
    }
}
