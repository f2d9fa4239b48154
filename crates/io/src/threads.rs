//! The engine of last resort: threads that make blocking calls. It works everywhere.

use crate::files::Files;
use crate::jobs::Jobs;
use crate::stall::Stall;
use crate::{Completion, Error, FileId, Op, Token};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A pool of threads, and the operations that are with it.
#[derive(Debug)]
pub struct Threads {
    jobs: Jobs,
    depth: usize,
    files: Files,
    stall: Stall,
    reason: Option<Error>,
}

impl Threads {
    pub(crate) fn open(depth: u32, reason: Option<Error>) -> Result<Self, Error> {
        let depth = depth as usize;
        let jobs = Jobs::start(depth).map_err(Error::Threads)?;
        Ok(Self { jobs, depth, files: Files::default(), stall: Stall::default(), reason })
    }

    pub(crate) fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.jobs.event()
    }

    pub(crate) fn register(&mut self, file: Arc<File>) -> FileId {
        self.files.insert(file).0
    }

    pub(crate) fn unregister(&mut self, file: FileId) {
        self.files.remove(file);
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        self.jobs.queue(op, token, &mut self.files);
        Ok(())
    }

    pub(crate) fn stall(&mut self) {
        self.stall.begin();
    }

    pub(crate) fn submit(&mut self) {
        self.stall.look();
        self.jobs.submit();
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        let before = into.len();
        self.jobs.reap(&mut self.files, |completion, _| into.push(completion));
        if into.len() > before {
            self.stall.end();
        }
    }

    pub(crate) fn needs_turn(&self) -> bool {
        self.jobs.needs_turn() || self.stall.is_on()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.jobs.in_flight()
    }

    pub(crate) fn room(&self) -> usize {
        if self.stall.is_on() { 0 } else { self.depth - self.jobs.in_flight() }
    }
}
