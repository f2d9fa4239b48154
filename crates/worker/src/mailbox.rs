//! Work items for a worker.

use crate::policy::Policy;
use crate::poll::Poll;
use kickless_device::{Leave, Limiter, Position, QueueTask, Stopped, Update};
use kickless_io::Waker;
#[cfg(debug_assertions)]
use kickless_sync::mpsc::Receiver;
use kickless_sync::mpsc::Sender;
use kickless_sync::{Mutex, lock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize};

/// The name of a task. It is unique for as long as the pool lives.
pub(crate) type TaskKey = u64;

/// The device and the worker of a task.
#[derive(Clone)]
pub(crate) struct Placement {
    /// The device's number in the pool, and its weight.
    pub(crate) device: u64,
    pub(crate) weight: Arc<AtomicU32>,
    /// The limits of the device, which a visit keeps.
    pub(crate) limiter: Arc<Limiter>,
    /// The worker on which all tasks of its affinity group should be. Relaxed is enough: a task that arrives
    /// at another worker, or stays behind there, moves on later.
    pub(crate) home: Option<Arc<AtomicUsize>>,
    /// The holder of the task. A sender holds the lock while it puts in a work item for the task. So a task
    /// that moves takes all earlier items with it, in their order, and later ones follow it.
    pub(crate) holder: Arc<Mutex<Holder>>,
}

/// The holder of a task.
pub(crate) enum Holder {
    /// The worker with this number.
    Worker(usize),
    /// The task's handle ([`crate::parking`]).
    Handle(ParkedTask),
}

/// A parked task, with the work items that have come since.
pub(crate) struct ParkedTask {
    pub(crate) moved: Box<MovedTask>,
    pub(crate) items: Vec<WorkItem>,
}

/// A task that comes from a worker.
pub(crate) struct MovedTask {
    pub(crate) task: Box<dyn QueueTask>,
    pub(crate) policy: Policy,
    /// The number of that worker.
    pub(crate) from: usize,
}

/// A work item, which a worker carries out between two rounds.
pub(crate) enum WorkItem {
    /// Runs a new task.
    Spawn(TaskKey, Placement, Box<dyn QueueTask>),
    /// Continues a task of another worker, or one that was parked.
    Adopt(TaskKey, Placement, Box<MovedTask>),
    /// Changes a task. The sender is used when the change is in force.
    Update(TaskKey, Update, Sender<()>),
    /// Stops a task. The sender is used when it has stopped.
    Stop(TaskKey, Leave, Sender<Stopped>),
    /// Parks a task. The sender is used when it is parked.
    Park(TaskKey, Sender<Position>),
    /// Lets a task go on that is to be parked, and is not yet.
    Unpark(TaskKey),
    /// Moves all present tasks to another worker.
    MoveAll(usize),
    /// Changes the polling rule.
    Poll(Poll),
    /// Changes the weight of a device.
    Weight(u64, u32),
    /// Changes nothing. The sender is used after the round in which the item came.
    Pass(Sender<()>),
    /// Keeps the worker until the sender is dropped, for tests.
    #[cfg(debug_assertions)]
    Block(Receiver<()>),
    /// Ends the worker, once all tasks have stopped.
    End,
}

impl WorkItem {
    /// Returns whether this item is for a task with this key that the worker has.
    fn is_for(&self, key: TaskKey) -> bool {
        match self {
            Self::Update(whose, ..) | Self::Stop(whose, ..) | Self::Park(whose, _) | Self::Unpark(whose) => {
                *whose == key
            }
            Self::Spawn(..) | Self::Adopt(..) | Self::MoveAll(_) | Self::Poll(_) => false,
            Self::Weight(..) | Self::Pass(_) | Self::End => false,
            #[cfg(debug_assertions)]
            Self::Block(_) => false,
        }
    }
}

/// A queue of work items and the eventfd that wakes their worker.
pub(crate) struct Mailbox {
    /// `None` once the worker has ended.
    items: Mutex<Option<VecDeque<WorkItem>>>,
    waker: Waker,
}

impl Mailbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self { items: Mutex::new(Some(VecDeque::new())), waker }
    }

    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Puts an item in and wakes the worker, in this order. The worker clears the waker and then takes the
    /// items ([`Mailbox::take_next`]), so it either takes this one or is woken for it.
    ///
    /// If the worker has ended, the item comes back. Dropping it drops the sender of its answer, so the
    /// receiver learns of this.
    pub(crate) fn put(&self, item: WorkItem) -> Result<(), WorkItem> {
        match &mut *lock(&self.items) {
            Some(items) => items.push_back(item),
            None => return Err(item),
        }
        self.waker.wake();
        Ok(())
    }

    /// Takes the oldest item. Call it after the waker was cleared, until it returns none.
    pub(crate) fn take_next(&self) -> Option<WorkItem> {
        lock(&self.items).as_mut()?.pop_front()
    }

    /// Clears the waker, and takes all items in their order.
    #[cfg(all(test, loom))]
    pub(crate) fn take(&self) -> VecDeque<WorkItem> {
        self.waker.clear();
        let mut items = lock(&self.items);
        items.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns whether there are items for a task.
    pub(crate) fn has_for(&self, key: TaskKey) -> bool {
        lock(&self.items).as_ref().is_some_and(|items| items.iter().any(|item| item.is_for(key)))
    }

    /// Takes the items for one task in their order.
    pub(crate) fn take_for(&self, key: TaskKey) -> Vec<WorkItem> {
        let mut items = lock(&self.items);
        let Some(items) = items.as_mut() else { return Vec::new() };
        let (taken, left): (Vec<_>, Vec<_>) =
            std::mem::take(items).into_iter().partition(|item| item.is_for(key));
        *items = left.into();
        taken
    }

    /// Closes the mailbox of a worker that has ended. Drops the items that are left.
    pub(crate) fn close(&self) {
        let items = lock(&self.items).take();
        // Outside the lock, because dropping a task can take long.
        drop(items);
    }
}
