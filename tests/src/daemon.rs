//! A vhost-user-blk back-end as a child process: `kickless`, or QEMU's storage daemon to compare with.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::transcript::Transcript;

/// Safety net for everything that takes a daemon a moment.
const LIMIT: Duration = Duration::from_secs(30);

/// How long a daemon has to end by itself after a test has failed.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Which back-end serves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Ours.
    Kickless,
    /// `qemu-storage-daemon`: tells whether a failure is ours or the test's.
    StorageDaemon,
}

impl Program {
    /// Ours, unless `KICKLESS_TEST_PROGRAM=qemu-storage-daemon` asks for the other.
    pub fn from_environment() -> Program {
        match std::env::var("KICKLESS_TEST_PROGRAM").as_deref() {
            Ok("qemu-storage-daemon") => Program::StorageDaemon,
            _ => Program::Kickless,
        }
    }
}

/// What a daemon is started with.
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    /// The back-end.
    pub program: Program,
    /// The disk: an image file or `null:SIZE` (which the storage daemon takes in bytes only), or for kickless also
    /// `mem:SIZE`.
    pub disk: OsString,
    /// The most queues a front-end may ask for.
    pub queues: u16,
    /// `--engine`, for kickless only.
    pub engine: Option<String>,
    /// A program that is given the daemon's command line to run.
    pub wrapper: Option<PathBuf>,
    /// Further arguments, for kickless only.
    pub arguments: Vec<String>,
    /// A thread of its own for the disk, for the storage daemon only.
    pub iothread: bool,
    /// That thread polls before it sleeps, as it does by default.
    pub polls: bool,
    /// It does its I/O by io_uring, and not by threads as it does by default, for the storage daemon only.
    pub by_uring: bool,
}

impl DaemonConfig {
    /// The program that the environment selects, four queues, and everything else as it is by default.
    pub fn new(disk: impl Into<OsString>) -> DaemonConfig {
        DaemonConfig {
            program: Program::from_environment(),
            disk: disk.into(),
            queues: 4,
            engine: None,
            wrapper: None,
            arguments: Vec::new(),
            iothread: false,
            polls: true,
            by_uring: false,
        }
    }

    fn command(&self, socket: &Path) -> Result<Vec<OsString>> {
        let mut words: Vec<OsString> = self.wrapper.iter().map(|path| path.clone().into()).collect();
        let joined = |prefix: &str, value: &dyn AsRef<std::ffi::OsStr>| {
            let mut word = OsString::from(prefix);
            word.push(value.as_ref());
            word
        };
        match self.program {
            Program::Kickless => {
                words.push(kickless_binary()?.into());
                words.push("blk".into());
                words.push(joined("--socket-path=", &socket));
                words.push(joined("--blk-file=", &self.disk));
                words.push(format!("--num-queues={}", self.queues).into());
                words.extend(self.engine.iter().map(|engine| format!("--engine={engine}").into()));
                words.extend(self.arguments.iter().map(OsString::from));
            }
            Program::StorageDaemon => {
                words.push("qemu-storage-daemon".into());
                words.push("--blockdev".into());
                match self.disk.to_str().and_then(|disk| disk.strip_prefix("null:")) {
                    Some(size) => words
                        .push(format!("driver=null-co,node-name=disk,read-zeroes=off,size={size}").into()),
                    None => {
                        let device = Path::new(&self.disk).starts_with("/dev");
                        let device = device && !Path::new(&self.disk).starts_with("/dev/shm");
                        let driver = if device { "host_device" } else { "file" };
                        let aio = if self.by_uring { "aio=io_uring," } else { "" };
                        let words_before =
                            format!("driver={driver},{aio}cache.direct=on,node-name=disk,filename=");
                        words.push(joined(&words_before, &self.disk));
                    }
                }
                if self.iothread {
                    let polling = if self.polls { "" } else { ",poll-max-ns=0" };
                    words.extend(["--object".into(), format!("iothread,id=thread{polling}").into()]);
                }
                words.push("--export".into());
                let mut export = joined(
                    "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path=",
                    &socket,
                );
                export.push(format!(",num-queues={}", self.queues));
                if self.iothread {
                    export.push(",iothread=thread");
                }
                words.push(export);
            }
        }
        Ok(words)
    }
}

/// A network card that `kickless net` serves.
#[derive(Clone, Debug)]
pub struct CardConfig {
    /// `--port`.
    pub port: String,
    /// Further arguments.
    pub arguments: Vec<String>,
}

impl CardConfig {
    /// A card with this port, and everything else as it is by default.
    pub fn new(port: &str) -> CardConfig {
        CardConfig { port: port.to_owned(), arguments: Vec::new() }
    }

    /// The same with these arguments.
    pub fn with(self, arguments: &[&str]) -> CardConfig {
        CardConfig { arguments: arguments.iter().map(ToString::to_string).collect(), ..self }
    }

    fn command(&self, socket: &Path) -> Result<Vec<OsString>> {
        let mut path = OsString::from("--socket-path=");
        path.push(socket);
        let mut words = vec![kickless_binary()?.into(), "net".into(), path];
        words.push(format!("--port={}", self.port).into());
        words.extend(self.arguments.iter().map(OsString::from));
        Ok(words)
    }
}

/// Returns a counter in the summary that a network card leaves in the log.
///
/// # Errors
/// There is no such counter.
pub fn card_counter(log: &[String], name: &str) -> Result<u64> {
    let summary =
        log.iter().find(|line| line.contains(" summary device ")).context("no summary of a card")?;
    let prefix = format!("{name}=");
    let value = summary.split_whitespace().find_map(|word| word.strip_prefix(&prefix));
    Ok(value.with_context(|| format!("no {name} in {summary}"))?.parse()?)
}

/// A daemon that listens on its socket; killed when dropped.
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: Transcript,
    dir: TempDir,
}

impl Daemon {
    /// Starts a daemon and waits until it listens.
    ///
    /// # Errors
    /// It could not be started, ended at once, or did not listen in time. What it printed is in the message.
    pub fn start(config: &DaemonConfig) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("blk.sock");
        let words = config.command(&socket)?;
        Daemon::launch(&words, dir, socket, config.program == Program::Kickless)
    }

    /// Starts `kickless serve` with a pool and devices, and waits until it serves them. `pool` has the lines of `[pool]`; a
    /// device has a name and further lines.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn serve(pool: &str, devices: &[(&str, &str)]) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let mut config = format!("[pool]\n{pool}\n");
        for (name, lines) in devices {
            let socket = socket_of(dir.path(), name);
            config +=
                &format!("[[device]]\nname = '{name}'\nsocket-path = '{}'\n{lines}\n", socket.display());
        }
        let path = dir.path().join("disks.toml");
        fs::write(&path, config)?;
        let mut option = OsString::from("--config=");
        option.push(&path);
        let first = devices.first().context("no device")?.0;
        let socket = socket_of(dir.path(), first);
        Daemon::launch(&[kickless_binary()?.into(), "serve".into(), option], dir, socket, true)
    }

    /// Starts `kickless net`, and waits until it listens.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn start_card(config: &CardConfig) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("net.sock");
        Daemon::launch(&config.command(&socket)?, dir, socket, true)
    }

    fn launch(words: &[OsString], dir: TempDir, socket: PathBuf, says_so: bool) -> Result<Daemon> {
        let (child, log) = spawn(words)?;
        let mut daemon = Daemon { child, socket, log, dir };
        daemon.wait_until_it_serves(words, says_so)?;
        Ok(daemon)
    }

    fn wait_until_it_serves(&mut self, words: &[OsString], says_so: bool) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !listens(&self.socket)? {
            if let Some(status) = self.child.try_wait()? {
                let lines = self.log.whole(LIMIT)?.join("\n");
                bail!("{words:?} ended, {status}: {lines}");
            }
            ensure!(Instant::now() < deadline, "{words:?} does not listen");
            thread::sleep(Duration::from_millis(5));
        }
        if says_so {
            // It listens before all else, and opens descriptors until it says that it serves.
            let serves = |line: &str| line.contains(" serving ").then_some(());
            self.log.wait_for("saying that it serves", LIMIT, serves)?;
        }
        Ok(())
    }

    /// Where the front-ends of one device of several connect.
    pub fn socket_of(&self, device: &str) -> PathBuf {
        socket_of(self.dir.path(), device)
    }

    /// Kills it (SIGKILL), whatever it is about to do, and starts another one on the same socket as soon as it is gone. The log is that
    /// of the new one; returns that of the old one.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn kill_and_restart(&mut self, config: &DaemonConfig) -> Result<Vec<String>> {
        let words = config.command(&self.socket)?;
        self.replace(&words, config.program == Program::Kickless)
    }

    /// As [`Daemon::kill_and_restart`], for a network card.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn kill_and_restart_card(&mut self, config: &CardConfig) -> Result<Vec<String>> {
        let words = config.command(&self.socket)?;
        self.replace(&words, true)
    }

    fn replace(&mut self, words: &[OsString], says_so: bool) -> Result<Vec<String>> {
        self.child.kill()?;
        self.child.wait()?;
        let before = self.log.whole(LIMIT)?;
        // It is in the directory of this one.
        let (child, log) = spawn(words)?;
        (self.child, self.log) = (child, log);
        self.wait_until_it_serves(words, says_so)?;
        Ok(before)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Where front-ends connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What it logs.
    pub fn log(&self) -> &Transcript {
        &self.log
    }

    /// Waits until it has taken so many requests out of a queue since it started. For a daemon with one device.
    ///
    /// # Errors
    /// It has not.
    pub fn wait_until_taken(&self, queue: u16, requests: u64) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let of = format!(" counters queue={queue} ");
        let taken = |line: &str| -> Option<u64> {
            let mut words = line.split_whitespace().filter(|_| line.contains(&of));
            words.find_map(|word| word.strip_prefix("requests="))?.parse().ok()
        };
        loop {
            let seen = self.log.len();
            self.signal(Signal::USR1)?;
            // There is no line of a queue that was not used yet.
            let taken = self.log.wait_from(seen, "counters", Duration::from_millis(200), taken).unwrap_or(0);
            if taken >= requests {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{taken} requests of queue {queue} were taken, not {requests}"
            );
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// The process cannot be asked for.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// How many descriptors it has open, and how many mappings: what grows when something of a guest that left stays behind.
    ///
    /// # Errors
    /// It has ended.
    pub fn holdings(&self) -> Result<(usize, usize)> {
        let process = PathBuf::from(format!("/proc/{}", self.child.id()));
        let descriptors = fs::read_dir(process.join("fd"))?.count();
        let maps = fs::read_to_string(process.join("maps"))?;
        // Guest memory is what it maps of others' memfds; its own heap and stacks may grow as they like.
        Ok((descriptors, maps.lines().filter(|line| line.contains("memfd:")).count()))
    }

    /// Waits until it holds no more than `before`.
    ///
    /// # Errors
    /// It goes on holding more.
    pub fn returns_to(&self, before: (usize, usize)) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = self.holdings()?;
            if now.0 <= before.0 && now.1 <= before.1 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "descriptors and mappings: {before:?} before, {now:?} now");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks it to end (SIGTERM) and gives its status and everything that it logged.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(mut self) -> Result<(ExitStatus, Vec<String>)> {
        self.signal(Signal::TERM)?;
        let status = wait_for_exit(&mut self.child, LIMIT).context("the daemon goes on after SIGTERM")?;
        let lines = self.log.whole(LIMIT)?;
        Ok((status, lines))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already; there is nobody to tell. After a failure, its own summary may say why.
        if thread::panicking() && self.signal(Signal::TERM).is_ok() {
            let _ = wait_for_exit(&mut self.child, LAST_WORDS);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.log.dump();
        }
    }
}

/// Starts a daemon; it, and what it logs.
fn spawn(words: &[OsString]) -> Result<(Child, Transcript)> {
    let mut child = dying_with_us(&words[0])
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {words:?}"))?;
    let stderr = child.stderr.take().context("no pipe")?;
    Ok((child, Transcript::of("daemon", stderr)))
}

/// A command whose process gets SIGKILL when the thread that starts it ends: nothing survives a test that is aborted.
pub fn dying_with_us(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Waits for a child's end.
///
/// # Errors
/// It does not end in time.
pub fn wait_for_exit(child: &mut Child, limit: Duration) -> Result<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        ensure!(Instant::now() < deadline, "process {} does not end", child.id());
        thread::sleep(Duration::from_millis(5));
    }
}

fn socket_of(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("{device}.sock"))
}

/// Whether somebody listens on a unix socket; found out without connecting, which a back-end would take for a front-end.
fn listens(socket: &Path) -> Result<bool> {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let path = socket.to_str().context("socket path is no text")?;
    Ok(fs::read_to_string("/proc/net/unix")?.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(3) == Some(ACCEPTS_CONNECTIONS) && fields.last() == Some(path)
    }))
}

/// The daemon to test: `KICKLESS_BIN`, or the release build in the target directory that this program is from.
///
/// # Errors
/// It is not there.
pub fn kickless_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("KICKLESS_BIN") {
        return Ok(path.into());
    }
    let exe = std::env::current_exe()?;
    let candidates = exe.ancestors().skip(1).take(3).map(|dir| dir.join("release/kickless"));
    candidates
        .chain([repository().join("target/release/kickless")])
        .find(|path| path.is_file())
        .context("kickless is not built: run `cargo build --release -p kickless`")
}

/// The root of the source tree.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
