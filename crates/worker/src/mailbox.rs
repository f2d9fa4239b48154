//! Work items for a worker.

use kickless_device::{Source, Stopped, Update};
use kickless_io::Waker;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

/// Names a source for as long as the pool lives; never used again.
pub(crate) type Key = u64;

/// What a worker is asked to do between two rounds.
pub(crate) enum Item {
    /// Run this source from now on.
    Put(Key, Box<dyn Source>),
    /// Change it; say when that is done.
    Update(Key, Update, Sender<()>),
    /// Stop it; say when it has.
    Stop(Key, Sender<Stopped>),
    /// End, once all sources have stopped.
    End,
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
    /// items, either takes this one now or is woken for it. Where the worker has ended the item is dropped, and
    /// with it the sender of its answer: whoever waits for that learns of it.
    pub(crate) fn put(&self, item: Item) {
        if let Some(items) = &mut *self.items.lock().unwrap_or_else(PoisonError::into_inner) {
            items.push(item);
        }
        self.waker.wake();
    }

    /// Takes all items, in the order they were put in.
    pub(crate) fn take(&self) -> Vec<Item> {
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        items.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The worker has ended: nothing is taken any more.
    pub(crate) fn close(&self) {
        let items = self.items.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside the lock: dropping a source can be long.
        drop(items);
    }
}
