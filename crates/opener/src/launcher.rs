//! Starts programs and looks names up, for the process that opens files.
//!
//! The launcher is a process with one thread. It is the parent of each passt, which makes namespaces and
//! mounts, so it can have neither a filter nor rules for paths. It looks names up in a process for each one,
//! because the C library loads code for that, and parses replies of servers. It believes the process that
//! opens files, and no other process can ask it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::connect::resolve_here;
use crate::error::SocketProblem;
use crate::message;
use crate::passt::{END_INTERVAL, END_MAX, has_passt_here, start_passt_here};
use crate::server::End;
use crate::socket::group_id;
use crate::wire::{self, REPLY_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request};

/// The look-ups at a time.
const LOOKUPS_MAX: usize = 64;
/// The time for a look-up.
const LOOKUP_MAX: Duration = Duration::from_secs(30);
/// The addresses of a host that are used.
const ADDRESSES_MAX: usize = 64;
/// The children at a time.
const CHILDREN_MAX: usize = 512;

/// A name that is to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookUp {
    /// The addresses of a host.
    Host {
        /// Its name.
        host: String,
        /// The port of the addresses.
        port: u16,
    },
    /// The number of a group.
    Group {
        /// Its name.
        name: String,
    },
}

impl LookUp {
    /// Looks the name up in this process, and writes the answer to the pipe that came with it.
    pub fn run(&self, pipe: &OwnedFd) {
        let reply = match self {
            Self::Host { host, port } => match resolve_here(host, *port) {
                Ok(mut addresses) => {
                    addresses.truncate(ADDRESSES_MAX);
                    Reply::Addresses { addresses }
                }
                Err(error) => Reply::failure(&error),
            },
            Self::Group { name } => match group_id(name) {
                Ok(id) => Reply::Group { id },
                Err(SocketProblem::Host { source, .. }) => Reply::failure(&source),
                Err(_) => Reply::Errno { errno: Errno::NOENT.raw_os_error() },
            },
        };
        // An answer that is too long, or that has no reader any more, is none.
        let _ = wire::write(0, &reply, REPLY_BYTES_MAX).map(|bytes| rustix::io::write(pipe, &bytes));
    }
}

/// Starts a process that calls [`LookUp::run`] with this pipe and ends. The process must not keep the last
/// descriptor, which is the launcher's own: its other end would not see that the launcher has ended.
pub type StartLookUp<'a> = &'a dyn Fn(LookUp, OwnedFd, BorrowedFd<'_>) -> io::Result<Pid>;

/// Serves requests until the other end of the socket closes. Its children go on: passt ends when its own
/// socket closes.
pub fn launch(socket: OwnedFd, start: StartLookUp<'_>) -> End {
    Launcher::new(socket, start, LOOKUP_MAX).run()
}

struct Launcher<'a> {
    socket: OwnedFd,
    start: StartLookUp<'a>,
    /// The time for a look-up.
    lookup_max: Duration,
    looking_up: Vec<LookingUp>,
    children: BTreeMap<u64, Child>,
    /// The number of the next child. A number is used once.
    next_child: u64,
    ending: Vec<Ending>,
    /// Children that were killed, and are not gone yet.
    killed: Vec<Child>,
}

/// Ends the look-ups, whose answers have no reader any more.
impl Drop for Launcher<'_> {
    fn drop(&mut self) {
        self.looking_up.iter().for_each(|looking_up| reap(looking_up.pid));
    }
}

/// A look-up that runs.
struct LookingUp {
    id: u64,
    pid: Pid,
    pipe: OwnedFd,
    answer: Vec<u8>,
    deadline: Instant,
}

/// A child whose end is awaited.
struct Ending {
    id: u64,
    child: Child,
    deadline: Instant,
}

impl<'a> Launcher<'a> {
    fn new(socket: OwnedFd, start: StartLookUp<'a>, lookup_max: Duration) -> Self {
        Self {
            socket,
            start,
            lookup_max,
            looking_up: Vec::new(),
            children: BTreeMap::new(),
            next_child: 1,
            ending: Vec::new(),
            killed: Vec::new(),
        }
    }

    fn run(mut self) -> End {
        loop {
            if let Err(end) = self.turn() {
                return end;
            }
        }
    }

    /// Waits for the next event, and handles all that are there.
    ///
    /// # Errors
    /// The launcher ends.
    fn turn(&mut self) -> Result<(), End> {
        let (has_request, ready) = self.wait();
        for nth in ready.into_iter().rev() {
            self.read_answer(nth)?;
        }
        self.end_late_lookups()?;
        self.end_children()?;
        if has_request { self.request() } else { Ok(()) }
    }

    /// Returns whether there is a request, and the look-ups that have something to read.
    fn wait(&self) -> (bool, Vec<usize>) {
        let pipes = self.looking_up.iter().map(|looking_up| looking_up.pipe.as_fd());
        let fds = std::iter::once(self.socket.as_fd()).chain(pipes);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let is_ending = !(self.ending.is_empty() && self.killed.is_empty());
        let next_end = is_ending.then_some(END_INTERVAL);
        let deadlines = self.looking_up.iter().map(|looking_up| looking_up.deadline);
        let next_late = deadlines.min().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = next_end.into_iter().chain(next_late).min().map(|time| Timespec {
            tv_sec: time.as_secs() as i64,
            // A poll in milliseconds must not end before the deadline.
            tv_nsec: time.subsec_nanos().into(),
        });
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // A signal, which the launcher ignores.
            return (false, Vec::new());
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let has_request = ready.next().unwrap_or_default();
        let ready = ready.enumerate().filter_map(|(nth, is_ready)| is_ready.then_some(nth));
        (has_request, ready.collect())
    }

    fn reply(&self, id: u64, reply: &Reply, fd: Option<BorrowedFd<'_>>) -> Result<(), End> {
        let too_long = Reply::Errno { errno: Errno::MSGSIZE.raw_os_error() };
        let bytes = wire::write(id, reply, REPLY_BYTES_MAX);
        let bytes = bytes.or_else(|_| wire::write(id, &too_long, REPLY_BYTES_MAX));
        let sent = bytes.map_err(io::Error::from).and_then(|bytes| message::send(&self.socket, &bytes, fd));
        sent.map_err(|_| End::Closed)
    }

    fn refuse(&self, id: u64, errno: Errno) -> Result<(), End> {
        self.reply(id, &Reply::Errno { errno: errno.raw_os_error() }, None)
    }

    /// Reads a part of an answer, or finds its end.
    fn read_answer(&mut self, nth: usize) -> Result<(), End> {
        let (looking_up, mut part) = (&mut self.looking_up[nth], [0; 4096]);
        match read(&looking_up.pipe, &mut part) {
            Ok(len) if len > 0 && looking_up.answer.len() + len <= REPLY_BYTES_MAX => {
                looking_up.answer.extend(&part[..len]);
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            _ => {
                let ended = self.looking_up.swap_remove(nth);
                // A process that has written too much does not end by itself.
                reap(ended.pid);
                match wire::parse(&ended.answer) {
                    Some((
                        _,
                        reply @ (Reply::Addresses { .. }
                        | Reply::Group { .. }
                        | Reply::Errno { .. }
                        | Reply::Failed { .. }),
                    )) => self.reply(ended.id, &reply, None),
                    _ => self.refuse(ended.id, Errno::IO),
                }
            }
        }
    }

    fn end_late_lookups(&mut self) -> Result<(), End> {
        let now = Instant::now();
        while let Some(nth) = self.looking_up.iter().position(|looking_up| looking_up.deadline <= now) {
            let late = self.looking_up.swap_remove(nth);
            reap(late.pid);
            self.refuse(late.id, Errno::TIMEDOUT)?;
        }
        Ok(())
    }

    /// Answers for children that have ended, and kills those that are late.
    fn end_children(&mut self) -> Result<(), End> {
        self.killed.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let now = Instant::now();
        for nth in (0..self.ending.len()).rev() {
            let ending = &mut self.ending[nth];
            let status = match ending.child.try_wait() {
                Ok(Some(status)) => Some(status.into_raw()),
                Ok(None) if now < ending.deadline => continue,
                _ => None,
            };
            let Ending { id, mut child, .. } = self.ending.swap_remove(nth);
            if status.is_none() {
                // It fails only after its end.
                let _ = child.kill();
                self.killed.push(child);
            }
            self.reply(id, &Reply::Ended { status }, None)?;
        }
        Ok(())
    }

    fn request(&mut self) -> Result<(), End> {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        let received = message::receive(&self.socket, &mut buffer).map_err(|_| End::Closed)?;
        if received.len == 0 {
            return Err(End::Closed);
        }
        let message =
            wire::parse(&buffer[..received.len]).filter(|_| !received.is_cut && received.fds.is_empty());
        let (id, request) = message.ok_or(End::Malformed)?;
        match request {
            Request::Resolve { host, port } => self.look_up(id, LookUp::Host { host, port }),
            Request::Group { name } => self.look_up(id, LookUp::Group { name }),
            Request::FindPasst {} => self.reply(id, &Reply::Found { is_found: has_passt_here() }, None),
            Request::StartPasst { arguments } => self.start_passt(id, &arguments),
            Request::EndPasst { child, wait_ms } => match self.children.remove(&child) {
                Some(child) => {
                    let wait = Duration::from_millis(wait_ms.into()).min(END_MAX);
                    self.ending.push(Ending { id, child, deadline: Instant::now() + wait });
                    self.end_children()
                }
                None => self.refuse(id, Errno::SRCH),
            },
            _ => self.refuse(id, Errno::PERM),
        }
    }

    fn look_up(&mut self, id: u64, name: LookUp) -> Result<(), End> {
        if self.looking_up.len() >= LOOKUPS_MAX {
            return self.refuse(id, Errno::AGAIN);
        }
        let started = pipe_with(PipeFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|(pipe, answer)| Ok(((self.start)(name, answer, self.socket.as_fd())?, pipe)));
        match started {
            Ok((pid, pipe)) => {
                let deadline = Instant::now() + self.lookup_max;
                self.looking_up.push(LookingUp { id, pid, pipe, answer: Vec::new(), deadline });
                Ok(())
            }
            Err(error) => self.reply(id, &Reply::failure(&error), None),
        }
    }

    fn start_passt(&mut self, id: u64, arguments: &[String]) -> Result<(), End> {
        if self.children.len() + self.ending.len() + self.killed.len() >= CHILDREN_MAX {
            return self.refuse(id, Errno::AGAIN);
        }
        match start_passt_here(arguments) {
            Ok((child, socket)) => {
                let (number, pid) = (self.next_child, child.id());
                self.next_child += 1;
                self.children.insert(number, child);
                self.reply(id, &Reply::Started { child: number, pid }, Some(socket.as_fd()))
            }
            Err(error) => self.reply(id, &Reply::failure(&error), None),
        }
    }
}

/// Kills a process, which may have ended, and waits for its end.
fn reap(pid: Pid) {
    // Each fails only if there is no such child.
    let _ = kill_process(pid, Signal::KILL);
    let _ = waitpid(Some(pid), WaitOptions::empty());
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::thread;

    use super::*;
    use crate::client::Client;

    /// Looks a group up by a command of the shell, which has the name of the group.
    fn start(name: LookUp, pipe: OwnedFd, _: BorrowedFd<'_>) -> io::Result<Pid> {
        let LookUp::Group { name } = name else { return Err(Errno::NOSYS.into()) };
        let child = Command::new("sh").args(["-c", &name]).stdout(Stdio::from(pipe)).spawn()?;
        Ok(Pid::from_child(&child))
    }

    /// Runs a launcher, and `ask` with a function that returns the reply to a look-up by this command.
    fn with_launcher(lookup_max: Duration, ask: impl FnOnce(&Client, &dyn Fn(&str) -> Reply)) -> End {
        let (ours, theirs) = message::socket_pair().unwrap();
        let launcher = thread::spawn(move || Launcher::new(theirs, &start, lookup_max).run());
        let client = Client::start(ours, || ()).unwrap();
        let group =
            |command: &str| client.ask_with(&Request::Group { name: command.into() }, None).unwrap().0;
        ask(&client, &group);
        drop(client);
        launcher.join().unwrap()
    }

    fn errno(errno: Errno) -> Reply {
        Reply::Errno { errno: errno.raw_os_error() }
    }

    #[test]
    fn a_look_up_can_answer_anything() {
        let end = with_launcher(LOOKUP_MAX, |client, group| {
            // Eight bytes of a number, and the reply 17 with a group.
            let number = "printf '\\0\\0\\0\\0\\0\\0\\0\\0\\021\\007\\0\\0\\0'";
            assert_eq!(group(number), Reply::Group { id: 7 });
            assert_eq!(group(&format!("{number}; exec sleep 0.01")), Reply::Group { id: 7 });
            // No reply, one that is no answer, a part, one that never ends, and none.
            let no_answer = "printf '\\0\\0\\0\\0\\0\\0\\0\\0\\0'";
            for command in ["echo group", no_answer, "printf '\\0'", "exec cat /dev/zero", "exit 1"] {
                assert_eq!(group(command), errno(Errno::IO), "{command}");
            }
            let host = Request::Resolve { host: "host".into(), port: 1 };
            assert_eq!(client.ask_with(&host, None).unwrap().0, errno(Errno::NOSYS));
            assert_eq!(client.ask_with(&Request::ReadConfig {}, None).unwrap().0, errno(Errno::PERM));
            let end = Request::EndPasst { child: 1, wait_ms: 0 };
            assert_eq!(client.ask_with(&end, None).unwrap().0, errno(Errno::SRCH));
        });
        assert_eq!(end, End::Closed);
    }

    #[test]
    fn look_ups_that_take_too_long_are_killed() {
        with_launcher(Duration::from_millis(20), |_, group| {
            assert_eq!(group("exec sleep 600"), errno(Errno::TIMEDOUT));
        });
    }

    #[test]
    fn look_ups_have_a_bound() {
        with_launcher(LOOKUP_MAX, |client, _| {
            let group = || client.ask_with(&Request::Group { name: "exec sleep 600".into() }, None);
            thread::scope(|scope| {
                let waiting: Vec<_> = (0..=LOOKUPS_MAX).map(|_| scope.spawn(group)).collect();
                while !waiting.iter().any(|thread| thread.is_finished()) {
                    thread::sleep(Duration::from_millis(1));
                }
                // Only one has a reply. The end of the client ends the others.
                client.end();
                let replies = waiting.into_iter().map(|thread| thread.join().unwrap().ok());
                let replies: Vec<_> = replies.flatten().map(|(reply, _)| reply).collect();
                assert_eq!(replies, [errno(Errno::AGAIN)]);
            });
        });
    }

    #[test]
    fn a_message_that_is_no_request_ends_it() {
        let end = with_launcher(LOOKUP_MAX, |client, _| {
            message::send(client.socket(), b"no request", None).unwrap();
            assert!(client.ask(&Request::FindPasst {}).is_err());
        });
        assert_eq!(end, End::Malformed);
    }
}
