//! The engine of last resort: threads that make blocking calls. It works everywhere.

pub(crate) mod jobs;
pub(crate) mod pool;
pub(crate) mod submit_wait;

use crate::files::Files;
use crate::threads::jobs::Jobs;
use crate::{BackingFile, Completion, EngineOptions, Error, FileId, Op, Token};
use std::os::fd::BorrowedFd;

/// A pool of threads, and the operations that are with it.
#[derive(Debug)]
pub struct Threads {
    jobs: Jobs,
    pub(crate) files: Files,
    reason: Option<Error>,
}

impl Threads {
    pub(crate) fn open(options: EngineOptions, reason: Option<Error>) -> Result<Self, Error> {
        let jobs = Jobs::start(options.depth as usize, options.owners as usize).map_err(Error::Threads)?;
        Ok(Self { jobs, files: Files::new(options.shares()), reason })
    }

    pub(crate) fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.jobs.event()
    }

    pub(crate) fn register(&mut self, backing: &BackingFile) -> FileId {
        let BackingFile { file, owner, .. } = backing.clone();
        self.files.insert(file, owner).0
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        self.files.remove(file);
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.files.room(op.file) == 0 {
            return Err(op);
        }
        let held = self.files.hold(op.file);
        self.jobs.queue(held, token, op, &self.files);
        Ok(())
    }

    pub(crate) fn submit(&mut self) {
        self.jobs.submit();
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        // Nothing else is given to these threads.
        let _ = self.jobs.reap(&mut self.files, |completion, _| into.push(completion));
    }

    pub(crate) fn needs_turn(&self) -> bool {
        self.jobs.needs_turn()
    }
}
