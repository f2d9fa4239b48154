//! Waking a worker, or one task of it, from another thread.
//!
//! # Why no wake of a task is lost
//! [`Waker::wake`] marks the task, and then makes the descriptor readable. The worker makes the descriptor
//! unreadable ([`Waker::clear`]), and then takes the marks ([`Waker::take_woken`]). A mark that comes after
//! this is followed by a signal that comes after this. `model` checks it in every order that the memory model
//! allows.
//!
//! Marks are bits, so any number of wakes takes the same memory, and taking them costs at most one step for
//! each task. Tasks whose numbers differ by a multiple of [`MARKS`] share a bit. A wake of one of them is a
//! wake of all.

use kickless_sync::Latch;
use kickless_sync::atomic::{AtomicU64, Ordering};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The number of words of marks. A model has fewer, because each costs time there.
const WORDS: usize = if cfg!(loom) { 2 } else { 64 };
/// The number of tasks with a mark of their own.
const MARKS: usize = WORDS * u64::BITS as usize;

/// An eventfd that any thread may signal. Clones signal the same one.
#[derive(Clone, Debug)]
pub struct Waker {
    event: Arc<Event>,
    /// The number of the task that a wake is for.
    task: Option<u32>,
}

#[derive(Debug)]
struct Event {
    fd: OwnedFd,
    latch: Latch,
    /// `None` if the event is for no tasks.
    marks: Option<Box<Marks>>,
}

/// The tasks that were woken.
#[derive(Debug)]
struct Marks {
    /// Words with a mark that was not taken, or is not set yet. Set after the mark.
    words_set: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Default for Marks {
    fn default() -> Self {
        Self { words_set: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Marks {
    fn set(&self, task: u32) {
        let mark = task as usize % MARKS;
        let (word, bit) = (mark / u64::BITS as usize, mark % u64::BITS as usize);
        // Release. Partner: the swaps in `take`. What the waking thread did before is visible to the task.
        self.words[word].fetch_or(1 << bit, Ordering::Release);
        self.words_set.fetch_or(1 << word, Ordering::Release);
    }

    fn contains(&self, task: u32) -> bool {
        let mark = task as usize % MARKS;
        // Acquire. Partner: `set`.
        self.words[mark / u64::BITS as usize].load(Ordering::Acquire) & 1 << (mark % u64::BITS as usize) != 0
    }

    /// Takes all marks. Calls `each` for each.
    fn take(&self, mut each: impl FnMut(usize)) {
        // Acquire. Partner: `set`.
        each_bit(self.words_set.swap(0, Ordering::Acquire), |word| {
            let marks = self.words[word].swap(0, Ordering::Acquire);
            each_bit(marks, |bit| each(word * u64::BITS as usize + bit));
        });
    }
}

/// Calls `each` for the number of each bit that is set.
fn each_bit(mut bits: u64, mut each: impl FnMut(usize)) {
    while bits != 0 {
        each(bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}

impl Waker {
    /// Makes a new one, not signalled.
    ///
    /// # Errors
    /// The process or the host is out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        Self::with(None)
    }

    /// Makes the waker of a worker, not signalled. [`Waker::of_task`] makes those of its tasks.
    ///
    /// # Errors
    /// As [`Waker::new`].
    pub fn of_worker() -> io::Result<Self> {
        Self::with(Some(Box::default()))
    }

    fn with(marks: Option<Box<Marks>>) -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event: Arc::new(Event { fd, latch: Latch::default(), marks }), task: None })
    }

    /// Returns a waker for one task of this worker. It signals the same descriptor, and the worker learns
    /// which task it is for.
    pub fn of_task(&self, task: u32) -> Self {
        Self { event: self.event.clone(), task: Some(task) }
    }

    /// Returns whether both wake the same task, or signal the same descriptor if they are for no task.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.event, &other.event) && self.task == other.task
    }

    /// Returns whether a wake of this task has not been taken. Does not take it.
    pub fn is_marked(&self) -> bool {
        let marks = self.task.zip(self.event.marks.as_ref());
        marks.is_some_and(|(task, marks)| marks.contains(task))
    }

    /// Marks the task, so that a worker that spins polls it at once. [`Waker::wake`] must follow.
    pub fn mark(&self) {
        if let (Some(task), Some(marks)) = (self.task, &self.event.marks) {
            marks.set(task);
        }
    }

    /// Makes the descriptor readable. Several calls before [`Waker::clear`] count as one.
    pub fn wake(&self) {
        self.mark();
        // A full counter is readable as well. Nothing else can fail.
        while write(&self.event.fd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
        self.event.latch.set();
    }

    /// Makes the descriptor unreadable. Returns whether it was readable. Callers must look for work *after*
    /// this, never before.
    pub fn clear(&self) -> bool {
        let mut count = [0; 8];
        let result = loop {
            match read(&self.event.fd, &mut count) {
                Err(Errno::INTR) => {}
                result => break result,
            }
        };
        self.event.latch.clear();
        result.is_ok()
    }

    /// Calls `wake` for each of the first `tasks` tasks that was woken since the last call. It can call it
    /// for others, too. Call it after [`Waker::clear`].
    pub fn take_woken(&self, tasks: usize, mut wake: impl FnMut(u32)) {
        let Some(marks) = &self.event.marks else { return };
        marks.take(|mark| (mark..tasks).step_by(MARKS).for_each(|task| wake(task as u32)));
    }

    /// Returns the latch that a model waits for instead of the descriptor.
    #[cfg(loom)]
    pub fn latch(&self) -> &Latch {
        &self.event.latch
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.fd.as_fd()
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use kickless_sync::loom;

    /// Two threads wake a task each, in different words. The worker sleeps until it has seen both.
    #[test]
    fn each_wake_of_a_task_is_seen() {
        loom::model(|| {
            let waker = Waker::of_worker().unwrap();
            let threads = [0, 64].map(|task| {
                let waker = waker.of_task(task);
                loom::thread::spawn(move || waker.wake())
            });
            let mut woken = Vec::new();
            while woken.len() < threads.len() {
                waker.latch().wait();
                waker.clear();
                waker.take_woken(65, |task| woken.push(task));
            }
            woken.sort_unstable();
            assert_eq!(woken, [0, 64]);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn clones_share_one_signal() {
        let waker = Waker::new().unwrap();
        assert!(!waker.clear());
        waker.clone().wake();
        waker.wake();
        assert!(waker.clear());
        assert!(!waker.clear());
    }

    fn woken(waker: &Waker, tasks: usize) -> Vec<u32> {
        let mut woken = Vec::new();
        waker.take_woken(tasks, |task| woken.push(task));
        woken
    }

    #[test]
    fn the_tasks_that_were_woken_are_known() {
        let worker = Waker::of_worker().unwrap();
        worker.wake();
        assert!(worker.clear() && woken(&worker, 10_000).is_empty(), "it is for no task");
        for task in [4095, 3, 64, 3] {
            worker.of_task(task).wake();
        }
        assert!(worker.clear());
        assert_eq!([3, 4, 64].map(|task| worker.of_task(task).is_marked()), [true, false, true]);
        assert_eq!(woken(&worker, 4096), [3, 64, 4095]);
        assert!(!worker.of_task(3).is_marked() && !worker.is_marked());
        assert!(woken(&worker, 4096).is_empty());
        // Tasks with the same mark, as far as there are such tasks.
        worker.of_task(3 + MARKS as u32).wake();
        assert_eq!(woken(&worker, 3 * MARKS), [3, 3 + MARKS, 3 + 2 * MARKS].map(|task| task as u32));
    }

    #[test]
    fn wakers_of_one_task_are_the_same() {
        let (worker, other) = (Waker::of_worker().unwrap(), Waker::of_worker().unwrap());
        assert!(worker.of_task(1).is_same(&worker.of_task(1)));
        assert!(!worker.of_task(1).is_same(&worker.of_task(2)));
        assert!(!worker.of_task(1).is_same(&other.of_task(1)) && !worker.of_task(1).is_same(&worker));
    }
}
