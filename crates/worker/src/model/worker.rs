//! A model of a worker's loop with at most one queue: who owns the queue and when it is polled. Its states
//! are polled, armed and leaving.

use super::events::Events;
use super::ring::Ring;
use crate::clock::Clock;
use crate::mailbox::{Mailbox, MovedTask, Placement, TaskKey, WorkItem};
use crate::peers::Peers;
use crate::policy::Policy;
use crate::poll::Poll;
use kickless_device::{Context, Polled, QueueTask, Stopped, Update, Vring};
use kickless_sync::mpsc::{Sender, channel};
use loom::sync::Mutex;
use std::sync::Arc;

pub(crate) const KEY: TaskKey = 7;

/// Stands for the queue. Its owner may use the device's part of `Ring`.
struct Token;

impl QueueTask for Token {
    fn vring(&mut self) -> &mut Vring {
        panic!("the model looks at the ring itself")
    }

    fn poll(&mut self, _: &mut Context<'_>, _: u32) -> Polled {
        panic!("the model looks at the ring itself")
    }

    fn in_flight(&self) -> usize {
        0
    }
}

/// Makes two workers of a pool, as other threads see them, and the events that each waits for.
pub(crate) fn peers() -> (Arc<Peers>, [Arc<Events>; 2]) {
    let events = [Arc::<Events>::default(), Arc::<Events>::default()];
    let mailboxes = events.iter().map(|events| Arc::new(Mailbox::new(events.waker()))).collect();
    (Arc::new(Peers::new(Clock::start(), mailboxes)), events)
}

/// Makes the placement of a task on the first worker.
pub(crate) fn placement() -> Placement {
    Placement {
        device: 0,
        weight: Arc::new(1.into()),
        limiter: Arc::default(),
        home: None,
        worker_id: Arc::new(Mutex::new(0)),
    }
}

/// A queue on a worker.
struct Queue {
    placement: Placement,
    task: Box<dyn QueueTask>,
    /// On the poll list. Otherwise it is armed.
    polled: bool,
    moving: Option<usize>,
    stopping: Vec<Sender<Stopped>>,
}

pub(crate) struct Worker {
    peers: Arc<Peers>,
    worker_id: usize,
    events: Arc<Events>,
    ring: Arc<Ring>,
    queue: Option<Queue>,
    ending: bool,
}

impl Worker {
    pub(crate) fn new(peers: &Arc<Peers>, worker_id: usize, events: &Arc<Events>, ring: &Arc<Ring>) -> Self {
        let (peers, events, ring) = (peers.clone(), events.clone(), ring.clone());
        Self { peers, worker_id, events, ring, queue: None, ending: false }
    }

    /// Adds a queue, which is polled once.
    pub(crate) fn add_task(&mut self, placement: Placement, task: Box<dyn QueueTask>) {
        assert!(self.queue.is_none());
        self.ring.watch(&self.events);
        self.ring.disarm();
        let stopping = if self.ending { vec![channel().0] } else { Vec::new() };
        self.queue = Some(Queue { placement, task, polled: true, moving: None, stopping });
    }

    /// Starts the worker with a queue.
    pub(crate) fn with_queue(mut self, placement: Placement) -> Self {
        self.add_task(placement, Box::new(Token));
        self
    }

    /// Runs until the worker is asked to end and has no queue.
    pub(crate) fn run(mut self) {
        while self.turn() {}
        self.peers.workers[self.worker_id].mailbox.close();
    }

    /// Runs until all requests up to `end` have been served, with the queue that the worker has, or gets.
    pub(crate) fn serve_until(mut self, end: u16) {
        while self.queue.is_none() || self.ring.next() != end {
            assert!(self.turn());
        }
        self.ring.unwatch();
        self.peers.workers[self.worker_id].mailbox.close();
    }

    /// Runs one turn of the loop. Returns whether there is another.
    fn turn(&mut self) -> bool {
        self.visit();
        if self.ending && self.queue.is_none() {
            return false;
        }
        let polled = self.queue.as_ref().is_some_and(|queue| queue.polled);
        let happened = if polled { self.events.look() } else { self.events.sleep() };
        if happened.kick
            && let Some(queue) = self.queue.as_mut().filter(|queue| !queue.polled)
            && self.ring.has_work()
        {
            poll(queue, &self.ring);
        }
        if happened.mailbox {
            for item in self.peers.clone().workers[self.worker_id].mailbox.take() {
                self.handle(item);
            }
        }
        true
    }

    /// Polls the queue, if it is polled.
    fn visit(&mut self) {
        let Some(queue) = self.queue.as_mut().filter(|queue| queue.polled) else { return };
        if queue.moving.is_some() || !queue.stopping.is_empty() {
            return self.leave();
        }
        if self.ring.serve() {
            return;
        }
        if self.ring.arm() {
            self.ring.disarm();
        } else {
            queue.polled = false;
        }
    }

    fn handle(&mut self, item: WorkItem) {
        let queue = self.queue.as_mut();
        match item {
            WorkItem::Adopt(key, placement, moved) => {
                assert_eq!(key, KEY);
                self.add_task(placement, moved.task);
            }
            WorkItem::Update(_, update, done) => {
                assert!(queue.is_some() || self.ending, "the item came to a worker without the queue");
                if let Some(queue) = queue {
                    self.ring.record_item(if matches!(update, Update::Poll) { 1 } else { 2 });
                    poll(queue, &self.ring);
                }
                assert!(done.send(()).is_ok());
            }
            WorkItem::Stop(_, _, done) => {
                assert!(queue.is_some() || self.ending, "the item came to a worker without the queue");
                if let Some(queue) = queue {
                    self.ring.record_item(3);
                    queue.stopping.push(done);
                    poll(queue, &self.ring);
                }
            }
            WorkItem::MoveAll(to) => {
                if let Some(queue) = queue
                    && to != self.worker_id
                    && queue.stopping.is_empty()
                {
                    queue.moving.get_or_insert(to);
                    poll(queue, &self.ring);
                }
            }
            WorkItem::End => {
                self.ending = true;
                if let Some(queue) = queue {
                    queue.stopping.push(channel().0);
                    poll(queue, &self.ring);
                }
            }
            WorkItem::Spawn(..) | WorkItem::Poll(_) | WorkItem::Weight(..) | WorkItem::Pass(_) => {
                panic!("an item that the model never sends")
            }
        }
    }

    /// Stops the queue, or moves it to the other worker.
    fn leave(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        self.ring.unwatch();
        if let (Some(to), true) = (queue.moving, queue.stopping.is_empty()) {
            let moved = Box::new(MovedTask { task: queue.task, policy: Policy::new(Poll::Never, 2) });
            match self.peers.hand_over(KEY, &queue.placement, moved, (self.worker_id, to)) {
                Ok(()) => {}
                Err(WorkItem::Adopt(_, placement, moved)) => self.add_task(placement, moved.task),
                Err(_) => panic!("something else came back"),
            }
            return;
        }
        let next_avail = self.ring.next();
        drop(queue.task);
        for done in queue.stopping {
            let _ = done.send(Stopped { next_avail, has_work: false, left: 0, unpublished: Vec::new() });
        }
    }
}

/// Puts the queue on the list.
fn poll(queue: &mut Queue, ring: &Ring) {
    if !std::mem::replace(&mut queue.polled, true) {
        ring.disarm();
    }
}
