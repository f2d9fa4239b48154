//! The device's end of a split virtqueue (virtio 1.3, section 2.7).

use super::credit::{self, Credit};
use super::elements::{PopOutcome, Popped, UnpublishedUsed};
use super::inflight::Split;
use super::metadata::{Areas, Options};
use super::single::{Direction, SingleChain};
use super::suppress::{self, NotificationWords, Word};
use crate::access::Access;
use crate::address_space::AddressSpace;
use crate::{Chain, RingError};
use kickless_memory::{Marks, View};
use kickless_spec::ring::UsedElem;
use std::sync::atomic::Ordering;

/// Distance by which the driver may pass a stale `avail_event` before we move it on: half of the index's
/// range.
const EVENT_LAG_MAX: u16 = 1 << 15;

/// Number of pops until the chain whose first buffer is prefetched, and until the one whose descriptor is. A
/// line of another core takes about as long as two requests to a disk that answers at once.
const PREFETCH_BUFFER: u16 = 2;
const PREFETCH_DESCRIPTOR: u16 = 4;

/// Used elements in a cache line of 64 bytes.
const ELEMENTS_PER_LINE: usize = 8;

/// The last request to the driver about kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kicks {
    /// This queue has made no request yet.
    Unknown,
    On,
    Off,
}

/// A split ring's [`super::Queue`], with the same methods.
#[derive(Debug)]
pub(super) struct SplitQueue<A: Access> {
    /// The next entry of the avail ring to pop.
    next_avail: u16,
    /// `avail.idx` when it was last read and checked: entries before it may be popped. Equal to `next_avail`
    /// while unmapped or broken, so that the fast path of a pop needs no other check.
    avail_seen: u16,
    /// The next element of the used ring to fill. Those in `unpublished` count.
    next_used: u16,
    /// `used.idx` as the driver sees it.
    published: u16,
    /// Whether the queue has had areas, and so has read the used index. Until then the used index is taken
    /// for 0.
    begun: bool,
    /// Number of chains popped and not pushed, credit included.
    in_flight: u16,
    options: Options,
    /// `used.idx` at the last decision about calls, and whether there was one.
    decided_at: u16,
    decided: bool,
    kicks: Kicks,
    /// `avail_event` as it stands in the ring, unless `kicks` is unknown. With EVENT_IDX only.
    kick_event: u16,
    metadata: Option<Areas<A>>,
    broken: Option<RingError>,
    /// Elements that wait for areas. Empty while mapped.
    unpublished: Vec<UsedElem>,
    /// The record of the chains in flight.
    tracker: Option<Box<Split<A::Region>>>,
}

impl<A: Access> SplitQueue<A> {
    pub(super) fn new(options: Options, next_avail: u16) -> Self {
        Self {
            next_avail,
            avail_seen: next_avail,
            next_used: 0,
            published: 0,
            begun: false,
            in_flight: 0,
            options,
            decided_at: 0,
            decided: false,
            kicks: Kicks::Unknown,
            kick_event: 0,
            metadata: None,
            broken: None,
            unpublished: Vec::new(),
            tracker: None,
        }
    }

    /// See [`super::Queue::begin_at`].
    pub(super) fn begin_at(&mut self, next_avail: u16) {
        (self.next_avail, self.avail_seen) = (next_avail, next_avail);
    }

    pub(super) fn track(&mut self, region: A::Region) {
        self.tracker = Some(Box::new(Split::new(region)));
    }

    pub(super) fn region(&self) -> Option<&A::Region> {
        Some(self.tracker.as_ref()?.region())
    }

    pub(super) fn remap(&mut self, metadata: Areas<A>, marks: &mut Marks) {
        assert_eq!(*metadata.options(), self.options, "areas of another shape");
        self.unmap(marks);
        let begins = !std::mem::replace(&mut self.begun, true);
        let goes_on = begins && self.begin(metadata.load(Word::UsedIdx, Ordering::Relaxed));
        let first = self.next_used.wrapping_sub(self.unpublished.len() as u16);
        for (i, elem) in self.unpublished.iter().enumerate() {
            metadata.set_used_elem(first.wrapping_add(i as u16), elem);
        }
        metadata.mark_used_elems(first, self.unpublished.len() as u16, marks);
        self.unpublished = Vec::new();
        if self.options.event_idx() {
            // The flags have no meaning then, and are zero (virtio 1.3, section 2.7.10.2).
            metadata.store(Word::UsedFlags, 0, Ordering::Relaxed);
            metadata.mark_word(Word::UsedFlags, marks);
        }
        self.metadata = Some(metadata);
        if begins && !goes_on {
            self.begin_region(marks);
        }
        // Repeats the last state of kicks in the new areas. The result is not needed: the owner looks at the
        // ring afterwards, and the fence has come before (see `super::Queue::remap`).
        match std::mem::replace(&mut self.kicks, Kicks::Unknown) {
            Kicks::Unknown => {}
            Kicks::On => {
                let _ = self.arm(marks);
            }
            Kicks::Off => self.disarm(marks),
        }
    }

    /// Begins with a ring that is seen for the first time, with its used index. Returns whether it continues
    /// with chains that another device had in flight.
    fn begin(&mut self, used: u16) -> bool {
        self.next_used = self.next_used.wrapping_add(used);
        (self.published, self.decided_at) = (used, used);
        let Some(tracker) = &mut self.tracker else { return false };
        match tracker.resume(used, self.options.size()) {
            Ok(Some(in_flight)) => {
                // The unpublished chains are among those to resubmit.
                self.unpublished = Vec::new();
                self.next_used = used;
                self.next_avail = used.wrapping_add(in_flight);
                self.avail_seen = self.next_avail;
                self.in_flight = in_flight;
                true
            }
            Ok(None) => {
                // Nothing is in flight, so each entry from the used index on waits, whatever index was given.
                // Cloud Hypervisor gives the available index.
                if self.in_flight == 0 && self.unpublished.is_empty() {
                    (self.next_avail, self.avail_seen) = (used, used);
                }
                false
            }
            Err(error) => {
                self.latch(error);
                // The record stays as it is, for a later device.
                self.tracker = None;
                false
            }
        }
    }

    /// See [`super::Queue::continue_from_used`].
    pub(super) fn continue_from_used(&mut self) -> Option<(u16, u16)> {
        let (given, used) = (self.next_avail, self.next_used);
        if !self.begun || self.tracker.is_some() || self.in_flight > 0 || given == used {
            return None;
        }
        (self.next_avail, self.avail_seen) = (used, used);
        Some((given, used))
    }

    /// Begins a region that was never used. Chains that are still held from before are not in it, so they are
    /// shown first.
    fn begin_region(&mut self, marks: &mut Marks) {
        if let Some(mut tracker) = self.tracker.take() {
            self.show(marks);
            tracker.begin(self.published);
            self.tracker = Some(tracker);
        }
    }

    /// Returns the same queue for another kind of access.
    pub(super) fn moved<B: Access<Region = A::Region>>(&mut self, marks: &mut Marks) -> SplitQueue<B> {
        self.unmap(marks);
        SplitQueue {
            next_avail: self.next_avail,
            avail_seen: self.avail_seen,
            next_used: self.next_used,
            published: self.published,
            in_flight: self.in_flight,
            options: self.options,
            decided_at: self.decided_at,
            decided: self.decided,
            kicks: self.kicks,
            kick_event: self.kick_event,
            metadata: None,
            begun: self.begun,
            broken: self.broken,
            unpublished: std::mem::take(&mut self.unpublished),
            tracker: self.tracker.take(),
        }
    }

    pub(super) fn unmap(&mut self, marks: &mut Marks) {
        self.avail_seen = self.next_avail;
        let Some(metadata) = self.metadata.take() else { return };
        metadata.mark_used_elems(self.published, self.next_used.wrapping_sub(self.published), marks);
        // Read back from the ring. A driver that has changed them harms only itself.
        let mut at = self.published;
        while at != self.next_used {
            self.unpublished.push(metadata.used_elem(at));
            at = at.wrapping_add(1);
        }
    }

    pub(super) fn take_unpublished(&mut self, marks: &mut Marks) -> Vec<UnpublishedUsed> {
        self.unmap(marks);
        self.next_used = self.published;
        let unpublished = self.unpublished();
        self.unpublished = Vec::new();
        unpublished
    }

    pub(super) fn unpublished(&self) -> Vec<UnpublishedUsed> {
        // The ids were heads, of 16 bits.
        self.unpublished
            .iter()
            .map(|e| UnpublishedUsed { id: e.id.get() as u16, len: e.len.get(), descriptors: 0 })
            .collect()
    }

    pub(super) fn push_unpublished(&mut self, unpublished: &[UnpublishedUsed]) {
        // More than fits cannot come from a queue of this size.
        if unpublished.len() > usize::from(self.options.size()) {
            return;
        }
        for UnpublishedUsed { id, len, .. } in unpublished {
            self.put(&UsedElem { id: u32::from(*id).into(), len: (*len).into() });
        }
    }

    #[inline]
    pub(super) fn is_mapped(&self) -> bool {
        self.metadata.is_some()
    }

    #[inline]
    pub(super) fn pop<'v, S: AddressSpace<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
        marks: &mut Marks,
    ) -> Popped {
        if self.resubmissions() > 0 {
            return self.pop_resubmission(space, chain);
        }
        if self.next_avail == self.avail_seen {
            if !self.refresh(marks)? {
                return Ok(PopOutcome::Empty);
            }
            self.prefetch_reused(space, chain);
        }
        let Some(metadata) = &self.metadata else { return Ok(PopOutcome::Empty) };
        let head = metadata.avail_entry(self.next_avail);
        let walked = chain.walk(space, metadata, head);
        if space.is_missing() {
            // If the chain also has an error, a later pop finds it again.
            return Ok(PopOutcome::MissingTranslation);
        }
        if let Err(error) = walked {
            return Err(self.latch(error));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_flight += 1;
        if let Some(tracker) = &mut self.tracker {
            tracker.popped(head);
        }
        Ok(PopOutcome::Chain)
    }

    /// Peeks chains: see [`super::Queue::peek`].
    #[inline]
    pub(super) fn peek(
        &mut self,
        view: &View,
        direction: Direction,
        into: &mut [SingleChain],
        marks: &mut Marks,
    ) -> usize {
        if self.in_flight != 0 || self.tracker.is_some() {
            return 0;
        }
        let ahead = |queue: &Self| usize::from(queue.avail_seen.wrapping_sub(queue.next_avail));
        if ahead(self) < into.len() && self.refresh(marks).is_err() {
            // The next pop reports it.
            return 0;
        }
        let count = into.len().min(ahead(self));
        let Some(metadata) = &self.metadata else { return 0 };
        let entry = |nth: usize| metadata.avail_entry(self.next_avail.wrapping_add(nth as u16));
        for (nth, chain) in into.iter_mut().take(count).enumerate() {
            chain.id = entry(nth);
            metadata.prefetch_descriptor(chain.id);
            if nth % ELEMENTS_PER_LINE == 0 {
                metadata.prefetch_used_elem(self.next_used.wrapping_add(nth as u16));
            }
        }
        for (nth, chain) in into.iter_mut().take(count).enumerate() {
            let head = chain.id;
            if head >= self.options.size() || !chain.set(head, metadata.descriptor(head), direction, view) {
                return nth;
            }
        }
        count
    }

    /// Completes peeked chains: see [`super::Queue::complete_peeked`].
    #[inline]
    pub(super) fn complete_peeked(&mut self, chains: &[SingleChain]) {
        let Some(metadata) = &self.metadata else { return };
        let elements =
            chains.iter().map(|chain| UsedElem { id: u32::from(chain.id).into(), len: chain.written.into() });
        for (nth, element) in elements.enumerate() {
            metadata.set_used_elem(self.next_used.wrapping_add(nth as u16), &element);
        }
        // Lossless, because there are at most as many as the ring has entries.
        let count = chains.len() as u16;
        self.next_used = self.next_used.wrapping_add(count);
        self.next_avail = self.next_avail.wrapping_add(count);
    }

    /// Prefetches what the driver is likely to use again: it takes the descriptors and the memory first that
    /// it got back last. So a chain that is alone in the ring waits for its lines together, instead of one
    /// after the other.
    #[inline]
    fn prefetch_reused<'v, S: AddressSpace<'v>>(&self, space: &S, last: &Chain) {
        let Some(metadata) = &self.metadata else { return };
        metadata.prefetch_descriptor(last.id.head());
        metadata.prefetch_used_elem(self.next_used);
        if let Some(first) = last.readable().first() {
            space.prefetch_for_write(first.addr);
        }
    }

    /// Prefetches for the next pops: see [`super::Queue::prefetch`].
    #[inline]
    pub(super) fn prefetch(&self, view: &View) {
        let Some(metadata) = &self.metadata else { return };
        let Self { next_avail, avail_seen, .. } = *self;
        let ahead = avail_seen.wrapping_sub(next_avail);
        let entry = |count: u16| metadata.avail_entry(next_avail.wrapping_add(count - 1));
        if ahead >= PREFETCH_BUFFER {
            view.prefetch_for_write(View::direct(metadata.descriptor(entry(PREFETCH_BUFFER)).addr));
        }
        if ahead >= PREFETCH_DESCRIPTOR {
            metadata.prefetch_descriptor(entry(PREFETCH_DESCRIPTOR));
        }
    }

    /// Pops a chain that another device has popped before. It is already in flight.
    #[cold]
    fn pop_resubmission<'v, S: AddressSpace<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Popped {
        let popped = self.walk_resubmission(space, chain);
        if let (Some(tracker), Ok(PopOutcome::Chain)) = (&mut self.tracker, popped) {
            tracker.resubmissions.popped();
        }
        popped
    }

    /// Walks the next chain that another device has popped before.
    fn walk_resubmission<'v, S: AddressSpace<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Popped {
        let (Some(metadata), Some(tracker)) = (&self.metadata, &self.tracker) else {
            return Ok(PopOutcome::Empty);
        };
        let Some(&head) = tracker.resubmissions.chains().last() else { return Ok(PopOutcome::Empty) };
        let walked = chain.walk(space, metadata, head);
        if space.is_missing() {
            return Ok(PopOutcome::MissingTranslation);
        }
        walked.map_err(|error| self.latch(error)).map(|()| PopOutcome::Chain)
    }

    /// Pops a chain as credit: see [`super::Queue::pop_credit`].
    pub(super) fn pop_credit<'v, S: AddressSpace<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
        marks: &mut Marks,
        credit: &mut Credit,
    ) -> Popped {
        if self.resubmissions() > 0 {
            let popped = self.walk_resubmission(space, chain);
            if let (Some(tracker), Ok(PopOutcome::Chain)) = (&mut self.tracker, popped) {
                tracker.resubmissions.popped_as_credit();
            }
            return popped;
        }
        // Credit is not recorded.
        let tracker = self.tracker.take();
        let popped = self.pop(space, chain, marks);
        self.tracker = tracker;
        if popped == Ok(PopOutcome::Chain) {
            let id = chain.id.head();
            credit.popped(credit::Chain { id, ring_descriptors: 1 });
        }
        popped
    }

    /// Uses credit: see [`super::Queue::use_credit`].
    pub(super) fn use_credit(&mut self, credit: &mut Credit) -> bool {
        // Resumed chains are the oldest.
        if self.tracker.as_mut().is_some_and(|tracker| tracker.resubmissions.use_credit()) {
            return true;
        }
        let Some(chain) = credit.oldest().filter(|_| self.metadata.is_some()) else { return false };
        credit.used();
        if let Some(tracker) = &mut self.tracker {
            tracker.popped(chain.id);
        }
        true
    }

    /// Returns credit: see [`super::Queue::unpop`].
    pub(super) fn unpop(&mut self, credit: &mut Credit) -> Option<u16> {
        let Some(chain) = credit.unpopped() else {
            return self.tracker.as_mut()?.resubmissions.unpop().copied();
        };
        self.next_avail = self.next_avail.wrapping_sub(chain.ring_descriptors);
        if self.metadata.is_none() || self.broken.is_some() {
            self.avail_seen = self.next_avail;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        Some(chain.id)
    }

    /// Returns the number of chains in the credit that an earlier process had in flight.
    pub(super) fn resubmitted_credit(&self) -> u16 {
        self.tracker.as_ref().map_or(0, |tracker| tracker.resubmissions.credit())
    }

    /// Reads the driver's avail index. Returns whether there is something to pop.
    fn refresh(&mut self, marks: &mut Marks) -> Result<bool, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let Some(metadata) = &self.metadata else { return Ok(false) };
        // Acquire: entries and descriptors before this index are read after it. Its partner is the driver's
        // release.
        let idx = metadata.load(Word::AvailIdx, Ordering::Acquire);
        // Chains that are pushed and not published are not free for the driver either.
        let taken = self.in_flight.saturating_add(self.next_used.wrapping_sub(self.published));
        let room = self.options.size().saturating_sub(taken);
        if idx.wrapping_sub(self.next_avail) > room {
            return Err(self.latch(RingError::AvailIndex { idx, next: self.next_avail, room }));
        }
        self.avail_seen = idx;
        // The lines of the first chains are asked for together, instead of one after the other.
        for count in 0..idx.wrapping_sub(self.next_avail).min(PREFETCH_DESCRIPTOR - 1) {
            metadata.prefetch_descriptor(metadata.avail_entry(self.next_avail.wrapping_add(count)));
        }
        if self.options.event_idx()
            && self.kicks == Kicks::Off
            && idx.wrapping_sub(self.kick_event) >= EVENT_LAG_MAX
        {
            self.kick_event = self.passed(idx);
            suppress::disable_kicks(metadata, true, self.kick_event);
            metadata.mark_word(Word::AvailEvent, marks);
            marks.commit();
        }
        Ok(idx != self.next_avail)
    }

    /// Returns an event index that the driver has passed, even if its batch after `idx` is as long as the
    /// ring (or 16384, in a larger ring) and it has not looked yet.
    fn passed(&self, idx: u16) -> u16 {
        idx.wrapping_sub(self.options.size().min(EVENT_LAG_MAX / 2)).wrapping_sub(1)
    }

    #[cold]
    fn latch(&mut self, error: RingError) -> RingError {
        self.avail_seen = self.next_avail;
        self.broken = Some(error);
        error
    }

    #[inline]
    pub(super) fn push(&mut self, head: u16, len: u32) {
        self.put(&UsedElem { id: u32::from(head).into(), len: len.into() });
        if let Some(tracker) = &mut self.tracker {
            tracker.pushed(head);
        }
        // A chain that another process popped, and that is pushed here after its crash, was not counted.
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    #[inline]
    fn put(&mut self, elem: &UsedElem) {
        match &self.metadata {
            Some(metadata) => metadata.set_used_elem(self.next_used, elem),
            None => self.unpublished.push(*elem),
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub(super) fn show(&mut self, marks: &mut Marks) {
        // An unnecessary store would take the cache line away from a driver that polls it.
        if self.published != self.next_used
            && let Some(metadata) = &self.metadata
        {
            if marks.is_on() {
                let count = self.next_used.wrapping_sub(self.published);
                metadata.mark_used_elems(self.published, count, marks);
                marks.commit();
            }
            if let Some(tracker) = &mut self.tracker {
                tracker.showing();
            }
            suppress::show(metadata, self.next_used);
            self.published = self.next_used;
            if let Some(tracker) = &mut self.tracker {
                tracker.shown(self.published);
            }
            // The mark is committed after the store, by the decision that must follow.
            metadata.mark_word(Word::UsedIdx, marks);
        }
    }

    #[inline]
    pub(super) fn publish(&mut self, marks: &mut Marks) -> bool {
        self.show(marks);
        let Some(metadata) = &self.metadata else { return false };
        if self.next_used == self.decided_at {
            return false;
        }
        let old = self.decided.then_some(self.decided_at);
        self.decided_at = self.next_used;
        self.decided = true;
        let wanted = suppress::decide(metadata, self.options.event_idx(), old, self.next_used);
        marks.commit_fenced();
        wanted
    }

    #[inline]
    pub(super) fn arm(&mut self, marks: &mut Marks) -> bool {
        self.kicks = Kicks::On;
        self.kick_event = self.next_avail;
        match &self.metadata {
            Some(metadata) if self.broken.is_none() => {
                let event_idx = self.options.event_idx();
                let come = suppress::arm(metadata, event_idx, self.next_avail);
                metadata.mark_word(if event_idx { Word::AvailEvent } else { Word::UsedFlags }, marks);
                marks.commit_fenced();
                come || self.resubmissions() > 0
            }
            _ => false,
        }
    }

    #[inline]
    pub(super) fn disarm(&mut self, marks: &mut Marks) {
        // With EVENT_IDX, the driver has passed the last event index, or is about to.
        if self.kicks == Kicks::Off || (self.options.event_idx() && self.kicks == Kicks::On) {
            self.kicks = Kicks::Off;
            return;
        }
        self.kicks = Kicks::Off;
        // This begins at the last seen index, because `next_avail` may have gone back since.
        self.kick_event = self.passed(self.avail_seen);
        if let Some(metadata) = &self.metadata {
            let event_idx = self.options.event_idx();
            suppress::disable_kicks(metadata, event_idx, self.kick_event);
            metadata.mark_word(if event_idx { Word::AvailEvent } else { Word::UsedFlags }, marks);
            marks.commit();
        }
    }

    #[inline]
    pub(super) fn pending(&self) -> u16 {
        match &self.metadata {
            Some(metadata) if self.broken.is_none() => {
                let idx = metadata.load(Word::AvailIdx, Ordering::Relaxed);
                idx.wrapping_sub(self.next_avail)
                    .saturating_add(self.resubmissions())
                    .min(self.options.size())
            }
            _ => 0,
        }
    }

    /// Returns the number of chains to resubmit. A chain that cannot be popped now does not count.
    #[inline]
    pub(super) fn resubmissions(&self) -> u16 {
        match &self.tracker {
            Some(tracker) if self.metadata.is_some() && self.broken.is_none() => tracker.resubmissions.len(),
            _ => 0,
        }
    }

    #[inline]
    pub(super) fn has_work(&self) -> bool {
        self.pending() != 0
    }

    #[inline]
    pub(super) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    pub(super) fn resume_at(&self) -> u16 {
        if self.tracker.is_some() && self.in_flight > 0 { self.published } else { self.next_avail }
    }

    #[inline]
    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    #[inline]
    pub(super) fn broken(&self) -> Option<RingError> {
        self.broken
    }
}
