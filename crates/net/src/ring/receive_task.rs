//! Delivers frames to a receive ring: those of the port.
//!
//! A poll takes frames from the port one by one, or in batches from a loop port. A frame that does not fit
//! into the driver's chains is *held* in memory of the card ([`HeldFrame`]).
//! - No frame waits: the task waits for the port, and kicks stay off ([`Next::Quiet`]). It does so even with
//!   too little credit for the longest frame, because the next one may be short, and the driver may have
//!   offered more chains by then.
//! - A frame waits for chains: the task waits only for the driver ([`Next::Idle`]).

use crate::frame::held::HeldFrame;
use crate::ports::loop_source::LoopSource;
use crate::ports::null::receive::TestSource;
use crate::ports::port_poll::{PORT_INTERVAL, Taken};
use crate::ports::stream::StreamSource;
use crate::ports::tap::receive::TapSource;
use crate::ports::xdp::XdpSource;
use crate::ring::cost::FRAMES_MAX;
use crate::ring::immediate;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::{Context, Event, Interest, Next, Parcel, Polled, QueueTask, TaskLocation, Vring};
use kickless_io::Engine;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The source of the frames of a receive ring.
pub(crate) enum Source {
    /// There are never any.
    None,
    /// The timer of a null port.
    Test(TestSource),
    /// The transmit ring of the same pair, or those of other cards.
    Loop(LoopSource),
    /// A queue of a TAP.
    Tap(Box<TapSource>),
    /// A stream socket.
    Stream(StreamSource),
    /// A queue of an interface.
    Xdp(XdpSource),
}

/// The task of a receive ring.
pub(crate) struct ReceiveTask {
    ring: ReceiveRing,
    source: Source,
    held: HeldFrame,
    /// The task waits for the driver alone.
    waits_for_chains: bool,
}

impl ReceiveTask {
    pub(crate) fn new(ring: ReceiveRing, source: Source) -> Self {
        let (len_max, header_len) = (ring.format.len_max, ring.format.header_len);
        let held = match &source {
            Source::None | Source::Test(_) | Source::Stream(_) | Source::Xdp(_) => {
                HeldFrame::for_whole_frames(len_max, header_len)
            }
            Source::Loop(_) | Source::Tap(_) => HeldFrame::new(len_max, header_len),
        };
        Self { ring, source, held, waits_for_chains: false }
    }

    /// Delivers the frames of the port, then pops credit ahead. Adds the number of delivered frames to
    /// `served`.
    ///
    /// # Errors
    /// Returns early: the budget is used up, there were [`FRAMES_MAX`] frames, or a frame waits for chains.
    fn receive(&mut self, far_side_due: bool, served: &mut u32) -> Result<(), Next> {
        let Self { ring, source, held, .. } = self;
        if far_side_due && let Source::Test(source) = source {
            source.check(ring);
        }
        held.drop_unused(ring);
        loop {
            held.deliver(ring, served)?;
            if ring.budget.is_used_up() || *served >= FRAMES_MAX {
                return Err(Next::More);
            }
            let taken = match source {
                Source::None => Taken::Nothing,
                Source::Test(source) => source.take(ring, held),
                Source::Loop(source) => source.take(ring, held)?,
                Source::Tap(source) => source.take(ring, held, far_side_due)?,
                Source::Stream(source) => source.take(ring, far_side_due)?,
                Source::Xdp(source) => source.take(ring, held)?,
            };
            match taken {
                Taken::Nothing => return Ok(()),
                Taken::Delivered(frames) => *served += frames,
                Taken::Held | Taken::Dropped => {}
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::None => None,
            Source::Test(source) => Some(source.fd()),
            Source::Loop(source) => Some(source.fd()),
            Source::Tap(source) => Some(source.fd()),
            Source::Stream(source) => Some(source.fd()),
            Source::Xdp(source) => Some(source.fd()),
        }
    }
}

impl QueueTask for ReceiveTask {
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
            // The frames of a loop port are in memory already, and most need no credit.
            Ok(()) if matches!(self.source, Source::Loop(_)) => Next::Quiet,
            Ok(()) => self.ring.refill(),
        };
        self.waits_for_chains = next == Next::Idle;
        self.ring.vring.publish();
        Polled { served, cost: self.ring.budget.cost(), next }
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let fd = self.fd()?;
        let is_gone = self.ring.card.port.is_gone();
        let interest = if self.waits_for_chains || is_gone { Interest::None } else { Interest::Readable };
        Some(Event { fd, interest })
    }

    fn far_side_interval(&self) -> Duration {
        match &self.source {
            Source::None => Duration::ZERO,
            Source::Test(_) | Source::Loop(_) | Source::Tap(_) | Source::Stream(_) | Source::Xdp(_) => {
                PORT_INTERVAL
            }
        }
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        if let Source::Loop(source) = &self.source {
            source.set_location(location);
        }
    }

    fn take_parcel(&mut self, parcel: &Parcel<'_>) -> u32 {
        // Frames that came earlier go first.
        let takes = match &self.source {
            Source::Loop(source) => source.takes(parcel.to) && !self.held.is_held(),
            _ => false,
        };
        if !takes {
            return 0;
        }
        let taken = self.ring.deliver_parcel(parcel);
        // The sender pays for the frames that were taken. To refuse others behind them costs nothing more.
        if let Source::Loop(source) = &self.source
            && taken == 0
        {
            source.set_refusal_cost(self.ring.budget.cost());
        }
        taken
    }

    fn return_credit(&mut self) {
        self.ring.return_credit();
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {
        self.ring.forget_returned();
        if let Source::Tap(source) = &mut self.source {
            source.memory_changed(&mut self.ring);
        }
    }
}

impl Drop for ReceiveTask {
    fn drop(&mut self) {
        self.held.drop_late(self.ring.counters());
    }
}
