//! Serves the requests of the process that uses no names.
//!
//! Each thread waits for a request. It makes sure that another one waits before it carries its request out.
//! So nothing is passed between threads, and a file system that never answers holds one of them. The one lock
//! is held for moments: no call of the host is made under it.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::authority::REQUESTS_MAX;
use crate::client::{Answer, Client};
use crate::grant::Authority;
use crate::message::{self, Received};
use crate::perform::{Config, Performer};
use crate::wire::{self, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request};

/// The threads that wait for requests when there are none. More are there while requests are carried out.
const WAITING_MAX: usize = 4;
/// The most threads. Requests that are refused have no share, so the threads need a bound of their own.
const THREADS_MAX: usize = REQUESTS_MAX + WAITING_MAX;
/// The stack of a thread.
const STACK_BYTES: usize = 128 << 10;

/// The reason why a helper process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The other process has closed the socket, or has ended.
    Closed,
    /// The other process has sent a message that is no request.
    Malformed,
    /// The launcher has ended.
    LauncherGone,
}

impl End {
    /// Returns the exit status of the helper.
    pub const fn status(self) -> i32 {
        match self {
            Self::Closed => 0,
            Self::Malformed => 2,
            Self::LauncherGone => 3,
        }
    }
}

/// Serves requests until the other end of `socket` closes. `launcher` is connected to a process in which
/// [`launch`](crate::launch) runs.
///
/// Returns at once at the end, even while threads still wait for the host: the process is to end then.
///
/// # Errors
/// The process cannot have threads.
pub fn serve(
    socket: OwnedFd,
    authority: Authority,
    launcher: Option<OwnedFd>,
    config: Option<Config>,
) -> io::Result<End> {
    let (sender, end) = mpsc::channel();
    let launcher_gone = sender.clone();
    let launcher = launcher.map(|socket| {
        Client::start(socket, move || {
            // After the end of this process's work, nothing waits for it.
            let _ = launcher_gone.send(End::LauncherGone);
        })
    });
    let performer = Performer::new(authority, launcher.transpose()?, config);
    let turns = Mutex::new(Turns { waiting: 0, threads: 0, ids: BTreeSet::new() });
    let server = Arc::new(Server { socket, performer, turns, end: sender });
    server.start_thread()?;
    let end = end.recv().unwrap_or(End::Closed);
    // Threads that wait end, and the other process sees the end. It fails only if that has closed the socket.
    let _ = shutdown(&server.socket, Shutdown::Both);
    Ok(end)
}

struct Server {
    socket: OwnedFd,
    performer: Performer,
    turns: Mutex<Turns>,
    end: Sender<End>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// The threads and their requests.
struct Turns {
    /// Threads that wait for a request, or will at once.
    waiting: usize,
    /// All threads, also those whose replies are not taken.
    threads: usize,
    /// The numbers of the requests that are carried out.
    ids: BTreeSet<u64>,
}

impl Server {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that waits for requests.
    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        {
            let mut turns = self.turns();
            (turns.waiting, turns.threads) = (turns.waiting + 1, turns.threads + 1);
        }
        let server = self.clone();
        let started =
            thread::Builder::new().name("request".into()).stack_size(STACK_BYTES).spawn(move || {
                if let Err(end) = server.take_requests() {
                    // The first one counts.
                    let _ = server.end.send(end);
                }
                server.turns().threads -= 1;
            });
        started.map(drop).inspect_err(|_| {
            let mut turns = self.turns();
            (turns.waiting, turns.threads) = (turns.waiting - 1, turns.threads - 1);
        })
    }

    /// Takes requests until enough other threads wait for the next one.
    ///
    /// # Errors
    /// The process is to end.
    fn take_requests(self: &Arc<Self>) -> Result<(), End> {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        loop {
            let received = message::receive(&self.socket, &mut buffer).map_err(|_| End::Closed)?;
            if received.len == 0 {
                return Err(End::Closed);
            }
            let is_last = {
                let mut turns = self.turns();
                turns.waiting -= 1;
                turns.waiting == 0 && turns.threads < THREADS_MAX
            };
            if is_last {
                // Without another thread, the next request waits until this one is done.
                let _ = self.start_thread();
            }
            self.take(received, &buffer)?;
            let mut turns = self.turns();
            if turns.waiting >= WAITING_MAX {
                return Ok(());
            }
            turns.waiting += 1;
        }
    }

    /// Carries the request of a message out, and replies.
    fn take(&self, mut received: Received, buffer: &[u8]) -> Result<(), End> {
        let message = wire::parse::<Request>(&buffer[..received.len]).filter(|_| !received.is_cut);
        let (id, request) = message.ok_or(End::Malformed)?;
        let needs_fd = matches!(request, Request::Reopen { .. });
        let fds = received.fds.len() + usize::from(received.lost_fd);
        if fds != usize::from(needs_fd) || !self.turns().ids.insert(id) {
            return Err(End::Malformed);
        }
        let (reply, fd) = match received.lost_fd {
            true => (Errno::MFILE.into(), None),
            false => self.answer(&request, received.fds.pop()),
        };
        self.turns().ids.remove(&id);
        let too_long = || wire::write(id, &Reply::from(Errno::MSGSIZE), REPLY_BYTES_MAX);
        let bytes = wire::write(id, &reply, REPLY_BYTES_MAX).or_else(|_| too_long());
        let sent = bytes
            .map_err(io::Error::from)
            .and_then(|bytes| message::send(&self.socket, &bytes, fd.as_ref().map(AsFd::as_fd)));
        sent.map_err(|_| End::Closed)
    }

    fn answer(&self, request: &Request, given: Option<OwnedFd>) -> Answer {
        let state = || self.performer.state();
        let decided = {
            let mut state = state();
            state.decide(request).inspect(|permit| state.begin(permit))
        };
        let permit = match decided {
            Ok(permit) => permit,
            Err(denied) => return (denied.into(), None),
        };
        let performed = self.performer.perform(request, &permit, given);
        state().finish(&permit);
        performed.unwrap_or_else(|reply| (reply, None))
    }
}

#[cfg(test)]
mod tests;
