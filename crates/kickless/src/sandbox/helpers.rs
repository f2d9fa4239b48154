//! The helper processes: the opener, which alone uses names, and the launcher, which starts programs.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{iter, thread};

use anyhow::{Context, Result, anyhow};
use kickless_daemon::DeviceConfig;
use kickless_opener::{
    Authority, Calls, Config, ConfigFile, End, LookUp, PathUse, Target, launch, leave_opener, serve,
    socket_pair, use_opener,
};
use kickless_sandbox::{Access, Child, Ended, OPENER, Ruleset, Tcp, fork, lock, place, restrict};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use rustix::thread::{CapabilitySet, clear_ambient_capability_set};

use super::roots;
use crate::notify::Relay;
use crate::service::Service;
use crate::{config, exit, log};

/// The time from the end of the socket of a helper until the kernel has its status.
const STATUS_WAIT: Duration = Duration::from_secs(1);
/// The status of an opener that ended because the launcher did.
const LAUNCHER_GONE: i32 = End::LauncherGone.status();
/// The message of an opener that is ready. All others are sentences.
const READY: &[u8] = b"\n";

/// The parts of the sandbox that this kernel has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// The version of landlock, or 0.
    pub(super) landlock: u32,
    /// It has filters of system calls.
    pub(super) has_filters: bool,
}

/// The helper processes, which run.
pub(crate) struct Helpers {
    /// The socket of requests to the opener.
    socket: OwnedFd,
    opener: Child,
    launcher: Option<Child>,
}

impl Helpers {
    /// Makes the processes, and waits until the opener has lost its rights. The opener runs the relay.
    ///
    /// # Errors
    /// There is no process to be had, or the opener fails. The error is one sentence.
    pub(super) fn fork(
        service: &Service,
        authority: Authority,
        kernel: Kernel,
        close: &[BorrowedFd<'_>],
        relay: Option<Relay>,
    ) -> Result<Self> {
        let (socket, of_opener) = pair()?;
        let (mut launcher, mut to_launcher) = (None, None);
        if needs_launcher(service, &authority) {
            let (to, of_launcher) = pair()?;
            let mut close = [close, &[socket.as_fd(), of_opener.as_fd(), to.as_fd()]].concat();
            close.extend(relay.iter().flat_map(Relay::fds));
            let run = move || {
                // A service manager gives a capability for TAPs so. It is not for the programs.
                let _ = clear_ambient_capability_set();
                launch(of_launcher, &|name, pipe, own| look_up(name, pipe, own, kernel)).status()
            };
            launcher = Some(fork(c"kickless-launch", &close, run)?);
            to_launcher = Some(to);
        }
        let (ready, says_ready) = pipe_with(PipeFlags::CLOEXEC).context("no free descriptor")?;
        let close = [close, &[socket.as_fd(), ready.as_fd()]].concat();
        let config = service.file.clone();
        let run = move || open_files(of_opener, to_launcher, authority, config, kernel, relay, says_ready);
        let opener = fork(c"kickless-opener", &close, run)?;
        let mut said = Vec::new();
        File::from(ready).read_to_end(&mut said).context("the process that opens files is lost")?;
        match said.as_slice() {
            READY => Ok(Self { socket, opener, launcher }),
            [] => Err(anyhow!("the process that opens files has ended at its start ({})", opener.wait()?)),
            sentence => Err(anyhow!("{}", String::from_utf8_lossy(sentence))),
        }
    }

    /// Makes all further uses of names requests to the opener. Ends this process when a helper ends by
    /// itself.
    ///
    /// # Errors
    /// The process cannot start a thread.
    pub(super) fn start(self) -> Result<Running> {
        let Self { socket, opener, launcher } = self;
        let running = Running(Arc::new(Children { opener, launcher, may_end: AtomicBool::new(false) }));
        let children = running.0.clone();
        use_opener(socket, move || {
            if !children.may_end.load(Ordering::Relaxed) {
                log::print_sentence(&sentence(&children.opener, children.launcher.as_ref()));
                exit::exit_now(1);
            }
        })
        .context("the process that opens files cannot be asked")?;
        Ok(running)
    }
}

/// The helper processes, which answer requests. Dropping it ends them.
///
/// A service manager would kill them otherwise, and some first processes of containers leave children of
/// others as zombies.
pub(super) struct Running(Arc<Children>);

struct Children {
    opener: Child,
    launcher: Option<Child>,
    /// This process ends too.
    may_end: AtomicBool,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.may_end.store(true, Ordering::Relaxed);
        leave_opener();
        let deadline = Instant::now() + STATUS_WAIT;
        let mut left: Vec<_> = iter::once(&self.0.opener).chain(&self.0.launcher).collect();
        // A file system that does not answer can hold the opener.
        while !left.is_empty() && Instant::now() < deadline {
            left.retain(|child| matches!(child.try_wait(), Ok(None)));
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Returns the sentence about helpers of which one has ended.
fn sentence(opener: &Child, launcher: Option<&Child>) -> String {
    let deadline = Instant::now() + STATUS_WAIT;
    // The kernel tells a status once.
    let (mut opener_ended, mut launcher_ended) = (None, None);
    let has_ended = |does: &str, how: &dyn Display| {
        format!("the process that {does} has ended ({how}), so the program ends")
    };
    loop {
        opener_ended = opener_ended.or_else(|| opener.try_wait().ok()?);
        launcher_ended = launcher_ended.or_else(|| launcher?.try_wait().ok()?);
        let is_late = Instant::now() >= deadline;
        match (opener_ended, launcher_ended) {
            (Some(Ended::Exited(LAUNCHER_GONE)), Some(how)) => return has_ended("starts programs", &how),
            (Some(Ended::Exited(LAUNCHER_GONE)), None) if !is_late => {}
            (Some(how), _) => return has_ended("opens files", &how),
            (None, _) if is_late => return has_ended("opens files", &"it closed its socket"),
            (None, _) => {}
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd)> {
    socket_pair().context("no free descriptor for the processes of the sandbox")
}

/// Returns whether something is to be started or looked up, now or by a later call or configuration file.
fn needs_launcher(service: &Service, authority: &Authority) -> bool {
    let needs = |target: &Target| match target {
        Target::Tcp { host, .. } => host.parse::<IpAddr>().is_err(),
        Target::Socket { group, .. } => group.as_ref().is_some_and(|group| group.parse::<u32>().is_err()),
        Target::Passt { .. } => true,
        Target::Image { .. }
        | Target::Capture { .. }
        | Target::Unix { .. }
        | Target::Tap { .. }
        | Target::Backing
        | Target::Library { .. } => false,
    };
    authority.calls != Calls::Nothing || service.file.is_some() || authority.named.iter().any(needs)
}

/// Starts a process that looks a name up. The C library loads code and reads files for it, so it can read
/// everything that this user can, and nothing else.
fn look_up(name: LookUp, pipe: OwnedFd, own: BorrowedFd<'_>, kernel: Kernel) -> io::Result<Pid> {
    let run = move || {
        let restricted = (|| {
            let mut rules = Ruleset::new(kernel.landlock, Tcp::Connect)?;
            let root = place(Path::new("/"))?;
            rules.allow(&root, Access::READ_FILE | Access::READ_DIR | Access::EXECUTE)?;
            Ok::<_, anyhow::Error>(restrict(CapabilitySet::empty(), rules)?)
        })();
        match restricted {
            Ok(()) => {
                name.run(&pipe);
                0
            }
            Err(_) => 1,
        }
    };
    let child = fork(c"kickless-lookup", &[own], run).map_err(io::Error::other)?;
    Ok(child.pid())
}

/// Runs in the opener. Returns its exit status.
fn open_files(
    socket: OwnedFd,
    launcher: Option<OwnedFd>,
    authority: Authority,
    config: Option<PathBuf>,
    kernel: Kernel,
    relay: Option<Relay>,
    ready: OwnedFd,
) -> i32 {
    let say = |text: &[u8]| {
        // The other process sees at least the end of the pipe.
        let _ = rustix::io::write(&ready, text);
    };
    // A thread that is made earlier would keep its rights.
    let started = lose_rights(&authority, config.as_deref(), kernel)
        .and_then(|()| relay.map_or(Ok(()), Relay::start).context("cannot start a thread"));
    if let Err(error) = started {
        say(kickless_daemon::sentence(&*error).as_bytes());
        return 1;
    }
    say(READY);
    drop(ready);
    match serve(socket, authority, launcher, config.map(config_file)) {
        Ok(end) => end.status(),
        Err(_) => 1,
    }
}

/// Takes everything from this process but the files below the roots.
fn lose_rights(authority: &Authority, config: Option<&Path>, kernel: Kernel) -> Result<()> {
    let is_tap = |target: &Target| matches!(target, Target::Tap { .. });
    let has_taps = authority.calls == Calls::All || authority.named.iter().any(is_tap);
    let mut rules = Ruleset::new(kernel.landlock, Tcp::Connect)?;
    let mut allow = |path: &Path, access: Access| {
        let place = place(path).with_context(|| format!("{} cannot be reached", path.display()))?;
        Ok::<_, anyhow::Error>(rules.allow(place, access)?)
    };
    for root in &authority.roots {
        allow(&root.directory, root.uses.iter().map(|&usage| access(usage)).collect())?;
    }
    if let Some(config) = config {
        // It may be replaced by another file of its name.
        let directory = config.parent().filter(|directory| !directory.as_os_str().is_empty());
        allow(directory.unwrap_or(Path::new(".")), Access::READ_FILE)?;
        // A pipe of a shell (`/dev/fd/63`) has no other path, and is not read again.
        if let Some(real) = roots::canonical(config).ok().as_deref().and_then(Path::parent) {
            allow(real, Access::READ_FILE)?;
        }
    }
    // A container may have no /sys, and then facts about devices are not known.
    let _ = allow(Path::new("/sys"), Access::READ_FILE);
    if has_taps {
        // A machine without TAPs has no such file, and the option of the port says so.
        let _ = allow(Path::new("/dev/net/tun"), access(PathUse::Image));
    }
    let mut kept = CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN | CapabilitySet::FOWNER;
    kept.set(CapabilitySet::NET_ADMIN, has_taps);
    restrict(kept, rules)?;
    if kernel.has_filters {
        lock(&OPENER)?;
    }
    Ok(())
}

/// Returns the rights of the files of a root. Those of size and of ioctls stay with a descriptor that is
/// passed on.
fn access(usage: PathUse) -> Access {
    let file = Access::READ_FILE | Access::WRITE_FILE | Access::TRUNCATE;
    match usage {
        PathUse::Image => file | Access::IOCTL_DEV,
        PathUse::Socket => Access::READ_DIR | Access::MAKE_SOCK | Access::REMOVE_FILE,
        PathUse::Capture => file | Access::MAKE_REG,
    }
}

/// Returns the configuration file, and how it is read. It is parsed on a thread with a usual stack, because
/// those of requests are small.
fn config_file(path: PathBuf) -> Config {
    let of_reader = path.clone();
    let read = move || {
        let text = config::read_bytes(&of_reader)?;
        let parse = || config::parse_bytes(&of_reader, &text).ok().map(|service| named(&service.devices));
        let parsed = thread::scope(|scope| {
            let thread = thread::Builder::new().name("config".into()).spawn_scoped(scope, parse)?;
            thread.join().map_err(|_| io::Error::from(io::ErrorKind::Other))
        });
        Ok(ConfigFile { named: parsed?, text })
    };
    Config { path, read: Box::new(read) }
}

/// Returns the things that the devices of a service use.
fn named(devices: &[DeviceConfig]) -> Vec<Target> {
    devices.iter().flat_map(DeviceConfig::grants).map(|grant| grant.to).collect()
}
