//! Loom models of the sleepers of a queue, of both kinds, together with pollers. They run in every order that
//! the memory model allows, up to a number of preemptions.
//!
//! The suppression of calls is the code of the rings. The lock, the eventfds and the device are models. A
//! lost wake-up is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-driver --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kickless_virtqueue::device::suppress::{self as device, NotificationWords, Word};
use kickless_virtqueue::driver::suppress as driver;
use loom::sync::atomic::{AtomicU16, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::{Calls, Sleepers, WakeEvent};

/// The number of requests in each model.
const REQUESTS: u16 = 2;

fn check(model: impl Fn(bool) + Send + Sync + 'static) {
    let model = Arc::new(model);
    for event_idx in [true, false] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        let model = model.clone();
        builder.check(move || model(event_idx));
    }
}

/// The words of a split ring.
struct Ring([AtomicU16; 6]);

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

/// The eventfds of the model.
#[derive(Clone, Copy)]
enum Fd {
    /// The calls of the device.
    Call,
    /// Wakes a thread whose request is done.
    Wake,
    /// The wake event of an Events.
    Sleeper(usize),
    /// A signal between the threads of the program itself.
    Program,
}

/// Eventfds, which stay readable until they are taken.
#[derive(Default)]
struct Fds {
    readable: Mutex<[bool; 5]>,
    changed: Condvar,
}

impl Fd {
    fn at(self) -> usize {
        match self {
            Fd::Call => 0,
            Fd::Wake => 1,
            Fd::Program => 2,
            Fd::Sleeper(number) => 3 + number,
        }
    }
}

impl Fds {
    fn signal(&self, fd: Fd) {
        self.readable.lock().unwrap()[fd.at()] = true;
        self.changed.notify_all();
    }

    fn take(&self, fd: Fd) {
        self.readable.lock().unwrap()[fd.at()] = false;
    }

    /// Sleeps until one of these is readable. Returns whether the first one is.
    fn sleep(&self, fds: &[Fd]) -> bool {
        let mut readable = self.readable.lock().unwrap();
        while !fds.iter().any(|fd| readable[fd.at()]) {
            readable = self.changed.wait(readable).unwrap();
        }
        readable[fds[0].at()]
    }
}

struct ModelWakeEvent {
    fds: Arc<Fds>,
    number: usize,
}

impl WakeEvent for ModelWakeEvent {
    fn signal(&self) {
        self.fds.signal(Fd::Sleeper(self.number));
    }

    fn clear(&self) {
        self.fds.take(Fd::Sleeper(self.number));
    }
}

/// The completion end: the popped elements, and the result of each.
struct CompletionEnd {
    ring: Arc<Ring>,
    fds: Arc<Fds>,
    event_idx: bool,
    /// The request for which a thread blocks. The others have tokens.
    blocking: Option<u16>,
    next: u16,
    kept: u16,
    /// The thread's request was delivered.
    done: bool,
}

impl CompletionEnd {
    /// Pops the next element, if there is one. Returns whether it has a token.
    fn pop(&mut self) -> Option<bool> {
        if self.ring.load(Word::UsedIdx, Ordering::Acquire) == self.next {
            return None;
        }
        let token = self.blocking != Some(self.next);
        self.next += 1;
        if !token {
            self.done = true;
            self.fds.signal(Fd::Wake);
        }
        Some(token)
    }
}

impl Calls for CompletionEnd {
    type Error = Infallible;

    fn enable(&mut self) -> bool {
        driver::arm(&*self.ring, self.event_idx, self.next)
    }

    fn disable(&mut self) {
        driver::disable_calls(&*self.ring, self.event_idx, self.next.wrapping_sub(9));
    }

    fn take(&mut self) {
        self.fds.take(Fd::Call);
    }

    fn hand_out(&mut self) -> Result<bool, Infallible> {
        let before = self.kept;
        while let Some(token) = self.pop() {
            self.kept += u16::from(token);
        }
        Ok(self.kept > before)
    }

    fn has_kept(&self) -> bool {
        self.kept > 0
    }
}

struct CompletionSide {
    end: CompletionEnd,
    sleepers: Sleepers<ModelWakeEvent>,
    /// The number of completions that pollers got.
    polled: u16,
}

/// The part of a queue that sleepers and pollers use.
struct Queue {
    fds: Arc<Fds>,
    ring: Arc<Ring>,
    event_idx: bool,
    completion: Mutex<CompletionSide>,
}

impl Queue {
    fn new(event_idx: bool, blocking: Option<u16>) -> Arc<Queue> {
        let ring = Arc::new(Ring([0, 0, 0, 0, 0, 0].map(AtomicU16::new)));
        let fds: Arc<Fds> = Arc::default();
        let (theirs, eventfds) = (ring.clone(), fds.clone());
        let mut end =
            CompletionEnd { ring: theirs, fds: eventfds, event_idx, blocking, next: 0, kept: 0, done: false };
        end.disable();
        let completion = Mutex::new(CompletionSide { end, sleepers: Sleepers::default(), polled: 0 });
        Arc::new(Queue { fds, ring, event_idx, completion })
    }

    fn wake_event(&self, number: usize) -> Arc<ModelWakeEvent> {
        Arc::new(ModelWakeEvent { fds: self.fds.clone(), number })
    }

    /// Polls as `Ring::poll`, for one completion.
    fn poll(&self) -> bool {
        let CompletionSide { end, sleepers, polled } = &mut *self.completion.lock().unwrap();
        let mut found = end.kept > 0;
        if found {
            end.kept -= 1;
        }
        while !found && let Some(token) = end.pop() {
            found = token;
            if found && !self.event_idx {
                sleepers.turn_calls_off(end);
            }
        }
        *polled += u16::from(found);
        found
    }

    fn polled(&self) -> u16 {
        self.completion.lock().unwrap().polled
    }

    fn arm(&self, wake_event: &Arc<ModelWakeEvent>) -> bool {
        let CompletionSide { end, sleepers, .. } = &mut *self.completion.lock().unwrap();
        sleepers.arm_events(end, wake_event).unwrap()
    }

    /// Sleeps on an Events until it has polled one completion, as a program does.
    fn poll_asleep(&self, number: usize) {
        let wake_event = self.wake_event(number);
        while !self.poll() {
            if self.arm(&wake_event) {
                self.fds.sleep(&[Fd::Call, Fd::Sleeper(number)]);
            }
        }
    }

    /// Blocks for the request `blocking`, as `Core::wait_as_leader` and `sleep_at_queue` do.
    fn block(&self) {
        loop {
            let mut completion = self.completion.lock().unwrap();
            let CompletionSide { end, sleepers, .. } = &mut *completion;
            if end.hand_out().unwrap() {
                sleepers.wake_all();
            }
            if end.done {
                return;
            }
            let sleeps = sleepers.arm_thread(end);
            drop(completion);
            let called = sleeps && self.fds.sleep(&[Fd::Call, Fd::Wake]);
            let CompletionSide { end, sleepers, .. } = &mut *self.completion.lock().unwrap();
            sleepers.disarm_thread(end, called).unwrap();
        }
    }

    /// Runs a device that completes all requests, one after the other.
    fn device(self: Arc<Self>) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            for new in 1..=REQUESTS {
                device::show(&*self.ring, new);
                if device::decide(&*self.ring, self.event_idx, Some(new - 1), new) {
                    self.fds.signal(Fd::Call);
                }
            }
        })
    }
}

/// One thread polls once. Another sleeps on an Events until all completions were taken.
///
/// With `turns_calls_off`, the poll takes the call and turns calls off, which only a sleeper may do.
fn poll_next_to_a_sleeper(turns_calls_off: bool) {
    check(move |event_idx| {
        let queue = Queue::new(event_idx, None);
        let device = queue.clone().device();
        let poller = thread::spawn({
            let queue = queue.clone();
            move || {
                if queue.poll() {
                    queue.fds.signal(Fd::Program);
                }
                if turns_calls_off {
                    let mut completion = queue.completion.lock().unwrap();
                    completion.end.take();
                    completion.end.disable();
                }
            }
        });
        let wake_event = queue.wake_event(0);
        loop {
            queue.poll();
            if queue.polled() == REQUESTS {
                break;
            }
            if queue.arm(&wake_event) {
                queue.fds.sleep(&[Fd::Call, Fd::Sleeper(0), Fd::Program]);
            }
            queue.fds.take(Fd::Program);
        }
        poller.join().unwrap();
        device.join().unwrap();
    });
}

#[test]
fn a_poll_loses_no_wake_up() {
    poll_next_to_a_sleeper(false);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_poll_that_turns_calls_off_loses_one() {
    poll_next_to_a_sleeper(true);
}

/// Each sleeper takes one of two completions. One of them arms its Events once more before it leaves, and so
/// takes a call.
#[test]
fn two_sleepers_wake_for_two_completions() {
    check(|event_idx| {
        let queue = Queue::new(event_idx, None);
        let device = queue.clone().device();
        let other = thread::spawn({
            let queue = queue.clone();
            move || queue.poll_asleep(1)
        });
        let wake_event = queue.wake_event(0);
        while !queue.poll() {
            if queue.arm(&wake_event) {
                queue.fds.sleep(&[Fd::Call, Fd::Sleeper(0)]);
            }
        }
        let _ = queue.arm(&wake_event);
        other.join().unwrap();
        device.join().unwrap();
    });
}

/// One thread blocks for a request. Another sleeps on an Events for the other request. Either may complete
/// first.
#[test]
fn a_blocking_thread_and_a_sleeper_wake_both() {
    for blocking in 0..REQUESTS {
        check(move |event_idx| {
            let queue = Queue::new(event_idx, Some(blocking));
            let device = queue.clone().device();
            let sleeper = thread::spawn({
                let queue = queue.clone();
                move || queue.poll_asleep(0)
            });
            queue.block();
            sleeper.join().unwrap();
            device.join().unwrap();
        });
    }
}
