//! Loom models of the parts of a queue that threads share. They run in every order that the memory model
//! allows, up to a number of preemptions.
//!
//! Slots, waiters and the leader's role are the driver's own code. Kicks are a model of `Ring::publish` and
//! of a reconnection, with the suppression that the rings use. A lost wake-up is a deadlock, which loom
//! finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-driver --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kickless_virtqueue::device::suppress::{self as device, NotificationWords, Word};
use kickless_virtqueue::driver::suppress as driver;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU16, fence};
use loom::thread;

use crate::buffer::Data;
use crate::error::Failure;
use crate::event::Event;
use crate::slots::slots;
use crate::wait_leader::WaitLeader;
use crate::waiter::Waiter;

fn event() -> Arc<Event> {
    Arc::new(Event::new().unwrap())
}

/// Sleeps until the event is signalled, and takes the signal.
fn sleep(event: &Event) {
    event.latch().wait();
    event.take();
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A request is filled in, while a hostile device reports its completion at any moment, and the id is reused.
#[test]
fn a_request_is_taken_once_with_a_hostile_device() {
    check(3, || {
        let (mut filler, mut taker) = slots::<Box<u16>>(1);
        let completer = thread::spawn(move || {
            let mut taken: Vec<u16> = (0..2).filter_map(|_| taker.take(0)).map(|request| *request).collect();
            // The caller takes the rest after the other thread has ended.
            (std::mem::take(&mut taken), taker)
        });
        let mut refused = 0;
        for request in [1, 2] {
            refused += u16::from(filler.fill(0, Box::new(request)).is_err());
        }
        let (mut taken, mut taker) = completer.join().unwrap();
        taken.extend(taker.take(0).map(|request| *request));
        assert_eq!(taken.len() as u16 + refused, 2);
        assert!(taken.is_sorted(), "{taken:?}");
    });
}

const WAITERS: usize = 3;

/// The part of a queue that waiting threads use.
struct Queue {
    wait_leader: WaitLeader,
    free_waiters: [Arc<Waiter>; WAITERS],
    /// Completed by the device, and not delivered yet. The lock stands for the completion lock.
    done: [AtomicBool; WAITERS],
    handed_out: Mutex<[bool; WAITERS]>,
    /// Stands for the eventfd of calls and the one that wakes the leader, which waits for both.
    events: Arc<Event>,
}

impl Queue {
    /// Delivers all completions.
    fn drain_for_all(&self) {
        let mut handed_out = self.handed_out.lock().unwrap();
        for at in 0..WAITERS {
            if !handed_out[at] && self.done[at].load(Ordering::Acquire) {
                handed_out[at] = true;
                self.free_waiters[at].complete((Err(Failure::Status(at as u8)), Data::None));
            }
        }
    }

    /// Waits as `Core::wait_for_outcome`, `wait_or_lead`, `wait_as_leader` and `sleep_at_queue` do.
    fn wait(&self, at: usize) {
        let waiter = &self.free_waiters[at];
        loop {
            if let Some((result, _)) = waiter.take() {
                assert_eq!(result, Err(Failure::Status(at as u8)));
                self.wait_leader.wake_next();
                return;
            }
            if !self.wait_leader.lead_or_follow(waiter) {
                waiter.wait(None);
                self.wait_leader.stop_following(waiter);
                continue;
            }
            loop {
                self.drain_for_all();
                if waiter.take_notified() {
                    break;
                }
                if waiter.wake_by_event(&self.events) {
                    sleep(&self.events);
                    waiter.wake_by_condvar();
                }
            }
            self.wait_leader.resign();
        }
    }
}

/// Three threads wait at one queue, one of them as the leader. A thread that leaves must not leave the others
/// without a leader.
///
/// Another thread polls and finds the request `polled`. The device calls for the other requests.
fn three_threads_wait(polled: usize) {
    check(2, move || {
        let queue = Arc::new(Queue {
            wait_leader: WaitLeader::default(),
            free_waiters: Default::default(),
            done: [(); WAITERS].map(|()| AtomicBool::new(false)),
            handed_out: Mutex::new([false; WAITERS]),
            events: event(),
        });
        let waiters = [1, 2].map(|at| {
            let queue = queue.clone();
            thread::spawn(move || queue.wait(at))
        });
        let device = thread::spawn({
            let queue = queue.clone();
            move || {
                for (at, done) in queue.done.iter().enumerate() {
                    done.store(true, Ordering::Release);
                    if at == polled { queue.drain_for_all() } else { queue.events.signal() }
                }
            }
        });
        queue.wait(0);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        device.join().unwrap();
    });
}

#[test]
fn no_thread_sleeps_after_its_request_is_done() {
    three_threads_wait(0);
    three_threads_wait(2);
}

/// The words of a split ring with event indices.
struct Ring([AtomicU16; 6]);

impl Ring {
    /// Makes an empty ring, in which the device has not asked for kicks yet.
    fn new() -> Arc<Ring> {
        Arc::new(Ring([0, 0, 0, 0, 0, 0].map(AtomicU16::new)))
    }
}

impl NotificationWords for Ring {
    fn load(&self, word: Word, order: Ordering) -> u16 {
        self.0[word as usize].load(order)
    }

    fn store(&self, word: Word, value: u16, order: Ordering) {
        self.0[word as usize].store(value, order);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// The state under the submission lock.
struct Submission {
    ring: Arc<Ring>,
    next: u16,
    kick: Arc<Event>,
    dead: bool,
}

/// Submits as `Ring::submit_one` and `Ring::publish` do: the decision under the lock, the kick after it.
/// Returns whether it was submitted.
fn submit(submission: &Mutex<Submission>) -> bool {
    let mut locked = submission.lock().unwrap();
    if locked.dead {
        return false;
    }
    let old = locked.next;
    locked.next = old + 1;
    if driver::publish(&*locked.ring, true, old, old + 1) {
        let kick = locked.kick.clone();
        drop(locked);
        kick.signal();
    }
    true
}

/// Serves `count` requests of a ring as a device. Sleeps while there are none.
fn serve(ring: &Ring, kick: &Event, count: u16) {
    let mut next = 0;
    while next < count {
        next = ring.load(Word::AvailIdx, Ordering::Acquire);
        if next < count && !device::arm(ring, true, next) {
            sleep(kick);
        }
    }
}

/// Threads submit to one queue. Each decides under the lock whether to kick, and kicks after it.
#[test]
fn every_request_is_seen() {
    check(3, || {
        let (ring, kick) = (Ring::new(), event());
        let submission =
            Arc::new(Mutex::new(Submission { ring: ring.clone(), next: 0, kick: kick.clone(), dead: false }));
        let other = thread::spawn({
            let submission = submission.clone();
            move || submit(&submission)
        });
        let device = thread::spawn(move || serve(&ring, &kick, 2));
        assert!(submit(&submission));
        assert!(other.join().unwrap());
        device.join().unwrap();
    });
}

/// Replaces the back-end at any moment.
///
/// There are two cases. A request is submitted to the first back-end, whose kick has no reader any more, and
/// is put into the new ring. Or it is submitted to the new back-end. With `kicks`, the restart kicks the
/// queue once.
fn replace_back_end(kicks: bool) {
    check(3, move || {
        let (ring, kick) = (Ring::new(), event());
        let submission = Arc::new(Mutex::new(Submission { ring, next: 0, kick, dead: false }));
        let submitter = thread::spawn({
            let submission = submission.clone();
            move || submit(&submission)
        });
        let (new_ring, new_kick) = (Ring::new(), event());
        // The new back-end knows the ring, and has found it empty.
        let asleep = !device::arm(&*new_ring, true, 0);
        assert!(asleep);
        // Does the same as `Ring::restart`.
        let mut locked = submission.lock().unwrap();
        locked.ring = new_ring.clone();
        locked.kick = new_kick.clone();
        // The index is published by a release store without a decision, so the queue must be kicked in any
        // case.
        new_ring.store(Word::AvailIdx, locked.next, Ordering::Release);
        drop(locked);
        if kicks {
            new_kick.signal();
        }
        assert!(submitter.join().unwrap());
        assert!(new_kick.take() > 0, "the new back-end sleeps on a request");
        assert_eq!(new_ring.load(Word::AvailIdx, Ordering::Acquire), 1);
    });
}

#[test]
fn a_restart_replaces_a_lost_kick() {
    replace_back_end(true);
}

#[test]
#[should_panic(expected = "sleeps on a request")]
fn without_a_kick_at_the_restart_one_is_lost() {
    replace_back_end(false);
}

/// The disk is unplugged while a thread is between the decision and the kick. The kick must still have its
/// eventfd, and later submissions are refused.
#[test]
fn unplugged_between_decision_and_kick() {
    check(3, || {
        let (ring, kick) = (Ring::new(), event());
        let submission = Arc::new(Mutex::new(Submission { ring, next: 0, kick, dead: false }));
        let submitter = thread::spawn({
            let submission = submission.clone();
            move || submit(&submission)
        });
        submission.lock().unwrap().dead = true;
        // The thread that unplugs returns all submitted requests to their owners. No request may be submitted
        // after that.
        let in_flight = submission.lock().unwrap().next;
        let submitted = submitter.join().unwrap();
        assert_eq!(submission.lock().unwrap().next, in_flight);
        assert_eq!(u16::from(submitted), in_flight);
        // The last reference to the eventfd is gone, except the one here.
        let submission = Arc::into_inner(submission).unwrap().into_inner().unwrap();
        assert_eq!(Arc::strong_count(&submission.kick), 1);
    });
}
