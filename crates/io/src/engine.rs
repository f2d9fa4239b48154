//! The one face.

use crate::files::Files;
use crate::options::{DEPTH_MAX, OWNERS_MAX};
use crate::{
    Aio, BackingFile, Completion, EngineKind, EngineOptions, Error, FileId, Op, Threads, Token, Uring,
};
use kickless_memory::View;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Does operations on files, many at once. See the crate's documentation for who owns what.
#[derive(Debug)]
pub enum Engine {
    /// One io_uring.
    Uring(Box<Uring>),
    /// A Linux AIO context.
    Aio(Box<Aio>),
    /// A pool of threads.
    Threads(Box<Threads>),
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
    /// shows itself in no other way, then Linux AIO in the same way, and falls back to threads; [`Engine::reason`] then
    /// tells why.
    ///
    /// Linux AIO has a limit that the whole system shares (`fs.aio-max-nr`): where others have used it up, the engine takes
    /// fewer operations.
    ///
    /// # Errors
    /// The one that was asked for cannot be had, or not with these options; for `Auto`, none can.
    pub fn open_with(options: EngineOptions) -> Result<Self, Error> {
        let (depth, owners) = (options.depth.clamp(1, DEPTH_MAX), options.owners.min(OWNERS_MAX));
        let options = EngineOptions { depth, owners, ..options };
        let uring = || Uring::open(options).map(|uring| Self::Uring(Box::new(uring)));
        match options.kind {
            EngineKind::Uring => uring(),
            EngineKind::Aio => Ok(Self::Aio(Box::new(Aio::open(options)?))),
            EngineKind::Threads => Ok(Self::Threads(Box::new(Threads::open(options, None)?))),
            EngineKind::Auto => {
                let no_uring = match uring() {
                    Ok(engine) => return Ok(engine),
                    Err(error) => error,
                };
                match Aio::open(options) {
                    Ok(aio) => Ok(Self::Aio(Box::new(aio.instead_of(no_uring)))),
                    Err(no_aio) => {
                        let reason = Error::Neither(Box::new(no_uring), Box::new(no_aio));
                        Ok(Self::Threads(Box::new(Threads::open(options, Some(reason))?)))
                    }
                }
            }
        }
    }

    /// What it is, by the name that chooses it on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "io_uring",
            Self::Aio(_) => "aio",
            Self::Threads(_) => "threads",
        }
    }

    /// Why `Auto` could not have a better one. For logging, once.
    pub fn reason(&self) -> Option<&Error> {
        match self {
            Self::Uring(_) => None,
            Self::Aio(aio) => aio.reason(),
            Self::Threads(threads) => threads.reason(),
        }
    }

    /// Readable when completions may be waiting. Never read it; [`Engine::reap`] makes it unreadable. Stays
    /// the same as long as the engine lives.
    pub fn event(&self) -> BorrowedFd<'_> {
        match self {
            Self::Uring(uring) => uring.event(),
            Self::Aio(aio) => aio.event(),
            Self::Threads(threads) => threads.event(),
        }
    }

    /// Makes a file known, under an identity of this engine only. Control path, and never waits. A file that is registered
    /// twice has two identities.
    ///
    /// # Errors
    /// None at present; an engine that cannot take the file in its fast way takes it in its slow one.
    pub fn register(&mut self, file: &BackingFile) -> Result<FileId, Error> {
        Ok(match self {
            Self::Uring(uring) => uring.register(file),
            Self::Aio(aio) => aio.register(file),
            Self::Threads(threads) => threads.register(file),
        })
    }

    /// Forgets a file. What is in flight goes on, and the file stays open until that is done.
    pub fn unregister(&mut self, file: FileId) {
        match self {
            Self::Uring(uring) => uring.unregister(file),
            Self::Aio(aio) => aio.unregister(file),
            Self::Threads(threads) => threads.unregister(file),
        }
    }

    /// Whether neighbouring transfers of a file that are queued one after the other may go to the kernel as one; not unless it
    /// is asked for. Each completes by itself all the same, with what is its own. Threads do every one by itself.
    pub fn merge(&mut self, file: FileId, merge: bool) {
        match self {
            Self::Uring(uring) => uring.merge(file, merge),
            Self::Aio(aio) => aio.merge(file, merge),
            Self::Threads(_) => {}
        }
    }

    /// Operations on memory of this view will come: it is registered, where that is asked for ([`EngineOptions::fixed_buffers`]), and
    /// stays mapped until it is released as often as it was held. Control path.
    pub fn hold_memory(&mut self, view: &Arc<View>) {
        if let Self::Uring(uring) = self {
            uring.hold_memory(view);
        }
    }

    /// No more operations on memory of this view will come. Those in flight go on.
    pub fn release_memory(&mut self, view: &Arc<View>) {
        if let Self::Uring(uring) = self {
            uring.release_memory(view);
        }
    }

    /// Takes an operation, to be started by the next [`Engine::submit`] at the latest: of a batch for an idle engine, the first go
    /// while the others are queued. It completes exactly once, whatever happens.
    ///
    /// # Errors
    /// There is no room; the operation is handed back.
    #[inline]
    pub fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        match self {
            Self::Uring(uring) => uring.queue(op, token),
            Self::Aio(aio) => aio.queue(op, token),
            Self::Threads(threads) => threads.queue(op, token),
        }
    }

    /// Starts what is queued, as one batch. May wait for threads that start a part of it, for a millisecond and not while one of them hangs. What the kernel cannot take just now stays queued
    /// ([`Engine::needs_turn`]).
    ///
    /// # Errors
    /// The engine has failed for good. What it had not started is completed with that error, and so will all
    /// be that is queued from now on; nothing is lost. Worth logging the first time.
    pub fn submit(&mut self) -> io::Result<()> {
        self.files_mut().look_at_stalls();
        match self {
            Self::Uring(uring) => uring.submit(),
            Self::Aio(aio) => {
                aio.submit();
                Ok(())
            }
            Self::Threads(threads) => {
                threads.submit();
                Ok(())
            }
        }
    }

    /// To be called when an operation on this file has completed with `EAGAIN`: the engine takes no more of the file's owner until one of the
    /// owner's operations has completed, or a moment has passed. Others go on.
    pub fn stall(&mut self, file: FileId) {
        self.files_mut().stall_owner(file);
    }

    /// Returns whether the engine takes operations again since this was asked last, although none has completed.
    pub fn take_resumed(&mut self) -> bool {
        self.files_mut().take_resumed()
    }

    /// Appends what has completed. Never waits, and makes no system call while completions are at hand.
    pub fn reap(&mut self, into: &mut Vec<Completion>) {
        match self {
            Self::Uring(uring) => uring.reap(into),
            Self::Aio(aio) => aio.reap(into),
            Self::Threads(threads) => threads.reap(into),
        }
    }

    /// Whether there is something that [`Engine::event`] will not tell of: operations that are not started,
    /// completions of failed ones, or that there is room again. Whoever is about to sleep then calls `submit` and `reap` again instead
    /// (within a millisecond or so).
    pub fn needs_turn(&self) -> bool {
        self.files().any_stalled()
            || match self {
                Self::Uring(uring) => uring.needs_turn(),
                Self::Aio(aio) => aio.needs_turn(),
                Self::Threads(threads) => threads.needs_turn(),
            }
    }

    /// Operations queued or started, and not yet reaped.
    pub fn in_flight(&self) -> usize {
        let failed = match self {
            Self::Uring(uring) => uring.failed(),
            Self::Aio(aio) => aio.failed(),
            Self::Threads(_) => 0,
        };
        self.files().in_flight() + failed
    }

    /// Returns how many more operations on this file it takes now, of all that its owner shares and of the owner's reserve: none also while the
    /// kernel has no room or the owner pauses ([`Engine::stall`]), however few are in flight.
    #[inline]
    pub fn room(&self, file: FileId) -> usize {
        self.files().room(file)
    }

    #[inline]
    fn files(&self) -> &Files {
        match self {
            Self::Uring(uring) => &uring.ops.files,
            Self::Aio(aio) => &aio.files,
            Self::Threads(threads) => &threads.files,
        }
    }

    #[inline]
    fn files_mut(&mut self) -> &mut Files {
        match self {
            Self::Uring(uring) => &mut uring.ops.files,
            Self::Aio(aio) => &mut aio.files,
            Self::Threads(threads) => &mut threads.files,
        }
    }
}
