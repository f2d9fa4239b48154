//! A model of the handover between a worker and its submitting thread. Loom runs it in every order that the
//! memory model allows, up to a number of preemptions.
//!
//! The kernel is a counter of completions. A lost result or completion is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-io --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::{Submission, WorkerEnd, handover};
use crate::Waker;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::sync::Arc;

/// Operations that the kernel has done and the worker has not reaped.
#[derive(Default)]
struct Kernel(AtomicU32);

/// Submits this many operations. The kernel takes all but one of them, and has done them before the call
/// returns.
struct Submit {
    kernel: Arc<Kernel>,
    waker: Waker,
    count: u32,
}

impl Submission for Submit {
    type Result = u32;

    fn run(&mut self) -> u32 {
        let taken = self.count.div_ceil(2);
        for _ in 0..taken {
            self.kernel.0.fetch_add(1, Ordering::AcqRel);
            self.waker.wake();
        }
        taken
    }
}

/// The part of a worker that submits and reaps.
struct Worker {
    end: WorkerEnd<Submit>,
    kernel: Arc<Kernel>,
    waker: Waker,
    staged: u32,
    in_flight: u32,
}

impl Worker {
    fn submit(&mut self) {
        if let Some((_, taken)) = self.end.take() {
            self.staged -= taken;
        }
        if self.staged > 0 && self.end.is_clear() {
            let (kernel, waker) = (self.kernel.clone(), self.waker.clone());
            self.end.hand_over(Submit { kernel, waker, count: self.staged });
        }
    }

    fn reap(&mut self) {
        self.waker.clear();
        self.in_flight -= self.kernel.0.swap(0, Ordering::AcqRel);
    }

    fn needs_turn(&self) -> bool {
        self.staged > 0 && !self.end.is_busy()
    }

    /// Runs turns until nothing is in flight, with more operations queued in the first.
    fn run(&mut self, more: u32) {
        self.submit();
        self.staged += more;
        self.in_flight += more;
        loop {
            self.submit();
            self.reap();
            if self.in_flight == 0 && self.staged == 0 {
                return;
            }
            if !self.needs_turn() {
                self.waker.latch().wait();
            }
        }
    }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn worker(count: u32) -> (Worker, thread::JoinHandle<()>) {
    let (waker, kernel) = (Waker::new().unwrap(), Arc::new(Kernel::default()));
    let (end, thread_end) = handover(waker.clone());
    let thread = thread::spawn(move || thread_end.serve());
    (Worker { end, kernel, waker, staged: count, in_flight: count }, thread)
}

#[test]
fn every_operation_is_reaped_and_every_result_taken() {
    for (count, more) in [(1, 0), (2, 0), (1, 1), (2, 1)] {
        check(3, move || {
            let (mut worker, thread) = worker(count);
            worker.run(more);
            worker.end.close();
            thread.join().unwrap();
            assert!(worker.end.take().is_none());
        });
    }
}

/// A worker that ends gets the result of the last call.
#[test]
fn the_last_call_is_made_before_the_end() {
    check(3, || {
        let (mut worker, thread) = worker(2);
        worker.submit();
        worker.end.close();
        thread.join().unwrap();
        assert_eq!(worker.end.take().map(|(_, taken)| taken), Some(1));
        assert_eq!(worker.kernel.0.load(Ordering::Acquire), 1);
    });
}
