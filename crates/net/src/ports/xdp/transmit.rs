//! Sends frames to a queue of an interface, which knows no offloads here. A frame is copied into the memory
//! that the kernel sends from.
//!
//! No event tells of room: the kernel calls a socket writable whose memory is all in use. So a timer ends
//! each pause.

use super::queues::XdpQueues;
use crate::frame::loop_queue::HEADER;
use crate::ports::timer::Timer;
use crate::ports::transmit::{Put, PutError, Transmit};
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Event, Interest, Next, Polled};
use kickless_net_port::{XDP_FRAME_LEN_MAX, XdpLink, XdpQueue};
use kickless_spec::net::FRAME_MAX;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The first pause: the time that 100 long frames take at 10 Gbit/s.
const PAUSE_MIN: Duration = Duration::from_micros(120);
/// The longest pause, which is for an interface that sends nothing for long. Each doubles the one before.
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// Sends frames to one queue of an interface.
pub(super) struct XdpTransmit {
    queues: Arc<XdpQueues>,
    queue: XdpQueue,
    /// Space for a frame that only a capture gets.
    copy: Box<[u8]>,
    timer: Timer,
    /// The present pause and its end, if the task waits for room.
    pause: Option<(Duration, Instant)>,
    /// Frames were added since the kernel was told of some.
    has_put: bool,
    /// Frames have moved since the present pause began.
    has_moved: bool,
}

impl XdpTransmit {
    /// Takes the queue of a pair.
    ///
    /// # Errors
    /// There is no such queue, or the process has no free descriptor.
    pub(super) fn new(queues: Arc<XdpQueues>, pair: u16) -> io::Result<Self> {
        let queue = queues.queues.queue(pair)?;
        Ok(Self {
            queues,
            queue,
            copy: vec![0; FRAME_MAX].into_boxed_slice(),
            timer: Timer::new()?,
            pause: None,
            has_put: false,
            has_moved: false,
        })
    }

    fn flush(&mut self, ring: &TransmitRing) -> XdpLink {
        self.has_put = false;
        let mut turn = self.queue.turn();
        let flushed = self.queues.flush(&mut turn);
        self.has_moved |= flushed.has_moved;
        // They were counted as sent when the kernel got them.
        ring.counters().sent_down.add(flushed.dropped.into());
        turn.link()
    }

    /// Begins a pause if frames wait for room, or ends it. `is_full` says that the ring may have a frame for
    /// which there was no room. Returns whether the task waits.
    fn waits(&mut self, link: XdpLink, is_full: bool) -> bool {
        let has_more = self.queue.turn().is_waiting();
        if link != XdpLink::Up || !(has_more || is_full && !self.queue.turn().has_room()) {
            self.pause = None;
            return false;
        }
        let now = Instant::now();
        let next = match self.pause {
            Some((_, end)) if now < end => return true,
            // An interface that sends nothing is asked ever more rarely.
            Some((pause, _)) if !self.has_moved => (2 * pause).min(PAUSE_MAX),
            _ => PAUSE_MIN,
        };
        self.has_moved = false;
        self.pause = Some((next, now + next));
        self.timer.begin(next);
        true
    }
}

impl Transmit for XdpTransmit {
    const LEN_MAX: usize = XDP_FRAME_LEN_MAX;
    const BATCHED_LEN_MAX: usize = HEADER + XDP_FRAME_LEN_MAX;
    const INTERVAL: Duration = PAUSE_MIN;

    fn put(&mut self, len: usize, write: impl FnOnce(&mut [u8]) -> Put) -> Put {
        let mut turn = self.queue.turn();
        if turn.link() != XdpLink::Up {
            write(&mut self.copy[..len])?;
            return Err(PutError::Down);
        }
        let len = len - HEADER;
        let pushed = turn.push(len, |space| write(space).map(|()| len));
        self.has_put = true;
        pushed.unwrap_or(Err(PutError::Full))
    }

    /// An interface that is down may be up again.
    fn begin(&mut self, ring: &mut TransmitRing, budget: u32) -> Result<u32, Next> {
        if self.queue.turn().link() == XdpLink::Down {
            self.flush(ring);
        }
        Ok(budget)
    }

    fn make_room(&mut self, ring: &mut TransmitRing, _len: usize) -> Result<(), Next> {
        if self.queue.turn().has_room() {
            return Ok(());
        }
        let is_up = self.flush(ring) == XdpLink::Up;
        if is_up && !self.queue.turn().has_room() { Err(Next::Quiet) } else { Ok(()) }
    }

    fn end(&mut self, ring: &mut TransmitRing, polled: &mut Polled, far_side_due: bool) {
        let link = match self.has_put || self.pause.is_some() && far_side_due {
            true => self.flush(ring),
            false => self.queue.turn().link(),
        };
        if !self.waits(link, polled.next == Next::Quiet) && polled.next == Next::Quiet {
            // There is room again since the last look, so no timer runs.
            polled.next = Next::More;
        }
    }

    fn event(&self, _is_refused: bool) -> Option<Event<'_>> {
        let interest = if self.pause.is_some() { Interest::Readable } else { Interest::None };
        Some(Event { fd: self.timer.as_fd(), interest })
    }
}
