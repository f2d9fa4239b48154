//! Delivers the frames of a port to a receive ring.
//!
//! A poll takes frames from the port one by one, or in batches from another ring. A frame that does not fit
//! into the driver's chains is *held* in memory of the card ([`HeldFrame`]).
//! - No frame waits: the task waits for the port, and kicks stay off ([`Next::Quiet`]). It does so even with
//!   too little credit for the longest frame, because the next one may be short, and the driver may have
//!   offered more chains by then.
//! - A frame waits for chains: the task waits only for the driver ([`Next::Idle`]).

use super::cost::FRAMES_MAX;
use super::immediate;
use super::receive_ring::ReceiveRing;
use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::ports::receive::Receive;
use kickless_device::{
    Context, Direction, Event, Interest, Next, Parcel, Polled, QueueTask, TaskLocation, Traffic, Vring,
};
use std::time::Duration;

/// The task of a receive ring.
pub(crate) struct ReceiveTask<P> {
    ring: ReceiveRing,
    port: P,
    held: HeldFrame,
    /// The task waits for the driver alone.
    waits_for_chains: bool,
}

impl<P: Receive> ReceiveTask<P> {
    /// Makes the task of a ring whose frames come from this port.
    pub(crate) fn boxed(ring: ReceiveRing, port: P) -> Box<dyn QueueTask> {
        let (len_max, header_len) = (ring.format.len_max, ring.format.header_len);
        let held = match P::HAS_OFFLOADS {
            true => HeldFrame::new(len_max, header_len),
            false => HeldFrame::for_whole_frames(len_max, header_len),
        };
        Box::new(Self { ring, port, held, waits_for_chains: false })
    }

    /// Delivers the frames of the port. Adds the number of delivered frames to `served`.
    ///
    /// # Errors
    /// Returns early: the budget is used up, there were [`FRAMES_MAX`] frames, or a frame waits for chains.
    fn receive(&mut self, far_side_due: bool, served: &mut u32) -> Result<(), Next> {
        let Self { ring, port, held, .. } = self;
        port.begin(ring, far_side_due);
        held.drop_unused(ring);
        loop {
            held.deliver(ring, served)?;
            if ring.budget.is_used_up() || *served >= FRAMES_MAX {
                return Err(Next::More);
            }
            match port.take(ring, held, far_side_due)? {
                Taken::Nothing => return Ok(()),
                Taken::Delivered(frames) => *served += frames,
                Taken::Held | Taken::Dropped => {}
            }
        }
    }
}

impl<P: Receive> QueueTask for ReceiveTask<P> {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.ring.forget_returned();
        if budget == 0 {
            // The task is stopping. Chains that an earlier process used are in flight, and may be among the
            // credit.
            self.ring.return_credit();
            return immediate::poll(&mut self.ring, 0);
        }
        self.ring.begin(budget);
        let mut served = 0;
        let received = self.receive(context.far_side_due, &mut served);
        let next = match received {
            Err(next) => next,
            Ok(()) if P::NEEDS_CREDIT => self.ring.refill(),
            Ok(()) => Next::Quiet,
        };
        self.waits_for_chains = next == Next::Idle;
        self.ring.vring.publish();
        Polled { served, cost: self.ring.budget.cost(), next }
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let fd = self.port.fd()?;
        let waits_for_port = !self.waits_for_chains && !self.port.is_gone();
        let interest = if waits_for_port { Interest::Readable } else { Interest::None };
        Some(Event { fd, interest })
    }

    fn far_side_interval(&self) -> Duration {
        P::INTERVAL
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(Traffic::Frames(Direction::Read))
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.port.set_location(location);
    }

    fn take_parcel(&mut self, parcel: &Parcel<'_>) -> u32 {
        // Frames that came earlier go first.
        if !self.port.takes_parcel(parcel.to) || self.held.is_held() {
            return 0;
        }
        let taken = self.ring.deliver_parcel(parcel);
        // The sender pays for the frames that were taken. To refuse others behind them costs nothing more.
        if taken == 0 {
            self.port.parcel_refused(self.ring.budget.cost());
        }
        taken
    }

    fn return_credit(&mut self) {
        self.ring.return_credit();
    }

    fn memory_changed(&mut self) {
        self.ring.forget_returned();
        self.port.memory_changed(&mut self.ring);
    }
}

impl<P> Drop for ReceiveTask<P> {
    fn drop(&mut self) {
        self.held.drop_late(self.ring.counters());
    }
}
