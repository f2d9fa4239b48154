//! A virtqueue with what hangs on it: memory, descriptors for kicks and calls, counters.

mod credit;
mod iommu;
mod misses;
mod parts;
mod show_after;
mod update;

pub use iommu::Iommu;
pub use misses::{Misses, Refusal};
pub use parts::VringParts;
pub use show_after::ShowAfter;

use crate::{Areas, Call, Counters, Kick, Stopped};
use iommu::Translation;
use kickless_memory::fault;
use kickless_memory::{Marks, Unmapped, View};
use kickless_spec::ring::EVENT_WRAP;
use kickless_virtqueue::device::{Metadata, Options, Popped, Queue};
use kickless_virtqueue::{Chain, ChainId, RingError};
use std::sync::Arc;
use tracing::{Span, debug, error, info, warn};

/// The device end of one virtqueue. A device pops from it and pushes to it; its worker arms and disarms it.
#[derive(Debug)]
pub struct Vring {
    index: u16,
    queue: Queue,
    options: Options,
    areas: Areas,
    /// Behind a vIOMMU only.
    translation: Option<Box<Translation>>,
    view: Arc<View>,
    kick: Option<Kick>,
    call: Option<Call>,
    err: Option<Call>,
    logged: Option<Call>,
    counters: Arc<Counters>,
    /// Something was pushed and is not published yet.
    pushed: bool,
    /// How much of it the driver cannot have seen.
    unseen: u32,
    /// How much that may come to.
    unseen_max: u32,
    show_after: ShowAfter,
    /// Calls are not made at once, but when the worker says so.
    defers_calls: bool,
    /// The driver is owed a call.
    has_pending_call: bool,
    /// See [`Vring::take_unfinished`].
    unfinished: bool,
    /// Latched: the driver broke the ring, and nothing in it can be trusted until it is set up anew.
    broken: bool,
    /// It was found not to be in guest memory, and that was logged.
    lost: bool,
    /// Guest memory or its log has lost pages: what was made of it is not shown to anybody.
    damaged: bool,
    /// See [`Vring::resumes_unrecorded`].
    resumes_unrecorded: bool,
    /// It has had its areas, and with them what an earlier device had left to do.
    begun: bool,
    /// [`fault::damages`] when guest memory was found to be sound. It may have been damaged before the ring was made.
    damages: usize,
    /// What the log's lines about this ring belong to: whatever was current when it was made, on the transport's thread.
    span: Span,
}

impl Vring {
    /// Maps the ring areas; behind a vIOMMU they are asked for when the ring is first looked at.
    ///
    /// # Errors
    /// An area is not, or not in one piece, in guest memory, or is misaligned.
    pub fn new(parts: VringParts) -> Result<Self, Unmapped> {
        let VringParts { index, options, areas, iommu, next_avail, is_unconfirmed, held, inflight, .. } = parts;
        let VringParts { view, kick, call, err, logged, counters, .. } = parts;
        let resumes_unrecorded =
            options.is_packed() && inflight.is_none() && is_unconfirmed && next_avail != EVENT_WRAP;
        let mut queue = Queue::unmapped(options, next_avail, &view);
        if let Some(records) = inflight {
            queue.track(records);
        }
        queue.push_held(&held);
        let metadata = match &areas {
            Areas::User(addresses) => Some(Metadata::map(&view, addresses, &options)?),
            Areas::Iova(_) => None,
        };
        let mut vring = Self {
            index,
            queue,
            options,
            areas,
            translation: iommu.map(|iommu| Box::new(Translation::new(iommu, index))),
            view,
            kick,
            call,
            err,
            logged,
            counters,
            pushed: !held.is_empty(),
            unseen: 0,
            unseen_max: ShowAfter::EARLY.first,
            show_after: ShowAfter::EARLY,
            defers_calls: false,
            has_pending_call: false,
            unfinished: false,
            broken: false,
            lost: false,
            damaged: false,
            resumes_unrecorded,
            begun: false,
            damages: 0,
            span: Span::current(),
        };
        if let Some(metadata) = metadata {
            vring.take_areas(metadata);
        }
        Ok(vring)
    }

    /// The span of log lines about this ring.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The ring lies there now.
    fn take_areas(&mut self, metadata: Metadata) {
        self.queue.remap(metadata);
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let requests = self.queue.again();
        if requests > 0 {
            self.counters.resubmitted.add(requests.into());
            info!(parent: &self.span, queue = self.index, requests, "what was in flight in an earlier process is done again");
        }
    }

    /// Its number, from 0.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Entries in the ring.
    pub fn size(&self) -> u16 {
        self.options.size()
    }

    /// Returns whether it is a packed ring that goes on from another place than the first, as only the front-end said, without
    /// an in-flight buffer. The place is wrong if an earlier process was killed.
    pub fn resumes_unrecorded(&self) -> bool {
        self.resumes_unrecorded
    }

    /// Guest memory as it is now.
    #[inline]
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Guest memory as it is now, and where to mark what is written to it.
    #[inline]
    pub fn memory(&mut self) -> (&Arc<View>, &mut Marks) {
        (&self.view, self.queue.marks())
    }

    /// Where to count.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Where kicks come from.
    pub fn kick(&self) -> Option<&Kick> {
        self.kick.as_ref()
    }

    /// Whether it is broken: by its driver, or because its memory was taken away.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Takes the next chain; `false` where there is none. A ring that turns out broken has none from then on.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> bool {
        if self.broken {
            return false;
        }
        if self.translation.is_some() {
            return self.pop_translated::<false>(chain);
        }
        match self.queue.pop(&self.view, chain) {
            Ok(true) => true,
            Ok(false) => self.came_to_nothing(None),
            Err(error) => self.came_to_nothing(Some(error)),
        }
    }

    /// A look at the ring that found no chain in it, or why there can be none: always `false`. Zeroes in the place of a ring that was
    /// taken away are empty, or make no sense, and that is not the driver's fault.
    fn came_to_nothing(&mut self, why: Option<RingError>) -> bool {
        if self.is_sound()
            && let Some(why) = why
        {
            self.fail(&why);
        }
        false
    }

    /// [`Vring::pop`] behind a vIOMMU. A chain whose translations are not all there stays in the ring, and the ring rests until
    /// they have come.
    fn pop_translated<const CREDIT: bool>(&mut self, chain: &mut Chain) -> bool {
        if self.is_standing() {
            return false;
        }
        if !self.queue.is_mapped() {
            self.remap();
        }
        let Some(translation) = &mut self.translation else { return false };
        let (view, tlb) = (&self.view, &mut translation.tlb);
        let popped = match CREDIT {
            true => self.queue.pop_credit_translated(view, tlb, chain),
            false => self.queue.pop_translated(view, tlb, chain),
        };
        match popped {
            Ok(Popped::Chain) if translation.is_held_up(chain.id.head) => {
                let head = chain.id.head;
                if CREDIT {
                    // The task does not hear of it.
                    self.queue.unpop();
                }
                self.fail(&format_args!(
                    "descriptor {head} is available again, and an invalidation waits for it"
                ));
                false
            }
            Ok(Popped::Chain) => {
                translation.took(chain.id.head);
                true
            }
            Ok(Popped::Missing) => {
                translation.ask();
                false
            }
            Ok(Popped::Unfinished) => {
                self.unfinished = true;
                false
            }
            Ok(Popped::Empty) => self.came_to_nothing(None),
            Err(error) => self.came_to_nothing(Some(error)),
        }
    }

    /// Whether the last pop found a chain that it did not come to the end of, so that there is more to do though nothing was popped.
    #[inline]
    pub fn take_unfinished(&mut self) -> bool {
        std::mem::take(&mut self.unfinished)
    }

    /// Whether [`Vring::take_cost`] may be something.
    #[inline]
    pub fn has_cost(&self) -> bool {
        self.translation.is_some()
    }

    /// Returns what looking for translations has cost since this was called last, in the measure of
    /// [`QueueTask::poll`](crate::QueueTask::poll); also for chains that were not popped, or are refused.
    pub fn take_cost(&mut self) -> u32 {
        self.translation.as_mut().map_or(0, |translation| translation.take_cost())
    }

    /// Whether it waits for translations: whatever is in it, there is nothing to do.
    #[inline]
    fn is_standing(&self) -> bool {
        self.translation.as_ref().is_some_and(|translation| translation.standing)
    }

    /// Completes this chain; the device wrote `len` bytes of its writable buffers, counted from the
    /// first. The driver can count on seeing it after [`Vring::publish`]; in a long batch, it may see it before.
    #[inline]
    pub fn push(&mut self, id: ChainId, len: u32) {
        // Into a broken ring too: what was popped before it broke is still owed.
        if let Some(translation) = &mut self.translation {
            translation.gave_back(id.head);
        }
        self.queue.push(id, len);
        self.pushed = true;
        self.unseen += 1;
        if self.unseen == self.unseen_max {
            self.show();
        }
    }

    /// Shows the driver what was pushed, while the batch goes on.
    #[inline]
    fn show(&mut self) {
        self.unseen = 0;
        self.unseen_max = self.show_after.then;
        if self.is_sound() {
            self.queue.show();
        }
    }

    /// Chooses when completions of a batch are shown before [`Vring::publish`]: [`ShowAfter::EARLY`] unless this is called. To be
    /// called before the first [`Vring::push`], or right after a publish.
    pub fn show_after(&mut self, rule: ShowAfter) {
        self.show_after = rule;
        self.unseen_max = rule.first;
    }

    /// Shows the driver all that was pushed, and calls it if it wants that.
    #[inline]
    pub fn publish(&mut self) {
        if !std::mem::take(&mut self.pushed) {
            // A part of a request may be done.
            return self.settle_marks();
        }
        self.unseen = 0;
        self.unseen_max = self.show_after.first;
        if !self.is_sound() {
            return self.settle_marks();
        }
        let wanted = self.queue.publish();
        self.settle_marks();
        match &self.call {
            Some(_) if wanted && self.defers_calls => self.has_pending_call = true,
            Some(_) if wanted => self.send_call(),
            _ => self.counters.calls_suppressed.add(1),
        }
    }

    /// From now on calls that the driver wants are owed until the worker makes them with [`Vring::send_pending_call`], so that one call tells
    /// of several batches.
    pub fn defer_calls(&mut self, later: bool) {
        self.defers_calls = later;
    }

    /// Returns whether the driver is owed a call: one that was put off, or that the kernel refused.
    #[inline]
    pub fn has_pending_call(&self) -> bool {
        self.has_pending_call
    }

    /// Whether there is something to pop, as far as the driver says; nothing while its translations are missing.
    #[inline]
    pub fn has_work(&mut self) -> bool {
        if self.broken || self.is_standing() {
            return false;
        }
        let has_work = self.queue.has_work();
        if !has_work {
            // In zeroes in the place of a ring there is nothing either.
            self.is_sound();
        }
        has_work
    }

    /// Chains that an earlier process had popped and not given back, and that can be popped again now. They are in flight: a ring that
    /// stops pops them all the same. None in a broken ring, or in one that waits for memory or translations.
    #[inline]
    pub fn resubmissions(&self) -> u16 {
        if self.broken || self.is_standing() { 0 } else { self.queue.again() }
    }

    /// How many chains there are to pop, as far as the driver says; none in a broken ring, or one that is not in memory. In a
    /// packed ring those count whose descriptors are among the first 256.
    pub fn pending(&self) -> u16 {
        if self.broken || self.is_standing() { 0 } else { self.queue.pending() }
    }

    /// Asks the driver for kicks, then looks once more; `true`: there is work already, and the kick for it may never
    /// come.
    pub fn arm(&mut self) -> bool {
        let come = !self.broken && self.queue.arm() && self.is_sound() && !self.is_standing();
        self.settle_marks();
        come
    }

    /// Tells the driver that no kicks are needed.
    pub fn disarm(&mut self) {
        if !self.broken {
            self.queue.disarm();
            self.settle_marks();
        }
    }

    /// Sees to it that no mark waits, and that the front-end hears of those that are new.
    #[inline]
    fn settle_marks(&mut self) {
        let marks = self.queue.marks();
        marks.commit();
        if marks.take_newly_set()
            && let Some(logged) = &self.logged
        {
            logged.signal();
        }
    }

    /// Makes the call that the driver is owed, if it is.
    #[inline]
    pub fn send_pending_call(&mut self) {
        if self.has_pending_call {
            self.send_call();
        }
    }

    /// Calls the driver without having anything new for it: a call that was made before may have gone where nobody
    /// looks, for while a ring is stopped, or its interrupt masked, the front-end has other descriptors in place. A call that the kernel
    /// refuses is owed.
    pub fn send_call(&mut self) {
        let made = self.call.as_ref().map(Call::signal);
        self.has_pending_call = made == Some(false);
        self.counters.calls.add(u64::from(made == Some(true)));
    }

    /// Leaves the ring for whoever runs it next. Kicks are enabled, since who comes next may be one that never touches them
    /// (without EVENT_IDX the flag stays as it was left), and those that were served already are taken out of the descriptor.
    pub fn stop(&mut self) -> Stopped {
        self.unpop(u16::MAX);
        if let Some(kick) = &self.kick {
            kick.take();
        }
        self.send_pending_call();
        // Requests that are there already are left to the next one.
        let has_work = self.arm();
        let left = self.queue.again();
        if left > 0 {
            // The transport cannot be let wait for what only it can bring.
            warn!(parent: &self.span, queue = self.index, requests = left, "what was in flight in an earlier process is not done yet; it is left to the next one");
        }
        let held = self.queue.take_held();
        // What a request has left in damaged memory is no answer to it.
        let held = if self.is_sound() { held } else { Vec::new() };
        self.settle_marks();
        Stopped { next_avail: self.queue.next_avail(), has_work, held }
    }

    /// Whether guest memory is all there, as far as it has been touched: to be asked after that, and before the driver is told of
    /// what came of it. A ring that has lost some is broken.
    #[inline]
    fn is_sound(&mut self) -> bool {
        let damages = fault::damages();
        if damages != self.damages {
            self.damages = damages;
            self.look_for_damage();
        }
        !self.damaged
    }

    #[cold]
    fn look_for_damage(&mut self) {
        if self.damaged {
            return;
        }
        let memory = self.view.damaged().or_else(|| self.queue.marks().damaged());
        let Some(damaged) = memory.or_else(|| self.queue.damaged()) else { return };
        self.damaged = true;
        // All rings of the device find it, and one tells.
        if damaged.is_first() {
            error!(parent: &self.span, queue = self.index, error = %damaged, "virtqueues broken; they rest until they are set up anew");
        } else {
            debug!(parent: &self.span, queue = self.index, error = %damaged, "virtqueue broken");
        }
        self.latch();
    }

    /// Latches that this ring cannot be served, logs `why` and tells the front-end. It rests until it is set up anew.
    pub fn fail(&mut self, why: &dyn std::fmt::Display) {
        error!(parent: &self.span, queue = self.index, error = %why, "virtqueue broken; it rests until it is set up anew");
        self.latch();
    }

    fn latch(&mut self) {
        self.broken = true;
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}
