//! A virtqueue with its memory, its descriptors for kicks and calls, and its counters.

mod credit;
mod iommu;
mod limited;
mod misses;
mod parts;
mod peek;
mod position;
mod show_after;
mod update;

pub use iommu::Iommu;
pub use misses::{IotlbMisses, RefusedMiss};
pub use parts::VringParts;
pub use show_after::ShowAfter;

use crate::limits::Allowance;
use crate::{Areas, Call, Counters, Kick, Stopped};
use iommu::Translation;
use kickless_memory::fault;
use kickless_memory::{Marks, Unmapped, View};
use kickless_spec::ring::EVENT_WRAP;
use kickless_virtqueue::device::{Metadata, Options, PopOutcome, Queue};
use kickless_virtqueue::{Chain, ChainId, RingError};
use show_after::Unseen;
use std::sync::Arc;
use tracing::{Span, debug, error, info, warn};

/// The device end of one virtqueue. A device pops from it and pushes to it. Its worker arms and disarms it.
#[derive(Debug)]
pub struct Vring {
    index: u16,
    queue: Queue,
    options: Options,
    areas: Areas,
    /// `Some` only behind a vIOMMU.
    translation: Option<Box<Translation>>,
    view: Arc<View>,
    kick: Option<Kick>,
    call: Option<Call>,
    err: Option<Call>,
    logged: Option<Call>,
    counters: Arc<Counters>,
    /// Set during a poll within limits.
    allowance: Option<Allowance>,
    /// Completions were pushed and are not published yet.
    pushed: bool,
    unseen: Unseen,
    /// The kernel refused a call, which must still be sent.
    has_pending_call: bool,
    /// See [`Vring::take_unfinished`].
    unfinished: bool,
    /// The driver broke the ring, or its memory is gone. It is not used again until it is set up anew.
    broken: bool,
    /// The log says that the ring is not in guest memory.
    lost: bool,
    /// Guest memory or its log has lost pages. Results that depend on them are not shown to the driver.
    damaged: bool,
    /// See [`Vring::is_resumed`].
    is_resumed: bool,
    /// See [`VringParts::is_unconfirmed`].
    is_unconfirmed: bool,
    /// The areas were mapped at least once. The first mapping shows which chains an earlier device has left.
    had_areas: bool,
    /// The value of [`fault::damages`] at the last check. It starts at 0, so that the first check also finds
    /// damage from before the ring was made.
    damages: usize,
    /// The span of log lines about this ring: the current one of the transport's thread when the ring was
    /// made.
    span: Span,
}

impl Vring {
    /// Maps the ring areas. Behind a vIOMMU, the first pop asks for their translations.
    ///
    /// # Errors
    /// An area is not in guest memory, not in one piece, or misaligned.
    pub fn new(parts: VringParts) -> Result<Self, Unmapped> {
        let mut vring = Self::unmapped(parts);
        if let Areas::User(addresses) = &vring.areas {
            let metadata = Metadata::map(&vring.view, addresses, &vring.options)?;
            vring.set_areas(metadata);
        }
        Ok(vring)
    }

    /// Makes a vring that does not touch its areas and its in-flight buffer before [`Vring::begin`], because
    /// another process still uses them. The task of such a ring does not run before that.
    pub fn unmapped(parts: VringParts) -> Self {
        let VringParts { index, options, areas, iommu, next_avail, unpublished, inflight, .. } = parts;
        let VringParts { view, is_unconfirmed, kick, call, err, logged, counters, .. } = parts;
        let mut queue = Queue::unmapped(options, next_avail, &view);
        if let Some(records) = inflight {
            queue.track(records);
        }
        queue.push_unpublished(&unpublished);
        Self {
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
            allowance: None,
            pushed: !unpublished.is_empty(),
            unseen: Unseen::new(ShowAfter::Early),
            has_pending_call: false,
            unfinished: false,
            broken: false,
            lost: false,
            damaged: false,
            is_resumed: is_resumed(&options, next_avail),
            is_unconfirmed,
            had_areas: false,
            damages: 0,
            span: Span::current(),
        }
    }

    /// Returns the span of log lines about this ring.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Uses newly mapped areas.
    fn set_areas(&mut self, metadata: Metadata) {
        self.queue.remap(metadata);
        if std::mem::replace(&mut self.had_areas, true) {
            return;
        }
        if self.may_be_beyond_base() {
            warn!(
                parent: &self.span,
                queue = self.index,
                "a packed ring continues from the front-end's index, but it was served before, and there is no in-flight \
                 buffer: if an earlier back-end was killed, the chains that it had popped are lost, and the ring may \
                 stall until its driver resets it"
            );
        }
        let requests = self.queue.resubmissions();
        if requests > 0 {
            self.counters.resubmitted.add(requests.into());
            info!(parent: &self.span, queue = self.index, requests, "requests in flight in an earlier process are done again");
        }
    }

    /// Returns the number of the ring, from 0.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns the number of entries in the ring.
    pub fn size(&self) -> u16 {
        self.options.size()
    }

    /// Returns whether this is a packed ring.
    pub fn is_packed(&self) -> bool {
        self.options.is_packed()
    }

    /// Returns whether the ring started at an index that a driver has reached, not where rings begin.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Returns whether this is a packed ring that was served before, and continues at an index that only the
    /// front-end has given ([`Queue::may_be_beyond_base`]). The index is wrong if an earlier process was
    /// killed. Behind a vIOMMU the ring is not known yet, and this returns `false`.
    ///
    /// The log has a warning of it. The answer holds until the first pop.
    pub fn may_be_beyond_base(&self) -> bool {
        self.is_unconfirmed && self.queue.may_be_beyond_base()
    }

    /// Lets a split ring continue at its used index if only the front-end has given another one, and returns
    /// the given index and the used one ([`Queue::continue_from_used`]). Behind a vIOMMU the ring is not
    /// known yet, and continues at the given index.
    ///
    /// A device that uses chains in the order in which they are available calls it before the first pop.
    pub fn continue_from_used(&mut self) -> Option<(u16, u16)> {
        if self.is_unconfirmed { self.queue.continue_from_used() } else { None }
    }

    /// Returns the present view of guest memory.
    #[inline]
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Returns the present view of guest memory, and the marks for writes to it.
    #[inline]
    pub fn memory(&mut self) -> (&Arc<View>, &mut Marks) {
        (&self.view, self.queue.marks())
    }

    /// Returns the counters of the ring.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the descriptor of kicks.
    pub fn kick(&self) -> Option<&Kick> {
        self.kick.as_ref()
    }

    /// Returns whether the ring is broken: by its driver, or because its memory was taken away.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Takes the next chain. Returns `false` if there is none. A ring that is found broken has none from then
    /// on.
    // A function of its own: within a device's loop, its variants would leave the loop no registers.
    #[inline(never)]
    pub fn pop(&mut self, chain: &mut Chain) -> bool {
        if self.broken {
            return false;
        }
        if self.translation.is_some() {
            return self.pop_translated::<false>(chain);
        }
        match self.queue.pop(&self.view, chain) {
            Ok(true) => {
                self.queue.prefetch(&self.view);
                true
            }
            Ok(false) => self.no_chain(None),
            Err(error) => self.no_chain(Some(error)),
        }
    }

    /// Handles a pop that found no chain, or an error. Always returns `false`.
    ///
    /// When memory is taken away, the ring reads as zeroes. Zeroes look like an empty or an invalid ring.
    /// This is not the driver's fault, so memory is checked first.
    #[inline(never)]
    fn no_chain(&mut self, why: Option<RingError>) -> bool {
        if self.is_intact()
            && let Some(why) = why
        {
            self.fail(&why);
        }
        false
    }

    /// Pops a chain behind a vIOMMU. A chain that lacks translations stays in the ring, and the ring waits
    /// until they have come.
    #[inline(never)]
    fn pop_translated<const CREDIT: bool>(&mut self, chain: &mut Chain) -> bool {
        if self.waits_for_translations() {
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
            Ok(PopOutcome::Chain) if translation.blocks_invalidation(chain.id.head()) => {
                let head = chain.id.head();
                if CREDIT {
                    // The task does not learn of this chain.
                    self.queue.unpop();
                }
                self.fail(&format_args!(
                    "descriptor {head} is available again, and an invalidation waits for it"
                ));
                false
            }
            Ok(PopOutcome::Chain) => {
                translation.chain_popped(chain.id.head());
                true
            }
            Ok(PopOutcome::MissingTranslation) => {
                translation.ask();
                false
            }
            Ok(PopOutcome::Unfinished) => {
                self.unfinished = true;
                false
            }
            Ok(PopOutcome::Empty) => self.no_chain(None),
            Err(error) => self.no_chain(Some(error)),
        }
    }

    /// Returns whether the last pop stopped within a chain. Then there is more to do although nothing was
    /// popped.
    #[inline]
    pub fn take_unfinished(&mut self) -> bool {
        std::mem::take(&mut self.unfinished)
    }

    /// Returns whether [`Vring::take_cost`] may return more than 0.
    #[inline]
    pub fn has_cost(&self) -> bool {
        self.translation.is_some()
    }

    /// Returns the cost of looking up translations since the last call, in the unit of
    /// [`QueueTask::poll`](crate::QueueTask::poll). Chains that were not popped, or are refused, count too.
    pub fn take_cost(&mut self) -> u32 {
        self.translation.as_mut().map_or(0, |translation| translation.take_cost())
    }

    /// Returns whether the ring waits for translations. Until they come, nothing in it can be served.
    #[inline]
    fn waits_for_translations(&self) -> bool {
        self.translation.as_ref().is_some_and(|translation| translation.is_waiting)
    }

    /// Completes this chain. The device wrote `len` bytes of its writable buffers, counted from the first.
    /// The driver sees the completion after [`Vring::publish`] at the latest; in a long batch, it may see it
    /// before.
    #[inline(always)]
    pub fn push(&mut self, id: ChainId, len: u32) {
        // A broken ring accepts this too, because chains that were popped before it broke must be pushed.
        if self.translation.is_some() {
            self.chain_returned(id);
        }
        self.queue.push(id, len);
        self.pushed = true;
        if self.unseen.add(1) {
            self.show();
        }
    }

    #[inline(never)]
    fn chain_returned(&mut self, id: ChainId) {
        if let Some(translation) = &mut self.translation {
            translation.chain_returned(id.head());
        }
    }

    /// Shows the driver the completions so far, while the batch goes on.
    #[inline(never)]
    fn show(&mut self) {
        self.unseen.shown();
        if self.is_intact() {
            self.queue.show();
        }
    }

    /// Chooses when completions of a batch are shown before [`Vring::publish`]. The default is
    /// [`ShowAfter::Early`]. Call this before the first [`Vring::push`], or right after a publish.
    pub fn show_after(&mut self, rule: ShowAfter) {
        self.unseen = Unseen::new(rule);
    }

    /// Begins a batch of a task whose worker has served `others` requests of other tasks since the last one.
    /// Then more completions are shown together. Without this call, the worker counts as serving nothing
    /// else.
    #[inline]
    pub fn begin_beside(&mut self, others: u32) {
        self.unseen.begin_beside(others);
    }

    /// Shows the driver all completions, and calls it if it wants that.
    #[inline]
    pub fn publish(&mut self) {
        if !std::mem::take(&mut self.pushed) {
            // A part of a request may be done, so its marks are committed without a completion.
            return self.commit_marks();
        }
        if !self.is_intact() {
            self.unseen.published(false);
            return self.commit_marks();
        }
        let wanted = self.queue.publish();
        self.unseen.published(wanted && self.call.is_some());
        self.commit_marks();
        match &self.call {
            Some(_) if wanted => self.send_call(),
            _ => self.counters.calls_suppressed.add(1),
        }
    }

    /// Returns whether a call must still be sent, because the kernel refused it.
    #[inline]
    pub fn has_pending_call(&self) -> bool {
        self.has_pending_call
    }

    /// Returns whether there is something to pop, as far as the driver says. Always `false` while
    /// translations are missing.
    #[inline]
    pub fn has_work(&mut self) -> bool {
        if self.broken || self.waits_for_translations() {
            return false;
        }
        let has_work = self.queue.has_work();
        if !has_work {
            // A ring that was taken away reads as zeroes, which look like an empty ring. So memory is
            // checked.
            self.is_intact();
        }
        has_work
    }

    /// Returns the number of chains that an earlier process had popped and not returned, and that can be
    /// popped again now. They count as in flight: a ring that stops pops them first. 0 in a broken ring, or
    /// in one that waits for memory or translations.
    #[inline]
    pub fn resubmissions(&self) -> u16 {
        if self.broken || self.waits_for_translations() { 0 } else { self.queue.resubmissions() }
    }

    /// Returns whether a front-end keeps the chains in flight, so that the next device takes those that this
    /// one leaves.
    pub fn has_inflight_buffer(&self) -> bool {
        self.queue.is_tracked()
    }

    /// Returns the number of chains to pop, as far as the driver says. 0 in a broken ring, or one that is not
    /// in memory. In a packed ring, only chains whose descriptors are among the first 256 count.
    pub fn pending(&self) -> u16 {
        if self.broken || self.waits_for_translations() { 0 } else { self.queue.pending() }
    }

    /// Enables kicks, then checks the ring once more. Returns whether there is work already, because the
    /// driver may send no kick for this work.
    pub fn arm(&mut self) -> bool {
        let come = !self.broken && self.queue.arm() && self.is_intact() && !self.waits_for_translations();
        self.commit_marks();
        come
    }

    /// Disables kicks.
    pub fn disarm(&mut self) {
        if !self.broken {
            self.queue.disarm();
            self.commit_marks();
        }
    }

    /// Commits all marks, and notifies the front-end of new ones.
    #[inline]
    fn commit_marks(&mut self) {
        let marks = self.queue.marks();
        marks.commit();
        if marks.take_newly_set()
            && let Some(logged) = &self.logged
        {
            logged.signal();
        }
    }

    /// Sends the pending call, if there is one.
    #[inline]
    pub fn send_pending_call(&mut self) {
        if self.has_pending_call {
            self.send_call();
        }
    }

    /// Calls the driver even if there is nothing new for it. A call that the kernel refuses is pending.
    ///
    /// When a ring starts, an earlier call may have been lost: while a ring is stopped or its interrupt
    /// masked, the front-end uses other descriptors, which may have no reader.
    pub fn send_call(&mut self) {
        let made = self.call.as_ref().map(Call::signal);
        self.has_pending_call = made == Some(false);
        self.counters.calls.add(u64::from(made == Some(true)));
    }

    /// Stops the ring and leaves it to the next device that runs it. Enables kicks, because the next device
    /// may never write that flag (without EVENT_IDX the flag keeps its value). Removes kicks from the
    /// descriptor that were served already.
    pub fn stop(&mut self) -> Stopped {
        self.unpop(u16::MAX);
        if let Some(kick) = &self.kick {
            kick.take();
        }
        self.send_pending_call();
        // Requests that are available already are left to the next device.
        let has_work = self.arm();
        let requests = self.queue.resubmissions();
        if requests > 0 {
            // The transport must not wait here: these requests may need an answer that only the transport can
            // bring.
            warn!(parent: &self.span, queue = self.index, requests, "requests in flight in an earlier process are not done yet; they are left to the next one");
        }
        let unpublished = self.queue.take_unpublished();
        // The contents of damaged memory are no valid answer to a request.
        let unpublished = if self.is_intact() { unpublished } else { Vec::new() };
        self.commit_marks();
        let left = if self.has_inflight_buffer() { self.queue.in_flight() } else { 0 };
        Stopped { next_avail: self.queue.resume_at(), has_work, left, unpublished }
    }

    /// Returns whether the guest memory that was accessed is all there. Callers check this after an access,
    /// and before they show its results to the driver or pass on what they have read. A ring that has lost
    /// memory is broken.
    #[inline]
    pub fn is_intact(&mut self) -> bool {
        let damages = fault::damages();
        if damages != self.damages {
            self.damages = damages;
            self.check_damage();
        }
        !self.damaged
    }

    #[cold]
    fn check_damage(&mut self) {
        if self.damaged {
            return;
        }
        let memory = self.view.damaged().or_else(|| self.queue.marks().damaged());
        let Some(damaged) = memory.or_else(|| self.queue.damaged()) else { return };
        self.damaged = true;
        // All rings of the device find the damage, and one of them logs it as an error.
        if damaged.is_first() {
            error!(parent: &self.span, queue = self.index, error = %damaged, "virtqueues broken; they rest until they are set up anew");
        } else {
            debug!(parent: &self.span, queue = self.index, error = %damaged, "virtqueue broken");
        }
        self.mark_broken();
    }

    /// Marks the ring as broken, logs `why` and tells the front-end. The ring rests until it is set up anew.
    pub fn fail(&mut self, why: &dyn std::fmt::Display) {
        error!(parent: &self.span, queue = self.index, error = %why, "virtqueue broken; it rests until it is set up anew");
        self.mark_broken();
    }

    fn mark_broken(&mut self) {
        self.counters.broken.add(u64::from(!self.broken));
        self.broken = true;
        if let Some(err) = &self.err {
            err.signal();
        }
    }
}

/// Returns whether a driver has reached this index: it is not the one at which rings begin.
fn is_resumed(options: &Options, next_avail: u16) -> bool {
    next_avail != if options.is_packed() { EVENT_WRAP } else { 0 }
}
