//! Threads that sleep until the device calls for a queue, and what is owed to them.
//!
//! Two kinds of sleepers share the eventfd of calls. A *thread* of the driver (the leader of those that wait, or the disk's own)
//! sleeps in `poll(2)`. An [`Events`](crate::Events) is a descriptor that a caller sleeps on, in an epoll or a runtime of its own;
//! it watches the eventfd of calls too, and its *bell*, an eventfd that only this process has. Others poll without sleeping.
//!
//! # What holds
//! After [`Sleepers::arm_events`] has returned `true`, the descriptor of that Events becomes readable when something completes that no
//! other thread hands out. It stays readable until the Events is armed again. It can also become readable for nothing.
//!
//! # Why
//! Everything here happens under the queue's lock for completions.
//!
//! 1. A sleeper asks for calls, and then looks at the ring. If something is due, it does not sleep. Otherwise the device calls for
//!    the first completion that it publishes afterwards: that is the argument of `kickless_virtqueue::device::suppress`. It does
//!    not matter who pops this completion, nor whether others ask for calls in between: each of them asks for a completion that
//!    is due or the next one to come, so the device passes one that was asked for.
//! 2. A call stays in the eventfd until a thread takes it, so all who watch it wake. A thread that takes it, or that turns calls off,
//!    breaks the first rule for the others. It makes up for that before it drops the lock. If a thread sleeps, it asks for
//!    calls again and hands out what is due, until nothing is: then the first rule holds anew, and the owners of what was
//!    handed out were told. If only Events are armed, it does the same, or it rings their bells and forgets them.
//! 3. A completion that is handed out to be kept for pollers is not in the ring any more, so no call announces it. It rings the
//!    bells. [`Sleepers::arm_events`] does not let its caller sleep while something is kept.
//! 4. A poll takes no call. Before it turns calls off, it rings the bells.
//!
//! An Events whose bell was rung is awake, and is owed nothing until it is armed again. The end of the disk rings all bells. A
//! device that does not call holds up those who wait for its own completions.

#[cfg(all(test, loom))]
mod model;

use std::sync::{Arc, Weak};

/// An event that only this process signals.
pub(crate) trait WakeEvent {
    /// Makes the sleeper's descriptor readable.
    fn signal(&self);
    /// Makes it unreadable.
    fn clear(&self);
}

/// The completing end of a ring, with its eventfd of calls.
pub(crate) trait Calls {
    /// The error that ends the queue.
    type Error;
    /// Asks for calls. Whether something is due already.
    fn enable(&mut self) -> bool;
    /// Asks for none.
    fn disable(&mut self);
    /// Takes the calls that were made from the eventfd.
    fn take(&mut self);
    /// Hands out what is due. Whether some of it is kept for pollers.
    ///
    /// # Errors
    /// The device lied.
    fn hand_out(&mut self) -> Result<bool, Self::Error>;
    /// Whether something is kept for pollers.
    fn has_kept(&self) -> bool;
}

/// All sleepers of a queue.
#[derive(Debug)]
pub(crate) struct Sleepers<B> {
    /// Threads that have asked for calls and sleep.
    threads: u32,
    /// The bells of Events that were armed, and not rung since.
    armed: Vec<Weak<B>>,
}

impl<B> Default for Sleepers<B> {
    fn default() -> Self {
        Self { threads: 0, armed: Vec::new() }
    }
}

impl<B: WakeEvent> Sleepers<B> {
    /// Counts a thread that wants to sleep. `false`: something is due, so it must not. Either way [`Sleepers::disarm_thread`] has to
    /// follow.
    pub(crate) fn arm_thread(&mut self, calls: &mut impl Calls) -> bool {
        self.threads += 1;
        !calls.enable()
    }

    /// Counts it off; `called`: its sleep was ended by a call.
    ///
    /// # Errors
    /// The device lied.
    pub(crate) fn disarm_thread<C: Calls>(&mut self, calls: &mut C, called: bool) -> Result<(), C::Error> {
        self.threads -= 1;
        if called {
            calls.take();
        }
        self.restore_calls(calls)
    }

    /// Arms an Events. `false`: there is something to poll, so its caller must not sleep.
    ///
    /// # Errors
    /// The device lied.
    pub(crate) fn arm_events<C: Calls>(&mut self, calls: &mut C, event: &Arc<B>) -> Result<bool, C::Error> {
        let this = Arc::downgrade(event);
        self.armed.retain(|other| !other.ptr_eq(&this));
        event.clear();
        calls.take();
        if self.threads > 0 {
            self.restore_calls(calls)?;
        }
        if !calls.enable() && !calls.has_kept() {
            self.armed.push(this);
            return Ok(true);
        }
        self.wake_all();
        if self.threads == 0 {
            calls.disable();
        }
        Ok(false)
    }

    /// Turns calls off after a poll, for a device that would go on calling.
    pub(crate) fn turn_calls_off(&mut self, calls: &mut impl Calls) {
        if self.threads == 0 && !self.armed.is_empty() {
            self.wake_all();
            calls.disable();
        }
    }

    /// Rings the bells of all that are armed.
    pub(crate) fn wake_all(&mut self) {
        self.armed.drain(..).filter_map(|event| event.upgrade()).for_each(|event| event.signal());
    }

    /// Makes up for a call that was taken: hands out what is due and has calls asked for, or nobody sleeps.
    pub(crate) fn restore_calls<C: Calls>(&mut self, calls: &mut C) -> Result<(), C::Error> {
        loop {
            self.armed.retain(|event| event.strong_count() > 0);
            if self.threads == 0 && self.armed.is_empty() {
                calls.disable();
                return Ok(());
            }
            if !calls.enable() {
                return Ok(());
            }
            if calls.hand_out()? {
                self.wake_all();
            }
        }
    }
}
