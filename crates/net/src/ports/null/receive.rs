//! The test frames of a null port. Each expiration of a timer makes one frame due.

use super::name::NullPort;
use crate::frame::held::HeldFrame;
use crate::frame::taken::Taken;
use crate::ports::receive::Receive;
use crate::ports::timer::Timer;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::Next;
use kickless_net_port::TestFrame;
use kickless_spec::net::{Header, NetFeatures};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// The most test frames that wait for chains. The task drops further ones.
const DUE_MAX: u64 = 256;

/// Makes the test frames of one pair.
pub(crate) struct TestFrames {
    port: NullPort,
    timer: Timer,
    /// Frames to deliver now, beside the one that is held.
    due: u64,
    /// The number of the next frame.
    number: u64,
}

impl TestFrames {
    /// Makes a source with the rate of `port`, which is not zero.
    ///
    /// # Errors
    /// The process has no free descriptor for the timer.
    pub(crate) fn new(port: NullPort) -> io::Result<Self> {
        let timer = Timer::new()?;
        timer.repeat(port.rate);
        Ok(Self { port, timer, due: 0, number: 0 })
    }

    /// Makes the next frame if one is due.
    fn make(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame) -> Taken {
        if self.due == 0 {
            return Taken::Nothing;
        }
        if ring.is_unused() {
            let unused = std::mem::take(&mut self.due);
            ring.counters().dropped_unused.add(unused);
            return Taken::Nothing;
        }
        self.due -= 1;
        let len = self.port.length(self.number) as usize;
        let number = self.number;
        self.number += 1;
        if ring.format.header_len + len > ring.format.len_max {
            ring.drop_frame(|counters| counters.dropped_long.add(1));
            return Taken::Dropped;
        }
        let frame = &mut held.space()[..len];
        TestFrame { pair: ring.pair, number }.write(ring.card.mac, frame);
        if !ring.wants(frame) {
            ring.drop_frame(|counters| counters.dropped_filtered.add(1));
            return Taken::Dropped;
        }
        // A plain frame is always held.
        let _ = held.hold(&Header::default(), len, NetFeatures::empty());
        Taken::Held
    }
}

impl Receive for TestFrames {
    fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame, _is_due: bool) -> Result<Taken, Next> {
        Ok(self.make(ring, held))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }

    /// Makes one frame due for each expiration of the timer.
    fn begin(&mut self, ring: &ReceiveRing, is_due: bool) {
        if !is_due {
            return;
        }
        let due = self.due + self.timer.take();
        self.due = due.min(DUE_MAX);
        ring.counters().dropped_late.add(due - self.due);
    }
}

/// The frames of a port without any.
pub(crate) struct NoFrames;

impl Receive for NoFrames {
    const INTERVAL: Duration = Duration::ZERO;

    fn take(&mut self, _: &mut ReceiveRing, _: &mut HeldFrame, _is_due: bool) -> Result<Taken, Next> {
        Ok(Taken::Nothing)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
