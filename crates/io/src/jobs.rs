//! Operations for a pool of threads, and what has come of them.

use crate::files::{Files, Gone};
use crate::pool::{Done, Job, Pool};
use crate::{Completion, Op, Token};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

/// A pool, what it is to do next, and what it has done.
#[derive(Debug)]
pub(crate) struct Jobs {
    pool: Pool,
    /// Queued, and not handed to the pool.
    staged: VecDeque<Job>,
    /// Queued and not reaped, the staged ones included.
    in_flight: usize,
    done: Vec<Done>,
}

impl Jobs {
    pub(crate) fn start(depth: usize) -> io::Result<Self> {
        Ok(Self { pool: Pool::start(depth)?, staged: VecDeque::new(), in_flight: 0, done: Vec::new() })
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.pool.event()
    }

    pub(crate) fn queue(&mut self, op: Op, token: Token, files: &mut Files) {
        let held = files.hold(op.file);
        let file = files.get(held).map(|(file, ..)| file.clone());
        self.staged.push_back(Job { held, file, token, op });
        self.in_flight += 1;
    }

    pub(crate) fn submit(&mut self) {
        if !self.staged.is_empty() {
            self.pool.submit(&mut self.staged);
        }
    }

    /// Calls `done` for what is done, with the file that went with it.
    pub(crate) fn reap(&mut self, files: &mut Files, mut done: impl FnMut(Completion, Option<Gone>)) {
        if self.in_flight == 0 {
            return;
        }
        self.pool.reap(&mut self.done);
        self.in_flight -= self.done.len();
        for Done { held, completion } in self.done.drain(..) {
            let gone = files.release(held);
            done(completion, gone);
        }
    }

    pub(crate) fn needs_turn(&self) -> bool {
        !self.staged.is_empty()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }
}
