//! Sends the frames of a transmit ring to a queue of an interface.
//!
//! An interface knows no offloads here, so the card completes checksums and segments packets. A frame
//! without segments is copied from the ring into the memory that the kernel sends from, and its chain
//! completed. The segments of a packet that find no room there stay in memory of the card, with one
//! packet at most. So no chain waits for an interface without room, and a stop takes none with it.
//!
//! No event tells of room: the kernel calls a socket writable whose memory is all in use. So a timer ends
//! each pause.

use crate::frame::header::{Frame, InvalidFrame};
use crate::offload::{Segments, complete_checksum};
use crate::ports::card_port::CardPort;
use crate::ports::timer::Pause;
use crate::ring::cost;
use crate::ring::immediate::{self, ImmediateRing};
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Context, Event, Interest, Next, Polled, QueueTask, Vring};
use kickless_net_port::{XDP_FRAME_LEN_MAX, XdpLink, XdpQueue};
use kickless_spec::net::{FRAME_MAX, Header};
use kickless_virtqueue::Chain;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const HEADER: usize = size_of::<Header>();
/// The most frames of one turn, so that the interface gets them while later ones are copied.
const FRAMES_MAX: u32 = 256;
/// The first pause: the time that 100 long frames take at 10 Gbit/s.
const PAUSE_MIN: Duration = Duration::from_micros(120);
/// The longest pause, which is for an interface that sends nothing for long. Each doubles the one before.
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// The task of a transmit ring.
pub(crate) struct XdpTransmitTask {
    ring: TransmitRing,
    queue: XdpQueue,
    /// Space for a packet that is segmented.
    copy: Box<[u8]>,
    /// The length of the packet in `copy`, and its segments that wait for room.
    segments: Option<(usize, Segments)>,
    timer: Pause,
    /// The present pause and its end, if the task waits for room.
    pause: Option<(Duration, Instant)>,
    /// Frames have moved since the present pause began.
    has_moved: bool,
}

/// The end of a frame that the driver sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// So many segments of it wait for room, none of which is longer than `len_max`.
    Waits {
        count: usize,
        len_max: usize,
    },
    /// The packet is not what its header says, would become too many segments, or is too long for the
    /// interface.
    Refused,
    /// The interface is down or gone.
    Down,
    /// There is no room, and the ring stops.
    Late,
    /// The frame is not in guest memory.
    Unmapped,
    /// Guest memory has lost pages, so that zeroes may be in the place of bytes of the frame.
    Lost,
}

impl XdpTransmitTask {
    /// Makes a task.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new(ring: TransmitRing, queue: XdpQueue) -> io::Result<Self> {
        Ok(Self {
            ring,
            queue,
            copy: vec![0; FRAME_MAX].into_boxed_slice(),
            segments: None,
            timer: Pause::new()?,
            pause: None,
            has_moved: false,
        })
    }

    /// Sends or drops the frame in the popped chain. Returns its cost, also that of segments that wait.
    fn send_frame(&mut self) -> u32 {
        let cost = cost::of_frame(self.ring.chain.readable_len());
        let Some((header, frame)) = self.ring.parse() else { return cost };
        let is_up = self.queue.turn().link() == XdpLink::Up;
        let fits = frame.segmentation.is_none() && frame.len as usize <= XDP_FRAME_LEN_MAX;
        let outcome =
            if is_up && fits { self.send_whole(frame) } else { self.copy_frame(&header, frame, is_up) };
        let counters = self.ring.counters();
        match outcome {
            Outcome::Passed => self.ring.count_sent(1, frame.len.into()),
            Outcome::Waits { count, len_max } => {
                // It is counted when its last segment has passed.
                self.push_segments();
                return cost.max(cost::of_segments(count, len_max));
            }
            Outcome::Lost => {}
            Outcome::Refused => counters.sent_refused.add(1),
            Outcome::Down => counters.sent_down.add(1),
            Outcome::Late => counters.dropped_late.add(1),
            Outcome::Unmapped => self.ring.count_invalid(InvalidFrame::Short),
        }
        cost
    }

    /// Copies a frame without segments into the memory that the kernel sends from.
    fn send_whole(&mut self, frame: Frame) -> Outcome {
        // Lossless, because a frame is short. The space has room for a header.
        let (header_len, len) = (self.ring.format.header_len, frame.len as usize);
        let pushed = self.queue.turn().push(len, |space| {
            self.ring.read(&mut space[HEADER - header_len..]).map_err(|_| Outcome::Unmapped)?;
            if !self.ring.vring.is_intact() {
                return Err(Outcome::Lost);
            }
            // From here on, only the copy counts.
            let bytes = &mut space[HEADER..];
            self.ring.capture(bytes);
            match frame.checksum {
                Some(at) if !complete_checksum(bytes, at) => Err(Outcome::Refused),
                _ => Ok(len),
            }
        });
        match pushed {
            Some(Ok(())) => Outcome::Passed,
            Some(Err(outcome)) => outcome,
            None => Outcome::Late,
        }
    }

    /// Copies a frame that is segmented, or that only a capture gets.
    #[cold]
    fn copy_frame(&mut self, header: &Header, frame: Frame, is_up: bool) -> Outcome {
        let (header_len, len) = (self.ring.format.header_len, frame.len as usize);
        if self.ring.read(&mut self.copy[HEADER - header_len..HEADER + len]).is_err() {
            return Outcome::Unmapped;
        }
        if !self.ring.vring.is_intact() {
            return Outcome::Lost;
        }
        let bytes = &self.copy[HEADER..HEADER + len];
        self.ring.capture(bytes);
        if !is_up {
            return Outcome::Down;
        }
        let segments = frame.segmentation.and_then(|_| Segments::of(header, bytes));
        match segments.filter(|segments| segments.len_max(bytes) <= XDP_FRAME_LEN_MAX) {
            Some(segments) => {
                let (count, len_max) = (segments.count(bytes), segments.len_max(bytes));
                self.segments = Some((len, segments));
                Outcome::Waits { count, len_max }
            }
            None => Outcome::Refused,
        }
    }

    /// Passes segments on while there is room.
    fn push_segments(&mut self) {
        let Some((len, segments)) = &mut self.segments else { return };
        let packet = &self.copy[HEADER..HEADER + *len];
        let mut turn = self.queue.turn();
        while segments.count(packet) > 0 {
            let pushed = turn.push(segments.len_max(packet), |space| {
                segments.write_next(packet, &mut space[HEADER..]).ok_or(())
            });
            if pushed.is_none() {
                return;
            }
        }
        drop(turn);
        let (len, count) = (*len as u64, segments.made());
        self.segments = None;
        self.ring.count_segmented(len, count);
    }

    /// Returns whether another frame may be copied.
    fn has_room(&mut self) -> bool {
        self.push_segments();
        self.segments.is_none() && self.queue.turn().has_room()
    }

    fn flush(&mut self) -> XdpLink {
        let mut turn = self.queue.turn();
        if let CardPort::Xdp(port) = &self.ring.card.port {
            let flushed = port.flush(&mut turn);
            self.has_moved |= flushed.has_moved;
            // They were counted as sent when the kernel got them.
            self.ring.counters().sent_down.add(flushed.dropped.into());
        }
        turn.link()
    }

    /// Begins a pause if frames wait for room, or ends it. `is_full` says that the ring may have a frame for
    /// which there was no room. Returns whether the task waits.
    fn waits(&mut self, link: XdpLink, is_full: bool) -> bool {
        if link != XdpLink::Up && self.segments.take().is_some() {
            self.ring.counters().sent_down.add(1);
        }
        let has_more = self.segments.is_some() || self.queue.turn().is_waiting();
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

impl ImmediateRing for XdpTransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.ring.vring, &mut self.ring.chain)
    }

    fn serve(&mut self) -> u32 {
        let cost = if self.segments.is_none() {
            self.send_frame()
        } else {
            // Only a ring that stops is served without room.
            self.ring.counters().dropped_late.add(1);
            1
        };
        self.ring.vring.push(self.ring.chain.id, 0);
        cost
    }

    fn pauses(&mut self, served: u32) -> Option<Next> {
        if served >= FRAMES_MAX {
            return Some(Next::More);
        }
        if self.has_room() {
            return None;
        }
        let is_up = self.flush() == XdpLink::Up;
        (is_up && !self.has_room()).then_some(Next::Quiet)
    }
}

impl QueueTask for XdpTransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.ring.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        if self.queue.turn().link() == XdpLink::Down {
            // It may be up again.
            self.flush();
        }
        let mut polled = immediate::poll(self, budget);
        if budget == 0 && self.segments.take().is_some() {
            self.ring.counters().dropped_late.add(1);
        }
        let link = match polled.served > 0 || self.pause.is_some() && context.far_side_due {
            true => self.flush(),
            false => self.queue.turn().link(),
        };
        if !self.waits(link, polled.next == Next::Quiet) && polled.next == Next::Quiet {
            // There is room again since the last look, so no timer runs.
            polled.next = Next::More;
        }
        polled
    }

    fn in_flight(&self) -> usize {
        self.ring.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let interest = if self.pause.is_some() { Interest::Readable } else { Interest::None };
        Some(Event { fd: self.timer.as_fd(), interest })
    }

    fn far_side_interval(&self) -> Duration {
        PAUSE_MIN
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.ring.pair.into())
    }

    fn set_enabled(&mut self, is_enabled: bool) {
        self.ring.is_enabled = is_enabled;
    }
}
