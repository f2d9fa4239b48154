//! A model of a worker's loop with at most one queue: who owns the queue and when it is polled. Its states
//! are polled, armed and leaving.

use super::events::Events;
use super::ring::Ring;
use crate::clock::Clock;
use crate::entry::NextHolder;
use crate::mailbox::{Holder, Mailbox, MovedTask, Placement, TaskKey, WorkItem};
use crate::peers::Peers;
use crate::policy::Policy;
use crate::poll::Poll;
use kickless_device::{Context, Polled, Position, QueueTask, Stopped, Update, Vring};
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
        holder: Arc::new(Mutex::new(Holder::Worker(0))),
    }
}

/// A queue on a worker.
struct Queue {
    placement: Placement,
    task: Box<dyn QueueTask>,
    /// On the poll list. Otherwise it is armed.
    polled: bool,
    next_holder: Option<NextHolder>,
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
        self.queue = Some(Queue { placement, task, polled: true, next_holder: None, stopping });
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
        if queue.next_holder.is_some() || !queue.stopping.is_empty() {
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
            WorkItem::Park(_, done) => {
                assert!(queue.is_some() || self.ending, "the item came to a worker without the queue");
                if let Some(queue) = queue {
                    queue.next_holder = Some(NextHolder::Handle(done));
                    poll(queue, &self.ring);
                }
            }
            WorkItem::Unpark(_) => {
                // The queue may have stopped. One that stays parked is a deadlock.
                if let Some(queue) = queue
                    && matches!(queue.next_holder, Some(NextHolder::Handle(_)))
                {
                    queue.next_holder = None;
                    poll(queue, &self.ring);
                }
            }
            WorkItem::MoveAll(to) => {
                if let Some(queue) = queue
                    && to != self.worker_id
                    && queue.stopping.is_empty()
                {
                    queue.next_holder.get_or_insert(NextHolder::Worker(to));
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
            #[cfg(debug_assertions)]
            WorkItem::Block(_) => unreachable!("only tests of the program block a worker"),
            WorkItem::Spawn(..) | WorkItem::Poll(_) | WorkItem::Weight(..) | WorkItem::Pass(_) => {
                panic!("an item that the model never sends")
            }
        }
    }

    /// Stops the queue, moves it to the other worker, or parks it.
    fn leave(&mut self) {
        let Some(Queue { placement, task, next_holder, stopping, .. }) = self.queue.take() else { return };
        self.ring.unwatch();
        let next_avail = self.ring.next();
        if stopping.is_empty()
            && let Some(next_holder) = next_holder
        {
            let moved = MovedTask { task, policy: Policy::new(Poll::Never, 2), from: self.worker_id };
            return self.pass_on(placement, Box::new(moved), next_holder);
        }
        drop(task);
        for done in stopping {
            let _ = done.send(Stopped { next_avail, has_work: false, left: 0, unpublished: Vec::new() });
        }
    }

    /// Gives the queue to its next holder.
    fn pass_on(&mut self, placement: Placement, moved: Box<MovedTask>, next_holder: NextHolder) {
        match next_holder {
            NextHolder::Worker(to) => match self.peers.hand_over(KEY, &placement, moved, to) {
                Ok(()) => {}
                Err(WorkItem::Adopt(_, placement, moved)) => self.add_task(placement, moved.task),
                Err(_) => panic!("something else came back"),
            },
            NextHolder::Handle(done) => {
                let position = position(self.ring.next());
                match self.peers.park(KEY, &placement, moved) {
                    Ok(()) => _ = done.send(position),
                    Err(moved) => {
                        self.add_task(placement, moved.task);
                        if let Some(queue) = &mut self.queue {
                            queue.next_holder = Some(NextHolder::Handle(done));
                        }
                    }
                }
            }
        }
    }
}

/// Returns the position of a queue that is parked with this index.
fn position(next_avail: u16) -> Position {
    Position { next_avail, in_flight: 0, unpublished: Vec::new(), is_broken: false }
}

/// Puts the queue on the list.
fn poll(queue: &mut Queue, ring: &Ring) {
    if !std::mem::replace(&mut queue.polled, true) {
        ring.disarm();
    }
}
