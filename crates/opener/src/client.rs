//! Requests to the process that opens files.
//!
//! Any thread asks, and waits for the reply to its own request. One thread reads all replies. The lock is
//! held for moments, and no other lock is taken under it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::grant::Outside;
use crate::message;
use crate::reason::Explained;
use crate::wire::{self, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request};

/// The stack of the thread that reads replies.
const STACK_BYTES: usize = 128 << 10;

/// The longest wait of a thread that gives something back: that for a lock on a directory. A file system that
/// does not answer must not keep a device from its end.
const GIVE_BACK_TIME: Duration = Duration::from_secs(5);
/// The wait after one was in vain, so that the waits of many devices are no long one.
const GIVE_BACK_LATE: Duration = Duration::from_millis(50);

/// A reply, with the descriptor that came with it.
pub(crate) type Answer = (Reply, Option<OwnedFd>);

/// The client of this process, if another process opens its files.
static CLIENT: OnceLock<Client> = OnceLock::new();

/// Makes all further calls of this crate requests to the process at the other end of `socket`, in which
/// [`serve`](crate::serve) runs. Calls `on_end` in another thread when that process has ended.
///
/// # Errors
/// Another process opens files already, or this process cannot have another thread.
pub fn use_opener(socket: OwnedFd, on_end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let client = Client::start(socket, on_end)?;
    CLIENT.set(client).map_err(|_| Errno::ALREADY.into())
}

/// Ends the connection to the process that opens files. All later calls that use names fail.
pub fn leave_opener() {
    if let Some(client) = client() {
        client.end();
    }
}

/// Returns the client, if another process opens the files of this one.
pub(crate) fn client() -> Option<&'static Client> {
    CLIENT.get()
}

/// A connection to a process that answers requests. Dropping it ends the connection.
#[derive(Debug)]
pub(crate) struct Client(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: OwnedFd,
    /// The number of the next request.
    next: AtomicU64,
    /// The threads that wait, by the numbers of their requests. `None` after the end.
    waiting: Mutex<Option<HashMap<u64, Sender<io::Result<Answer>>>>>,
    /// A thread has given something back in vain.
    is_late: AtomicBool,
}

impl Client {
    /// Uses a connected socket for messages. Calls `on_end` when the other end is closed.
    ///
    /// # Errors
    /// This process cannot have another thread.
    pub(crate) fn start(socket: OwnedFd, on_end: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let waiting = Mutex::new(Some(HashMap::new()));
        let shared =
            Arc::new(Shared { socket, next: AtomicU64::new(1), waiting, is_late: AtomicBool::new(false) });
        let reader = shared.clone();
        thread::Builder::new().name("opener".into()).stack_size(STACK_BYTES).spawn(move || {
            reader.read_replies();
            *reader.waiting.lock().unwrap_or_else(PoisonError::into_inner) = None;
            on_end();
        })?;
        Ok(Self(shared))
    }

    /// Returns a number that no other call returns.
    pub(crate) fn number(&self) -> u64 {
        self.0.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes a request, with a descriptor, and waits for its reply.
    ///
    /// # Errors
    /// The request cannot be sent, or the other process has ended.
    pub(crate) fn ask_with(&self, request: &Request, fd: Option<BorrowedFd<'_>>) -> io::Result<Answer> {
        let (_, reply) = self.send(request, fd)?;
        reply.recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Makes a request that gives something back, and waits for its reply for this time and a limited one
    /// more. The request is carried out all the same when the other process can.
    ///
    /// # Errors
    /// As [`Client::ask_with`], or [`io::ErrorKind::TimedOut`].
    pub(crate) fn give_back(&self, request: &Request, wait: Duration) -> io::Result<Answer> {
        let (id, reply) = self.send(request, None)?;
        let more = if self.0.is_late.load(Ordering::Relaxed) { GIVE_BACK_LATE } else { GIVE_BACK_TIME };
        let answer = reply.recv_timeout(wait + more).unwrap_or_else(|error| {
            self.0.with_waiting(|waiting| waiting.remove(&id));
            Err(match error {
                RecvTimeoutError::Timeout => {
                    self.0.is_late.store(true, Ordering::Relaxed);
                    io::ErrorKind::TimedOut.into()
                }
                RecvTimeoutError::Disconnected => gone(),
            })
        });
        without_refusal(answer?)
    }

    fn send(
        &self,
        request: &Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<(u64, Receiver<io::Result<Answer>>)> {
        let id = self.number();
        let bytes = wire::write(id, request, REQUEST_BYTES_MAX)?;
        let (sender, reply) = mpsc::channel();
        self.0.with_waiting(|waiting| waiting.insert(id, sender)).ok_or_else(gone)?;
        if let Err(error) = message::send(&self.0.socket, &bytes, fd) {
            self.0.with_waiting(|waiting| waiting.remove(&id));
            return Err(error);
        }
        Ok((id, reply))
    }

    /// Makes a request, and waits for its reply.
    ///
    /// # Errors
    /// The request cannot be made, or the host or the other process refuses it.
    pub(crate) fn ask(&self, request: &Request) -> io::Result<Answer> {
        without_refusal(self.ask_with(request, None)?)
    }

    /// Makes a request whose reply has only a descriptor.
    ///
    /// # Errors
    /// The request cannot be made, or the host or the other process refuses it.
    pub(crate) fn descriptor(&self, request: &Request) -> io::Result<OwnedFd> {
        match self.ask(request)? {
            (Reply::Done {}, Some(fd)) => Ok(fd),
            _ => Err(mismatch()),
        }
    }

    /// Ends the connection.
    pub(crate) fn end(&self) {
        // It fails only after the end.
        let _ = shutdown(&self.0.socket, Shutdown::Both);
    }
}

#[cfg(any(test, debug_assertions))]
impl Client {
    /// Returns the socket, for messages that no client sends.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.0.socket
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Returns `None` after the end.
    fn with_waiting<T>(
        &self,
        act: impl FnOnce(&mut HashMap<u64, Sender<io::Result<Answer>>>) -> T,
    ) -> Option<T> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(act)
    }

    /// Passes each reply on, until the end or a message that is none.
    fn read_replies(&self) {
        let mut buffer = vec![0; REPLY_BYTES_MAX];
        while let Ok(mut received) = message::receive(&self.socket, &mut buffer)
            && received.len > 0
            && !received.is_cut
            && let Some((id, reply)) = wire::parse::<Reply>(&buffer[..received.len])
        {
            let answer = match received.lost_fd {
                true => Err(Errno::MFILE.into()),
                false => Ok((reply, received.fds.pop())),
            };
            if let Some(Some(sender)) = self.with_waiting(|waiting| waiting.remove(&id)) {
                // The thread that asked waits.
                let _ = sender.send(answer);
            }
        }
    }
}

/// Returns the error of a reply that says why a request failed, and other replies as they are.
///
/// # Errors
/// The error.
pub(crate) fn without_refusal(answer: Answer) -> io::Result<Answer> {
    match answer.0 {
        Reply::Errno { errno } => Err(io::Error::from_raw_os_error(errno)),
        Reply::Failed { text } => Err(io::Error::other(text)),
        Reply::Explained { errno, text } => {
            let kind = io::Error::from_raw_os_error(errno).kind();
            Err(io::Error::new(kind, Explained { errno, why: text }))
        }
        Reply::Outside { path, .. } => Err(io::Error::other(Outside { path })),
        _ => Ok(answer),
    }
}

fn gone() -> io::Error {
    Errno::CONNRESET.into()
}

/// Returns the error of a reply to another request.
pub(crate) fn mismatch() -> io::Error {
    Errno::BADMSG.into()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn received(socket: &OwnedFd) -> (u64, Request) {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        let received = message::receive(socket, &mut buffer).unwrap();
        wire::parse(&buffer[..received.len]).unwrap()
    }

    #[test]
    fn replies_in_any_order_reach_the_threads_that_asked() {
        let (ours, theirs) = message::socket_pair().unwrap();
        let client = Client::start(ours, || ()).unwrap();
        let ask = |device| client.ask(&Request::CharSubsystem { device }).unwrap();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|device| scope.spawn(move || ask(device))).collect();
            let mut all: Vec<_> = threads.iter().map(|_| received(&theirs)).collect();
            all.reverse();
            // A reply that no thread waits for.
            let stray = wire::write(1 << 40, &Reply::Done {}, REPLY_BYTES_MAX).unwrap();
            message::send(&theirs, &stray, None).unwrap();
            for (id, request) in all {
                let Request::CharSubsystem { device } = request else { panic!("{request:?}") };
                let reply = Reply::Text { text: device.to_string() };
                let fd = (device % 2 == 0).then_some(theirs.as_fd());
                message::send(&theirs, &wire::write(id, &reply, REPLY_BYTES_MAX).unwrap(), fd).unwrap();
            }
            for (device, thread) in threads.into_iter().enumerate() {
                let (reply, fd) = thread.join().unwrap();
                assert_eq!(
                    (reply, fd.is_some()),
                    (Reply::Text { text: device.to_string() }, device % 2 == 0)
                );
            }
        });
    }

    #[test]
    fn the_end_of_the_other_process_ends_each_wait() {
        let (ours, theirs) = message::socket_pair().unwrap();
        let (ended, end) = mpsc::channel();
        let client = Client::start(ours, move || ended.send(()).unwrap()).unwrap();
        let asked = thread::scope(|scope| {
            let waits = scope.spawn(|| client.ask(&Request::ReadConfig {}));
            received(&theirs);
            drop(theirs);
            waits.join().unwrap()
        });
        assert_eq!(asked.unwrap_err().raw_os_error(), Some(Errno::CONNRESET.raw_os_error()));
        end.recv().unwrap();
        assert!(client.ask(&Request::ReadConfig {}).is_err());
        assert_eq!(client.ask(&Request::Group { name: "a\0".into() }).unwrap_err().raw_os_error(), Some(22));
    }

    #[test]
    fn what_is_given_back_to_a_process_that_hangs_is_not_waited_for_without_end() {
        let (ours, theirs) = message::socket_pair().unwrap();
        let client = Client::start(ours, || ()).unwrap();
        client.0.is_late.store(true, Ordering::Relaxed);
        let given = client.give_back(&Request::Leave { entry: 1 }, Duration::ZERO);
        assert_eq!(given.unwrap_err().kind(), io::ErrorKind::TimedOut);
        // A late reply is for no thread.
        let (id, _) = received(&theirs);
        message::send(&theirs, &wire::write(id, &Reply::Done {}, REPLY_BYTES_MAX).unwrap(), None).unwrap();
        let reply = thread::scope(|scope| {
            let asks = scope.spawn(|| client.ask(&Request::CharSubsystem { device: 1 }).unwrap().0);
            let (id, _) = received(&theirs);
            let reply = Reply::Text { text: "a".into() };
            message::send(&theirs, &wire::write(id, &reply, REPLY_BYTES_MAX).unwrap(), None).unwrap();
            asks.join().unwrap()
        });
        assert_eq!(reply, Reply::Text { text: "a".into() });
    }

    #[test]
    fn a_message_that_is_no_reply_is_the_end() {
        let (ours, theirs) = message::socket_pair().unwrap();
        let (ended, end) = mpsc::channel();
        let client = Client::start(ours, move || ended.send(()).unwrap()).unwrap();
        message::send(&theirs, b"no reply", None).unwrap();
        end.recv().unwrap();
        assert!(client.ask(&Request::ReadConfig {}).is_err());
    }
}
