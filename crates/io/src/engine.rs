//! The engine: the choice of a back-end for each operation, and the order of the back-ends' turns.

#[cfg(test)]
mod tests;

use crate::aio::Aio;
use crate::backend::Backend;
use crate::error::Error;
use crate::files::route::{Route, Routes};
use crate::files::shares::Shares;
use crate::files::{BackingFile, HeldFile};
use crate::op::{Completion, FileId, Op, Token};
use crate::operations::Operations;
use crate::operations::in_flight::InFlight;
use crate::options::{DEPTH_MAX, EngineKind, EngineOptions, OWNERS_MAX};
use crate::threads::{self, Threads};
use crate::uring::Uring;
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use tracing::debug;

/// An engine, which does many operations on files at once. See the crate's documentation for ownership.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    ops: Operations,
    /// The back-ends: io_uring or AIO, if the engine has one of them; AIO beside io_uring, from the first
    /// file on that needs it; threads. See [`backend_of`].
    backends: Vec<Backend>,
    /// Readable when one of the back-ends is.
    event: OwnedFd,
    reason: Option<Error>,
}

/// Returns the index of the back-end for operations of this route. `count` is the number of back-ends.
/// Threads are the last.
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
fn submits_for(route: Route, held: HeldFile) -> Option<u32> {
    (route == Route::Offload).then_some(held.owner())
}

impl Engine {
    /// Opens an engine for up to `depth` operations in flight, with default options.
    ///
    /// # Errors
    /// As [`Engine::open_with`].
    pub fn open(kind: EngineKind, depth: u32) -> Result<Self, Error> {
        Self::open_with(EngineOptions::new(kind, depth))
    }

    /// Opens an engine.
    ///
    /// `Auto` tries io_uring by doing an operation with it, because this is the only way to detect a seccomp
    /// filter, a sysctl or an old kernel. Then it tries Linux AIO in the same way, and falls back to threads.
    /// [`Engine::reason`] has the reason then.
    ///
    /// Linux AIO has a limit that the whole system shares (`fs.aio-max-nr`). If other programs have used it
    /// up, the engine takes fewer operations.
    ///
    /// # Errors
    /// The requested engine is not available, or not with these options. For `Auto`, no engine is.
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
        let (aio, shares) = Aio::open_within(&options.shares(), &event)?;
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
        let threads = Threads::open(depth, options.owners as usize, &event)?;
        backends.push(Backend::Threads(Box::new(threads)));
        Ok(Self { options, ops: Operations::new(shares), backends, event, reason: None })
    }

    /// Returns the name that chooses this engine on the command line.
    pub fn name(&self) -> &'static str {
        self.backends[0].name()
    }

    /// Returns the reason for which `Auto` has no better engine, for the log.
    pub fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    /// Returns a descriptor that is readable when completions may be waiting. Do not read it:
    /// [`Engine::reap`] makes it unreadable. It stays the same for the engine's life.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Registers a file, under an identity of this engine only. Control path; never waits. A file that is
    /// registered twice has two identities.
    ///
    /// # Errors
    /// None at present. A file that the engine cannot take in its fast way is taken in its slow one.
    pub fn register(&mut self, file: &BackingFile) -> Result<FileId, Error> {
        let BackingFile { file, owner, facts } = file.clone();
        let mut routes = self.backends[0].routes(facts, self.options.lone_owner);
        if routes.use_aio() && !self.open_aio() {
            routes = Routes::all(Route::Blocking);
        }
        // The new file may get the index of a closed one.
        self.forget_closed();
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

    /// Returns whether there is AIO. Adds it beside io_uring if necessary. If it is not available, threads
    /// serve instead.
    fn open_aio(&mut self) -> bool {
        if let [Backend::Uring(_), Backend::Threads(_)] = &self.backends[..] {
            let depth = self.options.shares().total();
            match Aio::open(depth, &self.event) {
                Ok(aio) => self.backends.insert(1, Backend::Aio(Box::new(aio))),
                Err(error) => debug!(%error, "no kernel AIO for a device on which io_uring is slow"),
            }
        }
        self.backends.iter().any(|backend| matches!(backend, Backend::Aio(_)))
    }

    /// Unregisters a file. Its operations in flight go on, and the file stays open until they are done.
    pub fn unregister(&mut self, file: FileId) {
        self.ops.unregister(file);
        self.forget_closed();
    }

    /// Unregisters closed files from the kernel.
    #[inline]
    fn forget_closed(&mut self) {
        while let Some(index) = self.ops.take_closed() {
            if let Backend::Uring(uring) = &mut self.backends[0] {
                uring.forget(index);
            }
        }
    }

    /// Allows that contiguous transfers of a file that are queued in succession go to the kernel as one. Each
    /// still completes by itself, with its own result. An engine of threads never merges.
    pub fn merge(&mut self, file: FileId) {
        if !matches!(self.backends[0], Backend::Threads(_)) {
            self.ops.files.merge(file);
        }
    }

    /// Queues an operation. The next [`Engine::submit`] starts it at the latest. For an idle engine, the
    /// first operations of a batch start while the others are queued. It completes exactly once, in all
    /// cases.
    ///
    /// # Errors
    /// There is no room. The operation is returned. [`Engine::take_sources_with_room`] names the token's
    /// source when there is room again.
    #[inline]
    pub fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        let Self { ops, backends, .. } = self;
        if ops.files.room(op.file) == 0 {
            ops.files.wait_for_room(op.file, token.source);
            return Err(op);
        }
        let Some(held) = ops.files.hold(op.file) else {
            ops.fail_unregistered(op, token);
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
            match ops.slots.merge(last, operation) {
                Ok(()) => return Ok(()),
                Err(back) => operation = back,
            }
        }
        if owner.is_none() {
            // The new operation has its place by now. Merged operations count separately, so the kernel can
            // have fewer.
            let unfinished = ops.files.in_flight_of(held) - 1;
            backend.submit_early(ops, unfinished);
        }
        let op_slot = ops.slots.insert(operation);
        backend.queue(op_slot, owner);
        Ok(())
    }

    /// Starts the queued operations as one batch. May wait for threads that start a part of it, for a
    /// millisecond and not while one of them hangs. Operations that the kernel cannot take at present stay
    /// queued ([`Engine::needs_turn`]).
    ///
    /// # Errors
    /// The engine has failed for good. Operations that were not started complete with this error, and so will
    /// all later ones. Nothing is lost. Worth logging the first time.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        if self.is_idle() { Ok(()) } else { self.submit_all() }
    }

    fn submit_all(&mut self) -> io::Result<()> {
        self.ops.files.check_pauses();
        let mut result = Ok(());
        // Threads last, because AIO has batches for them.
        for backend in &mut self.backends {
            result = result.and(backend.submit(&mut self.ops));
        }
        self.requeue();
        result
    }

    /// Cancels the operations on a file, as far as that is possible. Control path; never waits.
    ///
    /// Each operation still completes exactly once, at a later reap:
    /// - An operation that was not started completes with `ECANCELED`, and nothing of it was done.
    /// - io_uring can end an operation that waits for its file, such as a read from a pipe. The next
    ///   [`Engine::submit`] asks the kernel for that, and the operation completes with `ECANCELED`.
    /// - Any other operation completes as usual: nothing ends a call that a thread makes, a transfer that AIO
    ///   has started, or one that a device is doing. The engine repeats no part of it, though. If it would
    ///   have to, the operation completes with `ECANCELED`, and an unknown part of it was done.
    ///
    /// The kernel can miss an operation that it is just doing. Another call asks it once more. Operations
    /// that are queued later are not cancelled, so the caller must not repeat those that complete.
    pub fn cancel(&mut self, file: FileId) {
        self.ops.cancel(file);
        // Threads first, because they return batches to AIO.
        for backend in self.backends.iter_mut().rev() {
            backend.cancel(&mut self.ops);
        }
    }

    /// Pauses the owner of a file, after an operation on the file has completed with `EAGAIN`. The engine
    /// takes no more of the owner's operations until one of them has completed, or a moment has passed. Other
    /// owners go on.
    pub fn pause(&mut self, file: FileId) {
        self.ops.files.pause_owner(file);
    }

    /// Notes that a source of tokens waits until the engine has room for operations on this file. It did not
    /// try to queue one, because [`Engine::room`] said that there is none.
    pub fn wait_for_room(&mut self, file: FileId, source: u32) {
        self.ops.files.wait_for_room(file, source);
    }

    /// Returns whether [`Engine::take_sources_with_room`] may have something.
    #[inline]
    pub fn has_sources_with_room(&self) -> bool {
        self.ops.files.has_sources_with_room()
    }

    /// Appends sources whose operations found no room, and for which there is some now. Each of them tries
    /// again before the next call. There are no more of them than the engine takes operations, and the
    /// owners of their files take turns. So one source can have to wait until others have tried. Call this
    /// after each submit and reap, as long as [`Engine::has_sources_with_room`].
    pub fn take_sources_with_room(&mut self, into: &mut Vec<u32>) {
        self.ops.files.take_sources_with_room(into);
    }

    /// Appends the operations that have completed. Never waits. Makes no system call if completions are in
    /// memory already.
    pub fn reap(&mut self, into: &mut Vec<Completion>) {
        self.ops.reap_failed(into);
        // Threads first, because they return batches to AIO.
        for backend in self.backends.iter_mut().rev() {
            backend.reap(&mut self.ops, into);
        }
        self.requeue();
        self.forget_closed();
    }

    /// Queues operations again: merged ones each by itself, and those that would have had to wait for
    /// threads.
    #[inline]
    fn requeue(&mut self) {
        if self.ops.needs_requeue() {
            self.requeue_all();
        }
    }

    #[cold]
    fn requeue_all(&mut self) {
        let Self { ops, backends, .. } = self;
        let count = backends.len();
        ops.requeue_split(|op_slot, held, route| {
            backends[backend_of(route, count)].queue(op_slot, submits_for(route, held));
        });
        ops.requeue_missed(|op_slot| backends[count - 1].queue(op_slot, None));
    }

    /// Returns whether there is something that [`Engine::event`] does not report: operations that are not
    /// started, completions of failed ones, or new room. Before it sleeps, the caller then calls `submit` and
    /// `reap` again, within a millisecond or so.
    #[inline]
    pub fn needs_turn(&self) -> bool {
        !self.is_idle() && self.has_unseen_work()
    }

    fn has_unseen_work(&self) -> bool {
        self.ops.files.any_paused() || self.ops.needs_turn() || self.backends.iter().any(Backend::needs_turn)
    }

    /// Returns whether nothing is queued or in flight, and no pause has to end. A worker that polls asks in
    /// each turn.
    #[inline]
    fn is_idle(&self) -> bool {
        self.in_flight() == 0 && !self.ops.files.any_paused()
    }

    /// Returns the number of operations that are queued or started, and not reaped.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.ops.in_flight()
    }

    /// Returns the number of operations on this file that the engine takes now. This includes the slots that
    /// all owners share and the owner's reserve. It is 0 while the kernel has no room or the owner pauses
    /// ([`Engine::pause`]).
    #[inline]
    pub fn room(&self, file: FileId) -> usize {
        self.ops.files.room(file)
    }
}

/// Makes a descriptor that is readable when one of those added to it is.
fn make_event() -> io::Result<OwnedFd> {
    Ok(epoll::create(epoll::CreateFlags::CLOEXEC)?)
}

impl Drop for Engine {
    /// Discards operations that neither the kernel nor a thread knows, and waits for the rest.
    fn drop(&mut self) {
        let Self { ops, backends, .. } = self;
        let mut done = Vec::new();
        loop {
            // Threads first, because they submit operations to the kernel, too.
            for backend in backends.iter_mut().rev() {
                backend.end(ops, &mut done);
            }
            ops.discard_split();
            // The threads that could do these are gone.
            while let Some(op_slot) = ops.take_missed() {
                threads::perform(ops, op_slot);
            }
            done.clear();
            let Some(backend) = backends.iter_mut().find(|backend| backend.in_flight() > 0) else { break };
            if backend.wait(ops, &mut done).is_err() {
                // The kernel does not report when it has finished with these buffers, so they are leaked.
                std::mem::forget(std::mem::take(&mut ops.slots));
                return;
            }
        }
        if let Backend::Uring(uring) = &mut backends[0] {
            uring.release_files();
        }
    }
}
