//! A disk of an NBD server that passes to another process of this host, with its connection.
//!
//! A new connection could meet a server that takes one client only, and the loss of the old one would count
//! for writes that no flush has covered. So the socket passes, at a moment when nothing is in flight on it.
//! The thread is suspended in the old process from then on, and in the new one until then.

use super::Nbd;
use super::block_sizes::BlockSizes;
use super::client::Client;
use super::connection::Connection;
use super::handshake::Export;
use super::inbox::Resume;
use super::job::{ActiveJob, Answer, Caller, Counts, Job};
use super::socket::Address;
use crate::hand_over::{DiskHandOver, Suspended};
use crate::offload::Offload;
use crate::{Error, NbdUri, Options};
use kickless_handover::v1::{self, Medium, NbdFinal};
use kickless_handover::{Given, Giving};
use kickless_sync::lock;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{SocketType, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time for which the pause waits for the thread, which waits for nothing.
const SUSPEND_WITHIN: Duration = Duration::from_secs(1);

impl Nbd {
    /// Makes a disk with the connection of another process, which still uses it. It is suspended.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn of_handed(
        uri: &NbdUri,
        options: &Options,
        nbd: v1::Nbd,
        given: &mut Given,
    ) -> Result<(Self, Arc<Offload>), Error> {
        let failed = |source| Error::Handed { disk: uri.to_string(), source };
        let sizes = BlockSizes::new(nbd.block_sizes).map_err(|problem| failed(io::Error::other(problem)))?;
        let v1::Nbd { size, flags, is_structured: structured, .. } = nbd;
        let export = Export { size, flags, sizes, structured };
        if export.accessible_size() != size {
            return Err(failed(io::Error::other("its size is not a multiple of its block")));
        }
        let socket = nbd.socket.map(|fd| given.fd(fd)).transpose();
        let socket = socket.map_err(|error| failed(io::Error::other(error)))?;
        socket.iter().try_for_each(check_socket).map_err(failed)?;
        let connection = socket.map(|socket| Connection::new(socket, export, 0, false));
        Self::of_export(uri, options, Address::of_connected(&uri.server), (export, connection), true)
    }
}

/// Checks that a descriptor is a socket whose calls do not wait.
fn check_socket(socket: &OwnedFd) -> io::Result<()> {
    let is_stream = sockopt::socket_type(socket)? == SocketType::STREAM;
    match is_stream && fcntl_getfl(socket)?.contains(OFlags::NONBLOCK) {
        true => Ok(()),
        false => Err(io::Error::other("the socket of its connection is of another kind")),
    }
}

impl DiskHandOver for Nbd {
    fn changes(&self) -> u64 {
        self.inbox.changes()
    }

    fn give(&self, to: &mut Giving) -> io::Result<Medium> {
        let Answer::Connection(export, socket) = self.inbox.request(Job::Describe, self.job_within)? else {
            return Err(io::ErrorKind::Other.into());
        };
        Ok(Medium::Nbd(v1::Nbd {
            socket: socket.map(|socket| to.fd(socket)).transpose()?,
            size: self.offload.size(),
            flags: export.flags,
            block_sizes: export.sizes.numbers(),
            is_structured: export.structured,
        }))
    }

    fn suspend(&self, _is_taken: bool) -> io::Result<Suspended> {
        let Answer::Suspended(counts) = self.inbox.request(Job::Suspend, SUSPEND_WITHIN)? else {
            return Err(io::ErrorKind::Other.into());
        };
        let (at_driver_start, reported) = self.offload.reported_losses();
        let Counts { lost_writes: losses, is_dirty } = counts;
        let nbd = Some(NbdFinal { is_dirty, losses, at_driver_start, reported });
        Ok(Suspended { images: Vec::new(), nbd })
    }

    fn take_back(&self, is_taken: bool) -> io::Result<()> {
        self.inbox.resume(Resume { counts: None, is_taken });
        Ok(())
    }

    fn receive(&self, state: &Suspended, is_taken: bool, _locks: bool) -> io::Result<()> {
        let Some(nbd) = &state.nbd else {
            return Err(io::Error::other("its last state has no connection"));
        };
        self.offload.set_reported_losses(nbd.at_driver_start, &nbd.reported);
        let counts = Counts { lost_writes: nbd.losses, is_dirty: nbd.is_dirty };
        *lock(&self.received) = Resume { counts: Some(counts), is_taken };
        Ok(())
    }

    fn begin(&self) {
        self.inbox.resume(*lock(&self.received));
    }
}

impl Client {
    /// Does a job for another process, if there is one. It waits for nothing. Returns whether there was one.
    pub(super) fn prepare_hand_over(&mut self) -> bool {
        let is_one = |job: &mut ActiveJob| matches!(job.job, Job::Describe | Job::Suspend);
        let Some(ActiveJob { job, caller, .. }) = self.job.take_if(is_one) else { return false };
        let result = if job == Job::Describe { self.describe() } else { self.suspend(&caller) };
        // The caller may have given up.
        let _ = caller.send(Some(result));
        true
    }

    /// Returns the properties that the disk was opened with, and a duplicate of the socket.
    fn describe(&self) -> io::Result<Answer> {
        let Some(connection) = &self.connection else { return Ok(Answer::Connection(self.export, None)) };
        let export = Export { structured: connection.export.structured, ..self.export };
        Ok(Answer::Connection(export, Some(connection.socket().try_clone_to_owned()?)))
    }

    fn suspend(&mut self, caller: &Caller) -> io::Result<Answer> {
        let is_idle = self.queue.is_empty() && self.connection.as_ref().is_none_or(Connection::is_idle);
        if !is_idle {
            return Err(io::Error::other("a request is at the NBD server"));
        }
        if self.ending.is_some() {
            return Err(io::Error::other("the NBD server has not ended a lost connection"));
        }
        // A caller that has given up goes on.
        if caller.send(None).is_err() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.is_suspended = true;
        let in_flight = self.connection.as_ref().map(|connection| &connection.in_flight);
        Ok(Answer::Suspended(Counts {
            lost_writes: in_flight.map_or(self.lost_writes, |in_flight| in_flight.lost_writes()),
            is_dirty: in_flight.map_or(self.is_dirty, |in_flight| in_flight.is_dirty()),
        }))
    }

    /// Goes on after [`Client::suspend`], or begins with the connection of another process.
    pub(super) fn resume(&mut self, Resume { counts, is_taken }: Resume) {
        self.is_suspended = false;
        let now = Instant::now();
        (self.attempt_at, self.fails_at, self.has_failed) = (now, now + self.uri.reconnect_delay, false);
        let Some(Counts { lost_writes, is_dirty }) = counts else { return };
        (self.lost_writes, self.is_dirty) = (lost_writes, is_dirty);
        if let Some(connection) = &mut self.connection {
            connection.set_counts(lost_writes, is_dirty);
        }
        if !is_taken {
            self.is_closed = true;
            self.connection.take().into_iter().for_each(Connection::leave);
        }
    }
}
