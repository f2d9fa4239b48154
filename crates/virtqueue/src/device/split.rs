//! The device end of a split virtqueue (virtio 1.3, section 2.7).

use super::credit::{self, Credit};
use super::elements::{Held, Popped};
use super::inflight::Split;
use super::metadata::{Areas, Options};
use super::suppress::{self, Cells, Word};
use crate::access::Access;
use crate::space::Space;
use crate::{Chain, RingError};
use kickless_memory::Marks;
use kickless_spec::ring::UsedElem;
use std::sync::atomic::Ordering;

/// How far the driver may run ahead of a stale `avail_event` before we move it on: half of the way round.
const EVENT_LAG_MAX: u16 = 1 << 15;

/// What the driver was told about kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kicks {
    /// Nothing by us yet.
    Unknown,
    On,
    Off,
}

/// See [`super::Queue`], which has the same methods.
#[derive(Debug)]
pub(super) struct Queue<A: Access> {
    /// Next entry of the avail ring to pop.
    next_avail: u16,
    /// `avail.idx` when it was read last, checked: entries before it may be popped. Equal to `next_avail`
    /// while unmapped or broken, so that the quick way of a pop needs no other question.
    avail_seen: u16,
    /// Next element of the used ring to fill; those in `held` are counted.
    next_used: u16,
    /// `used.idx` as the driver sees it.
    published: u16,
    /// The ring has been seen, and with it where the used index stands: until then it is taken for 0.
    begun: bool,
    /// Chains popped and not pushed, credit included.
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
    /// Elements that wait for a place to be written to; empty while mapped.
    held: Vec<UsedElem>,
    /// Where what is in flight is written down.
    tracker: Option<Box<Split<A::Region>>>,
}

impl<A: Access> Queue<A> {
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
            held: Vec::new(),
            tracker: None,
        }
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
        let first = self.next_used.wrapping_sub(self.held.len() as u16);
        for (i, elem) in self.held.iter().enumerate() {
            metadata.set_used_elem(first.wrapping_add(i as u16), elem);
        }
        metadata.mark_used_elems(first, self.held.len() as u16, marks);
        self.held = Vec::new();
        if self.options.event_idx() {
            // The flags mean nothing then, and are zero (virtio 1.3, section 2.7.10.2).
            metadata.store(Word::UsedFlags, 0, Ordering::Relaxed);
            metadata.mark_word(Word::UsedFlags, marks);
        }
        self.metadata = Some(metadata);
        if begins && !goes_on {
            self.begin_region(marks);
        }
        // What the driver was told last is said again where it looks now. Whether there is work already need
        // not be known here: the owner looks after this, whose fence has come before (see
        // `super::Queue::remap`).
        match std::mem::replace(&mut self.kicks, Kicks::Unknown) {
            Kicks::Unknown => {}
            Kicks::On => {
                let _ = self.arm(marks);
            }
            Kicks::Off => self.disarm(marks),
        }
    }

    /// The ring is seen for the first time, with its used index. Whether it goes on with what another device had in flight.
    fn begin(&mut self, used: u16) -> bool {
        self.next_used = self.next_used.wrapping_add(used);
        (self.published, self.decided_at) = (used, used);
        let Some(tracker) = &mut self.tracker else { return false };
        match tracker.resume(used, self.options.size()) {
            Ok(Some(in_flight)) => {
                // What is still owed to the driver is among them.
                self.held = Vec::new();
                self.next_used = used;
                self.next_avail = used.wrapping_add(in_flight);
                self.avail_seen = self.next_avail;
                self.in_flight = in_flight;
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.latch(error);
                // Nothing is written there that somebody else may have to find.
                self.tracker = None;
                false
            }
        }
    }

    /// Begins the region that nobody has begun. What is owed to the driver from before is not in it, and is shown before that.
    fn begin_region(&mut self, marks: &mut Marks) {
        if let Some(mut tracker) = self.tracker.take() {
            self.show(marks);
            tracker.begin(self.published);
            self.tracker = Some(tracker);
        }
    }

    /// The same queue, to be mapped otherwise.
    pub(super) fn moved<B: Access<Region = A::Region>>(&mut self, marks: &mut Marks) -> Queue<B> {
        self.unmap(marks);
        Queue {
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
            held: std::mem::take(&mut self.held),
            tracker: self.tracker.take(),
        }
    }

    pub(super) fn unmap(&mut self, marks: &mut Marks) {
        self.avail_seen = self.next_avail;
        let Some(metadata) = self.metadata.take() else { return };
        metadata.mark_used_elems(self.published, self.next_used.wrapping_sub(self.published), marks);
        // Read back from the ring: what the driver scribbled there in the meantime harms itself alone.
        let mut at = self.published;
        while at != self.next_used {
            self.held.push(metadata.used_elem(at));
            at = at.wrapping_add(1);
        }
    }

    pub(super) fn take_held(&mut self, marks: &mut Marks) -> Vec<Held> {
        self.unmap(marks);
        self.next_used = self.published;
        let held = std::mem::take(&mut self.held);
        // The ids were heads, of 16 bits.
        held.iter().map(|e| Held { id: e.id.get() as u16, len: e.len.get(), descriptors: 0 }).collect()
    }

    pub(super) fn push_held(&mut self, held: &[Held]) {
        for Held { id, len, .. } in held {
            self.put(&UsedElem { id: u32::from(*id).into(), len: (*len).into() });
        }
    }

    #[inline]
    pub(super) fn is_mapped(&self) -> bool {
        self.metadata.is_some()
    }

    #[inline]
    pub(super) fn pop<'v, S: Space<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
        marks: &mut Marks,
    ) -> Result<Popped, RingError> {
        if self.again() > 0 {
            return self.pop_again(space, chain);
        }
        if self.next_avail == self.avail_seen && !self.refresh(marks)? {
            return Ok(Popped::Empty);
        }
        let Some(metadata) = &self.metadata else { return Ok(Popped::Empty) };
        let head = metadata.avail_entry(self.next_avail);
        let walked = chain.walk(space, metadata, head);
        if space.is_missing() {
            // Also what is wrong is found again.
            return Ok(Popped::Missing);
        }
        if let Err(error) = walked {
            return Err(self.latch(error));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_flight += 1;
        if let Some(tracker) = &mut self.tracker {
            tracker.popped(head);
        }
        Ok(Popped::Chain)
    }

    /// Pops a chain that another device has popped before. It is in flight already.
    #[cold]
    fn pop_again<'v, S: Space<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Result<Popped, RingError> {
        let popped = self.walk_again(space, chain);
        if let (Some(tracker), Ok(Popped::Chain)) = (&mut self.tracker, popped) {
            tracker.took_again();
        }
        popped
    }

    /// Walks the next chain that another device has popped before.
    fn walk_again<'v, S: Space<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
    ) -> Result<Popped, RingError> {
        let (Some(metadata), Some(tracker)) = (&self.metadata, &self.tracker) else {
            return Ok(Popped::Empty);
        };
        let Some(head) = tracker.next_again() else { return Ok(Popped::Empty) };
        let walked = chain.walk(space, metadata, head);
        if space.is_missing() {
            return Ok(Popped::Missing);
        }
        walked.map_err(|error| self.latch(error)).map(|()| Popped::Chain)
    }

    /// See [`super::Queue::pop_credit`].
    pub(super) fn pop_credit<'v, S: Space<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
        marks: &mut Marks,
        credit: &mut Credit,
    ) -> Result<Popped, RingError> {
        if self.again() > 0 {
            let popped = self.walk_again(space, chain);
            if let (Some(tracker), Ok(Popped::Chain)) = (&mut self.tracker, popped) {
                tracker.took_credit_again();
            }
            return popped;
        }
        // What is credit is not written down.
        let tracker = self.tracker.take();
        let popped = self.pop(space, chain, marks);
        self.tracker = tracker;
        if popped == Ok(Popped::Chain) {
            let id = chain.id.head;
            credit.popped(credit::Chain { id, places: 1 });
        }
        popped
    }

    /// See [`super::Queue::use_credit`].
    pub(super) fn use_credit(&mut self, credit: &mut Credit) -> bool {
        // These are the oldest.
        if self.tracker.as_mut().is_some_and(|tracker| tracker.use_credit()) {
            return true;
        }
        let Some(chain) = credit.oldest().filter(|_| self.metadata.is_some()) else { return false };
        credit.used();
        if let Some(tracker) = &mut self.tracker {
            tracker.popped(chain.id);
        }
        true
    }

    /// See [`super::Queue::unpop`].
    pub(super) fn unpop(&mut self, credit: &mut Credit) -> Option<u16> {
        let Some(chain) = credit.unpopped() else { return self.tracker.as_mut()?.unpop() };
        self.next_avail = self.next_avail.wrapping_sub(chain.places);
        if self.metadata.is_none() || self.broken.is_some() {
            self.avail_seen = self.next_avail;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        Some(chain.id)
    }

    /// Returns how many chains of the credit an earlier process had in flight.
    pub(super) fn credit_again(&self) -> u16 {
        self.tracker.as_ref().map_or(0, |tracker| tracker.credit())
    }

    /// Looks how far the driver is. Whether there is something to pop.
    fn refresh(&mut self, marks: &mut Marks) -> Result<bool, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let Some(metadata) = &self.metadata else { return Ok(false) };
        // Acquire: entries and descriptors before this index are read after it; its partner is the driver's
        // release.
        let idx = metadata.load(Word::AvailIdx, Ordering::Acquire);
        // What was pushed and is not published yet is not the driver's to use again either.
        let taken = self.in_flight.saturating_add(self.next_used.wrapping_sub(self.published));
        let room = self.options.size().saturating_sub(taken);
        if idx.wrapping_sub(self.next_avail) > room {
            return Err(self.latch(RingError::AvailIndex { idx, next: self.next_avail, room }));
        }
        self.avail_seen = idx;
        if self.options.event_idx()
            && self.kicks == Kicks::Off
            && idx.wrapping_sub(self.kick_event) >= EVENT_LAG_MAX
        {
            self.kick_event = self.passed(idx);
            suppress::quiet(metadata, true, self.kick_event);
            metadata.mark_word(Word::AvailEvent, marks);
            marks.commit();
        }
        Ok(idx != self.next_avail)
    }

    /// An event index that a driver which has published `idx` has passed, even if its last batch is as long
    /// as the ring (or 16384, in a larger ring) and it has not looked yet.
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
            None => self.held.push(*elem),
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline]
    pub(super) fn show(&mut self, marks: &mut Marks) {
        // A store of what is there already would still take the cache line from a driver that looks at it.
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
            // To be committed after the store: by the decision that has to follow.
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
                come || self.again() > 0
            }
            _ => false,
        }
    }

    #[inline]
    pub(super) fn disarm(&mut self, marks: &mut Marks) {
        // With EVENT_IDX, the event index of the last time it was armed has been passed, or is about to be.
        if self.kicks == Kicks::Off || (self.options.event_idx() && self.kicks == Kicks::On) {
            self.kicks = Kicks::Off;
            return;
        }
        self.kicks = Kicks::Off;
        // The index that the driver is known to have published, which `next_avail` may have gone back from.
        self.kick_event = self.passed(self.avail_seen);
        if let Some(metadata) = &self.metadata {
            let event_idx = self.options.event_idx();
            suppress::quiet(metadata, event_idx, self.kick_event);
            metadata.mark_word(if event_idx { Word::AvailEvent } else { Word::UsedFlags }, marks);
            marks.commit();
        }
    }

    #[inline]
    pub(super) fn pending(&self) -> u16 {
        match &self.metadata {
            Some(metadata) if self.broken.is_none() => {
                let idx = metadata.load(Word::AvailIdx, Ordering::Relaxed);
                idx.wrapping_sub(self.next_avail).saturating_add(self.again()).min(self.options.size())
            }
            _ => 0,
        }
    }

    /// A chain that cannot be popped now is none.
    #[inline]
    pub(super) fn again(&self) -> u16 {
        match &self.tracker {
            Some(tracker) if self.metadata.is_some() && self.broken.is_none() => tracker.again(),
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
