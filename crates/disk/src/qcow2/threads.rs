//! Threads for a library whose calls block.

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

/// So many threads at most, as an engine has.
const THREADS_MAX: usize = 16;

/// Up to [`THREADS_MAX`] threads, started as they are needed. They end with this.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    name: &'static str,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Carries out an operation, and waits for it.
type Perform = dyn Fn(&mut OffloadOp) -> Result<(), IoError> + Send + Sync;

struct Shared {
    perform: Box<Perform>,
    work: Mutex<Work>,
    more: Condvar,
    /// Names the disk in the log.
    span: Span,
}

#[derive(Default)]
struct Work {
    ops: VecDeque<OffloadOp>,
    /// Threads that wait for an operation.
    idle: usize,
    stop: bool,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Threads {
    /// Threads of this name that carry out operations by `perform`; one is started, and there is always one.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(
        name: &'static str,
        perform: impl Fn(&mut OffloadOp) -> Result<(), IoError> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Shared {
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

    /// Has an operation carried out.
    pub(crate) fn submit(&self, op: OffloadOp) {
        let (idle, waiting) = {
            let mut work = self.shared.lock();
            work.ops.push_back(op);
            (work.idle, work.ops.len())
        };
        self.shared.more.notify_one();
        if waiting > idle {
            // The host may refuse another; those that there are do the work as well.
            let _ = self.add();
        }
    }
}

impl Drop for Threads {
    /// What has been begun is done; what has not, has failed.
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.more.notify_all();
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some(mut op) = self.next() {
            // What an image holds can be anything, and a library's mistake about it is one request's failure.
            let result = catch(|| (self.perform)(&mut op));
            op.answer(result.unwrap_or(Err(IoError::Os(Errno::IO))), &mut WakeBatch::default());
        }
    }

    /// Waits for an operation; `None` when there will be none.
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
    fn as_many_threads_as_are_needed_and_allowed() {
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
        // Each has one; they are begun in their order, though not told of in it.
        first.sort_unstable();
        assert_eq!(first, (0..THREADS_MAX as u64).collect::<Vec<_>>());
        let results: Vec<_> = slots.iter().map(|slot| slot.take().unwrap().result).collect();
        assert!(results[..THREADS_MAX].iter().all(Result::is_ok));
        // Of the others some may have been begun; all have an answer.
        assert!(results.iter().all(|result| [Ok(()), Err(IoError::Os(Errno::IO))].contains(result)));
    }

    #[test]
    fn a_mistake_of_the_library_is_one_failure() {
        let threads = Threads::start("test", |op| {
            assert!(op.at != 0, "a mistake");
            Ok(())
        })
        .unwrap();
        let waker = Waker::new().unwrap();
        // More than there are threads: none of them has ended by it.
        for at in [0; THREADS_MAX + 1].into_iter().chain([1]) {
            let slot = Arc::new(AnswerSlot::default());
            threads.submit(slot.op(OffloadKind::Flush, (at, 0), None, &waker));
            let deadline = Instant::now() + Duration::from_secs(60);
            let answer = loop {
                match slot.take() {
                    Some(answer) => break answer,
                    None => assert!(Instant::now() < deadline, "nobody does it"),
                }
                std::thread::yield_now();
            };
            assert_eq!(answer.result.is_ok(), at != 0);
        }
    }
}
