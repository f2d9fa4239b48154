//! Parks tasks: a task leaves its worker without a stop, and may go on later.
//!
//! A parked task is with its handle ([`Holder::Handle`]). No thread uses its ring, its memory or its device.
//! Its credit is in the ring, and nothing of it is in flight except requests that it keeps. So another
//! process can continue the ring from the [`Position`], as long as this one does not. If no process does, the
//! task goes on where it was. It lost nothing, because it did not stop.
//!
//! # How a task is parked
//! As a task that moves to another worker (`control`), but its next holder is its handle:
//! 1. The worker carries out [`WorkItem::Park`]. From then on it polls the task with a budget of 0, until the
//!    task has nothing in flight. Nothing limits how long a request waits for a remote server.
//! 2. The worker returns the credit, removes the task from its tables, detaches it from the engine, and stops
//!    watching its descriptors. Now it touches nothing of the task any more.
//! 3. It puts the task into [`Placement::holder`], under its lock, unless its mailbox has items for the task
//!    ([`Peers::park`]).
//! 4. It answers with the position.
//!
//! [`Peers::unpark`] gives the task back, under the same lock: it puts the task into the mailbox of the
//! worker that had it, and the items that have come since behind it. The worker adopts it as one that has
//! moved.
//!
//! # Why no item is lost
//! Each sender holds the lock of the holder while it puts in an item. So each item is put in before step 3 or
//! after it.
//! * *After it*: the item goes to the parked task, and follows it to the worker.
//! * *Before it*: either the worker has carried the item out by then, because it still had the task. Or the
//!   item is in the mailbox. The worker finds it there in step 3, takes the task back, carries the item out,
//!   and tries again. Each of these items puts the task on the poll list, so no attempt is the last one. The
//!   worker also looks before step 2, so that it does not try in vain until it comes to the item.
//!
//! So all items from before the answer are in force when the position is told, and the others wait. An item
//! that comes while a worker does not have the task, and has not got it from another worker, would be
//! answered without an effect. There is no such time.
//!
//! # Races
//! * *Going on*: the lock tells whether the task is parked. If not, [`WorkItem::Unpark`] is an item like the
//!   others, so step 3 does not pass it by. A caller that gives up waiting needs no answer, and no task is in
//!   a message that nobody receives.
//! * *A stop* wins. The receiver of the position is disconnected. A stop of a parked task waits until the
//!   task goes on, because only a worker may use its ring.
//! * *A move*: a park replaces a move that is under way, and balancing leaves a leaving task alone. A task
//!   that goes on follows the home of its group.
//! * *A kick*: kicks are disabled while a task leaves, and stay so. A kick that was on its way stays in the
//!   descriptor, which nobody reads. The worker polls an adopted task once, and watches the descriptor
//!   edge-triggered, so it learns of both.
//! * *A change of the polling rule or of a weight* is found when the task is adopted.
//! * *The end of the worker* stops the tasks that it has, and a task that comes later. If it has ended, going
//!   on drops the task and its items, so their receivers are disconnected.
//! * *The handle* may go. It drops the parked task, which does not touch the ring.
//!
//! `model` checks items, kicks, moves, stops and ends beside a park in every order.
//!
//! # Why the next process sees the ring whole
//! The worker's last stores to the ring, the in-flight buffer and the log are before step 3. The lock and the
//! channel of the answer order them before everything that the receiver does, such as a message to the next
//! process.

use crate::entry::{Entry, NextHolder};
use crate::event_loop::EventLoop;
use crate::mailbox::{Holder, MovedTask, ParkedTask, Placement, TaskKey, WorkItem};
use crate::peers::Peers;
use kickless_device::Position;
use kickless_sync::lock;
use kickless_sync::mpsc::Sender;
use tracing::debug;

impl Peers {
    /// Gives a task that has left its worker to its handle. The task comes back if there are items for it
    /// that the worker has to carry out before.
    pub(crate) fn park(
        &self,
        key: TaskKey,
        placement: &Placement,
        moved: Box<MovedTask>,
    ) -> Result<(), Box<MovedTask>> {
        let mut holder = lock(&placement.holder);
        if self.workers[moved.from].mailbox.has_for(key) {
            return Err(moved);
        }
        *holder = Holder::Handle(ParkedTask { moved, items: Vec::new() });
        Ok(())
    }

    /// Lets a task go on, whether it is parked or not yet.
    pub(crate) fn unpark(&self, key: TaskKey, placement: &Placement) {
        let mut holder = lock(&placement.holder);
        let worker_id = match &*holder {
            Holder::Worker(worker_id) => *worker_id,
            Holder::Handle(parked) => parked.moved.from,
        };
        let mailbox = &self.workers[worker_id].mailbox;
        // Items come back if the worker has ended. They are dropped outside the lock, because dropping a task
        // can take long.
        let mut refused = Vec::new();
        match std::mem::replace(&mut *holder, Holder::Worker(worker_id)) {
            Holder::Worker(_) => refused.extend(mailbox.put(WorkItem::Unpark(key)).err()),
            Holder::Handle(ParkedTask { moved, items }) => {
                let adopt = WorkItem::Adopt(key, placement.clone(), moved);
                let all = std::iter::once(adopt).chain(items);
                refused.extend(all.filter_map(|item| mailbox.put(item).err()));
            }
        }
        drop(holder);
    }
}

impl EventLoop {
    /// Lets a task go on that is to be parked, and is not yet.
    pub(crate) fn end_park(&mut self, number: u32) {
        let entry = self.entries[number as usize].as_ref();
        if entry.is_some_and(|entry| matches!(entry.next_holder, Some(NextHolder::Handle(_)))) {
            self.set_next_holder(number, None);
        }
    }

    /// Parks a task that has left, unless there is something to do before.
    pub(crate) fn park(&mut self, mut entry: Entry, done: Sender<Position>) {
        let (key, placement) = (entry.key, entry.placement);
        let vring = entry.task.vring();
        vring.send_pending_call();
        let (queue, position) = (vring.index(), vring.position());
        let moved = MovedTask { task: entry.task, policy: entry.policy, from: self.worker_id };
        match self.peers.park(key, &placement, Box::new(moved)) {
            Ok(()) => {
                // Only the handle has the task when its owner learns of it.
                drop(placement);
                debug!(queue, next_avail = position.next_avail, "queue parked");
                // The receiver may be gone. The task goes on when it is told to.
                let _ = done.send(position);
            }
            Err(moved) => {
                let MovedTask { task, policy, .. } = *moved;
                let number = self.add_task(key, placement, task, Some(policy));
                self.set_next_holder(number, Some(NextHolder::Handle(done)));
            }
        }
    }
}
