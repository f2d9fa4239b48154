//! Limits the frames of a ring.
//!
//! A task counts its frames in [`RingCounters`]. The limiter is charged after each poll for the frames of
//! this poll. A poll gets no larger budget than there are tokens. While the limiter is in debt, the task is
//! not polled: the frames of the driver wait in its ring, and those for the driver wait at the port, which
//! drops frames when it is full. Each direction has its own limits, and a common one.
//!
//! A packet that passes whole is one frame. A packet that the card segments is as many frames as it makes.

use crate::card::counters::RingCounters;
use crate::card::state::CardState;
use kickless_device::{
    Context, Direction, Event, Leave, Next, Parcel, Polled, QueueTask, TaskLocation, Vring,
};
use kickless_io::{Completion, Engine};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A task of a ring whose frames are limited.
pub(crate) struct LimitedTask<T> {
    task: T,
    card: Arc<CardState>,
    ring: usize,
    direction: Direction,
    is_enabled: bool,
}

impl<T: QueueTask> LimitedTask<T> {
    /// Limits a task of this card whose frames go in this direction.
    pub(crate) fn new(mut task: T, card: Arc<CardState>, direction: Direction) -> Box<Self> {
        let ring = task.vring().index().into();
        Box::new(Self { task, card, ring, direction, is_enabled: true })
    }

    /// Returns the frames and bytes so far.
    fn carried(&self) -> (u64, u64) {
        let RingCounters { sent_frames, sent_segments, sent_bytes, received_frames, received_bytes, .. } =
            &self.card.counters[self.ring];
        match self.direction {
            Direction::Read => (received_frames.get(), received_bytes.get()),
            Direction::Write => (sent_frames.get() + sent_segments.get(), sent_bytes.get()),
        }
    }

    #[inline(never)]
    fn poll_limited(&mut self, context: &mut Context<'_>, budget: u32, now_ns: u64) -> Polled {
        let (direction, before) = (self.direction, self.carried());
        if let Some(wait_ns) = self.card.limiter.wait_ns_of(direction, now_ns)
            // A driver that sends nothing is not throttled. Whether the port has frames is not known.
            && (direction == Direction::Read || self.task.vring().has_work())
        {
            return Polled { served: 0, cost: 0, next: Next::Throttled { wait_ns } };
        }
        let tokens = self.card.limiter.tokens(direction, now_ns);
        let polled = self.task.poll(context, budget.min(tokens.max(1)));
        let after = self.carried();
        self.card.limiter.charge_all(direction, after.0 - before.0, after.1 - before.1, now_ns);
        polled
    }
}

impl<T: QueueTask> QueueTask for LimitedTask<T> {
    fn vring(&mut self) -> &mut Vring {
        self.task.vring()
    }

    fn attach(&mut self, engine: &mut Engine) -> io::Result<()> {
        self.task.attach(engine)
    }

    fn detach(&mut self, engine: &mut Engine) {
        self.task.detach(engine);
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        // A stop does not wait for tokens, and frames that are discarded take none.
        let is_limited = budget > 0 && self.is_enabled;
        match if is_limited { self.card.limiter.now_if_on() } else { None } {
            None => self.task.poll(context, budget),
            Some(now_ns) => self.poll_limited(context, budget, now_ns),
        }
    }

    fn complete(&mut self, context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        self.task.complete(context, completions)
    }

    fn in_flight(&self) -> usize {
        self.task.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.task.arm()
    }

    fn disarm(&mut self) {
        self.task.disarm();
    }

    fn event(&self) -> Option<Event<'_>> {
        self.task.event()
    }

    fn far_side_interval(&self) -> Duration {
        self.task.far_side_interval()
    }

    fn affinity(&self) -> Option<u32> {
        self.task.affinity()
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.task.set_location(location);
    }

    fn offers_parcels(&self) -> bool {
        self.task.offers_parcels()
    }

    /// Takes none while frames have limits, because only a poll charges the limiter.
    fn take_parcel(&mut self, parcel: &Parcel<'_>) -> u32 {
        if self.card.limiter.is_on() { 0 } else { self.task.take_parcel(parcel) }
    }

    fn return_credit(&mut self) {
        self.task.return_credit();
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
        self.task.set_enabled(is_enabled);
    }

    fn stopping(&mut self, leave: Leave) {
        self.task.stopping(leave);
    }

    fn memory_changed(&mut self, engine: &mut Engine) {
        self.task.memory_changed(engine);
    }
}
