//! The test frames of a null port. Each expiration of a timer makes one frame due.

use crate::frame::held::HeldFrame;
use crate::ports::port_poll::Taken;
use crate::ports::timer::Timer;
use crate::ring::receive_ring::ReceiveRing;
use kickless_net_port::{NullPort, TestFrame};
use kickless_spec::net::{Header, NetFeatures};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The most test frames that wait for chains. The task drops further ones.
const DUE_MAX: u64 = 256;

/// Makes the test frames of one pair.
pub(crate) struct TestSource {
    port: NullPort,
    timer: Timer,
    /// Frames to deliver now, beside the one that is held.
    due: u64,
    /// The number of the next frame.
    number: u64,
}

impl TestSource {
    /// Makes a source with the rate of `port`, which is not zero.
    ///
    /// # Errors
    /// The process has no free descriptor for the timer.
    pub(crate) fn new(port: NullPort) -> io::Result<Self> {
        let timer = Timer::new(port.rate)?;
        Ok(Self { port, timer, due: 0, number: 0 })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Makes one frame due for each expiration of the timer.
    pub(crate) fn check(&mut self, ring: &ReceiveRing) {
        let due = self.due + self.timer.take();
        self.due = due.min(DUE_MAX);
        ring.counters().dropped_late.add(due - self.due);
    }

    /// Makes the next frame if one is due.
    pub(crate) fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame) -> Taken {
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
