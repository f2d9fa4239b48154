//! Work items for a worker.

use crate::policy::Policy;
use crate::poll::Poll;
use kickless_device::{QueueTask, Stopped, Update};
use kickless_io::Waker;
use kickless_sync::Mutex;
use kickless_sync::mpsc::Sender;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError};

/// Names a task for as long as the pool lives; never used again.
pub(crate) type Key = u64;

/// Whose task it is, and where it is.
#[derive(Clone)]
pub(crate) struct Tenant {
    /// The device's number in the pool, and its weight.
    pub(crate) device: u64,
    pub(crate) weight: u32,
    /// The worker that all tasks of its affinity group are to be on. Relaxed: it only says where to go, and a task that comes
    /// to another worker, or stays behind there, follows.
    pub(crate) home: Option<Arc<AtomicUsize>>,
    /// The worker that the task is on. Work items for the task are put in with this locked, so that one that moves takes all
    /// that were put in before with it, in their order, and later ones follow it.
    pub(crate) worker_id: Arc<Mutex<usize>>,
}

/// A task that comes from another worker.
pub(crate) struct Arrival {
    pub(crate) task: Box<dyn QueueTask>,
    pub(crate) policy: Policy,
}

/// What a worker is asked to do between two rounds.
pub(crate) enum Item {
    /// Run this task from now on.
    Spawn(Key, Tenant, Box<dyn QueueTask>),
    /// Go on with this task of another worker's.
    Adopt(Key, Tenant, Box<Arrival>),
    /// Change it; say when that is done.
    Update(Key, Update, Sender<()>),
    /// Stop it; say when it has.
    Stop(Key, Sender<Stopped>),
    /// Hand all tasks that are there to another worker.
    MoveAll(usize),
    /// Poll by this rule; say when that is in force.
    Poll(Poll, Sender<()>),
    /// End, once all tasks have stopped.
    End,
}

impl Item {
    /// Whether it is for a task that is already there.
    fn concerns(&self, key: Key) -> bool {
        match self {
            Self::Update(whose, ..) | Self::Stop(whose, _) => *whose == key,
            Self::Spawn(..) | Self::Adopt(..) | Self::MoveAll(_) | Self::Poll(..) | Self::End => false,
        }
    }
}

/// A queue of work items and the eventfd that wakes their worker.
pub(crate) struct Mailbox {
    /// `None`: the worker has ended.
    items: Mutex<Option<Vec<Item>>>,
    waker: Waker,
}

impl Mailbox {
    pub(crate) fn new(waker: Waker) -> Self {
        Self { items: Mutex::new(Some(Vec::new())), waker }
    }

    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Puts an item in and wakes the worker: in this order, so that the worker, which clears the waker and then takes the
    /// items ([`Mailbox::take`]), either takes this one now or is woken for it. Where the worker has ended the item comes back; dropped, it takes
    /// the sender of its answer along, and whoever waits for that learns of it.
    pub(crate) fn put(&self, item: Item) -> Result<(), Item> {
        match &mut *self.items.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(items) => items.push(item),
            None => return Err(item),
        }
        self.waker.wake();
        Ok(())
    }

    /// Clears the waker, and takes all items, in the order they were put in.
    pub(crate) fn take(&self) -> Vec<Item> {
        self.waker.clear();
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        items.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes the items for one task, in the order they were put in.
    pub(crate) fn take_for(&self, key: Key) -> Vec<Item> {
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(items) = items.as_mut() else { return Vec::new() };
        let (taken, left) = std::mem::take(items).into_iter().partition(|item| item.concerns(key));
        *items = left;
        taken
    }

    /// The worker has ended: nothing is taken any more.
    pub(crate) fn close(&self) {
        let items = self.items.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside the lock: dropping a task can be long.
        drop(items);
    }
}
