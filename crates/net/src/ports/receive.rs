//! The part of a port that has the frames for a receive ring.

use super::transmit::PORT_INTERVAL;
use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::{Next, TaskLocation};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The part of a port that has the frames for one receive ring, for a
/// [`ReceiveTask`](crate::ring::receive_task::ReceiveTask).
///
/// [`Receive::take`] delivers one frame by [`ReceiveRing::deliver`], holds it, or drops and counts it. No
/// call waits or allocates.
pub(crate) trait Receive: Send + 'static {
    /// Frames can have offloads, which a [`HeldFrame`] undoes.
    const HAS_OFFLOADS: bool = false;
    /// The ring has buffers ready for the next frame, before there is one.
    const NEEDS_CREDIT: bool = true;
    /// The interval at which a spinning worker looks at the port.
    const INTERVAL: Duration = PORT_INTERVAL;

    /// Takes the next frame. Makes a system call for it only if the port `is_due`.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveRing::pop_credit`], or the turn is over.
    fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame, is_due: bool) -> Result<Taken, Next>;

    /// Returns the descriptor that becomes readable with the next frame. The worker asks for it before the
    /// task sleeps.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Begins a turn.
    fn begin(&mut self, _ring: &ReceiveRing, _is_due: bool) {}

    /// Returns whether the port was found to be gone for good.
    fn is_gone(&self) -> bool {
        false
    }

    /// Drops references to guest memory that was replaced.
    fn memory_changed(&mut self, _ring: &mut ReceiveRing) {}

    /// Takes the location of the task, or `None` before it leaves its worker.
    fn set_location(&self, _location: Option<TaskLocation>) {}

    /// Returns whether the ring may take a parcel for the queue with this address: no frame waits.
    fn takes_parcel(&self, _to: usize) -> bool {
        false
    }

    /// Tells the sender the cost of the look at a parcel that was refused.
    fn parcel_refused(&self, _cost: u32) {}
}
