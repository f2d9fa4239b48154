//! The thread that exchanges messages with a server, and reconnects to it.
//!
//! Requests without an answer on a lost connection are sent again on the next one. All of them have the same
//! effect when repeated, and the thread waits until the server has ended the lost connection (`ending.rs`).
//! But writes that the server had acknowledged and not flushed may be lost with it. The thread counts these
//! losses and puts the count into each answer, so that flushes fail (`lost_writes.rs`).

use super::connection::Connection;
use super::ending::Ending;
use super::handshake::Export;
use super::inbox::{Inbox, QueuedOp};
use super::job::ActiveJob;
use super::socket::{Address, until};
use super::wire::{self, Problem};
use crate::IoError;
use crate::NbdUri;
use crate::offload::{Offload, OffloadKind, WakeBatch};
use kickless_io::Errno;
use kickless_sync::lock;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause between two attempts to reconnect.
pub(super) const RECONNECT_EVERY: Duration = Duration::from_secs(1);
/// The longest time of an attempt.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The shortest and the longest time that requests in flight get when the disk stops.
const STOP_WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A request fails when this many connections were lost with it.
const LOSSES_MAX: u8 = 5;

/// The state of the thread.
pub(super) struct Client {
    pub(super) inbox: Arc<Inbox>,
    address: Address,
    pub(super) uri: NbdUri,
    pub(super) offload: Arc<Offload>,
    /// The properties that the disk was opened with.
    pub(super) export: Export,
    /// The operations that the server does not have.
    pub(super) queue: VecDeque<QueuedOp>,
    pub(super) connection: Option<Connection>,
    /// The last connection, until the server has ended it. There is no other one meanwhile.
    pub(super) ending: Option<Ending>,
    /// Another process goes on with the connection, or may still have it. Nothing is sent or read.
    pub(super) is_suspended: bool,
    /// The disk was given up and not taken over. Nothing connects.
    pub(super) is_closed: bool,
    pub(super) job: Option<ActiveJob>,
    /// The time from which requests fail, if there is no connection.
    pub(super) fails_at: Instant,
    /// The time of the next attempt to reconnect.
    pub(super) attempt_at: Instant,
    /// Requests have failed since `fails_at`.
    pub(super) has_failed: bool,
    /// The number of times when acknowledged writes may have been lost up to the end of the last connection,
    /// with it or by a failed flush.
    pub(super) lost_writes: u64,
    /// The server, which has no flushes, may lose writes of the last connection.
    pub(super) is_dirty: bool,
    /// Operations with smaller numbers must end by this time.
    stop_deadline: Option<(u64, Instant)>,
    wakes: WakeBatch,
}

impl Client {
    pub(super) fn new(
        inbox: Arc<Inbox>,
        address: Address,
        uri: NbdUri,
        offload: Arc<Offload>,
        (export, connection): (Export, Option<Connection>),
        is_suspended: bool,
    ) -> Self {
        let now = Instant::now();
        Self {
            inbox,
            address,
            uri,
            offload,
            export,
            queue: VecDeque::new(),
            connection,
            ending: None,
            is_suspended,
            is_closed: false,
            job: None,
            fails_at: now,
            attempt_at: now,
            has_failed: false,
            lost_writes: 0,
            is_dirty: false,
            stop_deadline: None,
            wakes: WakeBatch::default(),
        }
    }

    pub(super) fn run(mut self) {
        while !self.collect() {
            self.enforce_stop_limit();
            let progressed = self.turn();
            self.wakes.wake();
            if !progressed && self.inbox.sleep() {
                self.sleep();
            }
        }
        if let Some(connection) = self.connection.take().filter(|_| !self.is_suspended) {
            connection.leave();
        }
    }

    /// Does what can be done now. Returns whether there was anything.
    fn turn(&mut self) -> bool {
        if self.is_suspended {
            return false;
        }
        let is_ending = self.is_ending();
        if self.prepare_hand_over() {
            return true;
        }
        if is_ending {
            self.fail_overdue();
            return false;
        }
        if self.continue_job() {
            return true;
        }
        match self.connection.take() {
            Some(connection) => self.exchange_or_drop(connection),
            None => self.reconnect_if_due(),
        }
    }

    /// Returns whether the last connection has not ended.
    fn is_ending(&mut self) -> bool {
        let Some(ending) = self.ending.take_if(|ending| !ending.has_ended()) else {
            self.ending = None;
            return false;
        };
        if Instant::now() >= ending.deadline() {
            tracing::warn!(server = %self.uri, "the NBD server does not end a lost connection; it may still do what was sent there, after newer requests");
            return false;
        }
        self.ending = Some(ending);
        true
    }

    /// Takes over the submitted operations. Returns whether the thread must stop.
    fn collect(&mut self) -> bool {
        let mut inbox = lock(&self.inbox.state);
        inbox.asleep = false;
        self.queue.append(&mut inbox.ops);
        if std::mem::take(&mut inbox.limit_waits) {
            let deadline = Instant::now() + stop_within(&self.uri);
            self.stop_deadline.get_or_insert((inbox.next, deadline));
        }
        if std::mem::take(&mut inbox.restart_wait) {
            self.attempt_at = Instant::now();
            self.fails_at = self.attempt_at + self.uri.reconnect_delay;
            self.has_failed = false;
        }
        if let Some((job, caller)) = inbox.job.take() {
            let deadline = Instant::now() + stop_within(&self.uri);
            self.job = Some(ActiveJob::new(job, caller, deadline));
        }
        let (resume, stops) = (inbox.resume.take(), inbox.stop);
        drop(inbox);
        if let Some(resume) = resume.filter(|_| self.is_suspended) {
            self.resume(resume);
        }
        stops
    }

    /// Sends and receives as much as possible. Returns whether there was anything.
    fn exchange_or_drop(&mut self, mut connection: Connection) -> bool {
        match self.exchange(&mut connection) {
            Ok(progressed) => {
                self.connection = Some(connection);
                progressed
            }
            Err(problem) => {
                self.drop_connection(connection, &problem);
                true
            }
        }
    }

    fn exchange(&mut self, connection: &mut Connection) -> Result<bool, Problem> {
        while connection.in_flight.has_room()
            && let Some(mut next) = self.queue.pop_front()
        {
            match next.op.kind {
                // The server does not support it. It has lost nothing while it was there.
                OffloadKind::Flush if !self.export.has(wire::FLAG_FLUSH) => {
                    next.op.lost_writes = connection.in_flight.lost_writes();
                    next.op.answer(Ok(()), &mut self.wakes)
                }
                _ => connection.take(next),
            }
        }
        let sent = connection.send()?;
        let received = connection.receive(&mut self.wakes)?;
        Ok(sent || received)
    }

    /// Gives up the connection. Keeps its requests for the next one.
    pub(super) fn drop_connection(&mut self, mut connection: Connection, problem: &Problem) {
        let wait = self.uri.reconnect_delay;
        tracing::warn!(server = %self.uri, %problem, ?wait, "the connection to the NBD server is lost; requests wait for it");
        self.lost_writes = connection.in_flight.lost_writes() + u64::from(connection.in_flight.is_dirty());
        self.is_dirty = false;
        self.inbox.count_change();
        let has_changes = connection.in_flight.has_changes();
        for mut queued in connection.in_flight.drain().into_iter().rev() {
            queued.losses += 1;
            if queued.losses < LOSSES_MAX {
                self.queue.push_front(queued);
            } else {
                queued.op.answer(Err(IoError::Os(Errno::IO)), &mut self.wakes);
            }
        }
        self.ending = has_changes.then(|| Ending::begin(connection.into_socket(), wait));
        let now = Instant::now();
        self.fails_at = now + wait;
        // This is immediate only if the connection lasted for a while. The server may close it in response to
        // a request.
        self.attempt_at = self.attempt_at.max(now);
        self.has_failed = false;
    }

    /// Fails requests that have waited too long. Called while there is no connection.
    fn fail_overdue(&mut self) {
        if Instant::now() >= self.fails_at {
            if !self.queue.is_empty() && !std::mem::replace(&mut self.has_failed, true) {
                tracing::error!(server = %self.uri, "the NBD server stays away; requests fail until it is back");
            }
            for queued in self.queue.drain(..) {
                queued.op.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut self.wakes);
            }
            self.wakes.wake();
        }
    }

    /// Tries to reconnect if an attempt is due, and fails requests that have waited too long. Returns whether
    /// there is a connection. Called while there is none.
    fn reconnect_if_due(&mut self) -> bool {
        if self.is_closed {
            for queued in self.queue.drain(..) {
                queued.op.answer(Err(IoError::Os(Errno::BADF)), &mut self.wakes);
            }
            return false;
        }
        self.fail_overdue();
        let now = Instant::now();
        if now < self.attempt_at {
            return false;
        }
        // The attempt must not delay the failure of waiting requests much.
        let within = self.fails_at.saturating_duration_since(now).clamp(RECONNECT_EVERY, CONNECT_WITHIN);
        let found = self.reconnect(now + within);
        // The pause begins at the end of the attempt. In between, new requests fail without waiting.
        self.attempt_at = Instant::now() + RECONNECT_EVERY;
        match found {
            Ok(connection) => {
                tracing::info!(server = %self.uri, "the NBD server is back");
                self.inbox.count_change();
                self.connection = Some(connection);
                true
            }
            Err(problem) => {
                tracing::debug!(server = %self.uri, %problem, "the NBD server cannot be reached");
                false
            }
        }
    }

    /// Ends requests whose time is over because the disk stops.
    fn enforce_stop_limit(&mut self) {
        let Some((before, deadline)) = self.stop_deadline else { return };
        let in_flight = self.connection.as_ref().is_some_and(|c| c.in_flight.any_before(before));
        if !in_flight && self.queue.iter().all(|queued| queued.number >= before) {
            self.stop_deadline = None;
            return;
        }
        if Instant::now() < deadline {
            return;
        }
        self.stop_deadline = None;
        tracing::error!(server = %self.uri, "the disk stops and the NBD server does not answer: its requests fail");
        if let Some(connection) = self.connection.take() {
            self.drop_connection(connection, &Problem::Slow);
        }
        // All waiting requests fail now. Later requests of the stopping queues need not wait as long again,
        // nor for a new connection.
        self.fails_at = Instant::now();
        self.attempt_at = self.fails_at + RECONNECT_EVERY;
    }

    /// Waits for the server, for new operations, or for the next deadline.
    fn sleep(&self) {
        let waker = PollFd::from_borrowed_fd(self.inbox.waker().as_fd(), PollFlags::IN);
        if self.is_suspended {
            if poll(&mut [waker], None).is_ok() {
                self.inbox.waker().clear();
            }
            return;
        }
        let stop_deadline = self.stop_deadline.map(|(_, deadline)| deadline);
        // A job goes on when the last connection has ended.
        let job_deadline = self.job.as_ref().filter(|_| self.ending.is_none()).map(|job| job.deadline);
        let mut deadline = stop_deadline.into_iter().chain(job_deadline).min();
        let ready = match (&self.connection, &self.ending) {
            (Some(connection), _) => {
                let out = if connection.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
                let socket = PollFd::from_borrowed_fd(connection.socket(), PollFlags::IN | out);
                poll(&mut [waker, socket], deadline.map(until).as_ref())
            }
            (None, Some(ending)) => {
                let mut first =
                    deadline.map_or(ending.deadline(), |deadline| deadline.min(ending.deadline()));
                if !self.queue.is_empty() {
                    first = first.min(self.fails_at);
                }
                let socket = PollFd::from_borrowed_fd(ending.socket(), PollFlags::IN);
                poll(&mut [waker, socket], Some(&until(first)))
            }
            (None, None) => {
                if !self.is_closed {
                    deadline =
                        Some(deadline.map_or(self.attempt_at, |deadline| deadline.min(self.attempt_at)));
                }
                if !self.queue.is_empty() {
                    deadline = deadline.map(|deadline| deadline.min(self.fails_at));
                }
                poll(&mut [waker], deadline.map(until).as_ref())
            }
        };
        // The caller checks everything, whatever ended the wait.
        if ready.is_ok() {
            self.inbox.waker().clear();
        }
    }

    pub(super) fn reconnect(&self, deadline: Instant) -> Result<Connection, Problem> {
        let (socket, found) = self.address.connect(&self.uri.export, deadline, &self.inbox)?;
        let needed = wire::FLAG_FLUSH | wire::FLAG_FUA | wire::FLAG_TRIM | wire::FLAG_WRITE_ZEROES;
        if found.accessible_size() < self.offload.size() {
            return Err(Problem::Changed("the export is smaller"));
        }
        if found.size > i64::MAX as u64 {
            return Err(Problem::Changed("its size is invalid"));
        }
        let (sizes, new_sizes) = (self.export.sizes.of_ops(), found.sizes.of_ops());
        if new_sizes.block() > sizes.block() || new_sizes.payload_max() < sizes.payload_max() {
            return Err(Problem::Changed("the export takes fewer sizes of requests"));
        }
        if self.export.flags & needed & !found.flags != 0 {
            return Err(Problem::Changed("the export supports less"));
        }
        if found.has(wire::FLAG_READ_ONLY) && !self.export.has(wire::FLAG_READ_ONLY) {
            return Err(Problem::Changed("the export is read-only"));
        }
        Ok(Connection::new(socket, found, self.lost_writes, self.is_dirty))
    }
}

/// Returns the longest time that a stop waits for the server.
pub(super) fn stop_within(uri: &NbdUri) -> Duration {
    let (least, most) = STOP_WITHIN;
    uri.reconnect_delay.clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;
    use crate::nbd::block_sizes::BlockSizes;
    use crate::nbd::job::Job;
    use crate::offload::AnswerSlot;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::sync_channel;

    fn client(uri: &NbdUri) -> Client {
        let address = Address::of(&uri.server).unwrap();
        let export = Export { size: 512, flags: 0, sizes: BlockSizes::default(), structured: false };
        let connection = Connection::new(UnixStream::pair().unwrap().0.into(), export, 0, false);
        let (inbox, offload) = (Inbox::new().unwrap(), Offload::new(Limits::plain(false), 512, false));
        Client::new(Arc::new(inbox), address, uri.clone(), offload, (export, Some(connection)), false)
    }

    /// A stop has a limit even if the server may stay away for a long time.
    #[test]
    fn a_stop_has_its_own_bounds() {
        let (least, most) = STOP_WITHIN;
        for (delay, within) in [(0, least), (10, Duration::from_secs(10)), (3600, most)] {
            let uri: NbdUri = format!("nbd+unix:///?socket=/none&reconnect-delay={delay}").parse().unwrap();
            let mut client = client(&uri);
            let before = Instant::now();
            client.inbox.limit_remote_waits();
            assert!(!client.collect());
            let (_, deadline) = client.stop_deadline.unwrap();
            assert!((before + within..=Instant::now() + within).contains(&deadline), "{delay}");
            // A second call does not change the deadline.
            client.inbox.limit_remote_waits();
            client.collect();
            assert_eq!(client.stop_deadline, Some((0, deadline)));
        }
    }

    /// Puts a write or a read on the connection of a client, and has the client give the connection up.
    /// Returns the server's end.
    fn lose_connection_with(client: &mut Client, kind: OffloadKind) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut connection = Connection::new(ours.into(), client.export, 0, false);
        let op = Arc::new(AnswerSlot::default()).op(kind, (0, 0), None, client.inbox.waker());
        connection.take(client.inbox.number(op));
        client.drop_connection(connection, &Problem::Protocol("in a test"));
        client.connection = None;
        theirs
    }

    /// A copy of a write that the server has not read yet must not come after newer requests.
    #[test]
    fn nothing_connects_until_a_lost_connection_with_changes_has_ended() {
        let uri = "nbd+unix:///?socket=/none&reconnect-delay=60".parse().unwrap();
        for kind in [OffloadKind::Write { durable: false }, OffloadKind::Discard { durable: true }] {
            let mut client = client(&uri);
            let theirs = lose_connection_with(&mut client, kind);
            client.ending.as_mut().unwrap().extend();
            let attempt_at = client.attempt_at;
            client.turn();
            assert_eq!(client.attempt_at, attempt_at, "the client connected");
            // A new owner waits as well.
            client.job = Some(ActiveJob::new(Job::TakeOver, sync_channel(0).0, attempt_at + CONNECT_WITHIN));
            client.turn();
            assert!(client.job.is_some() && client.attempt_at == attempt_at);
            drop(theirs);
            client.turn();
            assert!(client.job.is_none() && client.attempt_at > attempt_at);
        }
        // The order of reads does not matter.
        let mut client = client(&uri);
        let _theirs = lose_connection_with(&mut client, OffloadKind::Read);
        let attempt_at = client.attempt_at;
        client.turn();
        assert!(client.attempt_at > attempt_at);
    }
}
