//! Runs a vhost-user back-end as a child process: `kickless`, or QEMU's storage daemon for comparison.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{mem, panic, thread};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::transcript::Transcript;

/// Time limit for steps that take a daemon a moment.
const LIMIT: Duration = Duration::from_secs(30);

/// Time that a daemon gets to end by itself after a test has failed.
const EXIT_LIMIT: Duration = Duration::from_secs(3);

/// Time that a load runs before each upgrade.
const BETWEEN_UPGRADES: Duration = Duration::from_millis(50);

/// The program that serves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `kickless`, the program under test.
    Kickless,
    /// `qemu-storage-daemon`. A test that fails with it too is wrong itself.
    StorageDaemon,
}

impl Program {
    /// Returns the program that `KICKLESS_TEST_PROGRAM` selects: `qemu-storage-daemon`, otherwise
    /// `kickless`.
    pub fn from_environment() -> Program {
        match std::env::var("KICKLESS_TEST_PROGRAM").as_deref() {
            Ok("qemu-storage-daemon") => Program::StorageDaemon,
            _ => Program::Kickless,
        }
    }
}

/// Options of a daemon that serves one disk.
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    /// The back-end.
    pub program: Program,
    /// The disk: an image file or `null:SIZE`; with kickless also `mem:SIZE`. The storage daemon takes SIZE
    /// in bytes only. `qcow2:PATH` with both.
    pub disk: OsString,
    /// Largest number of queues that a front-end may use.
    pub queues: u16,
    /// `--engine`, for kickless only.
    pub engine: Option<String>,
    /// A program that runs the daemon; its arguments are the daemon's command line.
    pub wrapper: Option<PathBuf>,
    /// Further arguments, for kickless only.
    pub arguments: Vec<String>,
    /// Gives the disk an I/O thread. For the storage daemon only.
    pub iothread: bool,
    /// Lets the I/O thread poll before it sleeps, which is its default.
    pub polls: bool,
    /// Uses io_uring for the I/O instead of the default, threads. For the storage daemon only.
    pub by_uring: bool,
    /// The cache of tables for each image of a chain. kickless gets their sum for the chain.
    pub cache_size: Option<u64>,
    /// The backing images of a qcow2 image, the topmost first. The storage daemon opens them with the options
    /// of the image itself. For the storage daemon only.
    pub backing: Vec<PathBuf>,
}

impl DaemonConfig {
    /// Returns defaults: the program that the environment selects, four queues, no options.
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
            cache_size: None,
            backing: Vec::new(),
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
                let images = 1 + self.backing.len() as u64;
                let cache = self.cache_size.map(|bytes| bytes * images);
                words.extend(cache.map(|bytes| format!("--cache-size={bytes}").into()));
                words.extend(self.arguments.iter().map(OsString::from));
            }
            Program::StorageDaemon => {
                words.push("qemu-storage-daemon".into());
                words.push("--blockdev".into());
                match self.disk.to_str().and_then(|disk| disk.strip_prefix("null:")) {
                    Some(size) => words
                        .push(format!("driver=null-co,node-name=disk,read-zeroes=off,size={size}").into()),
                    None if self.disk.as_bytes().starts_with(b"qcow2:") => {
                        let path = OsStr::from_bytes(&self.disk.as_bytes()[b"qcow2:".len()..]);
                        words.push(self.qcow2_blockdev(Path::new(path)));
                    }
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

    /// Returns the storage daemon's options of a qcow2 image and its backing images.
    fn qcow2_blockdev(&self, path: &Path) -> OsString {
        let mut word = OsString::from("cache.direct=on,discard=unmap,node-name=disk");
        let mut prefix = String::new();
        for path in std::iter::once(path).chain(self.backing.iter().map(PathBuf::as_path)) {
            let aio = if self.by_uring { format!(",{prefix}file.aio=io_uring") } else { String::new() };
            let cache = self.cache_size.map(|bytes| format!(",{prefix}cache-size={bytes}"));
            let cache = cache.unwrap_or_default();
            word.push(format!(",{prefix}driver=qcow2{aio}{cache},{prefix}file.driver=file"));
            word.push(format!(",{prefix}file.filename="));
            word.push(path);
            prefix.push_str("backing.");
        }
        word
    }
}

/// Options of a daemon that serves one network card.
#[derive(Clone, Debug)]
pub struct CardConfig {
    /// `--port`.
    pub port: String,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Run as the user `nobody`, without any capability.
    pub is_unprivileged: bool,
    /// A file that the daemon inherits as the descriptor 3.
    pub inherited: Option<PathBuf>,
}

impl CardConfig {
    /// Returns the options of a card with this port and defaults otherwise.
    pub fn new(port: &str) -> CardConfig {
        CardConfig { port: port.to_owned(), arguments: Vec::new(), is_unprivileged: false, inherited: None }
    }

    /// Sets further arguments.
    pub fn with(self, arguments: &[&str]) -> CardConfig {
        CardConfig { arguments: arguments.iter().map(ToString::to_string).collect(), ..self }
    }

    fn command(&self, socket: &Path) -> Result<Vec<OsString>> {
        let mut path = OsString::from("--socket-path=");
        path.push(socket);
        let mut words = Vec::new();
        let mut program = kickless_binary()?;
        if self.is_unprivileged {
            // The user may not reach the program where it was built.
            let copy = socket.with_file_name("kickless");
            // Another process writes it: a child that this one starts at that moment would keep it open for
            // writing, and nobody could run it.
            let copied = child_command("cp").arg(&program).arg(&copy).status()?;
            ensure!(copied.success(), "cp {}: {copied}", program.display());
            program = copy;
            fs::set_permissions(socket.parent().context("no directory")?, Permissions::from_mode(0o777))?;
            let nobody = "--reuid=65534 --regid=65534 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all";
            // A change of the user clears the signal for the death of the parent.
            let and_then = ["--", "setpriv", "--pdeathsig", "KILL", "--"];
            let setpriv = ["setpriv"].into_iter().chain(nobody.split(' ')).chain(and_then);
            words.extend(setpriv.map(OsString::from));
        }
        if let Some(file) = &self.inherited {
            words.extend(["sh", "-c", "exec 3<>\"$0\"; exec \"$@\""].map(OsString::from));
            words.push(file.into());
        }
        words.extend([program.into(), "net".into(), path]);
        words.push(format!("--port={}", self.port).into());
        words.extend(self.arguments.iter().map(OsString::from));
        Ok(words)
    }
}

/// Returns a counter from the summary that a network card prints when it ends.
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

/// A daemon that listens on its socket. Dropping it kills the process.
pub struct Daemon {
    child: Child,
    /// The command line, for another process that takes over.
    words: Vec<OsString>,
    socket: PathBuf,
    log: Transcript,
    dir: TempDir,
}

impl Daemon {
    /// Starts a daemon and waits until it listens.
    ///
    /// # Errors
    /// The daemon does not start, ends at once, or does not listen in time. The message has its output.
    pub fn start(config: &DaemonConfig) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("blk.sock");
        let words = config.command(&socket)?;
        Daemon::launch(&words, dir, socket, config.program == Program::Kickless)
    }

    /// Starts another program, whose only argument is the path of the socket, and waits until it listens.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn start_program(program: &Path) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let socket = dir.path().join("blk.sock");
        Daemon::launch(&[program.into(), (&socket).into()], dir, socket, false)
    }

    /// Starts `kickless serve` with a pool and devices, and waits until it serves them. `pool` has the
    /// lines of `[pool]`. Each device has a name and further lines of its `[[device]]`.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn serve(pool: &str, devices: &[(&str, &str)]) -> Result<Daemon> {
        Daemon::serve_with(&[], pool, devices)
    }

    /// Does the same as [`Daemon::serve`], with further arguments. Those that begin with `--control` are the
    /// options of control sockets, without their paths: the sockets are in the directory of the daemon
    /// ([`Daemon::socket_of`]).
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn serve_with(arguments: &[&str], pool: &str, devices: &[(&str, &str)]) -> Result<Daemon> {
        Daemon::serve_in(&[], arguments, pool, devices)
    }

    /// Does the same as [`Daemon::serve_with`], with variables of the environment (`NAME=VALUE`). A process
    /// that takes over does not have them.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn serve_in(
        environment: &[&str],
        arguments: &[&str],
        pool: &str,
        devices: &[(&str, &str)],
    ) -> Result<Daemon> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let path = write_config(dir.path(), pool, devices)?;
        let mut option = OsString::from("--config=");
        option.push(&path);
        let first = devices.first().context("no device")?.0;
        let socket = socket_of(dir.path(), first);
        let mut words: Vec<OsString> = environment.iter().map(Into::into).collect();
        words.extend([kickless_binary()?.into(), "serve".into(), option]);
        for argument in arguments {
            words.push(match argument.strip_prefix("--control") {
                Some(_) => format!("{argument}={}", socket_of(dir.path(), &argument[2..]).display()).into(),
                None => argument.into(),
            });
        }
        Daemon::launch(&words, dir, socket, true)
    }

    /// Writes the configuration file of [`Daemon::serve`] anew, and sends SIGHUP.
    ///
    /// # Errors
    /// The file cannot be written, or the process is gone.
    pub fn reload(&self, pool: &str, devices: &[(&str, &str)]) -> Result<()> {
        write_config(self.dir.path(), pool, devices)?;
        self.signal(Signal::HUP)
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

    fn launch(words: &[OsString], dir: TempDir, socket: PathBuf, logs_serving: bool) -> Result<Daemon> {
        let Process { child, log } = spawn(words)?;
        let mut daemon = Daemon { child, words: words.to_vec(), socket, log, dir };
        daemon.wait_until_serving(words, logs_serving)?;
        Ok(daemon)
    }

    /// Starts another process with the command line of this daemon, which has `--control`, and has it take
    /// over. Waits until it has read its configuration file. [`Daemon::log`] is then its log. Returns the log
    /// of the process before.
    ///
    /// # Errors
    /// The other process does not take over, or this one does not end well.
    pub fn upgrade(&mut self) -> Result<Vec<String>> {
        let mut new = self.begin_upgrade(&[], &[])?;
        let is_over = |line: &str| line.contains("the configuration file was read again").then_some(());
        if let Err(error) = new.log.wait_for("the line that it has taken over", LIMIT, is_over) {
            // The process before goes on, and the test ends it.
            let _ = new.child.kill();
            new.child.wait()?;
            return Err(error);
        }
        let mut old = self.becomes(new);
        let status = wait_for_exit(&mut old.child, LIMIT).context("the process before does not end")?;
        // Its passt goes on, and keeps the pipe.
        let is_last = |line: &str| line.contains(" handed over ").then_some(());
        let last = old.log.wait_for("the line that it has handed its devices over", LIMIT, is_last);
        let lines = old.log.lines();
        ensure!(status.success(), "the process before has ended, {status}: {}", lines.join("\n"));
        last?;
        check_sandbox(&lines)?;
        Ok(lines)
    }

    /// Upgrades the daemon `times` times while `load` runs, which ends when it is told to. Returns the result
    /// of the load.
    ///
    /// # Errors
    /// As for [`Daemon::upgrade`], or the log of a process has a warning.
    ///
    /// # Panics
    /// The load panics.
    pub fn upgrade_under<T: Send>(
        &mut self,
        times: u32,
        load: impl FnOnce(&AtomicBool) -> T + Send,
    ) -> Result<T> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let load = scope.spawn(|| load(&is_over));
            let upgraded = (0..times).try_for_each(|_| {
                thread::sleep(BETWEEN_UPGRADES);
                check_log(&self.upgrade()?)
            });
            is_over.store(true, Ordering::Relaxed);
            let result = load.join().unwrap_or_else(|failure| panic::resume_unwind(failure));
            upgraded.map(|()| result)
        })
    }

    /// Returns the pause of the rings at the upgrade to this process, in milliseconds, as its log has it.
    ///
    /// # Errors
    /// The process has not taken over from another one.
    pub fn stall_ms(&self) -> Result<f64> {
        let lines = self.log.grep("took over");
        let word =
            lines.first().and_then(|line| line.split_whitespace().find_map(|w| w.strip_prefix("stall_ms=")));
        Ok(word.context("it took nothing over")?.parse()?)
    }

    /// Starts a process that is to take over, with variables of the environment and more arguments.
    ///
    /// # Errors
    /// The process does not start.
    pub fn begin_upgrade(&self, environment: &[&str], more: &[&str]) -> Result<Process> {
        let environment = environment.iter().map(Into::into);
        spawn(&environment.chain(self.upgrade_words(more)).collect::<Vec<_>>())
    }

    /// Has another process in the place of this one, which it has taken over from. Returns this one.
    pub fn becomes(&mut self, process: Process) -> Process {
        let Process { child, log } = process;
        Process { child: mem::replace(&mut self.child, child), log: mem::replace(&mut self.log, log) }
    }

    /// Starts a daemon with the same command line in the place of this one, which has ended.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn restart(&mut self) -> Result<Vec<String>> {
        let words = self.own_words();
        self.replace(&words, true)
    }

    /// Returns the command line without variables of the environment.
    fn own_words(&self) -> Vec<OsString> {
        let is_variable = |word: &&OsString| word.to_string_lossy().starts_with("KICKLESS_");
        self.words.iter().skip_while(is_variable).cloned().collect()
    }

    /// Returns the command line of a process that takes over from this one, unless `more` has another
    /// `--upgrade-from`.
    pub fn upgrade_words(&self, more: &[&str]) -> Vec<OsString> {
        let mut from = OsString::from("--upgrade-from=");
        from.push(self.socket_of("control"));
        let has_one = more.iter().any(|word| word.starts_with("--upgrade-from="));
        let more = more.iter().map(Into::into);
        self.own_words().into_iter().chain((!has_one).then_some(from)).chain(more).collect()
    }

    fn wait_until_serving(&mut self, words: &[OsString], logs_serving: bool) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !listens(&self.socket)? {
            if let Some(status) = self.child.try_wait()? {
                let lines = self.log.wait_for_end(LIMIT)?.join("\n");
                bail!("{words:?} ended, {status}: {lines}");
            }
            let is_late = Instant::now() >= deadline;
            ensure!(!is_late, "{words:?} does not listen: {}", self.log.lines().join("\n"));
            thread::sleep(Duration::from_millis(5));
        }
        if logs_serving {
            // The daemon listens first. It opens more descriptors until it logs that it serves.
            let serves = |line: &str| line.contains(" serving ").then_some(());
            self.log.wait_for("the line that it serves", LIMIT, serves)?;
        }
        Ok(())
    }

    /// Returns the socket of one device of several.
    pub fn socket_of(&self, device: &str) -> PathBuf {
        socket_of(self.dir.path(), device)
    }

    /// Kills the daemon with SIGKILL and starts another one on the same socket when it has ended.
    /// [`Daemon::log`] is then the log of the new daemon. Returns the log of the old one.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn kill_and_restart(&mut self, config: &DaemonConfig) -> Result<Vec<String>> {
        let words = config.command(&self.socket)?;
        self.replace(&words, config.program == Program::Kickless)
    }

    /// Does the same as [`Daemon::kill_and_restart`] for a network card.
    ///
    /// # Errors
    /// As for [`Daemon::start`].
    pub fn kill_and_restart_card(&mut self, config: &CardConfig) -> Result<Vec<String>> {
        let words = config.command(&self.socket)?;
        self.replace(&words, true)
    }

    fn replace(&mut self, words: &[OsString], logs_serving: bool) -> Result<Vec<String>> {
        self.child.kill()?;
        self.child.wait()?;
        let before = self.log.wait_for_end(LIMIT)?;
        check_sandbox(&before)?;
        // The socket is in the directory of this daemon.
        let Process { child, log } = spawn(words)?;
        (self.child, self.log) = (child, log);
        self.wait_until_serving(words, logs_serving)?;
        Ok(before)
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Returns the socket that front-ends connect to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the log.
    pub fn log(&self) -> &Transcript {
        &self.log
    }

    /// Waits until the daemon has taken `requests` requests out of a queue since it started. For one device
    /// only.
    ///
    /// # Errors
    /// The daemon takes fewer requests in time.
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
            // The log has no line for a queue that was never used.
            let taken = self.log.wait_from(seen, "counters", Duration::from_millis(200), taken).unwrap_or(0);
            if taken >= requests {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the daemon took {taken} requests of queue {queue}, not {requests}"
            );
        }
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the process runs.
    ///
    /// # Errors
    /// The status of the process cannot be read.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Returns the number of open descriptors and of mapped memfds. They grow if the daemon keeps a
    /// resource of a guest that has left.
    ///
    /// # Errors
    /// The process has ended.
    pub fn holdings(&self) -> Result<(usize, usize)> {
        let process = PathBuf::from(format!("/proc/{}", self.child.id()));
        let descriptors = fs::read_dir(process.join("fd"))?.count();
        let maps = fs::read_to_string(process.join("maps"))?;
        // Guest memory is in memfds of the test. The daemon's own heap and stacks may grow.
        Ok((descriptors, maps.lines().filter(|line| line.contains("memfd:")).count()))
    }

    /// Waits until the daemon holds at most `before`, which [`Daemon::holdings`] returned.
    ///
    /// # Errors
    /// The daemon keeps more.
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

    /// Ends the daemon with SIGTERM. Returns its status and its whole log.
    ///
    /// # Errors
    /// The daemon does not end in time, or its sandbox has refused a system call.
    pub fn stop(mut self) -> Result<(ExitStatus, Vec<String>)> {
        self.signal(Signal::TERM)?;
        let status = wait_for_exit(&mut self.child, LIMIT).context("the daemon still runs after SIGTERM")?;
        let lines = self.log.wait_for_end(LIMIT)?;
        check_sandbox(&lines)?;
        Ok((status, lines))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended. After a failure, its summary may show the reason.
        if thread::panicking() && self.signal(Signal::TERM).is_ok() {
            let _ = wait_for_exit(&mut self.child, EXIT_LIMIT);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.log.dump();
            return;
        }
        // A file system that does not answer holds the helper processes, and with them the pipe.
        let _ = self.log.wait_for_end(EXIT_LIMIT);
        let checked = check_sandbox(self.log.lines());
        assert!(checked.is_ok(), "{checked:?}");
    }
}

/// Checks that the sandbox of a program has refused no system call, by the log of the program.
///
/// # Errors
/// It has refused one. The message has its name.
pub fn check_sandbox(log: impl IntoIterator<Item: AsRef<str>>) -> Result<()> {
    match log.into_iter().find(|line| line.as_ref().contains("the sandbox refused")) {
        Some(line) => bail!("{}", line.as_ref()),
        None => Ok(()),
    }
}

/// Checks that a log has no warning and no error. Only a disk that can move to another host warns at its
/// start.
///
/// # Errors
/// It has one, which is the message.
pub fn check_log(log: &[String]) -> Result<()> {
    let is_trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    let is_expected = |line: &String| line.contains("every write is made durable");
    match log.iter().filter(is_trouble).find(|line| !is_expected(line)) {
        Some(line) => bail!("{line}"),
        None => Ok(()),
    }
}

/// A process with its log. The test ends it.
pub struct Process {
    /// The process.
    pub child: Child,
    /// Its log.
    pub log: Transcript,
}

/// Starts a process. The words can begin with variables of the environment. Returns it with its log.
///
/// # Errors
/// The program cannot be run.
pub fn spawn(words: &[OsString]) -> Result<Process> {
    let mut child = child_command("env")
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {words:?}"))?;
    let stderr = child.stderr.take().context("no pipe")?;
    Ok(Process { child, log: Transcript::of("daemon", stderr) })
}

/// Returns a command whose process gets SIGKILL when the calling thread ends, also when a test is aborted.
pub fn child_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Waits until a child process ends, and returns its status.
///
/// # Errors
/// The child does not end in time.
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

/// Returns whether a signal has stopped a process.
///
/// A SIGCONT does not end a stop that begins after it.
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// Writes a configuration file for `kickless serve`. Returns its path.
fn write_config(dir: &Path, pool: &str, devices: &[(&str, &str)]) -> Result<PathBuf> {
    let mut config = format!("[pool]\n{pool}\n");
    for (name, lines) in devices {
        let socket = socket_of(dir, name);
        config += &format!("[[device]]\nname = '{name}'\nsocket-path = '{}'\n{lines}\n", socket.display());
    }
    let path = dir.join("disks.toml");
    fs::write(&path, config)?;
    Ok(path)
}

fn socket_of(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("{device}.sock"))
}

/// Returns whether a process listens on a unix socket. Does not connect, because a back-end would serve the
/// connection.
fn listens(socket: &Path) -> Result<bool> {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let path = socket.to_str().context("the socket path is not UTF-8")?;
    // This thread may be in a network namespace of its own, which the daemon has from it.
    Ok(fs::read_to_string("/proc/thread-self/net/unix")?.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(3) == Some(ACCEPTS_CONNECTIONS) && fields.last() == Some(path)
    }))
}

/// Returns the path of `kickless`: `KICKLESS_BIN`, or the program that was built with the profile of this
/// program. For a test, that has debug assertions; for a benchmark, it is the release build.
///
/// # Errors
/// The file does not exist.
pub fn kickless_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("KICKLESS_BIN") {
        return Ok(path.into());
    }
    built_program("kickless")
        .context("kickless is not built: run `cargo build --workspace` or, for benchmarks, `make build`")
}

/// Returns the path of a program of the workspace that was built with the profile of this program. Examples
/// are in `examples/`.
///
/// # Errors
/// The file does not exist.
pub fn built_program(name: &str) -> Result<PathBuf> {
    // Tests and benchmarks are in the directory `deps` of the profile, other programs are beside it.
    std::env::current_exe()?
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("{name} is not built"))
}

/// Returns the root of the source tree.
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Makes a command build the driver for C with the profile of this test: a debug build is ready sooner.
pub fn with_own_profile(command: &mut Command) -> &mut Command {
    command.env("DRIVER_PROFILE", if cfg!(debug_assertions) { "dev" } else { "release" })
}
