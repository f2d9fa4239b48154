//! Changes to a running task.

use crate::{Areas, Call, Kick};
use kickless_memory::{IovaRange, Miss, View};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// A change to a running task. None of them stops it.
#[derive(Debug)]
pub enum Update {
    /// Replaces guest memory and its log. Requests in flight keep the memory that they were submitted with,
    /// but mark their later writes in the new log. Once the change is in force, no request writes to the old
    /// log. A ring that is not in the new memory rests until a later view contains it.
    Memory(Arc<View>),
    /// Moves the ring's areas. Indices stay.
    Addresses(Areas),
    /// Takes kicks from another descriptor, and polls the ring once.
    Kick(Option<Kick>),
    /// Sends calls to another descriptor, and one call at once. The previous call may have gone to the old
    /// descriptor after the front-end stopped watching it. (The front-end masks and unmasks interrupts this
    /// way.)
    Call(Option<Call>),
    /// Reports a broken ring to this descriptor.
    Err(Option<Call>),
    /// Reports pages that were marked in the log to this descriptor.
    Logged(Option<Call>),
    /// Polls the ring: the front-end kicked by message, or translations have come that the ring waits for.
    Poll,
    /// Invalidates these translations. Each request that still uses one holds a clone of the sender; the
    /// channel closes when the last of them completes.
    Invalidate(IovaRange, Sender<Infallible>),
    /// Drops these translations from the cache. They stay valid, so no request has to complete first.
    Forget(IovaRange),
    /// Fails requests that need this translation, which the front-end does not have.
    TranslationRefused(Miss),
    /// Enables or disables a ring that is drained while it is disabled
    /// ([`Disabled::Drained`](crate::Disabled::Drained)).
    Enable(bool),
}
