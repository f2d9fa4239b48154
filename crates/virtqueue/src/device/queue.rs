//! The queue of either ring format, and its order of completions.

use super::credit::Credit;
use super::elements::{PopOutcome, Popped, UnpublishedUsed};
use super::metadata::{Kind, Metadata, Options};
use super::order::Order;
use super::packed::PackedQueue;
use super::single::{Direction, SingleChain};
use super::split::SplitQueue;
use crate::address_space::{AddressSpace, Translating};
use crate::progress::Progress;
use crate::{Chain, ChainId, RingError};
use kickless_memory::fault::Damaged;
use kickless_memory::{Area, Marks, Records, Scattered, Tlb, View};

/// The device's end of one virtqueue, of either ring format.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    marks: Marks,
    /// With IN_ORDER only.
    order: Option<Box<Order>>,
    /// Behind a vIOMMU only: the chain that is popped next.
    progress: Option<Box<Progress>>,
    /// The credit that came from the ring. Only in a queue that has had credit.
    credit: Option<Box<Credit>>,
}

#[derive(Debug)]
// A tag of its own, because one that is hidden in a field takes several instructions to read.
#[repr(u8)]
enum Ring {
    Split(SplitQueue<Area>),
    Packed(PackedQueue<Area>),
    // A separate variant, so that the usual ones need not check at each access how to reach their areas.
    Scattered(Box<ScatteredRing>),
}

/// A ring with an area that is not contiguous.
#[derive(Debug)]
enum ScatteredRing {
    Split(SplitQueue<Scattered>),
    Packed(PackedQueue<Scattered>),
}

/// Keeps rarely executed code out of the frequent code.
#[cold]
#[inline(never)]
fn apart<R>(code: impl FnOnce() -> R) -> R {
    code()
}

/// Calls a method of the ring's format. A scattered ring is looked for last, so that the others cost two
/// comparisons instead of a jump through a table.
macro_rules! forward {
    ($queue:expr, $method:ident $(, $arg:expr)*) => {
        match &$queue.ring {
            Ring::Split(queue) => queue.$method($($arg),*),
            Ring::Packed(queue) => queue.$method($($arg),*),
            Ring::Scattered(queue) => apart(|| match &**queue {
                ScatteredRing::Split(queue) => queue.$method($($arg),*),
                ScatteredRing::Packed(queue) => queue.$method($($arg),*),
            }),
        }
    };
    (mut $queue:expr, $method:ident $(, $arg:expr)*) => {
        match &mut $queue.ring {
            Ring::Split(queue) => queue.$method($($arg),*),
            Ring::Packed(queue) => queue.$method($($arg),*),
            Ring::Scattered(queue) => apart(|| match &mut **queue {
                ScatteredRing::Split(queue) => queue.$method($($arg),*),
                ScatteredRing::Packed(queue) => queue.$method($($arg),*),
            }),
        }
    };
}

impl Queue {
    /// Makes a queue that begins at entry `next_avail` of its avail ring. In a packed ring, that is a
    /// position: an index, and in bit 15 a wrap counter. The used index of a split ring is read from the
    /// ring. A packed ring is taken to be used up to the same position.
    ///
    /// Kicks are neither enabled nor disabled yet. Begin with [`Queue::arm`] or [`Queue::disarm`], and look
    /// at the ring without waiting for a kick.
    ///
    /// # Panics
    /// Panics if `metadata` was mapped for other options.
    pub fn new(options: Options, metadata: Metadata, next_avail: u16) -> Self {
        Self::logged(options, metadata, next_avail, &View::default())
    }

    /// Makes a queue as [`Queue::new`] does, which is logged from the beginning if this view has a log.
    ///
    /// # Panics
    /// As [`Queue::new`].
    pub fn logged(options: Options, metadata: Metadata, next_avail: u16, view: &View) -> Self {
        let mut queue = Self::unmapped(options, next_avail, view);
        queue.remap(metadata);
        queue
    }

    /// Makes a queue as [`Queue::logged`] does, without areas. [`Queue::remap`] adds them later.
    pub fn unmapped(options: Options, next_avail: u16, view: &View) -> Self {
        let mut marks = Marks::off();
        marks.set_view(view);
        let ring = match options.is_packed() {
            true => Ring::Packed(PackedQueue::new(options, next_avail)),
            false => Ring::Split(SplitQueue::new(options, next_avail)),
        };
        Self { ring, marks, order: options.in_order().then(Box::default), progress: None, credit: None }
    }

    /// Changes the entry at which a queue of [`Queue::unmapped`] begins, before it has areas.
    pub fn begin_at(&mut self, next_avail: u16) {
        debug_assert!(!self.is_mapped(), "the queue has begun");
        forward!(mut self, begin_at, next_avail);
    }

    /// Records the chains in flight in `records` from now on (vhost-user, *Inflight I/O tracking*).
    ///
    /// If an earlier device did so too, [`Queue::pop`] first returns the chains that it left in flight. The
    /// buffer then decides where the queue begins, and not the index of [`Queue::new`]. The region must have
    /// at least as many entries as the queue has descriptors. The argument is in the source,
    /// `device/inflight`.
    ///
    /// Call it once, before the queue first has areas.
    pub fn track(&mut self, records: Records) {
        forward!(mut self, track, records);
    }

    /// Lets a split ring continue at its used index if this is not the index of [`Queue::new`], and returns
    /// both. The two are equal in a ring of which nothing is in flight, because each available entry has one
    /// used element. Where they differ, the given index is wrong, and its entries were used before.
    ///
    /// Does nothing in a packed ring, which has no used index in memory, in a ring without areas, and in one
    /// that records its chains in flight. Only for a device that uses chains in the order in which they are
    /// available: the used index of another one does not say which chains an earlier device has left.
    ///
    /// Call it before the first pop.
    pub fn continue_from_used(&mut self) -> Option<(u16, u16)> {
        match &mut self.ring {
            Ring::Split(queue) => queue.continue_from_used(),
            Ring::Scattered(queue) => match &mut **queue {
                ScatteredRing::Split(queue) => queue.continue_from_used(),
                ScatteredRing::Packed(_) => None,
            },
            Ring::Packed(_) => None,
        }
    }

    /// Returns whether a device has served a packed ring before, and its flags do not show for certain how
    /// far: it continues at another position than the first, or its flags show a later round. A front-end
    /// that has lost this device may have named the position, and then the ring may stall. Or the ring
    /// stopped there.
    ///
    /// Returns `false` for a ring that is found broken, without areas, or with a record of its chains in
    /// flight.
    ///
    /// Call it before the first pop.
    pub fn may_be_beyond_base(&self) -> bool {
        match &self.ring {
            Ring::Packed(queue) => queue.may_be_beyond_base(),
            Ring::Scattered(queue) => match &**queue {
                ScatteredRing::Packed(queue) => queue.may_be_beyond_base(),
                ScatteredRing::Split(_) => false,
            },
            Ring::Split(_) => false,
        }
    }

    /// Returns the number of chains that [`Queue::pop`] returns now because an earlier device left them in
    /// flight ([`Queue::track`]). The queue counts them as in flight.
    #[inline]
    pub fn resubmissions(&self) -> u16 {
        forward!(self, resubmissions)
    }

    /// Returns whether the chains in flight are recorded ([`Queue::track`]).
    pub fn is_tracked(&self) -> bool {
        forward!(self, region).is_some()
    }

    /// Returns the damage if the memory of [`Queue::track`] has lost pages.
    pub fn damaged(&self) -> Option<Damaged> {
        forward!(self, region)?.damaged()
    }

    /// Returns the marks of everything that is written for this queue. The owner of the queue adds its writes
    /// to buffers, and the queue adds its writes to the ring. Writes to buffers and used elements are in the
    /// log before the driver is shown the completion.
    #[inline]
    pub fn marks(&mut self) -> &mut Marks {
        &mut self.marks
    }

    /// Sets the areas. The indices stay. Afterwards the owner must look at the queue as if kicked, and
    /// publish.
    ///
    /// # Panics
    /// Panics if `metadata` was mapped for other options.
    pub fn remap(&mut self, metadata: Metadata) {
        let marks = &mut self.marks;
        match (&mut self.ring, metadata.0) {
            (Ring::Split(queue), Kind::Mapped(areas)) => queue.remap(areas, marks),
            (Ring::Packed(queue), Kind::Mapped(areas)) => queue.remap(areas, marks),
            (Ring::Split(queue), Kind::Scattered(areas)) => {
                let mut queue = queue.moved(marks);
                queue.remap(areas, marks);
                self.ring = Ring::Scattered(Box::new(ScatteredRing::Split(queue)));
            }
            (Ring::Packed(queue), Kind::Scattered(areas)) => {
                let mut queue = queue.moved(marks);
                queue.remap(areas, marks);
                self.ring = Ring::Scattered(Box::new(ScatteredRing::Packed(queue)));
            }
            (Ring::Scattered(scattered), Kind::Scattered(areas)) => match &mut **scattered {
                ScatteredRing::Split(queue) => queue.remap(areas, marks),
                ScatteredRing::Packed(queue) => queue.remap(areas, marks),
            },
            (Ring::Scattered(scattered), Kind::Mapped(areas)) => {
                self.ring = match &mut **scattered {
                    ScatteredRing::Split(queue) => {
                        let mut queue = queue.moved(marks);
                        queue.remap(areas, marks);
                        Ring::Split(queue)
                    }
                    ScatteredRing::Packed(queue) => {
                        let mut queue = queue.moved(marks);
                        queue.remap(areas, marks);
                        Ring::Packed(queue)
                    }
                }
            }
        }
        self.marks.commit();
    }

    /// Drops the areas. The indices stay, and chains that are pushed are held until [`Queue::remap`].
    pub fn unmap(&mut self) {
        forward!(mut self, unmap, &mut self.marks);
        self.marks.commit();
    }

    /// Unmaps the queue for the last time. Returns the used elements that were pushed and never published.
    /// There are none unless the areas were away, because the owner has published everything else.
    pub fn take_unpublished(&mut self) -> Vec<UnpublishedUsed> {
        let unpublished = forward!(mut self, take_unpublished, &mut self.marks);
        self.marks.commit();
        unpublished
    }

    /// Returns a copy of the used elements that wait for areas. There are none while the queue has areas.
    pub fn unpublished(&self) -> Vec<UnpublishedUsed> {
        forward!(self, unpublished)
    }

    /// Pushes the used elements that an earlier queue of the same ring returned by
    /// [`Queue::take_unpublished`]. The caller must publish them. Ignores them if they do not fit into this
    /// ring.
    pub fn push_unpublished(&mut self, unpublished: &[UnpublishedUsed]) {
        forward!(mut self, push_unpublished, unpublished);
    }

    /// Returns whether the queue has areas.
    #[inline]
    pub fn is_mapped(&self) -> bool {
        forward!(self, is_mapped)
    }

    /// Pops the next chain, if there is one.
    ///
    /// # Errors
    /// The driver broke the ring's rules. No chain was popped, and every later call returns the same error.
    #[inline]
    pub fn pop(&mut self, view: &View, chain: &mut Chain) -> Result<bool, RingError> {
        // Without a vIOMMU, no translation is missing.
        Ok(self.pop_in(&mut { view }, chain)? == PopOutcome::Chain)
    }

    /// Prefetches for the next pops what the driver has written on another core: the first buffer of a later
    /// chain, which is the header of a request or an indirect table, and descriptors behind it. A header is
    /// asked for to write to it, because its status is usually on the same line.
    ///
    /// Call it after a pop, and then serve the popped chain. The lines arrive meanwhile. It takes addresses
    /// for guest-physical ones, so it gains nothing behind a vIOMMU.
    #[inline]
    pub fn prefetch(&self, view: &View) {
        match &self.ring {
            Ring::Split(queue) => queue.prefetch(view),
            Ring::Packed(queue) => queue.prefetch(view),
            // Each address of a scattered ring has to be looked up.
            Ring::Scattered(_) => {}
        }
    }

    /// Reads the next chains into `into`, and returns their number, if each has a single descriptor in this
    /// direction. They stay in the ring. Prefetches their buffers.
    ///
    /// Stops at the first other chain, and returns 0 if nothing can be peeked. Then [`Queue::pop`] decides.
    /// The argument is in the source, `device/single.rs`.
    #[inline]
    pub fn peek(&mut self, view: &View, direction: Direction, into: &mut [SingleChain]) -> usize {
        match &mut self.ring {
            Ring::Split(queue) => queue.peek(view, direction, into, &mut self.marks),
            Ring::Packed(queue) => queue.peek(view, direction, into),
            Ring::Scattered(_) => 0,
        }
    }

    /// Pops the chains that the last [`Queue::peek`] has read, or the first ones of them, and pushes them
    /// with the number of bytes written to each. The following ones may be completed by another call. The
    /// caller has done nothing else with the queue in between but show the completions. Does nothing if the
    /// areas have gone.
    #[inline]
    pub fn complete_peeked(&mut self, chains: &[SingleChain]) {
        match &mut self.ring {
            Ring::Split(queue) => queue.complete_peeked(chains),
            Ring::Packed(queue) => queue.complete_peeked(chains),
            // Nothing was peeked.
            Ring::Scattered(_) => {}
        }
    }

    /// Pops the next chain of a driver behind a vIOMMU, if there is one and all translations of its buffers
    /// and its indirect table are known.
    ///
    /// Otherwise the chain stays in the ring, and the cache has the missing translations ([`Tlb::missing`]).
    /// The cache also has the ranges that the chain uses ([`Tlb::ranges`]). Unmapped buffers get an address
    /// outside of guest memory.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_translated(&mut self, view: &View, tlb: &mut Tlb, chain: &mut Chain) -> Popped {
        self.translating(view, tlb, |queue, space| queue.pop_in(space, chain))
    }

    /// Pops a chain and translates its addresses.
    #[inline(always)]
    fn translating(
        &mut self,
        view: &View,
        tlb: &mut Tlb,
        pop: impl FnOnce(&mut Self, &mut Translating<'_, '_>) -> Popped,
    ) -> Popped {
        tlb.begin();
        let mut progress = self.progress.take().unwrap_or_default();
        progress.begin();
        let popped = pop(self, &mut Translating { view, tlb, progress: &mut progress });
        let unfinished = progress.is_unfinished();
        self.progress = Some(progress);
        match popped {
            Ok(PopOutcome::MissingTranslation) if unfinished => Ok(PopOutcome::Unfinished),
            popped => popped,
        }
    }

    #[inline(always)]
    fn pop_in<'v, S: AddressSpace<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Popped {
        debug_assert_eq!(self.credit(), 0, "a queue with credit pops nothing else");
        let popped = forward!(mut self, pop, space, chain, &mut self.marks);
        if let (Some(order), Ok(PopOutcome::Chain)) = (&mut self.order, popped) {
            chain.id = order.popped(chain.id.head());
        }
        popped
    }

    /// Pops the next chain, if there is one, as credit. It is not in flight, and may go back by
    /// [`Queue::unpop`].
    ///
    /// A queue that has credit pops nothing else. The argument is in the source, `device/credit.rs`.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_credit(&mut self, view: &View, chain: &mut Chain) -> Result<bool, RingError> {
        Ok(self.pop_credit_in(&mut { view }, chain)? == PopOutcome::Chain)
    }

    /// Pops credit as [`Queue::pop_credit`] does, for a driver behind a vIOMMU as in
    /// [`Queue::pop_translated`].
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_credit_translated(&mut self, view: &View, tlb: &mut Tlb, chain: &mut Chain) -> Popped {
        self.translating(view, tlb, |queue, space| queue.pop_credit_in(space, chain))
    }

    #[inline(always)]
    fn pop_credit_in<'v, S: AddressSpace<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Popped {
        let credit = &mut **self.credit.get_or_insert_default();
        let popped = forward!(mut self, pop_credit, space, chain, &mut self.marks, credit);
        if let (Some(order), Ok(PopOutcome::Chain)) = (&mut self.order, popped) {
            chain.id = order.popped(chain.id.head());
        }
        popped
    }

    /// Moves the oldest chain of the credit to those in flight, which the device has to push. Records it in
    /// the in-flight buffer, if the queue has one. The device calls this before it writes to the chain's
    /// buffers.
    ///
    /// Returns `false`, and changes nothing, if the queue has no credit or its areas are away. A device that
    /// keeps a list of its credit then empties the list, and calls [`Queue::unpop`] until the queue has no
    /// credit either.
    #[must_use]
    pub fn use_credit(&mut self) -> bool {
        let Some(credit) = self.credit.as_deref_mut() else { return false };
        forward!(mut self, use_credit, credit)
    }

    /// Returns the newest chain of the credit to the ring. Returns its head or id, or `None` if there is no
    /// credit. The next pop reads the chain again from the driver's ring.
    ///
    /// Its [`ChainId`] is invalid from now on. The ring has something to pop, for which no kick comes.
    pub fn unpop(&mut self) -> Option<u16> {
        let credit = self.credit.as_deref_mut()?;
        let head = forward!(mut self, unpop, credit)?;
        if let Some(order) = &mut self.order {
            order.unpopped();
        }
        Some(head)
    }

    /// Returns the number of chains in the credit.
    pub fn credit(&self) -> u16 {
        self.credit.as_ref().map_or(0, |credit| credit.len() + forward!(self, resubmitted_credit))
    }

    /// Gives a popped chain back to the driver. `len` bytes of its writable part were written. The driver
    /// does not see it before [`Queue::publish`].
    #[inline]
    pub fn push(&mut self, id: ChainId, len: u32) {
        if self.order.is_some() {
            return self.push_in_order(id, len);
        }
        forward!(mut self, push, id.head(), len);
    }

    #[inline(never)]
    fn push_in_order(&mut self, id: ChainId, len: u32) {
        if let Some(order) = &mut self.order {
            order.pushed(id, len);
        }
        while let Some((head, len)) = self.order.as_mut().and_then(|order| order.next()) {
            forward!(mut self, push, head, len);
        }
    }

    /// Gives chains back to the driver that it must see together, such as a frame in several buffers. Each
    /// has the number of bytes written to it. The driver sees all of them at once (see the [module](super)).
    ///
    /// They must be consecutive in the order of pops.
    #[inline]
    pub fn push_group(&mut self, group: &[(ChainId, u32)]) {
        debug_assert!(
            self.order.is_none()
                || group.windows(2).all(|two| two[1].0.position() == two[0].0.position().wrapping_add(1)),
            "other chains lie between those of a group"
        );
        for (id, len) in group {
            self.push(*id, *len);
        }
    }

    /// Shows the pushed chains to a driver that polls. A driver that sleeps is not called. [`Queue::publish`]
    /// must follow, which decides about that too.
    #[inline]
    pub fn show(&mut self) {
        forward!(mut self, show, &mut self.marks);
    }

    /// Shows the pushed chains to the driver. Returns whether the driver wants a call. The caller must make
    /// that call.
    ///
    /// Call it once a batch, because it costs a full fence. The first time, the driver is called if in doubt,
    /// because the last device's decision is unknown.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let wanted = forward!(mut self, publish, &mut self.marks);
        // A queue without areas shows nothing, but its owner may have written to buffers.
        self.marks.commit();
        wanted
    }

    /// Enables kicks. Returns whether there is something to pop already. It must be popped now, because its
    /// kick may never come.
    #[inline]
    #[must_use]
    pub fn arm(&mut self) -> bool {
        forward!(mut self, arm, &mut self.marks)
    }

    /// Disables kicks. A kick may still be on its way.
    #[inline]
    pub fn disarm(&mut self) {
        forward!(mut self, disarm, &mut self.marks);
    }

    /// Returns the number of chains to pop, according to the driver; at most the size. In a packed ring,
    /// only the first 256 descriptors are counted.
    pub fn pending(&self) -> u16 {
        forward!(self, pending)
    }

    /// Returns whether there is something to pop. A broken ring has nothing.
    #[inline]
    pub fn has_work(&self) -> bool {
        forward!(self, has_work)
    }

    /// Returns the first entry of the avail ring that is not popped, where a later queue begins.
    #[inline]
    pub fn next_avail(&self) -> u16 {
        forward!(self, next_avail)
    }

    /// Returns the index for the next queue of this ring, once this one is unmapped for the last time: that
    /// of [`Queue::next_avail`], or the used index if chains in flight are left in the in-flight buffer.
    ///
    /// A queue that begins with such a buffer finds both indices itself, from the used index and the buffer.
    /// Other devices (DPDK, Yandex's library) count the chains in the buffer from the given index, which is
    /// the used one where a device was killed. So this is the index that all of them understand.
    pub fn resume_at(&self) -> u16 {
        forward!(self, resume_at)
    }

    /// Returns the number of descriptors in the table.
    #[inline]
    pub fn size(&self) -> u16 {
        self.options().size()
    }

    /// Returns the queue's shape.
    #[inline]
    pub fn options(&self) -> &Options {
        forward!(self, options)
    }

    /// Returns the number of chains that were popped and not yet pushed, without the credit.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        let popped = forward!(self, in_flight);
        self.credit.as_ref().map_or(popped, |credit| popped.saturating_sub(credit.len()))
    }

    /// Returns the error with which the driver broke the ring, if it did.
    #[inline]
    pub fn broken(&self) -> Option<RingError> {
        forward!(self, broken)
    }
}
