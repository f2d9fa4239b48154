//! The device's end of a packed virtqueue. `crate::packed` has the rules for both ends.

use super::credit::{self, Credit};
use super::elements::{PopOutcome, Popped, UnpublishedUsed};
use super::inflight::Packed;
use super::metadata::{Areas, Options};
use super::single::{Direction, SingleChain};
use crate::access::Access;
use crate::address_space::AddressSpace;
use crate::descriptor::Descriptor;
use crate::packed::{self, RingPosition};
use crate::{Chain, RingError};
use kickless_memory::{Marks, View};
use kickless_spec::ring::{DESC_F_NEXT, DESC_F_WRITE, PackedDesc};
use std::sync::atomic::Ordering;

/// Number of ids. The driver may choose any (virtio 1.3, section 2.8.5). Pages of the table that are never
/// written take no memory.
const IDS: usize = 1 << 16;

/// Number of descriptors that are checked to count the pending chains. Without the limit, a driver could fill
/// a ring of 32768 and have it counted again and again.
const PENDING_DESCRIPTORS_MAX: u16 = 256;

/// Distance of a prefetched descriptor from the next chain: two cache lines of 64 bytes.
const PREFETCH_DESCRIPTORS: usize = 8;

/// Descriptors in a cache line of 64 bytes.
const DESCRIPTORS_PER_LINE: u16 = 4;

/// A packed ring's [`super::Queue`], with the same methods.
#[derive(Debug)]
pub(super) struct PackedQueue<A: Access> {
    /// The next position to pop.
    next: RingPosition,
    /// The position of the next used descriptor. Those in `unshown` are before it, those in `pushed` are not.
    used: RingPosition,
    options: Options,
    /// Chains that wait for areas. Empty while mapped.
    pushed: Vec<UnpublishedUsed>,
    /// Chains that are in the ring and that the driver does not see yet.
    unshown: Unshown,
    /// For each id, the descriptors of the chain in flight; 0 if there is none.
    lengths: Box<[u16]>,
    /// Number of chains popped and not pushed, credit included.
    in_flight: u16,
    /// Number of descriptors of those chains, of `pushed` and of `unshown`.
    taken: u16,
    /// Descriptors used since the last decision about calls. `None`: there was no decision, or they are more
    /// than a round.
    undecided: Option<u16>,
    /// Whether a decision about calls is due.
    owes_decision: bool,
    /// Whether kicks were enabled last. `None`: neither enabled nor disabled yet.
    kicks: Option<bool>,
    metadata: Option<Areas<A>>,
    /// Whether the queue has had areas.
    begun: bool,
    broken: Option<RingError>,
    /// The record of the chains in flight.
    tracker: Option<Box<Packed<A::Region>>>,
}

/// Used descriptors that are written except for the first one. The driver reads them in the order of the
/// ring, so it sees none of them.
///
/// A driver that polls reads the line of the first one all the time, and has it when the device writes there.
/// So the first one is written when it is shown. Otherwise the line would go to the device and back twice.
#[derive(Debug)]
struct Unshown {
    /// The position of the first one, and what is written there.
    first: RingPosition,
    len: u32,
    id: u16,
    flags: u16,
    /// For each, the number of descriptors of its chain.
    lengths: Vec<u16>,
    /// The sum of the lengths.
    descriptors: u16,
}

impl Unshown {
    fn new() -> Self {
        Self { first: RingPosition::FIRST, len: 0, id: 0, flags: 0, lengths: Vec::new(), descriptors: 0 }
    }

    /// Adds a chain that is used at a position, with these flags. Returns whether it is the first one, which
    /// is not written yet.
    #[inline]
    fn add(&mut self, position: RingPosition, chain: UnpublishedUsed, flags: u16) -> bool {
        let is_first = self.lengths.is_empty();
        if is_first {
            (self.first, self.len, self.id, self.flags) = (position, chain.len, chain.id, flags);
        }
        self.lengths.push(chain.descriptors);
        self.descriptors += chain.descriptors;
        is_first
    }

    /// Adds chains of one descriptor behind the first one.
    #[inline]
    fn add_singles(&mut self, count: usize) {
        self.lengths.resize(self.lengths.len() + count, 1);
        // Lossless, because a ring has at most 32768 descriptors.
        self.descriptors += count as u16;
    }

    /// Returns the position and the length of each.
    fn iter(&self, size: u16) -> impl Iterator<Item = (RingPosition, u16)> {
        self.lengths.iter().scan(self.first, move |next, &length| {
            let position = *next;
            *next = position.after(length, size);
            Some((position, length))
        })
    }

    fn clear(&mut self) {
        self.lengths.clear();
        self.descriptors = 0;
    }
}

/// Returns the flags of a used descriptor at this position, for a chain into which `len` bytes were written.
#[inline]
fn used_flags(position: RingPosition, len: u32) -> u16 {
    position.used() | if len > 0 { DESC_F_WRITE } else { 0 }
}

impl<A: Access> PackedQueue<A> {
    pub(super) fn new(options: Options, next_avail: u16) -> Self {
        let mut queue = Self {
            next: RingPosition::FIRST,
            used: RingPosition::FIRST,
            options,
            pushed: Vec::new(),
            unshown: Unshown::new(),
            lengths: vec![0; IDS].into(),
            in_flight: 0,
            taken: 0,
            undecided: None,
            owes_decision: false,
            kicks: None,
            metadata: None,
            begun: false,
            broken: None,
            tracker: None,
        };
        queue.begin_at(next_avail);
        queue
    }

    /// See [`super::Queue::begin_at`]. The index can be beyond the ring.
    pub(super) fn begin_at(&mut self, next_avail: u16) {
        let next = RingPosition::from_bits(next_avail);
        self.next = RingPosition { index: next.index % self.options.size(), ..next };
        self.used = self.next;
    }

    pub(super) fn track(&mut self, region: A::Region) {
        self.tracker = Some(Box::new(Packed::new(region)));
    }

    pub(super) fn region(&self) -> Option<&A::Region> {
        Some(self.tracker.as_ref()?.region())
    }

    pub(super) fn push_unpublished(&mut self, unpublished: &[UnpublishedUsed]) {
        let count =
            unpublished.iter().fold(0u16, |sum, unpublished| sum.saturating_add(unpublished.descriptors));
        // More than fits cannot come from a queue of this size.
        if count > self.options.size() - self.taken {
            return;
        }
        debug_assert_eq!(self.unshown.descriptors, 0, "these come before all chains of this queue");
        self.used = self.used.before(count, self.options.size());
        self.taken += count;
        self.pushed.splice(0..0, unpublished.iter().copied());
        self.put_held();
    }

    pub(super) fn take_unpublished(&mut self, marks: &mut Marks) -> Vec<UnpublishedUsed> {
        self.unmap(marks);
        std::mem::take(&mut self.pushed)
    }

    pub(super) fn unpublished(&self) -> Vec<UnpublishedUsed> {
        self.pushed.clone()
    }

    pub(super) fn remap(&mut self, metadata: Areas<A>, marks: &mut Marks) {
        assert_eq!(*metadata.options(), self.options, "areas of another shape");
        self.unmap(marks);
        let begins = !std::mem::replace(&mut self.begun, true);
        let goes_on = begins && self.begin(&metadata, marks);
        self.metadata = Some(metadata);
        self.put_held();
        if begins && !goes_on {
            self.begin_region(marks);
        }
        // Repeats the last state of kicks in the new areas.
        match self.kicks.take() {
            None => {}
            Some(true) => {
                let _ = self.arm(marks);
            }
            Some(false) => self.disarm(marks),
        }
    }

    /// Begins with a ring that is seen for the first time. Returns whether it continues with chains that
    /// another device had in flight.
    fn begin(&mut self, metadata: &Areas<A>, marks: &mut Marks) -> bool {
        let (ring, size) = (metadata.ring(), self.options.size());
        let flags = |position: RingPosition| ring.load(position.flags_at(), Ordering::Relaxed);
        let resumed = self.tracker.as_mut().map(|tracker| tracker.resume(size, flags));
        match resumed {
            None | Some(Ok(None)) => {
                if is_stale(metadata, self.next) {
                    self.broken = Some(RingError::Base { base: self.next.bits() });
                    // The record stays as it is, for a later device.
                    self.tracker = None;
                }
                false
            }
            Some(Ok(Some(resumed))) => {
                for position in (0..resumed.descriptors).map(|nth| resumed.used.after(nth, size)) {
                    if position.is_used(flags(position)) {
                        ring.store(position.flags_at(), position.available(), Ordering::Relaxed);
                        metadata.mark_descriptor(position, marks);
                    }
                }
                self.used = resumed.used;
                self.next = resumed.used.after(resumed.descriptors, size);
                self.taken = resumed.descriptors;
                // The unpublished chains are among those to resubmit.
                self.pushed = Vec::new();
                for chain in self.tracker.iter().flat_map(|tracker| tracker.resubmissions.chains()) {
                    self.lengths[usize::from(chain.id)] = chain.descs.len() as u16;
                    self.in_flight += 1;
                }
                true
            }
            Some(Err(error)) => {
                self.latch(error);
                // The record stays as it is, for a later device.
                self.tracker = None;
                false
            }
        }
    }

    /// Returns whether the ring may have been served beyond its base: see
    /// [`super::Queue::may_be_beyond_base`].
    pub(super) fn may_be_beyond_base(&self) -> bool {
        let was_served = |metadata| self.next != RingPosition::FIRST || has_later_round(metadata);
        self.tracker.is_none() && self.broken.is_none() && self.metadata.as_ref().is_some_and(was_served)
    }

    /// Begins a region that was never used. Chains that are still held from before are not in it, so they are
    /// shown first.
    fn begin_region(&mut self, marks: &mut Marks) {
        if let Some(mut tracker) = self.tracker.take() {
            self.show(marks);
            tracker.begin(self.used);
            self.tracker = Some(tracker);
        }
    }

    /// Returns the same queue for another kind of access.
    pub(super) fn moved<B: Access<Region = A::Region>>(&mut self, marks: &mut Marks) -> PackedQueue<B> {
        self.unmap(marks);
        PackedQueue {
            next: self.next,
            used: self.used,
            options: self.options,
            pushed: std::mem::take(&mut self.pushed),
            unshown: Unshown::new(),
            lengths: std::mem::take(&mut self.lengths),
            in_flight: self.in_flight,
            taken: self.taken,
            undecided: self.undecided,
            owes_decision: self.owes_decision,
            kicks: self.kicks,
            metadata: None,
            begun: self.begun,
            broken: self.broken,
            tracker: self.tracker.take(),
        }
    }

    /// Drops the areas. Takes the chains that the driver does not see out of the ring.
    pub(super) fn unmap(&mut self, marks: &mut Marks) {
        let Some(metadata) = self.metadata.take() else { return };
        for (position, descriptors) in self.unshown.iter(self.options.size()) {
            if position == self.unshown.first {
                let Unshown { len, id, .. } = self.unshown;
                self.pushed.push(UnpublishedUsed { id, len, descriptors });
                continue;
            }
            // Read back from the ring. A driver that has changed them harms only itself.
            let Descriptor { len, next: id, .. } = metadata.packed_descriptor(position);
            self.pushed.push(UnpublishedUsed { id, len, descriptors });
            // A later device shows other chains here, and the driver must not find this one behind them.
            metadata.ring().store(position.flags_at(), position.available(), Ordering::Relaxed);
            metadata.mark_descriptor(position, marks);
        }
        if self.unshown.descriptors > 0 {
            self.used = self.unshown.first;
        }
        self.unshown.clear();
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
        _: &mut Marks,
    ) -> Popped {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let Some(metadata) = &self.metadata else { return Ok(PopOutcome::Empty) };
        if self.resubmissions() > 0 {
            return self.pop_resubmission(space, chain);
        }
        // Acquire: the rest of the batch is read after the flags of its first descriptor.
        if !is_available(metadata, self.next, Ordering::Acquire) {
            return Ok(PopOutcome::Empty);
        }
        let room = self.options.size() - self.taken;
        if room == 0 {
            return Err(self.latch(RingError::Full));
        }
        let walked = chain.walk_packed(space, metadata, self.next, room);
        if space.is_missing() {
            return Ok(PopOutcome::MissingTranslation);
        }
        let count = match walked {
            Ok(count) => count,
            Err(error) => return Err(self.latch(error)),
        };
        let Some(length) = self.lengths.get_mut(usize::from(chain.id.head())).filter(|length| **length == 0)
        else {
            return Err(self.latch(RingError::DuplicateId { id: chain.id.head() }));
        };
        *length = count;
        if let Some(tracker) = &mut self.tracker {
            let (next, size) = (self.next, self.options.size());
            // The descriptors are read a second time, for the device that resubmits the chain. If they have
            // changed, that device reports an error of the ring.
            let words = (0..count).map(|nth| metadata.packed_words(next.after(nth, size)));
            tracker.popped(chain.id.head(), words);
        }
        self.next = self.next.after(count, self.options.size());
        self.in_flight += 1;
        self.taken += count;
        Ok(PopOutcome::Chain)
    }

    /// Peeks chains: see [`super::Queue::peek`].
    #[inline]
    pub(super) fn peek(&mut self, view: &View, direction: Direction, into: &mut [SingleChain]) -> usize {
        if self.in_flight != 0 || self.tracker.is_some() || self.broken.is_some() {
            return 0;
        }
        let Some(metadata) = &self.metadata else { return 0 };
        let size = self.options.size();
        let room = into.len().min((size - self.taken).into());
        // Chains up to the end of the ring have one wrap counter, and the others another one.
        let (before, behind) = into[..room].split_at_mut(room.min((size - self.next.index).into()));
        let count = Self::peek_part(metadata, view, direction, self.next, before);
        if count < before.len() || behind.is_empty() {
            return count;
        }
        let start = RingPosition { index: 0, wrap: !self.next.wrap };
        count + Self::peek_part(metadata, view, direction, start, behind)
    }

    /// Peeks chains from `first` on, which all have its wrap counter. Returns their number.
    #[inline]
    fn peek_part(
        metadata: &Areas<A>,
        view: &View,
        direction: Direction,
        first: RingPosition,
        into: &mut [SingleChain],
    ) -> usize {
        for (nth, (index, chain)) in (first.index..).zip(&mut *into).enumerate() {
            let position = RingPosition { index, ..first };
            // A receive ring is full of buffers. In a transmit ring, the driver may still write these lines.
            if direction == Direction::Writable && index.is_multiple_of(DESCRIPTORS_PER_LINE) {
                metadata.prefetch_packed_for_write(position, PREFETCH_DESCRIPTORS);
            }
            let Some(desc) = metadata.available_descriptor(position) else { return nth };
            if !chain.set(desc.next, desc, direction, view) {
                return nth;
            }
        }
        into.len()
    }

    /// Completes peeked chains: see [`super::Queue::complete_peeked`].
    #[inline]
    pub(super) fn complete_peeked(&mut self, chains: &[SingleChain]) {
        if self.metadata.is_none() {
            return;
        }
        // Lossless, because a peek finds at most as many as the ring has descriptors.
        let count = chains.len() as u16;
        match chains.last() {
            // With IN_ORDER, one used descriptor stands for all chains up to its own. The driver does not
            // learn the lengths of the others, which must be 0 then.
            Some(last) if self.options.in_order() && chains.iter().all(|chain| chain.written == 0) => {
                self.put(UnpublishedUsed { id: last.id, len: 0, descriptors: count });
            }
            _ => self.put_singles(chains),
        }
        self.next = self.next.after(count, self.options.size());
        self.taken += count;
    }

    /// Prefetches for the next pops: see [`super::Queue::prefetch`].
    #[inline]
    pub(super) fn prefetch(&self, view: &View) {
        if let Some(metadata) = &self.metadata
            && is_available(metadata, self.next, Ordering::Relaxed)
        {
            view.prefetch_for_write(View::direct(metadata.packed_descriptor(self.next).addr));
            metadata.prefetch_packed(self.next, PREFETCH_DESCRIPTORS);
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
        let Some(tracker) = &self.tracker else { return Ok(PopOutcome::Empty) };
        let Some(next) = tracker.resubmissions.chains().last() else { return Ok(PopOutcome::Empty) };
        let walked = chain.walk_copies(space, &self.options, &next.descs);
        if space.is_missing() {
            return Ok(PopOutcome::MissingTranslation);
        }
        walked.map_err(|error| self.latch(error)).map(|_| PopOutcome::Chain)
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
            credit.popped(credit::Chain {
                id,
                ring_descriptors: self.lengths.get(usize::from(id)).copied().unwrap_or(0),
            });
        }
        popped
    }

    /// Uses credit: see [`super::Queue::use_credit`].
    pub(super) fn use_credit(&mut self, credit: &mut Credit) -> bool {
        // Resumed chains are the oldest.
        if self.tracker.as_mut().is_some_and(|tracker| tracker.resubmissions.use_credit()) {
            return true;
        }
        let (Some(metadata), Some(chain)) = (&self.metadata, credit.oldest()) else { return false };
        let size = self.options.size();
        if let Some(tracker) = &mut self.tracker {
            let first = self.next.before(credit.ring_descriptors(), size);
            tracker.popped(chain.id, words_of(metadata, first, chain.ring_descriptors, size));
        }
        credit.used();
        true
    }

    /// Returns credit: see [`super::Queue::unpop`].
    pub(super) fn unpop(&mut self, credit: &mut Credit) -> Option<u16> {
        let Some(chain) = credit.unpopped() else {
            return self.tracker.as_mut()?.resubmissions.unpop().map(|chain| chain.id);
        };
        self.forget(chain.id);
        self.next = self.next.before(chain.ring_descriptors, self.options.size());
        self.taken -= chain.ring_descriptors;
        Some(chain.id)
    }

    /// Returns the number of chains in the credit that an earlier process had in flight.
    pub(super) fn resubmitted_credit(&self) -> u16 {
        self.tracker.as_ref().map_or(0, |tracker| tracker.resubmissions.credit())
    }

    #[cold]
    fn latch(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }

    /// Removes a chain from those in flight. Returns its number of descriptors, or `None` if it was not in
    /// flight.
    #[inline]
    fn forget(&mut self, id: u16) -> Option<u16> {
        let length = self.lengths.get_mut(usize::from(id))?;
        let count = std::mem::take(length);
        if count == 0 {
            return None;
        }
        self.in_flight -= 1;
        Some(count)
    }

    #[inline]
    pub(super) fn push(&mut self, id: u16, len: u32) {
        // An id that is not in flight is ignored: there is no room for it in the ring.
        let Some(descriptors) = self.forget(id) else { return };
        self.put(UnpublishedUsed { id, len, descriptors });
        if let Some(tracker) = &mut self.tracker {
            tracker.pushed(id);
        }
    }

    /// Writes the chains that waited for areas, if there are areas now.
    fn put_held(&mut self) {
        if self.metadata.is_some() {
            std::mem::take(&mut self.pushed).into_iter().for_each(|held| self.put(held));
        }
    }

    /// Writes a used descriptor, which the driver does not see yet, unless it is the first one.
    #[inline]
    fn put(&mut self, unpublished: UnpublishedUsed) {
        let Some(metadata) = &self.metadata else { return self.pushed.push(unpublished) };
        let UnpublishedUsed { id, len, descriptors } = unpublished;
        let position = self.used;
        let flags = used_flags(position, len);
        if !self.unshown.add(position, unpublished, flags) {
            metadata.set_packed_used_and_flags(position, len, id, flags);
        }
        self.used = position.after(descriptors, self.options.size());
    }

    /// Writes used descriptors as [`Self::put`] does, each for a chain of one descriptor. There are areas.
    #[inline]
    fn put_singles(&mut self, chains: &[SingleChain]) {
        let Some((first, rest)) = chains.split_first() else { return };
        // After it, there is a first one that the driver does not see.
        self.put(UnpublishedUsed { id: first.id, len: first.written, descriptors: 1 });
        let Some(metadata) = &self.metadata else { return };
        let size = self.options.size();
        // Chains up to the end of the ring have one wrap counter, and the others another one.
        let (before, behind) = rest.split_at(rest.len().min((size - self.used.index).into()));
        let start = self.used.after(before.len() as u16, size);
        // Backwards, so that the stores to the line of the first one come last, right before its flags.
        for (first, part) in [(start, behind), (self.used, before)] {
            for (nth, chain) in part.iter().enumerate().rev() {
                // Lossless, as in `complete_peeked`.
                let position = RingPosition { index: first.index + nth as u16, ..first };
                let flags = used_flags(position, chain.written);
                metadata.set_packed_used_and_flags(position, chain.written, chain.id, flags);
            }
        }
        self.used = start.after(behind.len() as u16, size);
        self.unshown.add_singles(rest.len());
    }

    #[inline]
    pub(super) fn show(&mut self, marks: &mut Marks) {
        if let Some((first, flags)) = self.take_unshown(marks)
            && let Some(metadata) = &self.metadata
        {
            // Release: the rest of the batch is written before.
            metadata.ring().store(first.flags_at(), flags, Ordering::Release);
            // The mark is committed after the store, by the decision that must follow.
            metadata.mark_descriptor(first, marks);
            if let Some(tracker) = &mut self.tracker {
                tracker.shown();
            }
        }
    }

    #[inline]
    pub(super) fn publish(&mut self, marks: &mut Marks) -> bool {
        let first = self.take_unshown(marks);
        let Some(metadata) = self.metadata.as_ref().filter(|_| self.owes_decision) else { return false };
        self.owes_decision = false;
        let count = self.undecided.replace(0);
        let (theirs, _) = metadata.events();
        let (event_idx, size) = (self.options.event_idx(), self.options.size());
        let wanted = packed::publish(metadata.ring(), theirs, event_idx, first, self.used, count, size);
        if let Some((first, _)) = first {
            metadata.mark_descriptor(first, marks);
            if let Some(tracker) = &mut self.tracker {
                tracker.shown();
            }
        }
        marks.commit_fenced();
        wanted
    }

    /// Takes the chains that the driver does not see. Writes the first descriptor without flags, marks the
    /// others, and commits the marks. Returns the first one's position and flags: storing them shows all.
    #[inline]
    fn take_unshown(&mut self, marks: &mut Marks) -> Option<(RingPosition, u16)> {
        let Some(metadata) = &self.metadata else { return None };
        let size = self.options.size();
        let Unshown { first, len, id, flags, descriptors: count, .. } = self.unshown;
        if count == 0 {
            return None;
        }
        if marks.is_on() {
            for (position, _) in self.unshown.iter(size).skip(1) {
                metadata.mark_descriptor(position, marks);
            }
            marks.commit();
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.showing(self.used);
        }
        self.taken -= count;
        self.unshown.clear();
        self.owes_decision = true;
        self.undecided =
            self.undecided.and_then(|before| before.checked_add(count)).filter(|all| *all <= size);
        metadata.set_packed_used(first, len, id);
        Some((first, flags))
    }

    #[inline]
    pub(super) fn arm(&mut self, marks: &mut Marks) -> bool {
        self.kicks = Some(true);
        match &self.metadata {
            Some(metadata) if self.broken.is_none() => {
                let (_, ours) = metadata.events();
                let event_idx = self.options.event_idx();
                let come =
                    packed::arm(metadata.ring(), ours, event_idx, self.next, RingPosition::is_available);
                metadata.mark_event(marks);
                marks.commit_fenced();
                come || self.resubmissions() > 0
            }
            _ => false,
        }
    }

    #[inline]
    pub(super) fn disarm(&mut self, marks: &mut Marks) {
        if self.kicks.replace(false) != Some(false)
            && let Some(metadata) = &self.metadata
        {
            packed::disable_notifications(metadata.events().1);
            metadata.mark_event(marks);
            marks.commit();
        }
    }

    /// Counts the last descriptors of chains, up to [`PENDING_DESCRIPTORS_MAX`] descriptors.
    pub(super) fn pending(&self) -> u16 {
        let Some(metadata) = &self.metadata else { return 0 };
        if self.broken.is_some() {
            return 0;
        }
        let positions = (0..self.options.size().min(PENDING_DESCRIPTORS_MAX))
            .map(|n| self.next.after(n, self.options.size()));
        let flags = positions
            .map(|position| (position, metadata.ring().load(position.flags_at(), Ordering::Relaxed)));
        let there = flags.take_while(|(position, flags)| position.is_available(*flags));
        let ends = there.filter(|(_, flags)| flags & DESC_F_NEXT == 0).count() as u16;
        // A chain can be longer than `PENDING_DESCRIPTORS_MAX`.
        let any = is_available(metadata, self.next, Ordering::Relaxed);
        ends.max(any.into()).saturating_add(self.resubmissions()).min(self.options.size())
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
        let is_next = |metadata| is_available(metadata, self.next, Ordering::Relaxed);
        self.broken.is_none() && self.metadata.as_ref().is_some_and(is_next) || self.resubmissions() > 0
    }

    #[inline]
    pub(super) fn next_avail(&self) -> u16 {
        self.next.bits()
    }

    pub(super) fn resume_at(&self) -> u16 {
        if self.tracker.is_some() && self.in_flight > 0 { self.used.bits() } else { self.next.bits() }
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

/// Returns whether a device has certainly served the ring beyond `next`.
///
/// A front-end that has lost its last device does not know how far that device had come, and names the last
/// base that it knows. A packed ring does not tell it (in a split ring `used.idx` does).
///
/// In a round with the wrap counter set, a used descriptor has both flags set. No descriptor after `next` can
/// look like this: in the round before, the flags were different or both clear. With the counter clear, a
/// used descriptor has both flags clear, as has memory that is all zeroes. So this checks only rounds with
/// the counter set.
///
/// A driver that makes used descriptors available again at once leaves none with both flags set: see
/// [`has_later_round`].
fn is_stale<A: Access>(metadata: &Areas<A>, next: RingPosition) -> bool {
    let flags = |index| metadata.ring().load(RingPosition { index, ..next }.flags_at(), Ordering::Relaxed);
    next.wrap && (next.index..metadata.options().size()).any(|index| next.is_used(flags(index)))
}

/// Returns whether the driver has made a descriptor available in a round with the wrap counter clear. If so,
/// a device has served the ring, because the first such round begins after a device has used descriptors.
///
/// In a round with the counter set, as the first is, an available descriptor has AVAIL alone, and a used one
/// both flags. With the counter clear, an available one has USED alone, and a used one no flag, as has memory
/// that is all zeroes.
///
/// The caller has a front-end that names the first position. That is wrong if the last device was killed. In
/// a ring whose chains have one descriptor each, [`is_stale`] or this function finds each wrong position. If
/// the counter of the true position is set, the descriptors before it are used in this round (both flags) or
/// available in the next one (USED alone). If it is clear, those from it on are used in the round before
/// (both flags) or available in this one (USED alone).
///
/// The first position is right if the ring stopped there after an even number of rounds. USED alone can then
/// be left over: a device writes only the first descriptor of a chain, and of a batch with IN_ORDER (virtio
/// 1.3, sections 2.8.6 and 2.8.8). The flags do not tell the two cases apart. In a ring of five, for example,
/// a chain of three and two of one are in flight, and the chain of three completes last. If the driver
/// replaces it by three of one, the flags are those of a full ring whose device was killed after eight
/// chains. So the caller warns and does not break the ring.
fn has_later_round<A: Access>(metadata: &Areas<A>) -> bool {
    let second = RingPosition { index: 0, wrap: false };
    (0..metadata.options().size())
        .map(|index| RingPosition { index, ..second })
        .any(|position| position.is_available(metadata.ring().load(position.flags_at(), Ordering::Relaxed)))
}

/// Reads the words of `count` descriptors, each once.
#[inline]
fn words_of<A: Access>(
    metadata: &Areas<A>,
    first: RingPosition,
    count: u16,
    size: u16,
) -> impl Iterator<Item = [u64; 2]> {
    (0..count).map(move |nth| metadata.packed_words(first.after(nth, size)))
}

#[inline]
fn is_available<A: Access>(metadata: &Areas<A>, position: RingPosition, order: Ordering) -> bool {
    position.is_available(metadata.ring().load(position.flags_at(), order))
}

const _: () = assert!(size_of::<PackedDesc>() == 16);
