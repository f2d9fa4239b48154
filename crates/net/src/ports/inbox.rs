//! The frames that other rings of this process send to a receive ring: those of a loop port and of a switch.

use crate::card::state::CardState;
use crate::frame::gathered::Bytes;
use crate::frame::held::HeldFrame;
use crate::frame::loop_queue::{Batch, HEADER, LoopQueue};
use crate::frame::taken::Taken;
use crate::offload::{Undo, passes_as_is, received_header, undo};
use crate::ports::receive::Receive;
use crate::ring::receive_ring::ReceiveRing;
use kickless_device::{Next, TaskLocation};
use kickless_io::Waker;
use kickless_spec::net::Header;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// A port whose receive rings have inboxes.
pub(crate) trait Inboxes: Send + Sync + 'static {
    /// Returns the queue with the frames for the receive ring of a pair.
    fn inbox(&self, pair: u16) -> Option<&LoopQueue>;
}

/// Takes the frames out of an inbox.
pub(crate) struct InboxReceive<I: Inboxes> {
    inboxes: Arc<I>,
    card: Arc<CardState>,
    pair: u16,
    waker: Waker,
    batch: Batch,
    /// The number of the next frame in the batch, and the offset of its header.
    next: usize,
    start: usize,
    /// The number of frames to deliver one by one before the next batch is tried.
    one_by_one: u32,
    /// A sender is about to signal the waker, for frames that are taken already.
    is_signal_due: Cell<bool>,
}

/// Number of frames after one that did not fit a batch that are delivered one by one. So a batch that
/// delivers nothing is tried for a part of the frames only.
const ONE_BY_ONE: u32 = 7;

impl<I: Inboxes> InboxReceive<I> {
    /// Opens the inbox of a pair.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new(inboxes: Arc<I>, card: Arc<CardState>, pair: u16) -> io::Result<Self> {
        let waker = Waker::new()?;
        let source = Self {
            inboxes,
            card,
            pair,
            waker: waker.clone(),
            batch: Batch::default(),
            next: 0,
            start: 0,
            one_by_one: 0,
            is_signal_due: Cell::new(false),
        };
        if let Some(queue) = source.queue() {
            queue.set_receiver(Some(waker));
        }
        Ok(source)
    }

    fn queue(&self) -> Option<&LoopQueue> {
        self.inboxes.inbox(self.pair)
    }

    /// Delivers the next frames together, as long as nothing has to be done to them. Returns their number.
    #[inline]
    fn deliver_batch(&mut self, ring: &mut ReceiveRing) -> u32 {
        let left = self.batch.len() - self.next;
        if left == 0 || !ring.takes_batches() {
            return 0;
        }
        let accepted = ring.accepted_offloads();
        let frames =
            self.batch.frames(self.next, self.start).take_while(|frame| passes_as_is(frame, accepted));
        let delivered = ring.deliver_whole(left, frames);
        for _ in 0..delivered {
            self.advance(self.batch.frame_len(self.next));
        }
        delivered
    }

    fn take_one(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame) -> Result<Taken, Next> {
        let Some(frame) = self.batch.frame(self.next, self.start) else { return Ok(Taken::Nothing) };
        let Ok((header, _)) = Header::read_from_prefix(frame) else { return Ok(Taken::Nothing) };
        let (total, accepted) = (frame.len(), ring.accepted_offloads());
        let taken = if ring.is_unused() {
            ring.drop_frame(|counters| counters.dropped_unused.add(1));
            Taken::Dropped
        } else if !ring.wants(&frame[HEADER..]) {
            ring.drop_frame(|counters| counters.dropped_filtered.add(1));
            Taken::Dropped
        } else if undo(&header, &frame[HEADER..], accepted) == Undo::Nothing {
            let header_len = ring.format.header_len;
            let received = received_header(&header, accepted);
            frame[HEADER - header_len..HEADER].copy_from_slice(&received.as_bytes()[..header_len]);
            if ring.takes_batches() && ring.deliver_in_singles(&mut Bytes::new(frame)) {
                self.advance(total);
                return Ok(Taken::Delivered(1));
            }
            match ring.deliver(&mut frame[HEADER - header_len..]) {
                Ok(true) => Taken::Delivered(1),
                Ok(false) => Taken::Dropped,
                Err(next) => {
                    // The header is parsed again at the next attempt.
                    frame[..HEADER].copy_from_slice(header.as_bytes());
                    return Err(next);
                }
            }
        } else {
            match held.copy(&header, &frame[HEADER..], accepted) {
                Ok(()) => Taken::Held,
                Err(refusal) => refusal.drop(ring),
            }
        };
        self.advance(total);
        Ok(taken)
    }

    /// Goes on to the next frame, behind one of `len` bytes.
    fn advance(&mut self, len: usize) {
        self.next += 1;
        self.start += len;
    }

    fn receive(&mut self) {
        (self.next, self.start) = (0, 0);
        let Some(queue) = self.inboxes.inbox(self.pair) else { return };
        if queue.receive(&mut self.batch) {
            self.is_signal_due.set(!self.waker.clear());
        }
    }
}

impl<I: Inboxes> Receive for InboxReceive<I> {
    const HAS_OFFLOADS: bool = true;
    /// The frames are in memory already, and most need no credit.
    const NEEDS_CREDIT: bool = false;

    /// A task that is polled is not woken, because that is a system call.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        if let Some(queue) = self.queue() {
            if self.is_signal_due.get() {
                // A signal that comes after this causes one poll too many, and is cleared by the next call.
                self.is_signal_due.set(!self.waker.clear());
            }
            queue.wake_receiver();
        }
        Some(self.waker.as_fd())
    }

    fn take(&mut self, ring: &mut ReceiveRing, held: &mut HeldFrame, _is_due: bool) -> Result<Taken, Next> {
        if self.next == self.batch.len() {
            self.receive();
        }
        if self.one_by_one == 0 {
            let delivered = self.deliver_batch(ring);
            if delivered > 0 {
                return Ok(Taken::Delivered(delivered));
            }
        }
        let taken = self.take_one(ring, held)?;
        if taken != Taken::Nothing {
            self.one_by_one = self.one_by_one.checked_sub(1).unwrap_or(ONE_BY_ONE);
        }
        Ok(taken)
    }

    fn set_location(&self, location: Option<TaskLocation>) {
        if let Some(queue) = self.queue() {
            queue.set_location(location);
        }
    }

    fn takes_parcel(&self, to: usize) -> bool {
        self.next == self.batch.len()
            && self.queue().is_some_and(|queue| queue.address() == to && !queue.has_frames())
    }

    fn parcel_refused(&self, cost: u32) {
        if let Some(queue) = self.queue() {
            queue.set_refusal_cost(cost);
        }
    }
}

impl<I: Inboxes> Drop for InboxReceive<I> {
    fn drop(&mut self) {
        let waiting = self.queue().map_or(0, |queue| queue.set_receiver(None));
        let taken = self.batch.len() - self.next;
        self.card.receive_counters(self.pair).dropped_late.add((waiting + taken) as u64);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::card::announcement::Announcements;
    use crate::card::counters::RingCounters;
    use crate::card::filter::Filter;
    use kickless_net_port::Capture;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64};

    #[derive(Default)]
    struct One(LoopQueue);

    impl Inboxes for One {
        fn inbox(&self, _: u16) -> Option<&LoopQueue> {
            Some(&self.0)
        }
    }

    fn card() -> Arc<CardState> {
        Arc::new(CardState {
            mac: None,
            capture: Capture::default(),
            pairs_max: 1,
            mtu: AtomicU16::new(1500),
            pairs: AtomicU16::new(1),
            has_control_ring: AtomicBool::new(false),
            settings_are_known: AtomicBool::new(false),
            features: AtomicU64::new(0),
            offloads: AtomicU64::new(0),
            filter: Mutex::new(Arc::new(Filter::new(None))),
            filter_changes: AtomicU64::new(0),
            receiving: vec![AtomicU32::new(0)],
            announcements: Announcements::default(),
            counters: vec![RingCounters::default(), RingCounters::default()],
        })
    }

    /// A sender is delayed between its frames and its signal. A descriptor that stays readable would wake the
    /// receiver each time that it is watched again.
    #[test]
    fn a_late_signal_does_not_stay() {
        let inboxes = Arc::new(One::default());
        let mut receive = InboxReceive::new(inboxes.clone(), card(), 0).unwrap();
        let send = || {
            let mut batch = Batch::default();
            batch.push(60).fill(0);
            assert_eq!(inboxes.0.send(&mut batch), 0);
        };
        receive.fd();
        send();
        assert!(receive.waker.clear(), "the signal has not come yet");
        receive.receive();
        assert_eq!(receive.batch.len(), 1);
        receive.waker.wake();
        receive.receive();
        receive.fd();
        assert!(!receive.waker.clear());
        // The next signal is cleared at once.
        send();
        receive.receive();
        assert!(!receive.waker.clear());
    }
}
