//! A model of a worker's loop with a receive task: when the task checks its ring and its far side, and where
//! its credit is. Its states are polled, armed, quiet and leaving.

use super::events::Events;
use super::ring::Ring;
use crate::mailbox::{Mailbox, WorkItem};
use kickless_device::Stopped;
use kickless_sync::mpsc::Sender;
use loom::sync::Mutex;
use std::sync::Arc;

/// The number of frames that are sent, which is that of the buffers that the driver offers.
pub(crate) const FRAMES: u16 = 2;

#[derive(Default)]
struct Waiting {
    frames: u16,
    /// The number of frames carried so far.
    carried: u16,
    watcher: Option<Arc<Events>>,
}

/// A descriptor from which frames are read.
#[derive(Default)]
pub(crate) struct FarSide(Mutex<Waiting>);

impl FarSide {
    /// Sends a frame, as another process.
    pub(crate) fn send(&self) {
        let mut waiting = self.0.lock().unwrap();
        waiting.frames += 1;
        if let Some(watcher) = &waiting.watcher {
            watcher.set_event();
        }
    }

    /// Reads a frame; `false` is `EAGAIN`.
    fn receive(&self) -> bool {
        let mut waiting = self.0.lock().unwrap();
        let ready = waiting.frames > 0;
        if ready {
            waiting.frames -= 1;
            waiting.carried += 1;
        }
        ready
    }

    fn carried(&self) -> u16 {
        self.0.lock().unwrap().carried
    }

    /// Registers the interest. Earlier readiness is reported.
    fn watch(&self, events: &Arc<Events>) {
        let mut waiting = self.0.lock().unwrap();
        waiting.watcher = Some(events.clone());
        if waiting.frames > 0 {
            events.set_event();
        }
    }

    /// Registers no interest. An earlier report is kept.
    fn ignore(&self) {
        self.0.lock().unwrap().watcher = None;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Polled,
    Armed,
    Quiet,
}

pub(crate) struct Receiver {
    mailbox: Arc<Mailbox>,
    events: Arc<Events>,
    ring: Arc<Ring>,
    far_side: Arc<FarSide>,
    /// Buffers that are popped and not used. One is enough.
    credit: u16,
    state: State,
    /// The interest is registered.
    watched: bool,
    stopping: Option<Sender<Stopped>>,
}

impl Receiver {
    pub(crate) fn new(ring: &Arc<Ring>, far_side: &Arc<FarSide>) -> (Self, Arc<Mailbox>) {
        let events = Arc::<Events>::default();
        let mailbox = Arc::new(Mailbox::new(events.waker()));
        ring.watch(&events);
        ring.disarm();
        let (ring, far_side) = (ring.clone(), far_side.clone());
        let (credit, state, watched, stopping) = (0, State::Polled, false, None);
        (Self { mailbox: mailbox.clone(), events, ring, far_side, credit, state, watched, stopping }, mailbox)
    }

    /// Runs until all frames have been carried.
    pub(crate) fn carry_all(mut self) {
        while self.far_side.carried() != FRAMES {
            self.turn();
        }
        self.leave();
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        while self.stopping.is_none() {
            self.turn();
        }
        self.leave();
    }

    fn turn(&mut self) {
        self.visit();
        let polled = self.state == State::Polled;
        let happened = if polled { self.events.look() } else { self.events.sleep() };
        if happened.kick && self.state == State::Armed && self.ring.has_work() {
            self.make_polled();
        }
        if happened.event && self.state == State::Quiet {
            self.make_polled();
        }
        if happened.mailbox {
            for item in self.mailbox.take() {
                match item {
                    WorkItem::Stop(_, _, done) => self.stopping = Some(done),
                    _ => panic!("an item that the model never sends"),
                }
                self.make_polled();
            }
        }
    }

    fn make_polled(&mut self) {
        if std::mem::replace(&mut self.state, State::Polled) == State::Armed {
            self.ring.disarm();
        }
    }

    /// Polls the task and acts on the result, without a wait in between.
    fn visit(&mut self) {
        if self.state != State::Polled {
            return;
        }
        if self.credit == 0 && self.ring.serve() {
            self.credit = 1;
        }
        if self.credit == 0 {
            if self.ring.arm() {
                return self.ring.disarm();
            }
            self.state = State::Armed;
            self.watched = false;
            return self.far_side.ignore();
        }
        if self.far_side.receive() {
            self.credit = 0;
            return;
        }
        self.state = State::Quiet;
        if !std::mem::replace(&mut self.watched, true) {
            self.far_side.watch(&self.events);
        }
    }

    /// Stops: returns the credit, and waits for nothing.
    fn leave(self) {
        self.ring.unserve(self.credit);
        self.far_side.ignore();
        self.ring.unwatch();
        let next_avail = self.ring.next();
        if let Some(done) = self.stopping {
            let _ = done.send(Stopped { next_avail, has_work: false, left: 0, unpublished: Vec::new() });
        }
        self.mailbox.close();
    }
}
