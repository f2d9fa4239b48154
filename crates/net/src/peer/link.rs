//! The thread of a port: connects to the back-end, and carries frames.

use super::offload::{accepted, header_of, of_header};
use super::queues::PeerQueues;
use crate::loop_queue::{Batch, HEADER};
use crate::offload::{Segments, Undo, complete_checksum, undo};
use kickless_driver::{Card, CardOptions, Choice, Error, Interest, Outgoing, QueuePair, Waiting};
use kickless_io::Waker;
use kickless_spec::net::{ETHERNET_HEADER_LEN, FRAME_MAX, Header, NetFeatures};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::{Span, debug, info, warn};
use zerocopy::{FromBytes, IntoBytes};

/// The time between two attempts to connect.
const RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The time in which the back-end has to reply to a message.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two warnings about lost connections.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);
/// The most frames of one turn in each direction. As many are shown to the back-end together.
const FRAMES_MAX: usize = 32;

/// The end of a port's thread, requested by another one.
#[derive(Clone, Debug)]
pub(super) struct Stop(Arc<(AtomicBool, Waker)>);

impl Stop {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new((AtomicBool::new(false), Waker::new()?))))
    }

    /// Requests the end.
    pub(super) fn set(&self) {
        self.0.0.store(true, Ordering::Relaxed);
        self.0.1.wake();
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    fn waker(&self) -> &Waker {
        &self.0.1
    }
}

/// The thread's state between connections.
pub(super) struct Link {
    pub(super) path: PathBuf,
    pub(super) queues: Arc<PeerQueues>,
    pub(super) stop: Stop,
    /// Wakes the thread for frames in the outbox.
    pub(super) frames: Waker,
    /// The span of log lines about the card.
    pub(super) span: Span,
}

/// The state of one connection.
struct Session<'a> {
    link: &'a Link,
    card: Card,
    pair: QueuePair,
    /// The offloads that the back-end accepts.
    accepted: NetFeatures,
    /// Frames for the back-end, the number of the next one, and the offset of its header.
    outgoing: Batch,
    next: usize,
    start: usize,
    /// The next segment of the next frame, its length, and those behind it.
    segment: Box<[u8]>,
    segments: Option<(usize, Segments)>,
    /// The back-end has no room for the next frame.
    is_full: bool,
    incoming: Batch,
}

impl Link {
    /// Keeps the port connected until the thread is to end.
    pub(super) fn run(self) {
        let mut warned_at: Option<Instant> = None;
        while !self.stop.is_set() {
            let Err(error) = self.connect().and_then(Session::run) else { break };
            let (path, error) = (self.path.display(), &error as &dyn std::error::Error);
            if warned_at.is_some_and(|at| at.elapsed() < WARNING_INTERVAL) {
                debug!(parent: &self.span, %path, error, "no connection to the back-end");
            } else {
                warned_at = Some(Instant::now());
                warn!(parent: &self.span, %path, error, "the port has no connection to its back-end: frames are \
                    dropped, and it tries again each second");
            }
            let mut stop = [PollFd::new(self.stop.waker(), PollFlags::IN)];
            // An interruption by a signal makes the pause shorter.
            let _ = poll(&mut stop, Some(&RETRY));
        }
    }

    fn connect(&self) -> Result<Session<'_>, Error> {
        let card = Card::connect(CardOptions {
            receive_offloads: Choice::Auto,
            // The guest's own commands stay with its card.
            control: Choice::Off,
            // This thread connects again itself.
            reconnect_limit: Duration::ZERO,
            reply_timeout: REPLY_TIMEOUT,
            waiting: Waiting::Sleep,
            ..CardOptions::new(&self.path)
        })?;
        let pair = card.pair(0).ok_or(Error::NotOffered { what: "a pair of queues" })?;
        info!(parent: &self.span, path = %self.path.display(), "the port is connected to its back-end");
        Ok(Session {
            link: self,
            accepted: accepted(card.net_features()),
            card,
            pair,
            outgoing: Batch::default(),
            next: 0,
            start: 0,
            segment: vec![0; FRAME_MAX].into_boxed_slice(),
            segments: None,
            is_full: false,
            incoming: Batch::default(),
        })
    }
}

impl Session<'_> {
    /// Carries frames until the thread is to end.
    ///
    /// # Errors
    /// The connection is lost, or the back-end has broken the rules.
    fn run(mut self) -> Result<(), Error> {
        self.link.queues.outbox.set_receiver(Some(self.link.frames.clone()));
        let outcome = self.carry();
        let waiting = self.link.queues.outbox.set_receiver(None);
        let lost = waiting + self.outgoing.len() - self.next;
        self.link.queues.counters.sent_down.add(lost as u64);
        self.card.close();
        outcome
    }

    fn carry(&mut self) -> Result<(), Error> {
        while !self.link.stop.is_set() {
            let (sent, received) = (self.send()?, self.receive()?);
            if !sent && !received {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) -> Result<(), Error> {
        let interest = if self.is_full { Interest::Any } else { Interest::Receive };
        if !self.pair.arm(interest)? {
            return Ok(());
        }
        // While a frame waits for the back-end, the outbox is not looked at.
        if !self.is_full {
            self.link.queues.outbox.wake_receiver();
        }
        let mut fds = [
            PollFd::new(self.link.stop.waker(), PollFlags::IN),
            PollFd::new(&self.link.frames, PollFlags::IN),
            PollFd::new(&self.pair, PollFlags::IN),
        ];
        // An error is a signal: the next turn looks at everything.
        let _ = poll(&mut fds, None);
        self.link.frames.clear();
        Ok(())
    }

    /// Sends frames of the outbox. Returns whether there may be more to do.
    fn send(&mut self) -> Result<bool, Error> {
        if self.next == self.outgoing.len() {
            (self.next, self.start) = (0, 0);
            self.link.queues.outbox.receive(&mut self.outgoing);
        }
        if self.outgoing.len() == 0 {
            return Ok(false);
        }
        let done = match self.segments {
            Some(_) => self.send_segments()?,
            None => self.send_whole()? > 0 || self.prepare(),
        };
        self.is_full = !done;
        Ok(done)
    }

    /// Sends the next frames that the back-end accepts as they are. Returns their number.
    fn send_whole(&mut self) -> Result<usize, Error> {
        let (accepted, len_max) = (self.accepted, self.pair.frame_len_max());
        let frames = self.outgoing.frames(self.next, self.start).map_while(|frame| {
            let (header, bytes) = Header::read_from_prefix(frame).ok()?;
            let fits = bytes.len() <= len_max && undo(&header, bytes, accepted) == Undo::Nothing;
            fits.then(|| Outgoing { bytes, offload: of_header(&header) })
        });
        let frames: Vec<_> = frames.take(FRAMES_MAX).collect();
        if frames.is_empty() {
            return Ok(0);
        }
        let sent = self.pair.send(&frames)?;
        (0..sent).for_each(|_| self.advance());
        Ok(sent)
    }

    /// Undoes the offload of the next frame, or drops the frame. Returns `false` if the frame waits for room.
    fn prepare(&mut self) -> bool {
        let (accepted, len_max) = (self.accepted, self.pair.frame_len_max());
        let Some(frame) = self.outgoing.frame(self.next, self.start) else { return false };
        let (head, bytes) = frame.split_at_mut(HEADER);
        let is_done = match Header::read_from_bytes(head) {
            Ok(header) => match undo(&header, bytes, accepted) {
                Undo::Nothing if bytes.len() <= len_max => return false,
                Undo::Nothing => false,
                Undo::Checksum(at) => {
                    head.copy_from_slice(Header::default().as_bytes());
                    complete_checksum(bytes, at)
                }
                Undo::Segments => {
                    let segments = Segments::of(&header, bytes).filter(|all| all.len_max(bytes) <= len_max);
                    self.segments = segments.and_then(|mut segments| {
                        let len = segments.write_next(bytes, &mut self.segment)?;
                        Some((len, segments))
                    });
                    self.segments.is_some()
                }
            },
            Err(_) => false,
        };
        if !is_done {
            self.link.queues.counters.sent_refused.add(1);
            self.advance();
        }
        true
    }

    /// Sends segments of the next frame. Returns `false` if the next one waits for room.
    fn send_segments(&mut self) -> Result<bool, Error> {
        for _ in 0..FRAMES_MAX {
            let Some((len, mut segments)) = self.segments else { return Ok(true) };
            if self.pair.send(&[Outgoing::from(&self.segment[..len])])? == 0 {
                return Ok(false);
            }
            let frame = self.outgoing.frame(self.next, self.start).unwrap_or_default();
            let next = segments.write_next(&frame[HEADER.min(frame.len())..], &mut self.segment);
            self.segments = next.map(|len| (len, segments));
            if next.is_none() {
                self.advance();
            }
        }
        Ok(true)
    }

    fn advance(&mut self) {
        self.start += self.outgoing.frame_len(self.next);
        self.next += 1;
    }

    /// Passes received frames to the card. Returns whether there were some.
    fn receive(&mut self) -> Result<bool, Error> {
        let (incoming, counters) = (&mut self.incoming, &self.link.queues.counters);
        let received = self.pair.receive(FRAMES_MAX, |frame| {
            let len = HEADER + frame.len();
            if frame.len() < ETHERNET_HEADER_LEN || len > FRAME_MAX {
                counters.dropped_unread.add(1);
                return;
            }
            if !incoming.has_room(len, 1) {
                counters.dropped_late.add(self.link.queues.inbox.send(incoming) as u64);
            }
            let space = incoming.push(len);
            space[..HEADER].copy_from_slice(header_of(&frame.offload()).as_bytes());
            frame.read(0, &mut space[HEADER..]);
        })?;
        counters.dropped_late.add(self.link.queues.inbox.send(incoming) as u64);
        Ok(received > 0)
    }
}
