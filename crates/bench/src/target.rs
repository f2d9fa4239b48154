//! The back-end under load: a socket that is served already, or a command that the benchmark starts.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kickless_driver::Error;
use kickless_values::CpuList;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tempfile::TempDir;

/// The placeholder for the socket in a command.
const SOCKET: &str = "{socket}";
/// The longest time for a command to make its socket.
const START_MAX: Duration = Duration::from_secs(30);
/// The longest time for a command to listen on its socket after it has made it.
const LISTEN_MAX: Duration = Duration::from_secs(5);
/// The longest time for a command to exit.
const END_MAX: Duration = Duration::from_secs(5);

/// A back-end.
#[derive(Debug)]
pub(crate) struct Target {
    name: String,
    socket: PathBuf,
    pid: Option<u32>,
    started: Option<Started>,
}

/// A back-end that the benchmark started. It is stopped when this is dropped.
#[derive(Debug)]
struct Started {
    child: Child,
    /// The directory of its socket.
    _dir: TempDir,
}

impl Target {
    /// Makes a target of a socket that is served already.
    pub(crate) fn at(name: String, socket: PathBuf, pid: Option<u32>) -> Target {
        Target { name, socket, pid, started: None }
    }

    /// Parses a target on the command line. If it is a command, starts it on these CPUs.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn parse(text: &str, cpus: Option<&CpuList>) -> Result<Target> {
        let (name, what) = named(text);
        if !what.contains(SOCKET) {
            return Ok(Target::at(name.unwrap_or(what).into(), what.into(), None));
        }
        let dir = tempfile::tempdir().context("the directory for the socket cannot be made")?;
        let socket = dir.path().join("target.sock");
        let command = what.replace(SOCKET, &socket.to_string_lossy());
        let mut child = on_cpus(cpus, || {
            // `exec` makes the process the back-end itself instead of a shell, so its processor time can be
            // measured.
            let mut shell = Command::new("/bin/sh");
            shell.arg("-c").arg(format!("exec {command}")).stdin(Stdio::null()).stdout(Stdio::null());
            // The interrupt key of a terminal ends the benchmark, which then ends the back-end.
            shell.process_group(0);
            shell.spawn().with_context(|| format!("{command} cannot be started"))
        })?;
        let name = name.map_or_else(|| program(what), str::to_owned);
        let listens = wait_for(&socket, &mut child);
        let target =
            Target { name, socket, pid: Some(child.id()), started: Some(Started { child, _dir: dir }) };
        listens.with_context(|| command).map(|()| target)
    }

    /// Returns its name in the results.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the path of the socket of its second card.
    pub(crate) fn peer_socket(&self) -> PathBuf {
        let mut path = self.socket.clone().into_os_string();
        path.push(".peer");
        path.into()
    }

    /// Returns its process number, if it is known.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Returns how long to retry the connection. A command makes its socket a moment before it listens.
    pub(crate) fn connect_timeout(&self) -> Duration {
        if self.started.is_some() { LISTEN_MAX } else { Duration::ZERO }
    }

    /// Stops the process of a command while another target has its turn. A back-end that polls without a
    /// client would take the CPU that they share.
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues a process that was stopped.
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(started) = &self.started {
            started.signal(signal);
        }
    }

    /// Changes the name.
    pub(crate) fn rename(&mut self, name: String) {
        self.name = name;
    }
}

impl Started {
    /// Sends a signal. The only error is that the process has ended, which the turns report.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        // A stopped process ends only when it goes on.
        self.signal(Signal::CONT);
        let deadline = Instant::now() + END_MAX;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a command has made its socket.
///
/// # Errors
/// The command exits, or takes too long.
fn wait_for(socket: &Path, child: &mut Child) -> Result<()> {
    let deadline = Instant::now() + START_MAX;
    while !socket.exists() {
        if let Some(status) = child.try_wait()? {
            bail!("it ended, {status}, without listening on {SOCKET}");
        }
        if Instant::now() >= deadline {
            bail!("it has no socket after {START_MAX:?}: it has to listen on {SOCKET}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Adds the name of a target to its error. The error of a connection has the path of the socket already,
/// which is the name of a target without another one.
pub(crate) fn name_in(error: anyhow::Error, name: &str) -> anyhow::Error {
    let has_it = matches!(error.downcast_ref(), Some(Error::Connect { path, .. }) if path == Path::new(name));
    if has_it { error } else { error.context(name.to_owned()) }
}

/// Adds the commands for the other kind of device to the error of a socket that has the wrong one.
pub(crate) fn name_command(error: Error, commands: &str) -> anyhow::Error {
    match error {
        Error::OtherDevice { found } => anyhow!("it serves {found}: use {commands}"),
        error => error.into(),
    }
}

/// Splits `NAME=TARGET`. A name contains no character of a path or a command: no `/`, space or `{`.
fn named(text: &str) -> (Option<&str>, &str) {
    let is_name = |name: &str| !name.is_empty() && !name.contains(['/', ' ', '{']);
    match text.split_once('=') {
        Some((name, what)) if is_name(name) => (Some(name), what),
        _ => (None, text),
    }
}

/// Returns the program of a command, without its directory.
fn program(command: &str) -> String {
    let first = command.split_whitespace().next().unwrap_or(command);
    Path::new(first).file_name().map_or(first.into(), |name| name.to_string_lossy().into_owned())
}

/// Runs `does` on these CPUs. A child that it starts stays on them.
fn on_cpus<T>(cpus: Option<&CpuList>, does: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(CpuList(cpus)) = cpus else { return does() };
    let all = sched_getaffinity(None).context("the CPUs of this process cannot be read")?;
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).context("--target-cpu: these CPUs cannot be used")?;
    let done = does();
    sched_setaffinity(None, &all).context("the CPUs of this process cannot be restored")?;
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_name_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let failed = || kickless_driver::Disk::connect(kickless_driver::Options::new(&path)).err().unwrap();
        let said = |name: &str| format!("{:#}", name_in(name_command(failed(), ""), name));
        let path = path.display().to_string();
        assert_eq!(said(&path).matches(&path).count(), 1);
        // A name can be a word of the sentence.
        assert!(said("a").starts_with("a: cannot connect to "), "{}", said("a"));
    }

    #[test]
    fn names() {
        assert_eq!(named("/run/a.sock"), (None, "/run/a.sock"));
        assert_eq!(named("a-b=/run/a.sock"), (Some("a-b"), "/run/a.sock"));
        assert_eq!(named("./k blk --socket-path={socket}"), (None, "./k blk --socket-path={socket}"));
        assert_eq!(named("a=k blk --fd=3"), (Some("a"), "k blk --fd=3"));
        assert_eq!(program("/usr/bin/qsd --x"), "qsd");
    }

    #[test]
    fn a_command_that_ends() {
        let error = Target::parse("false # {socket}", None).unwrap_err();
        assert!(format!("{error:#}").contains("exit status: 1"), "{error:#}");
    }

    #[test]
    fn a_command_ends_with_its_target() {
        let target = Target::parse("sleep=sh -c ': > {socket}; exec sleep 1000'", None).unwrap();
        let pid = Pid::from_raw(target.pid().unwrap() as i32).unwrap();
        assert_eq!(target.name(), "sleep");
        drop(target);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }
}
