//! A small service manager: what systemd does for one unit with `Type=notify`, `NotifyAccess=all`, a
//! watchdog, sockets and a descriptor store.
//!
//! It runs commands of the unit. It takes messages about the main process and the store (`MAINPID`,
//! `FDSTORE`, `FDSTOREREMOVE`, `BARRIER`) from the main process and from a command that it runs, and notes
//! those of others: kickless's helpers send none. All other messages it takes from each process, as systemd
//! does from each one of the unit. It passes sockets, and stored descriptors, to the next main process. As
//! systemd does, it drops a stored descriptor whose other end is closed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, getpid, kill_process, set_child_subreaper,
    test_kill_process, waitid,
};
use tempfile::TempDir;

use crate::daemon::wait_for_exit;
use crate::transcript::Transcript;

/// Time limit for each command.
const LIMIT: Duration = Duration::from_secs(60);
/// The interval at which the manager looks at stored descriptors.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Numbers of descriptors that a command gets other numbers for.
const FIRST_SPARE: i32 = 100;

/// The ways in which the manager differs from one that works.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// It answers each `BARRIER` after this time.
    pub barrier_delay: Duration,
    /// It never answers a `BARRIER`.
    pub is_deaf: bool,
    /// It stores no descriptors.
    pub has_no_store: bool,
}

/// A main process that another one has replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The process before.
    pub from: i32,
    /// The process after.
    pub to: i32,
    /// The process before was there at the next `BARRIER`.
    pub was_there: bool,
}

#[derive(Default)]
struct State {
    main: Option<i32>,
    control: Option<i32>,
    store: Vec<(String, OwnedFd)>,
    moves: Vec<Move>,
    /// Messages about the main process or the store, of processes that may send none.
    strays: Vec<String>,
    /// The other messages, in their order, without the signs of life.
    told: Vec<String>,
    /// The number of signs of life.
    feeds: usize,
    /// The sockets of the unit, and the interval of its watchdog.
    sockets: Vec<(String, OwnedFd)>,
    watchdog: Option<Duration>,
    /// Variables of the main process.
    variables: Vec<(OsString, OsString)>,
    faults: Faults,
    /// The ends of barriers that are not answered.
    barriers: Vec<OwnedFd>,
    is_over: bool,
}

/// A manager, with the main process of its unit.
pub struct Manager {
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
    dir: TempDir,
}

impl Manager {
    /// Makes a manager without a main process. Orphans of this process become its children.
    ///
    /// # Errors
    /// The host has no socket for it.
    pub fn new() -> Result<Self> {
        set_child_subreaper(Some(getpid()))?;
        let dir = tempfile::Builder::new().prefix("kickless-manager-").tempdir()?;
        let socket = UnixDatagram::bind(dir.path().join("notify"))?;
        set_socket_passcred(&socket, true)?;
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        let thread = thread::spawn(move || serve(&socket, &shared));
        Ok(Self { state, thread: Some(thread), dir })
    }

    /// Makes the manager differ from one that works.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.state).faults = faults;
    }

    /// Expects signs of life of later main processes. Does nothing if they do not come.
    pub fn set_watchdog(&self, interval: Duration) {
        lock(&self.state).watchdog = Some(interval);
    }

    /// Passes a socket of this name to later main processes.
    pub fn add_socket(&self, name: &str, socket: impl Into<OwnedFd>) {
        lock(&self.state).sockets.push((name.into(), socket.into()));
    }

    /// Sets a variable of later main processes.
    pub fn set_variable(&self, name: impl Into<OsString>, value: impl Into<OsString>) {
        lock(&self.state).variables.push((name.into(), value.into()));
    }

    /// Starts the main process with the sockets, and the descriptors of the store. Returns its log.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&self, words: &[OsString]) -> Result<Transcript> {
        let mut state = lock(&self.state);
        ensure!(state.main.is_none(), "there is a main process");
        let (mut script, mut names, mut passed) = (String::new(), Vec::new(), Vec::new());
        for (number, (name, fd)) in (3..).zip(state.sockets.iter().chain(&state.store)) {
            let spare = fcntl_dupfd_cloexec(fd, FIRST_SPARE)?;
            fcntl_setfd(&spare, FdFlags::empty())?;
            script += &format!("exec {number}<&{0} {0}<&-; ", spare.as_raw_fd());
            names.push(name.clone());
            passed.push(spare);
        }
        script += "LISTEN_PID=$$ WATCHDOG_PID=$$ exec \"$@\"";
        let mut command = self.command("bash");
        command.args(["-c", &script, "bash"]).args(words);
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.envs(state.watchdog.map(|interval| ("WATCHDOG_USEC", interval.as_micros().to_string())));
        command.envs(state.variables.iter().cloned());
        let mut child = command.spawn().with_context(|| format!("cannot run {words:?}"))?;
        state.main = i32::try_from(child.id()).ok();
        Ok(Transcript::of("main", child.stderr.take().context("no pipe")?))
    }

    /// Runs a command of the unit, as for `ExecReload=` and `ExecStop=`. Returns its status and the log of it
    /// and its children.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn run(&self, words: &[OsString]) -> Result<(ExitStatus, Transcript)> {
        let (mut child, log) = self.begin(words)?;
        let status = wait_for_exit(&mut child, LIMIT)?;
        // The kernel may give its number to another process from here on.
        lock(&self.state).control = None;
        Ok((status, log))
    }

    /// Begins a command of the unit.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin(&self, words: &[OsString]) -> Result<(std::process::Child, Transcript)> {
        let (program, arguments) = words.split_first().context("no command")?;
        let mut state = lock(&self.state);
        let mut child = self.command(program).args(arguments).spawn()?;
        state.control = i32::try_from(child.id()).ok();
        let log = Transcript::of("command", child.stderr.take().context("no pipe")?);
        Ok((child, log))
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env("NOTIFY_SOCKET", self.dir.path().join("notify"));
        command
    }

    /// Ends the main process with a signal. Returns its status. The store stays as it is.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn end_main(&self, signal: Signal) -> Result<WaitIdStatus> {
        let main = self.main_pid()?;
        kill_process(main, signal)?;
        self.wait_for_main()
    }

    /// Waits until the main process ends. Returns its status.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn wait_for_main(&self) -> Result<WaitIdStatus> {
        let main = self.main_pid()?;
        let status = wait_for(main)?;
        lock(&self.state).main = None;
        Ok(status)
    }

    /// Empties the store, as systemd does when the unit is inactive.
    pub fn empty_store(&self) {
        lock(&self.state).store.clear();
    }

    /// Returns the main process.
    ///
    /// # Errors
    /// There is none.
    pub fn main_pid(&self) -> Result<Pid> {
        lock(&self.state).main.and_then(Pid::from_raw).context("there is no main process")
    }

    /// Returns the changes of the main process.
    #[must_use]
    pub fn moves(&self) -> Vec<Move> {
        lock(&self.state).moves.clone()
    }

    /// Returns the names of stored descriptors, and how many there are.
    #[must_use]
    pub fn stored(&self) -> (BTreeSet<String>, usize) {
        let state = lock(&self.state);
        (state.store.iter().map(|(name, _)| name.clone()).collect(), state.store.len())
    }

    /// Returns the lines of all messages about the state of the service, in their order.
    #[must_use]
    pub fn told(&self) -> Vec<String> {
        lock(&self.state).told.clone()
    }

    /// Waits until a line of a message, after the first `skip` ones, `is_it`. Returns the number of lines up
    /// to it.
    ///
    /// # Errors
    /// It does not come in time.
    pub fn wait_for(&self, what: &str, skip: usize, is_it: impl Fn(&str) -> bool) -> Result<usize> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let told = self.told();
            if let Some(at) = told.iter().skip(skip).position(|line| is_it(line)) {
                return Ok(skip + at + 1);
            }
            ensure!(Instant::now() < deadline, "no message {what}: {told:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the number of signs of life.
    #[must_use]
    pub fn feeds(&self) -> usize {
        lock(&self.state).feeds
    }

    /// Waits for another sign of life.
    ///
    /// # Errors
    /// There is none in time.
    pub fn wait_for_feed(&self) -> Result<()> {
        let (before, deadline) = (self.feeds(), Instant::now() + LIMIT);
        while self.feeds() == before {
            ensure!(Instant::now() < deadline, "no sign of life");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns messages about the main process or the store, of processes that may send none.
    #[must_use]
    pub fn strays(&self) -> Vec<String> {
        lock(&self.state).strays.clone()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        state.is_over = true;
        if let Some(main) = state.main.take().and_then(Pid::from_raw) {
            let _ = kill_process(main, Signal::KILL);
        }
        drop(state);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Waits until a child ends. Returns its status.
///
/// # Errors
/// It does not end in time.
pub fn wait_for(pid: Pid) -> Result<WaitIdStatus> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            bail!("process {pid} does not end");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries out messages until the manager ends.
fn serve(socket: &UnixDatagram, state: &Mutex<State>) {
    let wait = Timespec { tv_sec: 0, tv_nsec: LOOK_EVERY.subsec_nanos().into() };
    while !lock(state).is_over {
        if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait)) == Ok(1) {
            receive(socket, state);
        }
        lock(state).store.retain(|(_, fd)| {
            let mut ends = [PollFd::new(fd, PollFlags::empty())];
            poll(&mut ends, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
        });
    }
}

fn receive(socket: &UnixDatagram, state: &Mutex<State>) {
    let (mut text, mut space) =
        ([0; 4096], [MaybeUninit::uninit(); cmsg_space!(ScmRights(16), ScmCredentials(1))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let Ok(got) = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, flags) else { return };
    let (mut fds, mut sender) = (Vec::new(), None);
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            RecvAncillaryMessage::ScmCredentials(credentials) => {
                sender = Some(credentials.pid.as_raw_nonzero().get());
            }
            _ => {}
        }
    }
    let text = String::from_utf8_lossy(&text[..got.bytes]).into_owned();
    let mut locked = lock(state);
    let is_of_unit = |line: &str| {
        ["MAINPID", "FDSTORE", "FDSTOREREMOVE", "FDNAME", "BARRIER"]
            .contains(&line.split('=').next().unwrap_or_default())
    };
    if !text.lines().any(is_of_unit) {
        let lines = text.lines().filter(|line| *line != "WATCHDOG=1").map(str::to_owned);
        locked.feeds += usize::from(text.lines().any(|line| line == "WATCHDOG=1"));
        return locked.told.extend(lines);
    }
    if sender.is_none() || sender != locked.main && sender != locked.control {
        return locked.strays.push(text);
    }
    carry_out(&text, fds, &mut locked);
    let delay = locked.faults.barrier_delay;
    drop(locked);
    if text.starts_with("BARRIER") {
        thread::sleep(delay);
        let mut state = lock(state);
        if let Some(last) = state.moves.last_mut() {
            last.was_there = Pid::from_raw(last.from).is_some_and(|from| test_kill_process(from).is_ok());
        }
        if !state.faults.is_deaf {
            state.barriers.clear();
        }
    }
}

fn carry_out(text: &str, fds: Vec<OwnedFd>, state: &mut State) {
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let name = value("FDNAME").unwrap_or("stored").to_owned();
    if let (Some(to), Some(from)) = (value("MAINPID").and_then(|pid| pid.parse().ok()), state.main) {
        state.moves.push(Move { from, to, was_there: false });
        state.main = Some(to);
    }
    if value("FDSTOREREMOVE") == Some("1") {
        state.store.retain(|(stored, _)| *stored != name);
    } else if value("FDSTORE") == Some("1") {
        if !state.faults.has_no_store {
            state.store.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
        }
    } else if value("BARRIER") == Some("1") {
        state.barriers.extend(fds);
    }
}
