//! How threads wait for completions: one sleeps on the queue's events for all, the others in their seats.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::core::{Core, is_called_back};
use crate::error::Error;
use crate::glance;
use crate::options::{Waiting, deadline_after};
use crate::request::{Notify, Request};
use crate::ring::Ring;
use crate::seat::{Outcome, Seat};

/// How often a thread that spins looks at the clock, and how often at the connection.
const SPINS_PER_CLOCK: u32 = 32;
const LOOKS_PER_CLOCK: u32 = 8;
const CLOCKS_PER_ATTENTION: u32 = 64;

impl Core {
    /// Submits a request and waits until it is done, and before that for room.
    ///
    /// # Errors
    /// The request is wrong or the disk is dead.
    pub(crate) fn run(self: &Arc<Self>, ring: &Ring, mut request: Request) -> Result<Outcome, Error> {
        // It would wait for itself.
        if is_called_back() {
            return Err(Error::InHandler);
        }
        let seat = ring.seats.take();
        request.notify = Notify::Seat(seat.clone());
        self.submit_or_wait(ring, &mut request)?;
        Ok(self.await_seat(ring, seat))
    }

    /// Waits for the request whose seat this is.
    pub(crate) fn await_seat(self: &Arc<Self>, ring: &Ring, seat: Arc<Seat>) -> Outcome {
        loop {
            if let Some(outcome) = seat.take() {
                ring.lead.pass_on();
                ring.seats.give_back(seat);
                return outcome;
            }
            self.pause(ring, &seat, None);
        }
    }

    /// Waits until nothing of the queue is in flight, as long as the back-end completes something from time to time. Some
    /// back-ends drop what is in flight when a queue is stopped.
    pub(crate) fn finish(self: &Arc<Self>, ring: &Ring) {
        let seat = ring.seats.take();
        ring.watch(&seat);
        let mut completed = ring.completed();
        let mut deadline = deadline_after(self.options.reply_timeout);
        while ring.in_flight() > 0 && !self.is_dead() && !self.is_over(Some(deadline)) {
            self.pause(ring, &seat, Some(deadline));
            let now = ring.completed();
            if now != completed {
                (completed, deadline) = (now, deadline_after(self.options.reply_timeout));
            }
        }
        ring.unwatch(&seat);
        ring.lead.pass_on();
        ring.seats.give_back(seat);
    }

    /// Submits a request, when there is room for it. What is left of it is another.
    ///
    /// # Errors
    /// The request is wrong or the disk is dead; the request is as it was.
    pub(crate) fn submit_or_wait(self: &Arc<Self>, ring: &Ring, request: &mut Request) -> Result<(), Error> {
        match ring.submit_one(request) {
            Ok(()) => return Ok(()),
            Err(Error::Full) => {}
            Err(error) => return Err(self.explain(error)),
        }
        if is_called_back() {
            return Err(Error::InHandler);
        }
        let seat = ring.seats.take();
        ring.watch(&seat);
        let submitted = loop {
            match ring.submit_one(request) {
                Ok(()) => break Ok(()),
                Err(Error::Full) => {}
                Err(error) => break Err(self.explain(error)),
            }
            self.pause(ring, &seat, None);
        };
        ring.unwatch(&seat);
        ring.lead.pass_on();
        ring.seats.give_back(seat);
        submitted
    }

    /// Waits until the seat is called, or so; the caller looks itself whether there is what it waits for.
    pub(crate) fn pause(self: &Arc<Self>, ring: &Ring, seat: &Arc<Seat>, deadline: Option<Instant>) {
        if self.takes_lead(ring, seat, deadline) {
            self.lead(ring, seat, deadline);
            ring.lead.give_up();
        }
    }

    /// The same for who polls afterwards: what comes is left in the ring, not taken out to be kept for pollers.
    pub(crate) fn pause_to_poll(self: &Arc<Self>, ring: &Ring, seat: &Arc<Seat>, deadline: Option<Instant>) {
        if matches!(self.options.waiting, Waiting::Spin(_)) {
            return self.pause(ring, seat, deadline);
        }
        if self.takes_lead(ring, seat, deadline) {
            if !seat.is_called() {
                self.doze(ring, seat, deadline);
            }
            ring.lead.give_up();
        }
    }

    /// Whether this thread is the one that sleeps on the queue's events. If another is, this waits until the seat is called.
    fn takes_lead(&self, ring: &Ring, seat: &Arc<Seat>, deadline: Option<Instant>) -> bool {
        let leads = ring.lead.take_or_follow(seat);
        if !leads {
            seat.wait(deadline);
            ring.lead.stop_following(seat);
        }
        leads
    }

    /// Hands out what comes until the seat is called.
    fn lead(self: &Arc<Self>, ring: &Ring, seat: &Arc<Seat>, deadline: Option<Instant>) {
        let spin = match self.options.waiting {
            Waiting::Auto | Waiting::Sleep => Duration::ZERO,
            Waiting::Spin(time) => time,
        };
        loop {
            if let Err(error) = ring.drain_for_all() {
                self.die(error);
            }
            if seat.is_called() || self.is_over(deadline) {
                return;
            }
            if !spin.is_zero() && self.spin(ring, seat, spin, deadline) {
                return;
            }
            if !self.glance(ring, Some(seat)) {
                self.doze(ring, seat, deadline);
            }
        }
    }

    /// Looks at the ring for a moment, if that is wanted and has paid lately. Whether there is something: in the ring, or at
    /// the seat; without a seat, kept for pollers.
    pub(crate) fn glance(&self, ring: &Ring, seat: Option<&Arc<Seat>>) -> bool {
        if self.options.waiting != Waiting::Auto || !ring.glance.is_due() {
            return false;
        }
        let start = Instant::now();
        let paid = loop {
            if (0..LOOKS_PER_CLOCK).any(|_| {
                std::hint::spin_loop();
                if seat.is_some() { ring.is_due_in_ring() } else { ring.is_due() }
            }) {
                break true;
            }
            if seat.is_some_and(|seat| seat.is_wanted()) {
                break true;
            }
            if start.elapsed() >= glance::TIME {
                break false;
            }
        };
        ring.glance.ended(paid);
        paid
    }

    fn is_over(&self, deadline: Option<Instant>) -> bool {
        deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Looks at the ring again and again; whether the seat was called.
    fn spin(
        self: &Arc<Self>,
        ring: &Ring,
        seat: &Arc<Seat>,
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
                if seat.is_called() {
                    return true;
                }
                std::hint::spin_loop();
            }
            clocks = clocks.wrapping_add(1);
            if clocks.is_multiple_of(CLOCKS_PER_ATTENTION) {
                self.attend();
            }
            if self.is_over(deadline) {
                return true;
            }
            if start.elapsed() >= time {
                return false;
            }
        }
    }

    /// Sleeps until the device calls, the seat is called, or something happens on the connection.
    fn doze(self: &Arc<Self>, ring: &Ring, seat: &Arc<Seat>, deadline: Option<Instant>) {
        let (mut called, mut happened) = (false, false);
        if ring.arm() && seat.lie_down(&ring.wake) {
            let mut fds = [readable(&ring.call), readable(&*ring.wake), readable(&self.control)];
            sleep(&mut fds, deadline);
            seat.get_up();
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
            self.attend();
        }
    }
}

/// A descriptor to sleep on.
pub(crate) fn readable<'a>(fd: &'a impl AsFd) -> PollFd<'a> {
    PollFd::new(fd, PollFlags::IN)
}

/// Sleeps until one of the descriptors is readable.
pub(crate) fn sleep(fds: &mut [PollFd<'_>], deadline: Option<Instant>) {
    let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    // An error can only be a signal that interrupts: whoever slept looks for itself.
    if poll(fds, timeout.as_ref()).is_err() {
        fds.iter_mut().for_each(PollFd::clear_revents);
    }
}

/// Whether that is what ended the sleep.
pub(crate) fn is_ready(fd: &PollFd<'_>) -> bool {
    !fd.revents().is_empty()
}
