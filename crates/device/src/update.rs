//! Changes to a running task.

use crate::{Areas, Call, Kick};
use kickless_memory::{IovaRange, Miss, View};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;

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
