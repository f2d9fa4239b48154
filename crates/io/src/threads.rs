//! The engine of last resort: threads that make blocking calls. It works everywhere.

use crate::files::{Files, Held};
use crate::pool::{Job, Pool};
use crate::{Completion, Error, FileId, Op, Token};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A pool of threads, and the operations that are with it.
#[derive(Debug)]
pub struct Threads {
    pool: Pool,
    /// Queued, and not handed to the pool.
    staged: VecDeque<Job>,
    depth: usize,
    /// Queued and not reaped, the staged ones included.
    in_flight: usize,
    files: Files,
    done: Vec<(Held, Completion)>,
    reason: Option<Error>,
}

impl Threads {
    pub(crate) fn open(depth: u32, reason: Option<Error>) -> Result<Self, Error> {
        let depth = depth as usize;
        Ok(Self {
            pool: Pool::start(depth).map_err(Error::Threads)?,
            staged: VecDeque::with_capacity(depth),
            depth,
            in_flight: 0,
            files: Files::default(),
            done: Vec::new(),
            reason,
        })
    }

    pub(crate) fn reason(&self) -> Option<&Error> {
        self.reason.as_ref()
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.pool.event()
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
        let held = self.files.hold(op.file);
        let file = self.files.get(held).map(|(file, ..)| file.clone());
        self.staged.push_back(Job { held, file, token, op });
        self.in_flight += 1;
        Ok(())
    }

    pub(crate) fn submit(&mut self) {
        if !self.staged.is_empty() {
            self.pool.submit(&mut self.staged);
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        self.pool.reap(&mut self.done);
        self.in_flight -= self.done.len();
        for (held, completion) in self.done.drain(..) {
            self.files.release(held);
            into.push(completion);
        }
    }

    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(crate) fn room(&self) -> usize {
        self.depth - self.in_flight
    }
}
