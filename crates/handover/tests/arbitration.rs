//! Lets two processes race for who serves, thousands of times: the new one says that it serves while the old
//! one gives up, and one of them is stopped or killed. They never disagree.
//!
//! It starts itself as the new process. `HANDOVER_RACES=100000` is a longer run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use std::env;
use std::hint::spin_loop;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kickless_handover::v1::Plan;
use kickless_handover::{Decision, FromOld, Giving, NewEnd, OldEnd};
use kickless_testing::Random;
use rustix::cmsg_space;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, kill_process};

/// The variable that makes this program the new process.
const ROLE: &str = "KICKLESS_HANDOVER_TEST_ROLE";
const RACES: &str = "HANDOVER_RACES";
/// Longer than any step takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// The range of the moments of a race. The way from process to process takes about as long.
const MOMENT_US: u64 = 100;

/// A message without a body: of the old process, that all have come, and of the new one, that descriptors
/// have.
const LAST: [u8; 12] = [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const GOT: [u8; 12] = [10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The properties of a race.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Race {
    /// The new process ends while messages to it are unread.
    is_unread_by_new: bool,
    /// Other messages are in the old process's queue.
    is_unread_by_old: bool,
    /// The signal that the new process gets, and after which microseconds.
    signal: Option<(Signal, u64)>,
    /// The microseconds for which each process waits.
    old_us: u64,
    new_us: u64,
}

fn main() {
    if env::var_os(ROLE).is_some() {
        new_process(&std::io::stdin().as_fd().try_clone_to_owned().unwrap());
        return;
    }
    let races = env::var(RACES).map_or(4000, |races| races.parse().unwrap());
    let (mut random, mut taken, mut kept) = (Random(39), 0, 0);
    let mut new = New::start();
    for number in 0..races {
        let signal = match number % 40 {
            0 => Some((Signal::STOP, random.below(2 * MOMENT_US))),
            1 => Some((Signal::KILL, random.below(4 * MOMENT_US))),
            _ => None,
        };
        let race = Race {
            is_unread_by_new: random.one_in(2),
            is_unread_by_old: random.one_in(4),
            signal,
            old_us: random.below(MOMENT_US),
            new_us: random.below(2 * MOMENT_US),
        };
        match new.race(race) {
            true => taken += 1,
            false => kept += 1,
        }
    }
    println!("arbitration: {races} races, {taken} taken over, {kept} kept");
    assert!(taken > races / 100 && kept > races / 100, "the races are no races");
}

/// A new process, and the socket on which it gets races and reports their results.
struct New {
    process: Child,
    races: OwnedFd,
}

impl New {
    fn start() -> Self {
        let (races, theirs) = pair();
        let mut command = Command::new(env::current_exe().unwrap());
        let process = command.env(ROLE, "new").stdin(Stdio::from(theirs)).spawn().unwrap();
        Self { process, races }
    }

    /// Runs a race. Returns whether the new process has taken over.
    fn race(&mut self, race: Race) -> bool {
        let (old, new) = pair();
        let to_new = [race.new_us as u8, race.is_unread_by_old.into()];
        send_with(&self.races, &to_new, Some(new));
        let raw = old.try_clone().unwrap();
        let (mut old, deadline) = (OldEnd::new(old), Instant::now() + LONG);
        old.plan(0, Giving::default().record(&Plan::default()).unwrap(), deadline).unwrap();
        if race.is_unread_by_new {
            // The new process does not read the one that the offer sends.
            send(&raw, &LAST, SendFlags::NOSIGNAL).unwrap();
        }
        drop(raw);
        let pid = Pid::from_child(&self.process);
        let decision = thread::scope(|scope| {
            if let Some((signal, after)) = race.signal {
                scope.spawn(move || {
                    spin(after);
                    kill_process(pid, signal).unwrap();
                });
            }
            old.offer(Instant::now() + Duration::from_micros(race.old_us))
        });
        if race.signal.is_some_and(|(signal, _)| signal == Signal::STOP) {
            kill_process(pid, Signal::CONT).unwrap();
        }
        let is_taken = matches!(decision, Decision::Taken(_));
        let report = receive_with(&self.races).map(|(report, _)| report[0]);
        let is_killed = race.signal.is_some_and(|(signal, _)| signal == Signal::KILL);
        match report {
            Some(report) => assert_eq!(report == b't', is_taken, "{race:?}: {decision:?}"),
            // It was killed before it could say what it had found. If it had taken over, this process knows.
            None => assert!(is_killed, "{race:?}: the new process has ended"),
        }
        if is_killed {
            self.process.wait().unwrap();
            *self = Self::start();
        }
        is_taken
    }
}

impl Drop for New {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Takes part in races until the old process ends.
fn new_process(races: &OwnedFd) {
    while let Some((race, channel)) = receive_with(races) {
        let (raw, deadline) = (channel.try_clone().unwrap(), Instant::now() + LONG);
        let mut new = NewEnd::new(channel);
        assert!(matches!(new.receive(deadline), Ok(FromOld::Plan(_))));
        new.confirm(deadline).unwrap();
        assert!(matches!(new.receive(deadline), Ok(FromOld::Last)));
        if race[1] != 0 {
            let _ = send(&raw, &GOT, SendFlags::NOSIGNAL);
        }
        drop(raw);
        spin(race[0].into());
        let is_taken = new.take(deadline).is_ok();
        send_with(races, if is_taken { b"tt" } else { b"nn" }, None);
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn spin(microseconds: u64) {
    let end = Instant::now() + Duration::from_micros(microseconds);
    while Instant::now() < end {
        spin_loop();
    }
}

fn send_with(socket: &OwnedFd, bytes: &[u8; 2], fd: Option<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Returns the next message and its descriptor, or a duplicate of the socket if it has none. `None` at the
/// end.
fn receive_with(socket: &OwnedFd) -> Option<([u8; 2], OwnedFd)> {
    let mut bytes = [0; 2];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    // An end with unread messages is an error first.
    let is_message = got.is_ok_and(|got| got.bytes == 2);
    is_message.then(|| (bytes, fd.unwrap_or_else(|| socket.try_clone().unwrap())))
}
