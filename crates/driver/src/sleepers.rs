//! The threads that sleep until the device calls for a queue, and the rules that wake them.
//!
//! Two kinds of sleepers share the eventfd of calls:
//!
//! - A *thread* of the driver (the leader of the waiting threads, or the reactor) sleeps in `poll(2)`.
//! - An [`Events`](crate::Events) is a descriptor on which a caller sleeps, in its own epoll or runtime. It
//!   watches the eventfd of calls, and its own *wake event*, which only this process has.
//!
//! Other threads poll without sleeping.
//!
//! # Guarantee
//! After [`Sleepers::arm_events`] has returned `true`, the descriptor of that Events becomes readable when a
//! request completes that no other thread delivers. It stays readable until the Events is armed again. It can
//! also become readable for no reason.
//!
//! # Reasons
//! All methods are called under the completion lock of the queue.
//!
//! 1. A sleeper asks for calls, and then checks the ring. If a completion is there, it does not sleep.
//!    Otherwise the device calls for the first completion that it publishes afterwards;
//!    `kickless_virtqueue::device::suppress` explains why. It does not matter which thread pops this
//!    completion, nor whether others ask for calls in between. Each of them asks for a completion that is
//!    there or for the next one, so the device passes one that was asked for.
//! 2. A call stays in the eventfd until a thread takes it, so all threads that watch it wake. A thread that
//!    takes it, or turns calls off, breaks rule 1 for the others. It must restore the rule before it drops
//!    the lock. While another thread sleeps, it does so by asking for calls again and delivering completions,
//!    until there are none. Then rule 1 holds again, and the owners of the delivered requests were woken.
//!    While only Events are armed, it does the same, or it signals their wake events and removes them.
//! 3. A completion that is kept for pollers is not in the ring any more, so no call announces it. It signals
//!    the wake events instead. [`Sleepers::arm_events`] does not let its caller sleep while something is
//!    kept.
//! 4. A poll takes no call. Before it turns calls off, it signals the wake events.
//!
//! An Events whose wake event was signalled is awake. The rules do not apply to it until it is armed again.
//! The end of the disk signals all wake events. A device that does not call delays only the owners of its own
//! completions.

#[cfg(all(test, loom))]
mod model;

use std::sync::{Arc, Weak};

/// An eventfd that only this process signals.
pub(crate) trait WakeEvent {
    /// Makes the sleeper's descriptor readable.
    fn signal(&self);
    /// Makes the descriptor unreadable.
    fn clear(&self);
}

/// The completion end of a ring, with its eventfd of calls.
pub(crate) trait Calls {
    /// The error that ends the queue.
    type Error;
    /// Asks for calls. Returns whether a completion is there already.
    fn enable(&mut self) -> bool;
    /// Turns calls off.
    fn disable(&mut self);
    /// Takes the calls from the eventfd.
    fn take(&mut self);
    /// Delivers all completions. Returns whether some were kept for pollers.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    fn hand_out(&mut self) -> Result<bool, Self::Error>;
    /// Returns whether completions are kept for pollers.
    fn has_kept(&self) -> bool;
}

/// All sleepers of a queue.
#[derive(Debug)]
pub(crate) struct Sleepers<B> {
    /// The number of threads that have asked for calls and sleep.
    threads: u32,
    /// The wake events of the armed Events. A signalled one is removed.
    armed: Vec<Weak<B>>,
}

impl<B> Default for Sleepers<B> {
    fn default() -> Self {
        Self { threads: 0, armed: Vec::new() }
    }
}

impl<B: WakeEvent> Sleepers<B> {
    /// Adds a thread that wants to sleep. Returns `false` if a completion is there, so that it must not.
    ///
    /// [`Sleepers::disarm_thread`] must follow in either case.
    pub(crate) fn arm_thread(&mut self, calls: &mut impl Calls) -> bool {
        self.threads += 1;
        !calls.enable()
    }

    /// Removes a thread. `called`: a call ended its sleep.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
    pub(crate) fn disarm_thread<C: Calls>(&mut self, calls: &mut C, called: bool) -> Result<(), C::Error> {
        self.threads -= 1;
        if called {
            calls.take();
        }
        self.restore_calls(calls)
    }

    /// Arms an Events. Returns `false` if there is something to poll, so that its caller must not sleep.
    ///
    /// # Errors
    /// The device broke the rules of the ring.
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

    /// Turns calls off after a poll, for a device that would call again and again.
    pub(crate) fn turn_calls_off(&mut self, calls: &mut impl Calls) {
        if self.threads == 0 && !self.armed.is_empty() {
            self.wake_all();
            calls.disable();
        }
    }

    /// Signals all armed wake events.
    pub(crate) fn wake_all(&mut self) {
        self.armed.drain(..).filter_map(|event| event.upgrade()).for_each(|event| event.signal());
    }

    /// Restores rule 1 after a call was taken: delivers completions and asks for calls, until there are none.
    /// Turns calls off if there is no sleeper.
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
