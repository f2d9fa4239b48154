//! The queue of either ring format, and its order of completions.

use super::credit::Credit;
use super::elements::{Held, Popped};
use super::metadata::{Kind, Metadata, Options};
use super::order::Order;
use super::{packed, split};
use crate::progress::Progress;
use crate::space::{Space, Translating};
use crate::{Chain, ChainId, RingError};
use kickless_memory::fault::Damaged;
use kickless_memory::{Area, Marks, Records, Scattered, Tlb, View};

/// The device end of one virtqueue, of either ring format.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    marks: Marks,
    /// With IN_ORDER only.
    order: Option<Box<Order>>,
    /// Behind a vIOMMU only: the chain that is popped next.
    progress: Option<Box<Progress>>,
    /// Of a queue that has had credit only: the chains of it that came out of the ring.
    credit: Option<Box<Credit>>,
}

#[derive(Debug)]
enum Ring {
    Split(split::Queue<Area>),
    Packed(packed::Queue<Area>),
    // Apart, so that the usual ones need not ask at each access how their areas are reached.
    SplitScattered(Box<split::Queue<Scattered>>),
    PackedScattered(Box<packed::Queue<Scattered>>),
}

/// Keeps code that hardly ever runs out of the way of what does all the time.
#[cold]
#[inline(never)]
fn apart<R>(code: impl FnOnce() -> R) -> R {
    code()
}

/// Runs a method of whichever ring it is.
macro_rules! forward {
    ($queue:expr, $method:ident $(, $arg:expr)*) => {
        match &$queue.ring {
            Ring::Split(queue) => queue.$method($($arg),*),
            Ring::Packed(queue) => queue.$method($($arg),*),
            Ring::SplitScattered(queue) => apart(|| queue.$method($($arg),*)),
            Ring::PackedScattered(queue) => apart(|| queue.$method($($arg),*)),
        }
    };
    (mut $queue:expr, $method:ident $(, $arg:expr)*) => {
        match &mut $queue.ring {
            Ring::Split(queue) => queue.$method($($arg),*),
            Ring::Packed(queue) => queue.$method($($arg),*),
            Ring::SplitScattered(queue) => apart(|| queue.$method($($arg),*)),
            Ring::PackedScattered(queue) => apart(|| queue.$method($($arg),*)),
        }
    };
}

impl Queue {
    /// A queue that goes on at entry `next_avail` of its avail ring, or at the place with this index and, in bit 15, this wrap
    /// counter of a packed one. A split ring says itself how far it is used; a packed one is used up to the same place.
    ///
    /// Kicks are neither enabled nor disabled yet: begin with [`Queue::arm`] or [`Queue::disarm`], and look
    /// at the ring without waiting for a kick.
    ///
    /// # Panics
    /// `metadata` was mapped for other options.
    pub fn new(options: Options, metadata: Metadata, next_avail: u16) -> Self {
        Self::logged(options, metadata, next_avail, &View::default())
    }

    /// [`Queue::new`] of a queue that is logged from the beginning, if this view has a log.
    ///
    /// # Panics
    /// As [`Queue::new`].
    pub fn logged(options: Options, metadata: Metadata, next_avail: u16, view: &View) -> Self {
        let mut queue = Self::unmapped(options, next_avail, view);
        queue.remap(metadata);
        queue
    }

    /// As [`Queue::logged`], but where its areas are comes later, with [`Queue::remap`].
    pub fn unmapped(options: Options, next_avail: u16, view: &View) -> Self {
        let mut marks = Marks::off();
        marks.set_view(view);
        let ring = match options.is_packed() {
            true => Ring::Packed(packed::Queue::new(options, next_avail)),
            false => Ring::Split(split::Queue::new(options, next_avail)),
        };
        Self { ring, marks, order: options.in_order().then(Box::default), progress: None, credit: None }
    }

    /// From the beginning: what is in flight is written down there, and if a device before this one did so too, what it left
    /// comes out of [`Queue::pop`] again before anything else does (vhost-user, *Inflight I/O tracking*). Then that, and not what the
    /// queue was made with, says where it goes on. The region is as long as it has entries, which are no fewer than the queue's
    /// descriptors. Its argument is in the source, `device/inflight`.
    ///
    /// To be called once, before the queue first has areas.
    pub fn track(&mut self, records: Records) {
        forward!(mut self, track, records);
    }

    /// Chains that an earlier device popped and that can be popped again now; until they are, the queue counts them as in
    /// flight.
    #[inline]
    pub fn again(&self) -> u16 {
        forward!(self, again)
    }

    /// Whether the memory that [`Queue::track`] was given has lost pages.
    pub fn damaged(&self) -> Option<Damaged> {
        forward!(self, region)?.damaged()
    }

    /// The marks of all that is written for this queue: what its owner writes into buffers goes here, what it writes into the
    /// ring is there already. They are in the log before the driver is shown what they belong to.
    #[inline]
    pub fn marks(&mut self) -> &mut Marks {
        &mut self.marks
    }

    /// Takes the areas where they are now; the indices stay. The queue is to be looked at as if kicked, and
    /// published.
    ///
    /// # Panics
    /// `metadata` was mapped for other options.
    pub fn remap(&mut self, metadata: Metadata) {
        let marks = &mut self.marks;
        match (&mut self.ring, metadata.0) {
            (Ring::Split(queue), Kind::Mapped(areas)) => queue.remap(areas, marks),
            (Ring::Packed(queue), Kind::Mapped(areas)) => queue.remap(areas, marks),
            (Ring::SplitScattered(queue), Kind::Scattered(areas)) => queue.remap(areas, marks),
            (Ring::PackedScattered(queue), Kind::Scattered(areas)) => queue.remap(areas, marks),
            (Ring::Split(queue), Kind::Scattered(areas)) => {
                let mut queue = Box::new(queue.moved(marks));
                queue.remap(areas, marks);
                self.ring = Ring::SplitScattered(queue);
            }
            (Ring::Packed(queue), Kind::Scattered(areas)) => {
                let mut queue = Box::new(queue.moved(marks));
                queue.remap(areas, marks);
                self.ring = Ring::PackedScattered(queue);
            }
            (Ring::SplitScattered(queue), Kind::Mapped(areas)) => {
                let mut queue = queue.moved(marks);
                queue.remap(areas, marks);
                self.ring = Ring::Split(queue);
            }
            (Ring::PackedScattered(queue), Kind::Mapped(areas)) => {
                let mut queue = queue.moved(marks);
                queue.remap(areas, marks);
                self.ring = Ring::Packed(queue);
            }
        }
        self.marks.commit();
    }

    /// Lets go of the areas; the indices stay, and what is pushed meanwhile is held until [`Queue::remap`].
    pub fn unmap(&mut self) {
        forward!(mut self, unmap, &mut self.marks);
        self.marks.commit();
    }

    /// Unmaps the queue for good. What was pushed and never published: nothing unless its areas were away, for the
    /// owner has published everything else.
    pub fn take_held(&mut self) -> Vec<Held> {
        let held = forward!(mut self, take_held, &mut self.marks);
        self.marks.commit();
        held
    }

    /// Pushes what an earlier queue over the same ring held. To be published.
    pub fn push_held(&mut self, held: &[Held]) {
        forward!(mut self, push_held, held);
    }

    /// Whether it has areas.
    #[inline]
    pub fn is_mapped(&self) -> bool {
        forward!(self, is_mapped)
    }

    /// Takes the next chain, if there is one.
    ///
    /// # Errors
    /// The driver broke the ring. No chain was taken, and every later call gives the same error.
    #[inline]
    pub fn pop(&mut self, view: &View, chain: &mut Chain) -> Result<bool, RingError> {
        // Nothing is ever missing there.
        Ok(self.pop_in(&mut { view }, chain)? == Popped::Chain)
    }

    /// Takes the next chain of a driver behind a vIOMMU, if there is one, all of whose translations are there: of its buffers,
    /// and of its indirect table. What is missing is in the cache to be read ([`Tlb::missing`]), and so is what the chain uses
    /// ([`Tlb::ranges`]); the chain stays in the ring then. Buffers that lead nowhere are no guest memory.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_translated(
        &mut self,
        view: &View,
        tlb: &mut Tlb,
        chain: &mut Chain,
    ) -> Result<Popped, RingError> {
        self.translating(view, tlb, |queue, space| queue.pop_in(space, chain))
    }

    /// Pops a chain while its addresses are translated.
    #[inline(always)]
    fn translating(
        &mut self,
        view: &View,
        tlb: &mut Tlb,
        pop: impl FnOnce(&mut Self, &mut Translating<'_, '_>) -> Result<Popped, RingError>,
    ) -> Result<Popped, RingError> {
        tlb.begin();
        let mut progress = self.progress.take().unwrap_or_default();
        progress.begin();
        let popped = pop(self, &mut Translating { view, tlb, progress: &mut progress });
        let unfinished = progress.is_unfinished();
        self.progress = Some(progress);
        match popped {
            Ok(Popped::Missing) if unfinished => Ok(Popped::Unfinished),
            popped => popped,
        }
    }

    #[inline(always)]
    fn pop_in<'v, S: Space<'v>>(&mut self, space: &mut S, chain: &mut Chain) -> Result<Popped, RingError> {
        debug_assert_eq!(self.credit(), 0, "a queue with credit pops nothing else");
        let popped = forward!(mut self, pop, space, chain, &mut self.marks);
        if let (Some(order), Ok(Popped::Chain)) = (&mut self.order, popped) {
            chain.id.position = order.popped(chain.id.head);
        }
        popped
    }

    /// Takes the next chain, if there is one, as credit: it is not in flight, and may go back by [`Queue::unpop`].
    ///
    /// A queue that has credit pops nothing else. The argument of all three is in the source, `device/credit.rs`.
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_credit(&mut self, view: &View, chain: &mut Chain) -> Result<bool, RingError> {
        Ok(self.pop_credit_in(&mut { view }, chain)? == Popped::Chain)
    }

    /// [`Queue::pop_credit`] of a driver behind a vIOMMU, as [`Queue::pop_translated`].
    ///
    /// # Errors
    /// As [`Queue::pop`].
    #[inline]
    pub fn pop_credit_translated(
        &mut self,
        view: &View,
        tlb: &mut Tlb,
        chain: &mut Chain,
    ) -> Result<Popped, RingError> {
        self.translating(view, tlb, |queue, space| queue.pop_credit_in(space, chain))
    }

    #[inline(always)]
    fn pop_credit_in<'v, S: Space<'v>>(
        &mut self,
        space: &mut S,
        chain: &mut Chain,
    ) -> Result<Popped, RingError> {
        let credit = &mut **self.credit.get_or_insert_default();
        let popped = forward!(mut self, pop_credit, space, chain, &mut self.marks, credit);
        if let (Some(order), Ok(Popped::Chain)) = (&mut self.order, popped) {
            chain.id.position = order.popped(chain.id.head);
        }
        popped
    }

    /// Moves the oldest chain of the credit to those in flight, which the device has to push. Records it in the in-flight
    /// buffer, if the queue has one. The device calls this before it writes to the chain's buffers.
    ///
    /// Returns `false`, and changes nothing, if the queue has no credit or its areas are away. A device that keeps a list of
    /// its credit then empties the list, and calls [`Queue::unpop`] until the queue has no credit either.
    #[must_use]
    pub fn use_credit(&mut self) -> bool {
        let Some(credit) = self.credit.as_deref_mut() else { return false };
        forward!(mut self, use_credit, credit)
    }

    /// Returns the newest chain of the credit to the ring, and tells its head or id. The next pop yields it again, as the driver has it in its
    /// ring then. `None`: there is no credit.
    ///
    /// Its [`ChainId`] means nothing from now on. The ring has something to pop, for which no kick comes.
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
        self.credit.as_ref().map_or(0, |credit| credit.len() + forward!(self, credit_again))
    }

    /// Gives a popped chain back to the driver, `len` bytes of whose writable part were written. The driver
    /// does not see it before [`Queue::publish`].
    #[inline]
    pub fn push(&mut self, id: ChainId, len: u32) {
        let Some(order) = &mut self.order else { return forward!(mut self, push, id.head, len) };
        order.pushed(id, len);
        while let Some((head, len)) = self.order.as_mut().and_then(|order| order.next()) {
            forward!(mut self, push, head, len);
        }
    }

    /// Gives chains back to the driver that it has to see together, each with the bytes written to it: a frame in several buffers.
    /// The driver sees none of them before all (see the [module](super)).
    ///
    /// They follow one another in the order of their pops.
    #[inline]
    pub fn push_group(&mut self, group: &[(ChainId, u32)]) {
        debug_assert!(
            self.order.is_none()
                || group.windows(2).all(|two| two[1].0.position == two[0].0.position.wrapping_add(1)),
            "other chains lie between those of a group"
        );
        for (id, len) in group {
            self.push(*id, *len);
        }
    }

    /// Shows a driver that is looking what was pushed; one that sleeps is not called. [`Queue::publish`] has to follow, which
    /// decides about that too.
    #[inline]
    pub fn show(&mut self) {
        forward!(mut self, show, &mut self.marks);
    }

    /// Shows the driver what was pushed. Whether it wants to be called for it; a call that this asks for must
    /// be made.
    ///
    /// Once a batch: it costs a full fence. The first time the driver is called if in doubt, since what the
    /// last device told it is not known.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let wanted = forward!(mut self, publish, &mut self.marks);
        // Of a ring that shows nothing now, because it is not in memory, the buffers are all the same.
        self.marks.commit();
        wanted
    }

    /// Enables kicks. Whether there is something to pop already: its kick may never come, so it must be
    /// popped now.
    #[inline]
    #[must_use]
    pub fn arm(&mut self) -> bool {
        forward!(mut self, arm, &mut self.marks)
    }

    /// Disables kicks. One that is under way can still come.
    #[inline]
    pub fn disarm(&mut self) {
        forward!(mut self, disarm, &mut self.marks);
    }

    /// How many chains there are to pop, as far as the driver says; at most the size. In a packed ring
    /// these are counted by their descriptors, of which the first 256 are looked at.
    pub fn pending(&self) -> u16 {
        forward!(self, pending)
    }

    /// Whether there is something to pop. A broken ring has nothing.
    #[inline]
    pub fn has_work(&self) -> bool {
        forward!(self, has_work)
    }

    /// The first entry of the avail ring that was not popped: where a later queue goes on.
    #[inline]
    pub fn next_avail(&self) -> u16 {
        forward!(self, next_avail)
    }

    /// Descriptors in the table.
    #[inline]
    pub fn size(&self) -> u16 {
        self.options().size()
    }

    /// The queue's shape.
    #[inline]
    pub fn options(&self) -> &Options {
        forward!(self, options)
    }

    /// Chains that were popped and not yet pushed, without the credit.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        let popped = forward!(self, in_flight);
        self.credit.as_ref().map_or(popped, |credit| popped.saturating_sub(credit.len()))
    }

    /// What the driver did to the ring, if it did.
    #[inline]
    pub fn broken(&self) -> Option<RingError> {
        forward!(self, broken)
    }
}
