//! The part of a port that gets the frames of a transmit ring.

use crate::frame::header::InvalidFrame;
use crate::frame::loop_queue::HEADER;
use crate::ring::cost;
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Event, Neighbours, Next, Polled, TaskLocation};
use kickless_memory::Iov;
use kickless_spec::net::{FRAME_MAX, Header, NetFeatures};
use kickless_virtqueue::device::SingleChain;
use std::time::Duration;

/// The interval at which a spinning worker checks a port. A system call for that takes about 0.2 us, so the
/// worker spends most of its time on rings.
pub(crate) const PORT_INTERVAL: Duration = Duration::from_micros(2);

/// The part of a port that gets the frames of one transmit ring.
///
/// A [`TransmitTask`](crate::ring::transmit_task::TransmitTask) does everything else: it takes chains from
/// the ring, checks frames, undoes offloads, holds a frame that the port refuses, counts, and completes
/// chains. A port only needs [`Transmit::put`]. No call waits or allocates.
pub(crate) trait Transmit: Send + 'static {
    /// The longest frame of a single buffer, header included, that is put while its chain stays in the ring.
    /// The chains of others are popped.
    const BATCHED_LEN_MAX: usize = FRAME_MAX;
    /// The longest frame, header excluded.
    const LEN_MAX: usize = FRAME_MAX - HEADER;
    /// The most frames of one turn, up to a batch more.
    const FRAMES_MAX: u32 = cost::FRAMES_MAX;
    /// A frame that is put leaves the card at once. Otherwise the port keeps the frames of a turn until
    /// [`Transmit::end`], adds them to a capture, and drops them if guest memory has lost pages.
    const AT_ONCE: bool = true;
    /// Frames go nowhere. They are put only for a capture.
    const DISCARDS: bool = false;
    /// A frame may be refused although there was room ([`PutError::Full`]). The task pops chains as credit
    /// then.
    const MAY_REFUSE: bool = false;
    /// The length, header excluded, from which on a frame is passed in guest memory
    /// ([`Transmit::put_pieces`]).
    const PIECES_LEN_MIN: Option<u32> = None;
    /// The lengths from which on a frame is offered to a receiver on the same worker: of one buffer, header
    /// included, and of a popped chain, header excluded.
    const OFFERED_LEN_MIN: Option<[u32; 2]> = None;
    /// The interval at which a spinning worker looks at the port.
    const INTERVAL: Duration = PORT_INTERVAL;

    /// Puts a frame of `len` bytes, header included. `write` fills the space for it with a complete header
    /// and the frame. If `write` fails, nothing is put.
    ///
    /// # Errors
    /// The port does not take the frame, or `write` has failed.
    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put;

    /// Puts a frame that is in guest memory. Returns `None` if it has too many pieces for that.
    fn put_pieces(&mut self, _header: &Header, _frame: &Iov) -> Option<Put> {
        None
    }

    /// Returns the offloads that the port takes, as a driver that receives does. The task undoes all others.
    fn accepts(&self) -> NetFeatures {
        NetFeatures::empty()
    }

    /// Begins a turn with this budget, which is 0 for a ring that stops. Returns what is left of the budget.
    ///
    /// # Errors
    /// The turn is over, because the port has work of an earlier one.
    fn begin(&mut self, _ring: &mut TransmitRing, budget: u32) -> Result<u32, Next> {
        Ok(budget)
    }

    /// Makes room for a frame of `len` bytes, header included. A `len` of 0 is for one of any length.
    ///
    /// # Errors
    /// There is none. A turn ends with this result.
    fn make_room(&mut self, _ring: &mut TransmitRing, _len: usize) -> Result<(), Next> {
        Ok(())
    }

    /// Offers the frames of peeked chains to a receiver on the same worker. Returns the number of those that
    /// it has taken.
    fn offer(
        &mut self,
        _ring: &TransmitRing,
        _chains: &[SingleChain],
        _neighbours: &mut dyn Neighbours,
        _budget: u32,
    ) -> u32 {
        0
    }

    /// Offers the frame in the popped chain, of `len` bytes and with this header to pass on. Returns whether
    /// the receiver has taken it.
    fn offer_popped(
        &mut self,
        _ring: &TransmitRing,
        _header: &Header,
        _len: u32,
        _neighbours: &mut dyn Neighbours,
    ) -> bool {
        false
    }

    /// Ends a turn: passes on what it has collected, and adds the cost of this.
    fn end(&mut self, _ring: &mut TransmitRing, _polled: &mut Polled, _far_side_due: bool) {}

    /// Wakes receivers on the same worker that have got frames in this turn, after [`Transmit::end`].
    #[inline(always)]
    fn wake_receivers(&mut self, _neighbours: Option<&mut (dyn Neighbours + '_)>) {}

    /// Returns the event that makes room. `is_refused`: the port has refused the next frame.
    fn event(&self, _is_refused: bool) -> Option<Event<'_>> {
        None
    }

    /// Takes the location of the task, or `None` before it leaves its worker.
    fn set_location(&mut self, _location: Option<TaskLocation>) {}
}

/// The result of putting a frame.
pub(crate) type Put = Result<(), PutError>;

/// The reason for which a frame was not put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PutError {
    /// The port has no room now.
    Full,
    /// The port does not accept the frame, or it is not what its header says.
    Refused,
    /// The port is down or gone.
    Down,
    /// The driver should not have sent it.
    Invalid(InvalidFrame),
    /// Guest memory has lost pages, so that zeroes may be in the place of bytes of the frame.
    Lost,
    /// Its chain has to be popped to find out what is wrong, or to undo its offloads.
    Unbatched,
}
