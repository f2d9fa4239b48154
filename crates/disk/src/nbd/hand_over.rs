//! The jobs of the thread when the disk passes from one owner to the next.
//!
//! The disk is *given up* when its writes are at the server and flushed. Then it has no connection. It is
//! *taken over* by a new connection, because another client may have written since the last one was made: a
//! server without `NBD_FLAG_CAN_MULTI_CONN` may keep what an older connection has read.

use super::client::{CONNECT_WITHIN, Client, RECONNECT_EVERY};
use super::job::{ActiveJob, Answer, Caller, Job};
use super::wire::{self, Problem};
use crate::IoError;
use crate::offload::{AnswerSlot, OffloadKind};
use kickless_io::Errno;
use std::io;
use std::sync::Arc;
use std::time::Instant;

impl Client {
    /// Continues the job, if there is one. Returns whether it made progress. Called while no connection ends,
    /// so that what was sent on an older one comes before the next owner's requests.
    pub(super) fn continue_job(&mut self) -> bool {
        let Some(mut job) = self.job.take_if(|job| matches!(job.job, Job::GiveUp | Job::TakeOver)) else {
            return false;
        };
        let Some(flushed) = self.flush(&mut job) else {
            self.job = Some(job);
            return false;
        };
        let result = if job.job == Job::GiveUp {
            self.give_up(&job.caller, flushed)
        } else {
            self.end_connection(flushed.is_ok());
            if self.ending.is_some() {
                job.flush = None;
                self.job = Some(job);
                return true;
            }
            self.take_over()
        };
        // The caller may have given up.
        let _ = job.caller.send(Some(result.map(|()| Answer::Done)));
        true
    }

    /// Flushes what the server has acknowledged and not flushed. Returns the result when it is known.
    fn flush(&mut self, job: &mut ActiveJob) -> Option<Result<(), IoError>> {
        let Some(slot) = &job.flush else {
            let is_dirty = self.connection.as_ref().is_some_and(|c| c.in_flight.is_dirty());
            if !is_dirty || !self.export.has(wire::FLAG_FLUSH) {
                return Some(Ok(()));
            }
            let slot = Arc::new(AnswerSlot::default());
            let op = slot.op(OffloadKind::Flush, (0, 0), None, self.inbox.waker());
            let next = self.inbox.number(op);
            self.queue.push_back(next);
            job.flush = Some(slot);
            return None;
        };
        match slot.take() {
            Some(answer) => Some(answer.result),
            None => (Instant::now() >= job.deadline).then_some(Err(IoError::Os(Errno::TIMEDOUT))),
        }
    }

    /// Gives up the disk, if no write can be lost without a report to the guest. Otherwise the disk stays
    /// with its owner, and nothing changes.
    fn give_up(&mut self, caller: &Caller, flushed: Result<(), IoError>) -> io::Result<()> {
        if let Err(error) = flushed {
            return Err(io::Error::other(format!("the NBD server has not flushed the writes: {error}")));
        }
        let lost_writes = self.connection.as_ref().map_or(self.lost_writes, |c| c.in_flight.lost_writes());
        if !self.offload.has_reported(lost_writes) {
            return Err(io::Error::other(
                "the NBD server may have lost writes, and no flush of the guest has reported that",
            ));
        }
        // A caller that has given up believes that it keeps the disk, and may send requests again.
        if caller.send(None).is_err() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.end_connection(true);
        self.is_closed = true;
        Ok(())
    }

    /// Ends the connection, if there is one. `flushed`: what it has acknowledged is not lost with it.
    fn end_connection(&mut self, flushed: bool) {
        let Some(connection) = self.connection.take() else { return };
        if !flushed || !connection.in_flight.is_empty() {
            return self.drop_connection(connection, &Problem::NotFlushed);
        }
        self.lost_writes = connection.in_flight.lost_writes();
        // Without flushes, the server may still lose these writes when it goes away later.
        self.is_dirty = connection.in_flight.is_dirty();
        self.inbox.count_change();
        connection.leave();
    }

    /// Makes a connection for a new owner. A server that is away fails only requests.
    fn take_over(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let within = self.uri.reconnect_delay.clamp(RECONNECT_EVERY, CONNECT_WITHIN);
        let connected = self.reconnect(now + within);
        self.attempt_at = Instant::now() + RECONNECT_EVERY;
        self.fails_at = Instant::now() + self.uri.reconnect_delay;
        (self.has_failed, self.is_closed) = (false, false);
        match connected {
            Ok(connection) => {
                self.inbox.set_export_size(connection.export.accessible_size());
                self.inbox.count_change();
                self.connection = Some(connection);
                Ok(())
            }
            Err(problem) if problem.is_away() => {
                let wait = self.uri.reconnect_delay;
                tracing::warn!(server = %self.uri, %problem, ?wait, "the NBD server is away when the disk is opened; requests wait for it");
                Ok(())
            }
            Err(problem) => {
                self.is_closed = true;
                Err(io::Error::other(format!("the NBD server: {problem}")))
            }
        }
    }
}
