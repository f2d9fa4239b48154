//! The engine: which back-end does an operation, and in which order they have their turns.

#[cfg(test)]
mod tests;

use crate::aio::Aio;
use crate::backend::Backend;
use crate::error::Error;
use crate::files::route::{Route, Routes};
use crate::files::shares::Shares;
use crate::files::{BackingFile, Held};
use crate::op::{Completion, FileId, Op, Token};
use crate::operations::Operations;
use crate::operations::in_flight::InFlight;
use crate::options::{DEPTH_MAX, EngineKind, EngineOptions, OWNERS_MAX};
use crate::threads::{self, Threads};
use crate::uring::Uring;
use kickless_memory::View;
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use tracing::debug;

/// Does operations on files, many at once. See the crate's documentation for who owns what.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    ops: Operations,
    /// io_uring or AIO, if the engine has one of them; AIO beside io_uring, from the first file on that needs
    /// it; threads. See
    /// [`backend_of`].
    backends: Vec<Backend>,
    /// Readable when one of the back-ends is.
    event: OwnedFd,
    reason: Option<Error>,
}

/// Returns the index of the back-end that does operations of this route, of so many back-ends. Threads are
/// the last.
#[inline]
fn backend_of(route: Route, count: usize) -> usize {
    match route {
        Route::NoWait | Route::Plain => 0,
        // AIO is the only one beside threads, or stands between io_uring and them.
        Route::Worker | Route::Offload => count.saturating_sub(2),
        Route::Blocking => count - 1,
    }
}

/// Returns the owner for whom a thread submits operations of this route, if one does.
#[inline]
fn submits_for(route: Route, held: Held) -> Option<u32> {
    (route == Route::Offload).then_some(held.owner())
}

impl Engine {
    /// Opens an engine for up to `depth` operations in flight, with nothing out of the ordinary.
    ///
    /// # Errors
    /// As [`Engine::open_with`].
    pub fn open(kind: EngineKind, depth: u32) -> Result<Self, Error> {
        Self::open_with(EngineOptions::new(kind, depth))
    }

    /// Opens an engine.
    ///
    /// `Auto` tries io_uring by doing an operation with it, for a seccomp filter, a sysctl or an old kernel
    /// shows itself in no other way, then Linux AIO in the same way, and falls back to threads;
    /// [`Engine::reason`] then tells why.
    ///
    /// Linux AIO has a limit that the whole system shares (`fs.aio-max-nr`): where others have used it up,
    /// the engine takes fewer operations.
    ///
    /// # Errors
    /// The one that was asked for cannot be had, or not with these options; for `Auto`, none can.
    pub fn open_with(options: EngineOptions) -> Result<Self, Error> {
        let (depth, owners) = (options.depth.clamp(1, DEPTH_MAX), options.owners.min(OWNERS_MAX));
        let options = EngineOptions { depth, owners, ..options };
        match options.kind {
            EngineKind::Uring => Self::with_uring(options),
            EngineKind::Aio => Self::with_aio(options),
            EngineKind::Threads => Self::with_threads(options),
            EngineKind::Auto => {
                let no_uring = match Self::with_uring(options) {
                    Ok(engine) => return Ok(engine),
                    Err(error) => error,
                };
                let (mut engine, reason) = match Self::with_aio(options) {
                    Ok(engine) => (engine, no_uring),
                    Err(no_aio) => {
                        let reason = Error::Neither(Box::new(no_uring), Box::new(no_aio));
                        (Self::with_threads(options)?, reason)
                    }
                };
                engine.reason = Some(reason);
                Ok(engine)
            }
        }
    }

    fn with_uring(options: EngineOptions) -> Result<Self, Error> {
        let failed = |source| Error::Uring { step: "epoll", source };
        let event = make_event().map_err(failed)?;
        let uring = Uring::open(&options, &event)?;
        let depth = options.depth as usize;
        Self::new(options, vec![Backend::Uring(Box::new(uring))], options.shares(), depth, event)
    }

    fn with_aio(options: EngineOptions) -> Result<Self, Error> {
        let failed = |source| Error::Aio { step: "epoll", source };
        let event = make_event().map_err(failed)?;
        let (aio, shares) = Aio::open_within(&options.shares(), options.completion, &event)?;
        let depth = shares.total();
        Self::new(options, vec![Backend::Aio(Box::new(aio))], shares, depth, event)
    }

    fn with_threads(options: EngineOptions) -> Result<Self, Error> {
        let event = make_event().map_err(Error::Threads)?;
        Self::new(options, Vec::new(), options.shares(), options.depth as usize, event)
    }

    /// Adds threads for an engine of this depth to the other back-ends.
    fn new(
        options: EngineOptions,
        mut backends: Vec<Backend>,
        shares: Shares,
        depth: usize,
        event: OwnedFd,
    ) -> Result<Self, Error> {
        let threads = Threads::open(depth, options.owners as usize, options.completion, &event)?;
        backends.push(Backend::Threads(Box::new(threads)));
        Ok(Self { options, ops: Operations::new(shares), backends, event, reason: None })
    }

    /// What it is, by the name that chooses it on the command line.
    pub fn name(&self) -> &'static str {
        self.backends[0].name()
    }

    /// Why `Auto` could not have a better one. For logging, once.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    /// Readable when completions may be waiting. Never read it; [`Engine::reap`] makes it unreadable. Stays
    /// the same as long as the engine lives.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Makes a file known, under an identity of this engine only. Control path, and never waits. A file that
    /// is registered twice has two identities.
    ///
    /// # Errors
    /// None at present; an engine that cannot take the file in its fast way takes it in its slow one.
    pub fn register(&mut self, file: &BackingFile) -> Result<FileId, Error> {
        let BackingFile { file, owner, facts } = file.clone();
        let mut routes = self.backends[0].routes(facts, self.options.lone_owner);
        if routes.use_aio() && !self.open_aio() {
            routes = Routes::all(Route::Blocking);
        }
        // Their indices may be given to this file.
        self.forget_gone();
        let fd = file.as_raw_fd();
        let (id, index) = self.ops.files.insert(file, owner);
        self.ops.files.set_routes(index, routes);
        if let Backend::Uring(uring) = &mut self.backends[0]
            && uring.register(index, fd)
        {
            self.ops.files.set_fixed(index);
        }
        Ok(id)
    }

    /// Returns whether there is AIO; adds it beside io_uring. Where it cannot be had threads serve.
    fn open_aio(&mut self) -> bool {
        if let [Backend::Uring(_), Backend::Threads(_)] = &self.backends[..] {
            let depth = self.options.shares().total();
            match Aio::open(depth, self.options.completion, &self.event) {
                Ok(aio) => self.backends.insert(1, Backend::Aio(Box::new(aio))),
                Err(error) => debug!(%error, "no kernel AIO for a device on which io_uring is slow"),
            }
        }
        self.backends.iter().any(|backend| matches!(backend, Backend::Aio(_)))
    }

    /// Forgets a file. What is in flight goes on, and the file stays open until that is done.
    pub fn unregister(&mut self, file: FileId) {
        self.ops.unregister(file);
        self.forget_gone();
    }

    /// Has the kernel let go of files that went.
    #[inline]
    fn forget_gone(&mut self) {
        while let Some(index) = self.ops.take_gone() {
            if let Backend::Uring(uring) = &mut self.backends[0] {
                uring.forget(index);
            }
        }
    }

    /// Whether neighbouring transfers of a file that are queued one after the other may go to the kernel as
    /// one; not unless it is asked for. Each completes by itself all the same, with what is its own. An
    /// engine of threads does every one by itself.
    pub fn merge(&mut self, file: FileId, merge: bool) {
        if !matches!(self.backends[0], Backend::Threads(_)) {
            self.ops.files.set_merge(file, merge);
        }
    }

    /// Operations on memory of this view will come: it is registered, where that is asked for
    /// ([`EngineOptions::fixed_buffers`]), and stays mapped until it is released as often as it was held.
    /// Control path.
    pub fn hold_memory(&mut self, view: &Arc<View>) {
        if let Backend::Uring(uring) = &mut self.backends[0] {
            uring.hold_memory(view);
        }
    }

    /// No more operations on memory of this view will come. Those in flight go on.
    pub fn release_memory(&mut self, view: &Arc<View>) {
        if let Backend::Uring(uring) = &mut self.backends[0] {
            uring.release_memory(view);
        }
    }

    /// Takes an operation, to be started by the next [`Engine::submit`] at the latest: of a batch for an idle
    /// engine, the first go while the others are queued. It completes exactly once, whatever happens.
    ///
    /// # Errors
    /// There is no room; the operation is handed back.
    #[inline]
    pub fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        let Self { ops, backends, .. } = self;
        if ops.files.room(op.file) == 0 {
            return Err(op);
        }
        let Some(held) = ops.files.hold(op.file) else {
            ops.fail_stray(op, token);
            return Ok(());
        };
        let route = ops.files.route(held, op.kind, op.buffers.len());
        let owner = submits_for(route, held);
        let at = backend_of(route, backends.len());
        let backend = &mut backends[at];
        let mut operation = InFlight::new(token, held, op, route == Route::NoWait);
        if ops.files.merges(held)
            && let Some(last) = backend.last(owner)
        {
            match ops.slots.join(last, operation) {
                Ok(()) => return Ok(()),
                Err(back) => operation = back,
            }
        }
        if owner.is_none() {
            // The new one holds its place by now. Merged ones count each, so there can be fewer in the kernel.
            let unfinished = ops.files.in_flight_of(held) - 1;
            backend.submit_early(ops, unfinished);
        }
        let place = ops.slots.insert(operation);
        backend.queue(place, owner);
        Ok(())
    }

    /// Starts what is queued, as one batch. May wait for threads that start a part of it, for a millisecond
    /// and not while one of them hangs. What the kernel cannot take just now stays queued
    /// ([`Engine::needs_turn`]).
    ///
    /// # Errors
    /// The engine has failed for good. What it had not started is completed with that error, and so will all
    /// be that is queued from now on; nothing is lost. Worth logging the first time.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        if self.is_idle() { Ok(()) } else { self.submit_all() }
    }

    fn submit_all(&mut self) -> io::Result<()> {
        self.ops.files.look_at_stalls();
        let mut result = Ok(());
        // Threads last: AIO has batches for them.
        for backend in &mut self.backends {
            result = result.and(backend.submit(&mut self.ops));
        }
        self.queue_again();
        result
    }

    /// Cancels the operations on a file, as far as that is possible. Control path, and never waits.
    ///
    /// Each operation still completes exactly once, at a later reap:
    /// - One that was not started completes with `ECANCELED`, and nothing of it was done.
    /// - io_uring can end one that waits for its file, such as a read from a pipe. The next
    ///   [`Engine::submit`] asks the kernel for that, and the operation completes with `ECANCELED`.
    /// - Any other completes as it would have done: nothing ends a call that a thread makes, a transfer that
    ///   AIO has started, or one that a device is doing. The engine starts no part of it again, though. It
    ///   completes with `ECANCELED` if it would have to, and then an unknown part of it was done.
    ///
    /// The kernel can miss an operation that it is just doing. Calling this again asks once more. Operations
    /// that are queued later are not cancelled, so the caller must not repeat those that complete.
    pub fn cancel(&mut self, file: FileId) {
        self.ops.cancel(file);
        // Threads first: they give batches back to AIO.
        for backend in self.backends.iter_mut().rev() {
            backend.cancel(&mut self.ops);
        }
    }

    /// To be called when an operation on this file has completed with `EAGAIN`: the engine takes no more of
    /// the file's owner until one of the owner's operations has completed, or a moment has passed. Others go
    /// on.
    pub fn stall(&mut self, file: FileId) {
        self.ops.files.stall_owner(file);
    }

    /// Returns whether the engine takes operations again since this was asked last, although none has
    /// completed.
    pub fn take_resumed(&mut self) -> bool {
        self.ops.files.take_resumed()
    }

    /// Appends what has completed. Never waits, and makes no system call while completions are at hand.
    pub fn reap(&mut self, into: &mut Vec<Completion>) {
        self.ops.reap_failed(into);
        // Threads first: they give batches back to AIO.
        for backend in self.backends.iter_mut().rev() {
            backend.reap(&mut self.ops, into);
        }
        self.queue_again();
        self.forget_gone();
    }

    /// Queues operations that are to be done again: those that were merged each by itself, and those that
    /// would have had to wait for threads.
    #[inline]
    fn queue_again(&mut self) {
        if self.ops.has_again() {
            self.queue_all_again();
        }
    }

    #[cold]
    fn queue_all_again(&mut self) {
        let Self { ops, backends, .. } = self;
        let count = backends.len();
        ops.queue_again(|place, held, route| {
            backends[backend_of(route, count)].queue(place, submits_for(route, held));
        });
        ops.queue_missed(|place| backends[count - 1].queue(place, None));
    }

    /// Whether there is something that [`Engine::event`] will not tell of: operations that are not started,
    /// completions of failed ones, or that there is room again. Whoever is about to sleep then calls `submit`
    /// and `reap` again instead (within a millisecond or so).
    #[inline]
    pub fn needs_turn(&self) -> bool {
        !self.is_idle() && self.has_unseen_work()
    }

    fn has_unseen_work(&self) -> bool {
        self.ops.files.any_stalled() || self.ops.needs_turn() || self.backends.iter().any(Backend::needs_turn)
    }

    /// Returns whether nothing is queued or in flight, and no pause is to end. A worker that polls asks in each turn.
    #[inline]
    fn is_idle(&self) -> bool {
        self.in_flight() == 0 && !self.ops.files.any_stalled()
    }

    /// Operations queued or started, and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.ops.in_flight()
    }

    /// Returns how many more operations on this file it takes now, of all that its owner shares and of the
    /// owner's reserve: none also while the kernel has no room or the owner pauses ([`Engine::stall`]),
    /// however few are in flight.
    #[inline]
    pub fn room(&self, file: FileId) -> usize {
        self.ops.files.room(file)
    }
}

/// Makes a descriptor that is readable when one of those is that are added to it.
fn make_event() -> io::Result<OwnedFd> {
    Ok(epoll::create(epoll::CreateFlags::CLOEXEC)?)
}

impl Drop for Engine {
    /// Gives up what nobody has been told of, and waits for the rest.
    fn drop(&mut self) {
        let Self { ops, backends, .. } = self;
        let mut done = Vec::new();
        loop {
            // Threads first: they tell the kernel of operations, too.
            for backend in backends.iter_mut().rev() {
                backend.end(ops, &mut done);
            }
            ops.discard_again();
            // There are no threads any more that could do these.
            while let Some(place) = ops.take_missed() {
                threads::perform(ops, place);
            }
            done.clear();
            let Some(backend) = backends.iter_mut().find(|backend| backend.in_flight() > 0) else { break };
            if backend.wait(ops, &mut done).is_err() {
                // The kernel does not say when it will have finished with these buffers.
                std::mem::forget(std::mem::take(&mut ops.slots));
                return;
            }
        }
        if let Backend::Uring(uring) = &mut backends[0] {
            uring.release_all();
        }
    }
}
