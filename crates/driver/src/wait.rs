//! The ways in which threads wait for completions. One thread is the leader and sleeps on the queue's events;
//! the others sleep on their waiters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::connection::deadline_after;
use crate::core::Core;
use crate::error::Error;
use crate::options::Waiting;
use crate::poll::{is_ready, readable, sleep};
use crate::reconnect::Reconnect;
use crate::request::{Notify, Request};
use crate::ring::{Ring, is_delivering};
use crate::short_spin;
use crate::waiter::{Outcome, Waiter};

/// The number of polls between two readings of the clock, during a long spin.
const SPINS_PER_CLOCK: u32 = 32;
/// The number of polls between two readings of the clock, during a short spin.
const LOOKS_PER_CLOCK: u32 = 8;
/// The number of readings of the clock between two checks of the connection.
const CLOCKS_PER_ATTENTION: u32 = 64;

impl Core {
    /// Submits a request, after waiting for room, and waits until it is done.
    ///
    /// # Errors
    /// The request is invalid or the disk is dead.
    pub(crate) fn run(self: &Arc<Self>, ring: &Ring, mut request: Request) -> Result<Outcome, Error> {
        // A callback would wait for itself.
        if is_delivering() {
            return Err(Error::InCallback);
        }
        let waiter = ring.free_waiters.take();
        request.notify = Notify::Waiter(waiter.clone());
        self.submit_or_wait(ring, &mut request)?;
        Ok(self.wait_for_outcome(ring, waiter))
    }

    /// Waits for the request of this waiter.
    pub(crate) fn wait_for_outcome(self: &Arc<Self>, ring: &Ring, waiter: Arc<Waiter>) -> Outcome {
        loop {
            if let Some(outcome) = waiter.take() {
                ring.wait_leader.wake_next();
                ring.free_waiters.give_back(waiter);
                return outcome;
            }
            self.wait_or_lead(ring, &waiter, None);
        }
    }

    /// Waits until nothing of the queue is in flight, as long as the back-end completes something from time
    /// to time.
    ///
    /// Some back-ends drop the requests in flight when a queue is stopped, so this comes first.
    pub(crate) fn finish(self: &Arc<Self>, ring: &Ring) {
        let waiter = ring.free_waiters.take();
        ring.watch(&waiter);
        let mut completed = ring.completed();
        let mut deadline = deadline_after(self.options.reply_timeout);
        while ring.in_flight() > 0 && !self.link.is_dead() && !self.is_over(Some(deadline)) {
            self.wait_or_lead(ring, &waiter, Some(deadline));
            let now = ring.completed();
            if now != completed {
                (completed, deadline) = (now, deadline_after(self.options.reply_timeout));
            }
        }
        ring.unwatch(&waiter);
        ring.wait_leader.wake_next();
        ring.free_waiters.give_back(waiter);
    }

    /// Submits a request, after waiting for room. Leaves an empty request in its place.
    ///
    /// # Errors
    /// The request is invalid or the disk is dead. The request is unchanged.
    pub(crate) fn submit_or_wait(self: &Arc<Self>, ring: &Ring, request: &mut Request) -> Result<(), Error> {
        match ring.submit_one(request) {
            Ok(()) => return Ok(()),
            Err(Error::Full) => {}
            Err(error) => return Err(self.link.explain(error)),
        }
        if is_delivering() {
            return Err(Error::InCallback);
        }
        let waiter = ring.free_waiters.take();
        ring.watch(&waiter);
        let submitted = loop {
            match ring.submit_one(request) {
                Ok(()) => break Ok(()),
                Err(Error::Full) => {}
                Err(error) => break Err(self.link.explain(error)),
            }
            self.wait_or_lead(ring, &waiter, None);
        };
        ring.unwatch(&waiter);
        ring.wait_leader.wake_next();
        ring.free_waiters.give_back(waiter);
        submitted
    }

    /// Waits until the waiter is notified. May return early, so the caller checks its condition again.
    pub(crate) fn wait_or_lead(
        self: &Arc<Self>,
        ring: &Ring,
        waiter: &Arc<Waiter>,
        deadline: Option<Instant>,
    ) {
        if self.becomes_leader(ring, waiter, deadline) {
            self.wait_as_leader(ring, waiter, deadline);
            ring.wait_leader.resign();
        }
    }

    /// Waits as [`Core::wait_or_lead`], for a caller that polls afterwards. Completions stay in the ring
    /// instead of being kept for pollers.
    pub(crate) fn wait_to_poll(
        self: &Arc<Self>,
        ring: &Ring,
        waiter: &Arc<Waiter>,
        deadline: Option<Instant>,
    ) {
        if matches!(self.options.waiting, Waiting::Spin(_)) {
            return self.wait_or_lead(ring, waiter, deadline);
        }
        if self.becomes_leader(ring, waiter, deadline) {
            if !waiter.take_notified() {
                self.sleep_at_queue(ring, waiter, deadline);
            }
            ring.wait_leader.resign();
        }
    }

    /// Returns whether this thread became the leader. Otherwise, waits first until the waiter is notified.
    fn becomes_leader(&self, ring: &Ring, waiter: &Arc<Waiter>, deadline: Option<Instant>) -> bool {
        let leads = ring.wait_leader.lead_or_follow(waiter);
        if !leads {
            waiter.wait(deadline);
            ring.wait_leader.stop_following(waiter);
        }
        leads
    }

    /// Delivers completions until the waiter is notified or the deadline has passed.
    fn wait_as_leader(self: &Arc<Self>, ring: &Ring, waiter: &Arc<Waiter>, deadline: Option<Instant>) {
        let spin = match self.options.waiting {
            Waiting::Auto | Waiting::Sleep => Duration::ZERO,
            Waiting::Spin(time) => time,
        };
        loop {
            if let Err(error) = ring.drain_for_all() {
                self.die(error);
            }
            if waiter.take_notified() || self.is_over(deadline) {
                return;
            }
            if !spin.is_zero() && self.spin(ring, waiter, spin, deadline) {
                return;
            }
            if !self.short_spin(ring, Some(waiter)) {
                self.sleep_at_queue(ring, waiter, deadline);
            }
        }
    }

    /// Polls the ring for a moment, if the options allow it and recent spins were successful.
    ///
    /// Returns whether there is a completion in the ring, or for the waiter. Without a waiter, completions
    /// kept for pollers count too.
    pub(crate) fn short_spin(&self, ring: &Ring, waiter: Option<&Arc<Waiter>>) -> bool {
        if self.options.waiting != Waiting::Auto || !ring.short_spin.is_due() {
            return false;
        }
        let start = Instant::now();
        let paid = loop {
            if (0..LOOKS_PER_CLOCK).any(|_| {
                std::hint::spin_loop();
                if waiter.is_some() { ring.is_due_in_ring() } else { ring.is_due() }
            }) {
                break true;
            }
            if waiter.is_some_and(|waiter| waiter.is_notified()) {
                break true;
            }
            if start.elapsed() >= short_spin::TIME {
                break false;
            }
        };
        ring.short_spin.record(paid);
        paid
    }

    fn is_over(&self, deadline: Option<Instant>) -> bool {
        deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Polls the ring for `time`. Returns whether the waiter was notified or the deadline has passed.
    fn spin(
        self: &Arc<Self>,
        ring: &Ring,
        waiter: &Arc<Waiter>,
        time: Duration,
        deadline: Option<Instant>,
    ) -> bool {
        let start = Instant::now();
        let mut clocks = 0u32;
        loop {
            for _ in 0..SPINS_PER_CLOCK {
                if let Err(error) = ring.drain_for_all() {
                    self.die(error);
                }
                if waiter.take_notified() {
                    return true;
                }
                std::hint::spin_loop();
            }
            clocks = clocks.wrapping_add(1);
            if clocks.is_multiple_of(CLOCKS_PER_ATTENTION) {
                self.check_connection();
            }
            if self.is_over(deadline) {
                return true;
            }
            if start.elapsed() >= time {
                return false;
            }
        }
    }

    /// Sleeps until the device calls, the waiter is notified, or there is an event on the connection.
    fn sleep_at_queue(self: &Arc<Self>, ring: &Ring, waiter: &Arc<Waiter>, deadline: Option<Instant>) {
        let (mut called, mut happened) = (false, false);
        if ring.arm() && waiter.wake_by_event(&ring.wake) {
            let mut fds = [readable(&ring.call), readable(&*ring.wake), readable(&self.link.control)];
            sleep(&mut fds, deadline);
            waiter.wake_by_condvar();
            let [call, wake, control] = &fds;
            if is_ready(wake) {
                ring.wake.take();
            }
            (called, happened) = (is_ready(call), is_ready(control));
        }
        if let Err(error) = ring.disarm(called) {
            self.die(error);
        }
        if happened {
            self.check_connection();
        }
    }
}
