//! A pair of queues with its only owner.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{CreateFlags, Event as Ready, EventData, EventFlags, add, create, wait};

use crate::card::core::CardCore;
use crate::card::features;
use crate::card::handle::CardHandle;
use crate::card::memory::Frame;
use crate::card::rings::PairRings;
use crate::error::Error;
use crate::event::Event;
use crate::offload::Offload;
use crate::options::Waiting;
use crate::reconnect::Reconnect;
use crate::short_spin::{self, ShortSpin};

/// The number of calls that found nothing to do between two checks of the connection.
const IDLE_CALLS: u32 = 2048;
/// The number of looks at the rings between two readings of the clock, during a spin.
const LOOKS_PER_CLOCK: u32 = 8;

/// The number of each descriptor that a sleeping owner watches.
const RECEIVE_CALL: u64 = 0;
const TRANSMIT_CALL: u64 = 1;
const CONNECTION: u64 = 2;

/// The event that an owner waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// A frame was received.
    Receive,
    /// There is room to send a frame.
    Send,
    /// Either.
    Any,
}

impl Interest {
    fn in_receive(self) -> bool {
        self != Self::Send
    }

    fn in_send(self) -> bool {
        self != Self::Receive
    }
}

/// A frame to send: its bytes from the Ethernet header on, and the work that is left to the card.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// The work that is left to the card.
    pub offload: Offload,
}

impl<'a> From<&'a [u8]> for Outgoing<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, offload: Offload::default() }
    }
}

/// The counters of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CardCounters {
    /// Frames given to the device.
    pub sent_frames: u64,
    /// Their bytes, without the headers of virtio.
    pub sent_bytes: u64,
    /// Frames taken from the device.
    pub received_frames: u64,
    /// Their bytes, without the headers of virtio.
    pub received_bytes: u64,
    /// Received frames that were dropped because their header of virtio makes no sense.
    pub received_invalid: u64,
    /// Frames that [`QueuePair::forward`] dropped because they cannot be sent.
    pub forward_dropped: u64,
    /// Sent frames that were in flight when the back-end went away. It may have sent them or not.
    pub lost_sent: u64,
    /// Frames in the receive queue that were not taken when the back-end went away.
    pub lost_received: u64,
    /// Kicks of the device, for both queues.
    pub kicks: u64,
    /// Calls of the device, for both queues, whether the owner slept or not.
    pub calls: u64,
}

/// A receive queue and a transmit queue, with their buffers.
///
/// A pair has one owner, so its calls need no lock. [`Card::pair`](crate::Card::pair) hands it out.
pub struct QueuePair {
    handle: Arc<CardHandle>,
    index: usize,
    rings: PairRings,
    generation: u64,
    kicks: [Event; 2],
    calls: [Event; 2],
    epoll: OwnedFd,
    short_spin: ShortSpin,
    idle_calls: u32,
    counters: CardCounters,
}

impl QueuePair {
    /// Makes the rings of a pair, and starts them.
    pub(crate) fn start(handle: &Arc<CardHandle>, index: usize) -> Result<Self, Error> {
        let core = &handle.core;
        let layout = core.layouts.get(index).ok_or(Error::NotOffered { what: "so many queue pairs" })?;
        let rings = PairRings::new(index, layout, &core.region, features::of_card(core.features))?;
        let calls = [Event::new()?, Event::new()?];
        let epoll = create(CreateFlags::CLOEXEC).map_err(Error::os("an epoll descriptor"))?;
        let [receive, transmit] = &calls;
        for (tag, fd) in [
            (RECEIVE_CALL, receive.as_fd()),
            (TRANSMIT_CALL, transmit.as_fd()),
            (CONNECTION, core.link.control.as_fd()),
            (CONNECTION, core.wake(index).as_fd()),
        ] {
            add(&epoll, fd, EventData::new_u64(tag), EventFlags::IN)
                .map_err(Error::os("an epoll descriptor"))?;
        }
        let mut pair = Self {
            handle: handle.clone(),
            index,
            rings,
            generation: core.generation(),
            kicks: [Event::new()?, Event::new()?],
            calls,
            epoll,
            short_spin: ShortSpin::default(),
            idle_calls: 0,
            counters: CardCounters::default(),
        };
        pair.start_rings()?;
        Ok(pair)
    }

    #[inline]
    fn core(&self) -> &Arc<CardCore> {
        &self.handle.core
    }

    /// Returns the number of the pair.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the length of the longest frame that can be sent.
    pub fn frame_len_max(&self) -> usize {
        self.rings.transmit.len_max(&self.rings.memory)
    }

    /// Returns the counters of the pair. Too slow for the data path.
    pub fn counters(&self) -> CardCounters {
        // The device signals calls, and can signal any number, so the sum may wrap.
        let pending = self.calls.iter().fold(0u64, |sum, call| sum.wrapping_add(call.pending()));
        CardCounters { calls: self.counters.calls.wrapping_add(pending), ..self.counters }
    }

    /// Returns the number of kicks of the device so far, as [`QueuePair::counters`] but without a system
    /// call.
    pub fn kicks(&self) -> u64 {
        self.counters.kicks
    }

    /// Returns the number of sent frames that the device has not used yet.
    ///
    /// # Errors
    /// The card is dead.
    pub fn in_flight(&mut self) -> Result<u64, Error> {
        self.refresh()?;
        let reaped = self.rings.transmit.reap(&mut self.rings.memory);
        self.checked(reaped)?;
        Ok(self.rings.transmit.in_flight())
    }

    /// Starts the rings on the present connection, if that has changed. Every call begins with this.
    #[inline]
    fn refresh(&mut self) -> Result<(), Error> {
        if self.core().generation() == self.generation { Ok(()) } else { self.restart() }
    }

    #[cold]
    fn restart(&mut self) -> Result<(), Error> {
        let core = self.core().clone();
        let generation = core.generation();
        if core.link.is_dead() {
            return Err(core.link.dead_error());
        }
        core.wake(self.index).take();
        let lost = self.rings.restart();
        let lost = self.checked(lost)?;
        self.counters.lost_sent += lost.sent;
        self.counters.lost_received += lost.received;
        for kick in &mut self.kicks {
            // The last back-end may still have the old one.
            *kick = Event::new()?;
        }
        self.generation = generation;
        self.start_rings()
    }

    /// Starts the rings, and kicks both queues once: the receive queue has buffers, and a kick of an outage
    /// went to a descriptor without a reader.
    fn start_rings(&mut self) -> Result<(), Error> {
        let ([receive_kick, transmit_kick], [receive_call, transmit_call]) = (&self.kicks, &self.calls);
        let started = self.core().start_pair(
            self.index,
            self.rings.setups(),
            [receive_kick, transmit_kick],
            [receive_call, transmit_call],
        );
        if self.checked(started)? {
            self.kick(0);
            self.kick(1);
        }
        Ok(())
    }

    /// Passes a result on. An error kills the card.
    #[inline]
    fn checked<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|error| {
            self.core().die(error);
            self.core().link.dead_error()
        })
    }

    #[inline]
    fn kick(&mut self, ring: usize) {
        self.counters.kicks += 1;
        self.handle.core.kicker.kick(&self.kicks[ring]);
    }

    /// Checks the connection from time to time, after a call that found nothing to do.
    #[inline]
    fn idle(&mut self) {
        self.idle_calls = self.idle_calls.wrapping_add(1);
        if self.idle_calls.is_multiple_of(IDLE_CALLS) {
            self.core().check_connection();
        }
    }

    /// Sends copies of these frames, as many as there is room for. Returns their number.
    ///
    /// The device sees the first ones while the others are written. Kicks it at most once, at the end.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the first frame that was not sent is too short or too long, or its offload was
    ///   not negotiated. Those before it were sent; [`CardCounters::sent_frames`] tells their number.
    /// - The card is dead.
    #[inline]
    pub fn send(&mut self, frames: &[Outgoing<'_>]) -> Result<usize, Error> {
        self.send_with(
            frames.len(),
            |at| frames[at].bytes.len(),
            |at, frame| {
                frame.write(0, frames[at].bytes);
                frame.set_offload(frames[at].offload);
            },
        )
    }

    /// Sends up to `count` frames, as many as there is room for. Returns their number.
    ///
    /// `len_of` returns the length of the frame with a number from 0 on, and `fill` writes it into shared
    /// memory. The content of bytes that it does not write is unknown.
    ///
    /// # Errors
    /// As [`QueuePair::send`].
    #[inline]
    pub fn send_with(
        &mut self,
        count: usize,
        len_of: impl FnMut(usize) -> usize,
        fill: impl FnMut(usize, &mut Frame<'_>),
    ) -> Result<usize, Error> {
        self.refresh()?;
        let sent = self.rings.send(count, len_of, fill);
        let (sent, ended) = self.checked(sent)?;
        self.counters.sent_frames += sent.frames as u64;
        self.counters.sent_bytes += sent.bytes;
        if sent.kick {
            self.kick(1);
        }
        ended?;
        if sent.frames == 0 {
            self.idle();
        }
        Ok(sent.frames)
    }

    /// Passes up to `max` received frames to `each`, and returns their number. Never waits.
    ///
    /// Frames that come during the call may be left for the next one.
    ///
    /// A frame whose header makes no sense is dropped and counted.
    ///
    /// # Errors
    /// The card is dead.
    #[inline]
    pub fn receive(&mut self, max: usize, each: impl FnMut(&Frame<'_>)) -> Result<usize, Error> {
        self.refresh()?;
        let received = self.rings.receive(max, each);
        let received = self.checked(received)?;
        self.counters.received_frames += received.frames as u64;
        self.counters.received_bytes += received.bytes;
        self.counters.received_invalid += received.invalid;
        if received.kick {
            self.kick(0);
        }
        if received.frames == 0 {
            self.idle();
        }
        Ok(received.frames)
    }

    /// Passes up to `max` received frames to `each`, and sends back those for which it returns `true`,
    /// without a copy. Returns the number of received frames. Never waits.
    ///
    /// Frames that find no room in the transmit queue stay in the receive queue. A frame that cannot be sent
    /// because of its length or its offload is dropped and counted.
    ///
    /// # Errors
    /// The card is dead.
    #[inline]
    pub fn forward(&mut self, max: usize, each: impl FnMut(&mut Frame<'_>) -> bool) -> Result<usize, Error> {
        self.refresh()?;
        let done = self.rings.forward(max, each);
        let done = self.checked(done)?;
        self.counters.received_frames += done.received.frames as u64;
        self.counters.received_bytes += done.received.bytes;
        self.counters.received_invalid += done.received.invalid;
        self.counters.sent_frames += done.sent.frames as u64;
        self.counters.sent_bytes += done.sent.bytes;
        self.counters.forward_dropped += done.dropped;
        if done.sent.kick {
            self.kick(1);
        }
        if done.received.kick {
            self.kick(0);
        }
        if done.received.frames == 0 {
            self.idle();
        }
        Ok(done.received.frames)
    }

    /// Waits until what `interest` names is there, as [`CardOptions::waiting`](crate::CardOptions::waiting)
    /// says. Returns `false` after `timeout`.
    ///
    /// A frame can be due and still incomplete, so [`QueuePair::receive`] may find nothing after this.
    ///
    /// # Errors
    /// The card is dead.
    pub fn wait(&mut self, interest: Interest, timeout: Option<Duration>) -> Result<bool, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if self.is_due(interest)? {
                return Ok(true);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            if self.spin(interest, now, deadline)? {
                continue;
            }
            if self.arm_rings(interest) {
                self.sleep(deadline);
            }
            self.disarm_rings(interest);
        }
    }

    /// Waits until the device has used all sent frames. Returns `false` after `timeout`.
    ///
    /// # Errors
    /// The card is dead.
    pub fn flush(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if self.in_flight()? == 0 {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            if !self.rings.transmit.enable_calls() {
                self.sleep(deadline);
            }
            self.rings.transmit.disable_calls();
        }
    }

    /// Returns whether what `interest` names is there.
    fn is_due(&mut self, interest: Interest) -> Result<bool, Error> {
        self.refresh()?;
        if interest.in_receive() && self.rings.receive.is_due() {
            return Ok(true);
        }
        if !interest.in_send() {
            return Ok(false);
        }
        let reaped = self.rings.transmit.reap(&mut self.rings.memory);
        self.checked(reaped)?;
        Ok(self.rings.transmit.room(&self.rings.memory) > 0)
    }

    /// Looks at the rings for a moment, if the options allow it. Returns whether something is there, or the
    /// deadline has passed.
    fn spin(&mut self, interest: Interest, start: Instant, deadline: Option<Instant>) -> Result<bool, Error> {
        let is_short = matches!(self.core().options.waiting, Waiting::Auto);
        let time = match self.core().options.waiting {
            Waiting::Sleep => return Ok(false),
            Waiting::Auto if self.short_spin.is_due() => short_spin::TIME,
            Waiting::Auto => return Ok(false),
            Waiting::Spin(time) => time,
        };
        let found = loop {
            for _ in 0..LOOKS_PER_CLOCK {
                std::hint::spin_loop();
                if self.is_due(interest)? {
                    break;
                }
            }
            if self.is_due(interest)? {
                break true;
            }
            self.idle();
            if start.elapsed() >= time {
                break false;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(true);
            }
        };
        if is_short {
            self.short_spin.record(found);
        }
        Ok(found)
    }

    /// Asks the device for calls. Returns `false` if something is there already.
    fn arm_rings(&mut self, interest: Interest) -> bool {
        let received = interest.in_receive() && self.rings.receive.enable_calls();
        let used = interest.in_send() && self.rings.transmit.enable_calls();
        !received && !used
    }

    fn disarm_rings(&mut self, interest: Interest) {
        if interest.in_receive() {
            self.rings.receive.disable_calls();
        }
        if interest.in_send() {
            self.rings.transmit.disable_calls();
        }
    }

    /// Sleeps until the device calls, or there is an event on the connection, and handles the events.
    fn sleep(&mut self, deadline: Option<Instant>) {
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [Ready { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        // The only error is an interruption by a signal. The caller checks its condition again.
        let count = wait(&self.epoll, &mut events, timeout.as_ref()).unwrap_or_default();
        for event in events.iter().take(count) {
            match event.data.u64() {
                RECEIVE_CALL => self.take_calls(0),
                TRANSMIT_CALL => self.take_calls(1),
                _ => {
                    self.core().wake(self.index).take();
                    self.core().check_connection();
                }
            }
        }
    }

    fn take_calls(&mut self, ring: usize) {
        self.counters.calls = self.counters.calls.wrapping_add(self.calls[ring].take());
    }

    /// Asks the device for calls, before the owner sleeps on the descriptor of the pair: with epoll, or
    /// `AsyncFd` in tokio. Returns `false` if what `interest` names is there already, so that the owner must
    /// not sleep.
    ///
    /// The descriptor becomes readable when it may be there. Then call [`QueuePair::receive`] or
    /// [`QueuePair::send`], and this again before the next sleep.
    ///
    /// # Errors
    /// The card is dead.
    pub fn arm(&mut self, interest: Interest) -> Result<bool, Error> {
        // Takes the events of the last sleep.
        self.sleep(Some(Instant::now()));
        if self.is_due(interest)? || !self.arm_rings(interest) {
            self.disarm_rings(interest);
            return Ok(false);
        }
        Ok(true)
    }
}

impl AsRawFd for QueuePair {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

impl AsFd for QueuePair {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QueuePair({})", self.index)
    }
}
