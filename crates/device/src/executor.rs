//! Where tasks are put, and what is asked of them there.

use crate::{Call, IovaAddresses, Kick, QueueTask};
use kickless_memory::{IovaRange, Miss, View};
use kickless_virtqueue::device::{Addresses, Held};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// Runs tasks: a pool of workers.
pub trait Executor: Send + Sync {
    /// Hands a task to a worker. It is looked at once, kick or no kick: QEMU sends none after a reconnection.
    ///
    /// # Errors
    /// The worker cannot take it (it has ended, or the kernel has no room for one more descriptor to wait for).
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>>;
}

/// A running task, as the transport holds it. Dropping it stops the task without waiting.
pub trait TaskHandle: Send {
    /// Asks the worker for a change. The receiver gets a message once the change is in force; it is disconnected when the
    /// worker has ended.
    fn update(&self, update: Update) -> Receiver<()>;

    /// Asks the worker to stop. From the moment it runs this, no head is popped; the answer comes when everything in
    /// flight has been completed and pushed.
    fn stop(&self) -> Receiver<Stopped>;
}

/// Where a ring's areas are said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Areas {
    /// By the front-end's addresses.
    User(Addresses),
    /// By the device's, for a ring that was made with an [`Iommu`](crate::Iommu).
    Iova(IovaAddresses),
}

/// A change to a running task. None of them stops it.
#[derive(Debug)]
pub enum Update {
    /// Guest memory is this now, and its log. Requests in flight keep what they were submitted with, but what they write from now on
    /// is marked in this log: once the change is answered, nobody writes the one before. A ring that is not in memory any more
    /// rests until a later view has it.
    Memory(Arc<View>),
    /// The ring areas lie here now; indices stay.
    Addresses(Areas),
    /// Kicks come from here now. The ring is looked at once.
    Kick(Option<Kick>),
    /// Calls go here now. One is sent at once: the last one may have gone to the old descriptor after the front-end
    /// stopped looking there (it masks and unmasks interrupts this way).
    Call(Option<Call>),
    /// A broken ring is told here.
    Err(Option<Call>),
    /// It is told here that pages were marked in the log.
    Logged(Option<Call>),
    /// Look at the ring: the front-end kicked by message, or translations have come that it waits for.
    Look,
    /// The translations of these addresses are not true any more. Whoever of the queue still uses them keeps the sender; when all
    /// senders are gone, nobody does.
    Invalidate(IovaRange, Sender<Infallible>),
    /// The translations of these addresses are true, but not kept any more.
    Forget(IovaRange),
    /// The front-end has no such translation: a request that needs it fails.
    Refused(Miss),
}

/// What is left of a task that has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Index of the next available ring entry that nobody has taken.
    pub next_avail: u16,
    /// Whether the driver had offered more than was taken.
    pub has_work: bool,
    /// What was completed and could not be shown to the driver, because the ring was not in guest memory: to be handed to
    /// whoever runs this ring next. Nearly always empty.
    pub held: Vec<Held>,
}
