//! Serves the control sockets on a thread of its own.
//!
//! # Bounds
//! A hostile client takes a bounded part of the daemon. A line has at most
//! [`LINE_BYTES_MAX`](crate::LINE_BYTES_MAX) bytes, and an answer is written before the next line is read.
//! Each socket has [`CLIENTS_MAX`] clients. If more connect, the one that was idle for longest is
//! disconnected, so that no number of silent connections keeps an operator out. At most [`CALLS_MAX`] calls
//! wait for disks at a time, including those whose clients have left. A client that has subscribed and takes
//! nothing is disconnected. A budget bounds the descriptors of all clients together.
//!
//! Clients take turns, line by line, by the work that their lines cause (`turns.rs`). A request that only
//! shows and wants no answer is not executed. The end of the server waits for one line at most, however many
//! others wait.
//!
//! # Threads
//! The thread of the server never waits for a disk, a request or a worker. A call that can wait is executed
//! on a thread of its own, which ends with the call. Each client has a thread that reads what it sends and
//! closes its descriptors, which can wait too. Such a thread can outlive its client. While
//! [`LEFT_MAX`] of a socket have, this socket takes no further clients.

mod budget;
mod connection;
mod reader;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kickless_io::Waker;
use kickless_opener::{Descriptors, Listener, Peer, refuse_descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::Value;
use tracing::{info, warn};

use super::call::{Call, Effect, Method};
use super::daemon::Daemon;
use super::events::Seen;
use super::rpc::{Request, RpcError, answer, notification};
use budget::{Budget, Permit};
use connection::Connection;
pub use reader::Access;
use reader::{GivenFd, Reader, Received};
use turns::Turns;

/// The most clients of each socket. Operators, exporters and a few scripts need fewer.
pub const CLIENTS_MAX: usize = 64;
/// The most calls that are executed on threads at a time: one of each client that can make such calls.
pub const CALLS_MAX: usize = CLIENTS_MAX;
/// The most threads of clients of a socket that have left, and whose descriptors are still being closed. With
/// those of the clients that are served, a socket has at most twice as many threads as clients.
pub const LEFT_MAX: usize = CLIENTS_MAX;
/// The target of the log lines about calls that change something. The program limits them less than others,
/// because an audit has to be complete.
pub const CALLS_TARGET: &str = "kickless_control::calls";
/// The time until connections are accepted again, after the host had no resources for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The work between two looks at all clients, in bytes that are taken or made. A line that causes more ends
/// the turn too. So the look, of some ten microseconds, is a small part of the time also while clients send
/// many short lines.
const TURN_WORK: usize = 16 << 10;

/// The interval at which the server looks for events, while a client wants them.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The time that the end of the server waits for calls. A device that was removed last ends the daemon, and
/// its removal is answered in this time.
const END_WAIT: Duration = Duration::from_secs(1);

/// A running server. Dropping it closes the sockets and all connections, after a short wait for calls. Calls
/// that take longer go on without an answer.
pub struct Server {
    thread: Option<JoinHandle<()>>,
    waker: Waker,
    is_ending: Arc<AtomicBool>,
    sender: Sender<Message>,
}

impl Server {
    /// Serves these sockets.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub fn start(daemon: Arc<Daemon>, listeners: Vec<(Listener, Access)>) -> io::Result<Self> {
        for (listener, access) in &listeners {
            listener.socket().set_nonblocking(true)?;
            if *access == Access::ReadOnly {
                // An older kernel takes them, and the thread of the client closes them.
                let _ = refuse_descriptors(listener.socket());
            }
        }
        let (waker, is_ending) = (Waker::new()?, Arc::new(AtomicBool::new(false)));
        let mut sockets = Sockets::new(daemon, listeners, waker.clone(), is_ending.clone());
        let sender = sockets.sender.clone();
        let run = move || {
            sockets.run();
            sockets.end(Instant::now() + END_WAIT);
        };
        let thread = thread::Builder::new().name("control".into()).spawn(run)?;
        Ok(Self { thread: Some(thread), waker, is_ending, sender })
    }

    /// Asks the thread of the server to answer after its present round. Does not wait. The receiver is
    /// disconnected if the thread has ended.
    pub fn pass(&self) -> Receiver<()> {
        let (done, answer) = channel();
        let _ = self.sender.send(Message::Pass(done));
        self.waker.wake();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            warn!("the thread of the control socket panicked");
        }
    }
}

/// The result of a call that was executed on a thread.
struct Finished {
    connection: u64,
    id: Option<Value>,
    result: Result<Value, RpcError>,
}

/// A message of another thread to the thread of the server.
enum Message {
    /// A call has finished.
    Finished(Finished),
    /// The thread of this client has read.
    Received(u64, io::Result<Received>),
    /// The thread of a client of the listener with this number has ended.
    ClientEnded(usize),
    /// Another thread asks whether this one gets on. The sender is its answer.
    Pass(Sender<()>),
}

/// A socket that clients connect to.
struct Socket {
    listener: Listener,
    access: Access,
    /// The number of threads of its clients, also of those that have left.
    threads: usize,
}

impl Socket {
    /// Returns whether there is room for the thread of another client.
    fn has_room(&self) -> bool {
        self.threads < CLIENTS_MAX + LEFT_MAX
    }
}

struct Sockets {
    daemon: Arc<Daemon>,
    listeners: Vec<Socket>,
    connections: BTreeMap<u64, Connection>,
    next_id: u64,
    /// The number of calls that are executed on threads.
    calls: usize,
    budget: Arc<Budget>,
    sender: Sender<Message>,
    messages: Receiver<Message>,
    /// Signalled for each message, and at the end.
    waker: Waker,
    is_ending: Arc<AtomicBool>,
    turns: Turns,
    /// The time at which connections are accepted again.
    accept_at: Option<Instant>,
    /// The last look at the devices, while a client wants events, and the time of the next one.
    seen: Option<(Seen, Instant)>,
}

impl Sockets {
    fn new(
        daemon: Arc<Daemon>,
        listeners: Vec<(Listener, Access)>,
        waker: Waker,
        is_ending: Arc<AtomicBool>,
    ) -> Self {
        let listeners =
            listeners.into_iter().map(|(listener, access)| Socket { listener, access, threads: 0 });
        let (sender, messages) = channel();
        Self {
            daemon,
            listeners: listeners.collect(),
            connections: BTreeMap::new(),
            next_id: 0,
            calls: 0,
            budget: Arc::new(Budget::of_process(CLIENTS_MAX)),
            sender,
            messages,
            waker,
            is_ending,
            turns: Turns::default(),
            accept_at: None,
            seen: None,
        }
    }

    /// Serves clients until the end is requested.
    fn run(&mut self) {
        while !self.is_ending.load(Ordering::Acquire) {
            self.collect();
            self.work();
        }
    }

    /// Handles lines of the clients whose turn it is, until [`TURN_WORK`] is done.
    fn work(&mut self) {
        let mut work = 0;
        while work < TURN_WORK && !self.is_ending.load(Ordering::Acquire) {
            let ready = self.connections.iter().filter(|(_, client)| client.share.is_ready());
            let order = |client: &Connection| self.turns.order(client.access, client.share);
            let Some((&id, client)) = ready.min_by_key(|(_, client)| order(client)) else { return };
            self.turns.begin(client.access, client.share);
            self.serve_line(id);
            work += self.charge(id);
        }
    }

    /// Charges a client with what was done for it. Returns that.
    fn charge(&mut self, id: u64) -> usize {
        // The work for a client that has left is unknown.
        let Some(client) = self.connections.get_mut(&id) else { return TURN_WORK };
        let work = client.take_work();
        self.turns.charge(client.access, &mut client.share, work);
        work
    }

    /// Waits for events, and handles them. Lines of clients get their turn later.
    fn collect(&mut self) {
        let stats = self.connections.values().filter_map(|client| client.subscriptions.stats);
        let due = stats.map(|(_, due)| due).chain(self.seen.as_ref().map(|(_, due)| *due));
        let pause = due.chain(self.accept_at).min().map(|at| at.saturating_duration_since(Instant::now()));
        let is_any_ready = self.connections.values().any(|client| client.share.is_ready());
        let pause = if is_any_ready { Some(Duration::ZERO) } else { pause };
        let timeout = pause.and_then(|pause| Timespec::try_from(pause).ok());
        let waker = self.waker.clone();
        let mut fds = vec![PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)];
        fds.extend(self.listeners.iter().map(|socket| {
            let accepts = self.accept_at.is_none() && socket.has_room();
            let flags = if accepts { PollFlags::IN } else { PollFlags::empty() };
            PollFd::from_borrowed_fd(socket.listener.socket().as_fd(), flags)
        }));
        let mut ids = Vec::with_capacity(self.connections.len());
        for (id, client) in &self.connections {
            if let Some(flags) = client.interest() {
                ids.push(*id);
                fds.push(PollFd::from_borrowed_fd(client.as_fd(), flags));
            }
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return thread::sleep(ACCEPT_PAUSE),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let (listeners, clients) = ready[1..].split_at(self.listeners.len());
        if self.accept_at.is_some_and(|at| at <= Instant::now()) {
            self.accept_at = None;
        }
        self.waker.clear();
        while let Ok(message) = self.messages.try_recv() {
            self.take(message);
        }
        for (id, events) in ids.into_iter().zip(clients) {
            if !events.is_empty() {
                self.handle(id, *events);
            }
        }
        for (number, events) in listeners.iter().enumerate() {
            if events.contains(PollFlags::IN) {
                self.accept(number);
            }
        }
        self.notify(Instant::now());
    }

    /// Sends the events and counters that are due.
    fn notify(&mut self, now: Instant) {
        let mut lines = Vec::new();
        if !self.connections.values().any(|client| client.subscriptions.events) {
            self.seen = None;
        } else if self.seen.as_ref().is_none_or(|(_, due)| *due <= now) {
            let mut seen = Seen::look(self.daemon.registry());
            if let Some((earlier, _)) = &self.seen {
                lines = seen.since(earlier).iter().map(|event| notification("event", event)).collect();
            }
            self.seen = Some((seen, now + LOOK_EVERY));
        }
        // The counters are read once for all clients.
        let mut stats = None;
        let daemon = &self.daemon;
        self.connections.retain(|_, client| {
            let events = if client.subscriptions.events { &lines[..] } else { &[] };
            let mut written = events.iter().try_for_each(|line| client.notify(line, false));
            if let Some((interval, due)) = &mut client.subscriptions.stats
                && *due <= now
            {
                *due = now + *interval;
                let line = stats.get_or_insert_with(|| {
                    let stats = daemon.stats(None).unwrap_or_default();
                    notification("stats", &stats)
                });
                written = written.and_then(|()| client.notify(line, true));
            }
            written.is_ok()
        });
    }

    /// Notes what a client subscribes to.
    fn subscribe(&mut self, connection: u64, call: &Call) {
        let now = Instant::now();
        let Some(client) = self.connections.get_mut(&connection) else { return };
        match call {
            Call::EventsSubscribe => client.subscriptions.events = true,
            Call::StatsSubscribe(interval) => client.subscriptions.stats = Some((*interval, now)),
            _ => return,
        }
        // Changes from now on are events, although the first look comes with the next turn.
        if client.subscriptions.events && self.seen.is_none() {
            self.seen = Some((Seen::look(self.daemon.registry()), now + LOOK_EVERY));
        }
    }

    /// Handles a message of another thread.
    fn take(&mut self, message: Message) {
        match message {
            Message::Finished(finished) => {
                if let Some(connection) = self.finish(finished) {
                    self.ready(connection);
                }
            }
            Message::Received(id, received) => {
                let Some(client) = self.connections.get_mut(&id) else { return };
                match client.take_read(received) {
                    Ok(()) => self.ready(id),
                    Err(_) => drop(self.connections.remove(&id)),
                }
            }
            Message::ClientEnded(listener) => self.listeners[listener].threads -= 1,
            // The other thread may have given up.
            Message::Pass(done) => drop(done.send(())),
        }
    }

    /// Starts the thread of the next client.
    fn start_reader(&mut self, listener: usize) -> io::Result<Reader> {
        let (id, access) = (self.next_id, self.listeners[listener].access);
        let tell = {
            let (sender, waker) = (self.sender.clone(), self.waker.clone());
            move |message| {
                // The server may have ended.
                let _ = sender.send(message);
                waker.wake();
            }
        };
        let ended = {
            let tell = tell.clone();
            move || tell(Message::ClientEnded(listener))
        };
        let pass_on = move |received| tell(Message::Received(id, received));
        let reader = Reader::start(access, self.budget.clone(), pass_on, ended)?;
        let socket = &mut self.listeners[listener];
        socket.threads += 1;
        if !socket.has_room() {
            warn!(
                threads = socket.threads,
                "no further clients of this control socket are taken until descriptors of earlier ones are closed"
            );
        }
        Ok(reader)
    }

    /// Accepts a connection.
    fn accept(&mut self, listener: usize) {
        // Before the connection, because only this thread may close it.
        let Ok(reader) = self.start_reader(listener) else {
            self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
            return;
        };
        let Socket { listener, access, .. } = &self.listeners[listener];
        let access = *access;
        let stream = match listener.socket().accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                let errno = Errno::from_io_error(&error);
                // With all other errors, the client is gone already.
                if matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) {
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                }
                return;
            }
        };
        let Ok(mut connection) = Connection::new(stream, access, reader) else { return };
        if !self.make_room(access) {
            let why = format!("{CLIENTS_MAX} clients wait for their calls: try again later");
            // The client may be gone, and gets no second try.
            let _ = connection.write(&answer(&Value::Null, &Err(RpcError::busy(why))));
            return;
        }
        self.connections.insert(self.next_id, connection);
        self.next_id += 1;
    }

    /// Disconnects the client that was idle for longest, if the socket has as many as it can. Returns whether
    /// there is room for another one.
    fn make_room(&mut self, access: Access) -> bool {
        let same = || self.connections.iter().filter(|(_, client)| client.access == access);
        if same().count() < CLIENTS_MAX {
            return true;
        }
        let idle = same().filter(|(_, client)| !client.is_calling);
        let Some((&oldest, _)) = idle.min_by_key(|(_, client)| client.active) else { return false };
        self.connections.remove(&oldest);
        true
    }

    /// Handles events of a connection.
    fn handle(&mut self, id: u64, events: PollFlags) {
        let Some(client) = self.connections.get_mut(&id) else { return };
        let moved = if events.contains(PollFlags::OUT) {
            client.write_rest()
        } else if events.contains(PollFlags::IN) {
            return client.read();
        } else {
            // The client has closed its end while no bytes were expected from it.
            Err(io::ErrorKind::ConnectionAborted.into())
        };
        match moved {
            Ok(()) => self.ready(id),
            Err(_) => drop(self.connections.remove(&id)),
        }
    }

    /// Lets a client wait for its turn, if it may have sent a line. Closes a connection that is over.
    fn ready(&mut self, id: u64) {
        let Some(client) = self.connections.get_mut(&id) else { return };
        if client.may_have_line() {
            self.turns.ready(client.access, &mut client.share);
        } else {
            client.share.rest();
            if client.is_over() {
                self.connections.remove(&id);
            }
        }
    }

    /// Handles the next line of a client.
    fn serve_line(&mut self, id: u64) {
        let Some(client) = self.connections.get_mut(&id) else { return };
        let written = match client.take_line() {
            Ok(None | Some([])) => Ok(()),
            Ok(Some(line)) => {
                let request = Request::parse(line);
                self.request(id, request)
            }
            Err(error) => client.refuse(RpcError::line(error.to_string())),
        };
        match written {
            Ok(()) => self.ready(id),
            Err(_) => drop(self.connections.remove(&id)),
        }
    }

    /// Executes a request, or starts a thread that does.
    ///
    /// # Errors
    /// The client is gone.
    fn request(&mut self, connection: u64, request: Result<Request, (Value, RpcError)>) -> io::Result<()> {
        let Some(client) = self.connections.get_mut(&connection) else { return Ok(()) };
        let Request { id, method, params, fds } = match request {
            Ok(request) => request,
            Err((id, error)) => return client.write(&answer(&id, &Err(error))),
        };
        let (peer, access) = (client.peer, client.access);
        let descriptors = client.claim(fds.len());
        let call = Method::find(&method).and_then(|method| match (method.effect, access) {
            (Effect::Changes, Access::ReadOnly) => Err(RpcError::read_only(method.name)),
            _ => {
                let call = method.parse(params, self.daemon.registry().kinds())?;
                Ok((method, call, method.named(fds, descriptors)?))
            }
        });
        let result = match call {
            // It would change nothing, and its client wants no result.
            Ok((method, call, _)) if id.is_none() && method.effect == Effect::Reads && !call.subscribes() => {
                return Ok(());
            }
            Ok((method, call, descriptors)) if method.waits => {
                match self.spawn(connection, id.clone(), peer, method, call, descriptors) {
                    Ok(()) => return Ok(()),
                    Err(error) => Err(error),
                }
            }
            Ok((method, call, descriptors)) => {
                client.add_call();
                self.subscribe(connection, &call);
                // Only calls that wait take descriptors, and others have refused them.
                drop(descriptors);
                execute(&self.daemon, peer, method, call, &Descriptors::default())
            }
            Err(error) => Err(error),
        };
        self.reply(connection, id, &result)
    }

    /// Executes a call on a thread of its own.
    fn spawn(
        &mut self,
        connection: u64,
        id: Option<Value>,
        peer: Peer,
        method: &'static Method,
        call: Call,
        descriptors: Vec<(String, GivenFd)>,
    ) -> Result<(), RpcError> {
        if self.calls >= CALLS_MAX {
            return Err(RpcError::busy(format!("{CALLS_MAX} calls wait for disks: try again later")));
        }
        let (daemon, sender, waker) = (self.daemon.clone(), self.sender.clone(), self.waker.clone());
        let run = move || {
            let given = descriptors.into_iter().filter_map(|(name, given)| Some((name, given.take()?)));
            let (given, permits): (Vec<_>, Vec<Permit>) =
                given.map(|(name, (fd, permit))| ((name, fd), permit)).unzip();
            let given: Descriptors = given.into_iter().collect();
            let result = execute(&daemon, peer, method, call, &given);
            // Before the answer, so that a client that has it finds them closed. Only this client waits.
            drop(given);
            drop(permits);
            // The server may have ended.
            let _ = sender.send(Message::Finished(Finished { connection, id, result }));
            waker.wake();
        };
        let thread = thread::Builder::new().name("control call".into()).spawn(run);
        thread.map_err(|error| RpcError::failed(format!("cannot start a thread: {error}")))?;
        self.calls += 1;
        if let Some(client) = self.connections.get_mut(&connection) {
            client.is_calling = true;
            client.add_call();
        }
        Ok(())
    }

    /// Answers a call that was executed on a thread. Returns the connection, unless the client is gone.
    fn finish(&mut self, Finished { connection, id, result }: Finished) -> Option<u64> {
        self.calls -= 1;
        self.connections.get_mut(&connection)?.is_calling = false;
        if self.reply(connection, id, &result).is_err() {
            self.connections.remove(&connection);
            return None;
        }
        Some(connection)
    }

    /// Answers calls that finish before `deadline`.
    fn end(&mut self, deadline: Instant) {
        while self.calls > 0
            && let Ok(message) =
                self.messages.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if let Message::Finished(finished) = message {
                self.finish(finished);
            }
        }
        // Clients that are not accepted may have sent descriptors, which the close of their socket closes.
        // The end does not wait for that. The names of the sockets are removed here.
        let sockets: Vec<_> = self.listeners.drain(..).map(|socket| socket.listener.into_socket()).collect();
        // Without a thread, they are closed here.
        let _ = thread::Builder::new().name("control close".into()).spawn(move || drop(sockets));
    }

    /// Answers a request, unless the client wants no answer.
    fn reply(
        &mut self,
        connection: u64,
        id: Option<Value>,
        result: &Result<Value, RpcError>,
    ) -> io::Result<()> {
        match (self.connections.get_mut(&connection), id) {
            (Some(client), Some(id)) => client.write(&answer(&id, result)),
            _ => Ok(()),
        }
    }
}

/// Executes a call, and logs it if it changes something.
fn execute(
    daemon: &Daemon,
    peer: Peer,
    method: &Method,
    call: Call,
    descriptors: &Descriptors,
) -> Result<Value, RpcError> {
    if method.effect == Effect::Reads {
        return daemon.execute(call, descriptors, peer);
    }
    let name = call.subject().to_owned();
    let result = daemon.execute(call, descriptors, peer);
    let shown = match &result {
        Ok(result) => result.to_string(),
        Err(error) => error.message.clone(),
    };
    let Peer { uid, pid } = peer;
    info!(target: CALLS_TARGET, uid, pid, method = method.name, name, result = shown, "control call");
    result
}
