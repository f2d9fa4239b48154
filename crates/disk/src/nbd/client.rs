//! The thread that exchanges messages with a server, and reconnects to it.
//!
//! Requests without an answer on a lost connection are sent again on the next one. That is harmless, because
//! all of them have the same effect when repeated. But writes that the server had acknowledged and not
//! flushed may be lost with it. The thread counts these losses and puts the count into each answer, so that
//! flushes fail (`lost_writes.rs`).

use super::connection::Connection;
use super::handshake::Export;
use super::inbox::{Inbox, QueuedOp};
use super::socket::{Address, until};
use super::wire::{self, Problem};
use crate::IoError;
use crate::NbdUri;
use crate::offload::{OffloadKind, WakeBatch};
use kickless_io::Errno;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause between two attempts to reconnect.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);
/// The longest time of an attempt.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// The shortest and the longest time that requests in flight get when the disk stops.
const STOP_WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A request fails when this many connections were lost with it.
const LOSSES_MAX: u8 = 5;

/// The state of the thread.
pub(super) struct Client {
    inbox: Arc<Inbox>,
    address: Address,
    uri: NbdUri,
    /// The properties that the disk was opened with.
    export: Export,
    /// The operations that the server does not have.
    queue: VecDeque<QueuedOp>,
    connection: Option<Connection>,
    /// The time from which requests fail, if there is no connection.
    fails_at: Instant,
    /// The time of the next attempt to reconnect.
    attempt_at: Instant,
    /// Requests have failed since `fails_at`.
    has_failed: bool,
    /// The number of times when acknowledged writes may have been lost up to the end of the last connection,
    /// with it or by a failed flush.
    lost_writes: u64,
    /// Operations with smaller numbers must end by this time.
    stop_deadline: Option<(u64, Instant)>,
    wakes: WakeBatch,
}

impl Client {
    pub(super) fn new(inbox: Arc<Inbox>, address: Address, uri: NbdUri, connection: Connection) -> Self {
        let now = Instant::now();
        Self {
            inbox,
            address,
            uri,
            export: connection.export,
            queue: VecDeque::new(),
            connection: Some(connection),
            fails_at: now,
            attempt_at: now,
            has_failed: false,
            lost_writes: 0,
            stop_deadline: None,
            wakes: WakeBatch::default(),
        }
    }

    pub(super) fn run(mut self) {
        while !self.collect() {
            self.enforce_stop_limit();
            let progressed = match self.connection.take() {
                Some(connection) => self.exchange_or_drop(connection),
                None => self.reconnect_if_due(),
            };
            self.wakes.wake();
            if !progressed && self.inbox.sleep() {
                self.sleep();
            }
        }
        if let Some(connection) = self.connection.take() {
            connection.leave();
        }
    }

    /// Takes over the submitted operations. Returns whether the thread must stop.
    fn collect(&mut self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.asleep = false;
        self.queue.append(&mut inbox.ops);
        if std::mem::take(&mut inbox.limit_waits) {
            let (least, most) = STOP_WITHIN;
            let deadline = Instant::now() + self.uri.reconnect_delay.clamp(least, most);
            self.stop_deadline.get_or_insert((inbox.next, deadline));
        }
        if std::mem::take(&mut inbox.restart_wait) {
            self.attempt_at = Instant::now();
            self.fails_at = self.attempt_at + self.uri.reconnect_delay;
            self.has_failed = false;
        }
        inbox.stop
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
    fn drop_connection(&mut self, mut connection: Connection, problem: &Problem) {
        let wait = self.uri.reconnect_delay;
        tracing::warn!(server = %self.uri, %problem, ?wait, "the connection to the NBD server is lost; requests wait for it");
        self.lost_writes = connection.in_flight.lost_writes() + u64::from(connection.in_flight.is_dirty());
        for mut queued in connection.in_flight.drain().into_iter().rev() {
            queued.losses += 1;
            if queued.losses < LOSSES_MAX {
                self.queue.push_front(queued);
            } else {
                queued.op.answer(Err(IoError::Os(Errno::IO)), &mut self.wakes);
            }
        }
        let now = Instant::now();
        self.fails_at = now + self.uri.reconnect_delay;
        // This is immediate only if the connection lasted for a while. The server may close it in response to
        // a request.
        self.attempt_at = self.attempt_at.max(now);
        self.has_failed = false;
    }

    /// Tries to reconnect if an attempt is due, and fails requests that have waited too long. Returns whether
    /// there is a connection. Called while there is none.
    fn reconnect_if_due(&mut self) -> bool {
        let now = Instant::now();
        if now >= self.fails_at {
            if !self.queue.is_empty() && !std::mem::replace(&mut self.has_failed, true) {
                tracing::error!(server = %self.uri, "the NBD server stays away; requests fail until it is back");
            }
            for queued in self.queue.drain(..) {
                queued.op.answer(Err(IoError::Os(Errno::TIMEDOUT)), &mut self.wakes);
            }
            self.wakes.wake();
        }
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
        let mut deadline = self.stop_deadline.map(|(_, deadline)| deadline);
        let ready = match &self.connection {
            Some(connection) => {
                let out = if connection.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
                let socket = PollFd::from_borrowed_fd(connection.socket(), PollFlags::IN | out);
                poll(&mut [waker, socket], deadline.map(until).as_ref())
            }
            None => {
                deadline = Some(deadline.map_or(self.attempt_at, |deadline| deadline.min(self.attempt_at)));
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

    fn reconnect(&self, deadline: Instant) -> Result<Connection, Problem> {
        let (socket, found) = self.address.connect(&self.uri.export, deadline, &self.inbox)?;
        let needed = wire::FLAG_FLUSH | wire::FLAG_FUA | wire::FLAG_TRIM | wire::FLAG_WRITE_ZEROES;
        if found.size < self.export.size {
            return Err(Problem::Changed("the export is smaller"));
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
        Ok(Connection::new(socket, found, self.lost_writes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::block_sizes::BlockSizes;
    use std::os::unix::net::UnixStream;

    /// A stop has a limit even if the server may stay away for a long time.
    #[test]
    fn a_stop_has_its_own_bounds() {
        let (least, most) = STOP_WITHIN;
        for (delay, within) in [(0, least), (10, Duration::from_secs(10)), (3600, most)] {
            let uri: NbdUri = format!("nbd+unix:///?socket=/none&reconnect-delay={delay}").parse().unwrap();
            let address = Address::of(&uri.server).unwrap();
            let export = Export { size: 512, flags: 0, sizes: BlockSizes::default(), structured: false };
            let connection = Connection::new(UnixStream::pair().unwrap().0.into(), export, 0);
            let mut client = Client::new(Arc::new(Inbox::new().unwrap()), address, uri, connection);
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
}
