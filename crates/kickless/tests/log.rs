//! Checks the log while standard error is not read. The program does not wait for it.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{PROGRAM, check_sandbox};
use kickless_driver::{Card, CardOptions, Disk, Options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// After this time, a test has failed. No machine is so slow.
const LIMIT: Duration = Duration::from_secs(60);

/// Reads a log up to the next line that has these words. Returns the line.
fn line_with(log: &mut impl BufRead, words: &str) -> String {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended and has not said {words:?}");
        check_sandbox(&line);
    }
    line
}

/// A daemon that logs into a pipe. Killed if the test fails.
struct Daemon {
    child: Child,
    dir: TempDir,
    /// Another reader of the log, for the lines that the test leaves.
    rest: Option<OwnedFd>,
}

impl Daemon {
    /// Starts a daemon. Returns it with a reader of its log, from the moment when it serves.
    fn start() -> (Self, BufReader<ChildStderr>) {
        Self::start_with(&["--blk-file=mem:1M", "--log-level=debug"])
    }

    fn start_with(arguments: &[&str]) -> (Self, BufReader<ChildStderr>) {
        let dir = TempDir::new().unwrap();
        let socket = format!("--socket-path={}", dir.path().join("socket").display());
        Self::launch(Command::new(PROGRAM).arg("blk").args(arguments).arg(socket), dir)
    }

    /// As [`Daemon::start`], for a command with the socket in `dir`.
    fn launch(command: &mut Command, dir: TempDir) -> (Self, BufReader<ChildStderr>) {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        line_with(&mut log, " serving ");
        let rest = Some(log.get_ref().as_fd().try_clone_to_owned().unwrap());
        (Self { child, dir, rest }, log)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Connects a front-end, uses the disk, and disconnects. The daemon logs some thousand bytes.
    fn visit(&self) {
        let disk = Disk::connect(Options::new(self.socket())).unwrap();
        let (written, mut read) = ([7; 4096], [0; 4096]);
        disk.write_at(&written, 8192).unwrap();
        disk.read_at(&mut read, 8192).unwrap();
        assert_eq!(written, read);
    }

    /// Connects a front-end, which reads 60 bytes of the configuration space `times` times, and disconnects.
    /// The log of each message has 60 numbers of three digits.
    fn read_config(&self, times: usize) {
        let mut front_end = UnixStream::connect(self.socket()).unwrap();
        // GET_CONFIG, version 1, with 72 bytes: the offset, the size, the flags and 60 bytes of data.
        let numbers: [u32; 6] = [24, 1, 72, 0, 60, 0];
        let message: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).chain([255; 60]).collect();
        let mut reply = vec![0; message.len()];
        for _ in 0..times {
            front_end.write_all(&message).unwrap();
            front_end.read_exact(&mut reply).unwrap();
            assert_eq!(reply[..4], message[..4]);
        }
    }

    fn stop(&mut self) -> ExitStatus {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < LIMIT, "it does not end");
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut rest = String::new();
        if let Some(log) = self.rest.take() {
            let _ = File::from(log).read_to_string(&mut rest);
        }
        check_sandbox(&rest);
    }
}

#[test]
fn the_program_ends_after_the_reader_of_the_log_has_ended() {
    let (mut daemon, log) = Daemon::start();
    daemon.visit();
    daemon.rest = None;
    drop(log);
    for _ in 0..5 {
        daemon.visit();
    }
    assert_eq!(daemon.stop().code(), Some(0));
    assert!(!daemon.socket().exists());
}

/// Makes the daemon log more than a pipe and its own buffers hold, which is 2 MiB and 64 KiB.
///
/// Uses the messages of one front-end. Many connections of a driver would be slow, because each ends with
/// `io_destroy`, which waits for a grace period of the kernel.
fn flood(daemon: &Daemon) {
    daemon.read_config((3 << 20) / (5 * 60));
    daemon.visit();
}

#[test]
fn a_reader_that_stops_and_continues_sees_the_number_of_lost_lines() {
    let (mut daemon, mut log) = Daemon::start();
    flood(&daemon);
    let line = line_with(&mut log, "lines lost");
    let (_, count) = line.trim_end().rsplit_once("count=").unwrap();
    assert!(count.parse::<u64>().unwrap() > 0, "{line}");
    // Later lines are not lost.
    assert_eq!(daemon.stop().code(), Some(0));
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    // The driver chooses the queue.
    assert!(rest.contains(" summary queue="), "{rest}");
    assert!(!rest.contains("lines lost"), "{rest}");
}

#[test]
fn the_program_ends_although_the_reader_of_the_log_has_stopped() {
    let (mut daemon, _log) = Daemon::start();
    flood(&daemon);
    assert_eq!(daemon.stop().code(), Some(0));
}

/// A write beyond the limit ends a process that does not catch the signal.
#[test]
fn the_log_is_a_file_that_may_not_grow() {
    let dir = TempDir::new().unwrap();
    let log = dir.path().join("log");
    fs::write(&log, vec![b'\n'; 4 << 20]).unwrap();
    // The limit is at most 2 MiB, because the unit of `ulimit` depends on the shell.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 2048 && exec \"$@\"", "sh", PROGRAM, "blk", "--blk-file=mem:64K"]);
    command.arg(format!("--socket-path={}", dir.path().join("socket").display()));
    let log = OpenOptions::new().append(true).open(log).unwrap();
    let mut daemon = Daemon { child: command.stderr(log).spawn().unwrap(), dir, rest: None };
    let start = Instant::now();
    // The name is there a moment before the socket listens.
    while Disk::connect(Options::new(daemon.socket())).is_err() {
        assert!(daemon.child.try_wait().unwrap().is_none(), "it has ended");
        assert!(start.elapsed() < LIMIT, "it does not serve");
        sleep(Duration::from_millis(5));
    }
    daemon.visit();
    assert_eq!(daemon.stop().code(), Some(0));
}

/// Returns the number of lines of `text` that contain all these words.
fn having(text: &str, words: &[&str]) -> usize {
    text.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

#[test]
fn a_disk_that_fails_is_one_warning_of_each_kind() {
    let (mut daemon, mut log) = Daemon::start_with(&["--blk-file=fault:eio:mem:1M"]);
    let disk = Disk::connect(Options::new(daemon.socket())).unwrap();
    for _ in 0..200 {
        assert!(disk.read_at(&mut [0; 4096], 0).is_err());
        assert!(disk.write_at(&[0; 4096], 0).is_err());
    }
    drop(disk);
    assert_eq!(daemon.stop().code(), Some(0));
    let mut said = String::new();
    log.read_to_string(&mut said).unwrap();
    for operation in ["operation=read", "operation=write"] {
        // There are more lines only if this took longer than ten seconds.
        let lines = having(&said, &[" WARN ", operation, "a request failed", "error=\"Input/output error"]);
        assert!((1..10).contains(&lines), "{said}");
        let rest = having(&said, &[" WARN ", operation, "more requests failed", "suppressed=1"]);
        assert_eq!(rest, 1, "{said}");
    }
}

#[test]
fn suppressed_lines_are_reported_at_the_end() {
    let (mut daemon, mut log) = Daemon::start_with(&["--blk-file=mem:1M"]);
    const VISITS: usize = 200;
    (0..VISITS).for_each(|_| daemon.read_config(1));
    assert_eq!(daemon.stop().code(), Some(0));
    let mut said = String::new();
    log.read_to_string(&mut said).unwrap();
    let told = said.lines().filter(|line| line.contains("front-end connected"));
    let visits = told.map(|line| match line.rsplit_once("suppressed=") {
        Some((_, count)) => 1 + count.parse::<usize>().unwrap(),
        None => 1,
    });
    assert_eq!(visits.sum::<usize>(), VISITS, "{said}");
}

#[test]
fn a_second_front_end_is_logged() {
    let (mut daemon, mut log) = Daemon::start_with(&["--blk-file=null:1M"]);
    let first = Disk::connect(Options::new(daemon.socket())).unwrap();
    let second = UnixStream::connect(daemon.socket()).unwrap();
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    let mut line = String::new();
    while !line.contains("another front-end has connected") {
        line.clear();
        if log.buffer().is_empty() {
            let mut fds = [PollFd::new(log.get_ref(), PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "it says nothing");
        }
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
    }
    drop((first, second));
    assert_eq!(daemon.stop().code(), Some(0));
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("another front-end"), "{rest}");
}

/// A line about a card that a thread of its port logs.
#[test]
fn a_line_names_its_device_once() {
    let dir = TempDir::new().unwrap();
    let (config, socket) = (dir.path().join("config"), dir.path().join("socket"));
    let port = dir.path().join("nobody");
    let text =
        format!("[[device]]\nname = 'a'\nsocket-path = {socket:?}\nport = \"stream:{}\"\n", port.display());
    fs::write(&config, text).unwrap();
    let mut command = Command::new(PROGRAM);
    let (daemon, mut log) =
        Daemon::launch(command.arg("serve").arg(format!("--config={}", config.display())), dir);
    let card = Card::connect(CardOptions::new(daemon.socket())).unwrap();
    let pair = card.pair(0).unwrap();
    let line = line_with(&mut log, "the port cannot connect");
    assert_eq!(line.matches(" device=a\n").count(), 1, "{line}");
    drop((pair, card));
}

/// The lines of passt, which a guest can cause.
#[test]
fn lines_of_passt_are_fields_of_ours() {
    let dir = TempDir::new().unwrap();
    let (config, socket) = (dir.path().join("config"), dir.path().join("socket"));
    let passt = dir.path().join("passt");
    let script = "#!/bin/sh\nprintf '<0>forged\\033[2J device=b\\n' >&2\nexec cat >/dev/null\n";
    fs::write(&passt, script).unwrap();
    fs::set_permissions(&passt, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(&config, format!("[[device]]\nname = 'a'\nsocket-path = {socket:?}\nport = 'user'\n")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("serve").arg(format!("--config={}", config.display()));
    command.env("PATH", format!("{}:/usr/bin:/bin", dir.path().display()));
    let (daemon, mut log) = Daemon::launch(&mut command, dir);
    let card = Card::connect(CardOptions::new(daemon.socket())).unwrap();
    let pair = card.pair(0).unwrap();
    let line = line_with(&mut log, "program=passt");
    let fields = "program=passt line=\"<0>forged\\u{1b}[2J device=b\" device=a\n";
    assert!(line.contains("  INFO ") && line.ends_with(fields), "{line}");
    drop((pair, card));
}

/// Each format, with lines, a sentence at the end, and the device.
#[test]
fn formats() {
    let serve = |format: &str| {
        let dir = TempDir::new().unwrap();
        let config = dir.path().join("config");
        let socket = dir.path().join("socket");
        fs::write(&config, format!("[[device]]\nname = 'a'\nsocket-path = {socket:?}\nblk-file = 'mem:1M'\nsocket-mode = '0600'\n")).unwrap();
        let mut command = Command::new(PROGRAM);
        command
            .arg("serve")
            .arg(format!("--config={}", config.display()))
            .arg(format!("--log-format={format}"));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("serving") {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
        }
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let mut rest = String::new();
        log.read_to_string(&mut rest).unwrap();
        assert!(child.wait().unwrap().success());
        let owner = format!("{}:{}", rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        (line, rest, socket.display().to_string(), owner)
    };
    for format in ["journal", "text", "auto"] {
        let (line, rest, socket, owner) = serve(format);
        let fields = format!(
            "serving version={} disk=mem:1M format=mem size=1M read_only=false cache=none lock=on queues=64 \
             queue_size=1024 socket={socket} mode=0600 owner={owner} device=a\n",
            env!("CARGO_PKG_VERSION")
        );
        assert!(line.ends_with(&fields), "{line}");
        let is_ours = |line: &str| {
            if format == "journal" { line.starts_with("<6>") } else { line.contains("Z  INFO ") }
        };
        assert!(is_ours(&line) && rest.lines().all(is_ours) && rest.contains("summary"), "{line}{rest}");
    }
    let (line, rest, socket, _) = serve("json");
    for line in [&*line].into_iter().chain(rest.lines()) {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(value["level"], "INFO", "{line}");
    }
    let served: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&served["message"], &served["fields"]["device"]), (&"serving".into(), &"a".into()));
    assert_eq!((&served["fields"]["socket"], &served["fields"]["queues"]), (&socket.into(), &64.into()));
}

/// systemd names its stream to the journal by device and inode.
#[test]
fn the_journal_is_found() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("log");
    let said = |variable: &str| {
        let log = File::create(&path).unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(["blk", "--blk-file=/nonexistent", "--socket-path=/nonexistent/s"]);
        assert_eq!(command.env("JOURNAL_STREAM", variable).stderr(log).status().unwrap().code(), Some(1));
        fs::read_to_string(&path).unwrap()
    };
    let file = File::create(&path).unwrap().metadata().unwrap();
    let sentence = said(&format!("{}:{}", file.dev(), file.ino()));
    assert!(sentence.starts_with("<3>--") && sentence.lines().count() == 1, "{sentence}");
    for variable in [&*format!("{}:1", file.dev()), "", "x"] {
        assert!(said(variable).starts_with("kickless: --"), "{variable}");
    }
}

/// Runs `kickless` with standard output and error closed at the other end. Returns its exit status.
fn unheard(arguments: &[&str]) -> Option<i32> {
    let writer = || pipe_with(PipeFlags::CLOEXEC).unwrap().1;
    Command::new(PROGRAM).args(arguments).stderr(writer()).stdout(writer()).status().unwrap().code()
}

#[test]
fn the_exit_status_shows_errors_that_cannot_be_printed() {
    assert_eq!(unheard(&["blk"]), Some(2));
    assert_eq!(unheard(&["blk", "--socket-path=a", "--blk-file=/nonexistent/disk.img"]), Some(1));
    assert_eq!(unheard(&["blk", "--socket-path=a", "--blk-file=null:1M", "--log-level=ifno"]), Some(2));
    assert_eq!(unheard(&["--help"]), Some(1));
    assert!(!Path::new("a").exists());
}
