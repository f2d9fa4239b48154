//! Runs the program, and checks its exit status, its sentences and its socket.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{PROGRAM, check_sandbox};
use kickless_disk::lock::ImageLock;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

/// After this time, a test has failed. No machine is so slow.
const LIMIT: Duration = Duration::from_secs(20);

fn kickless(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs a program that must fail with status 1. Returns its sentence.
fn refused(program: &mut Command) -> String {
    refused_with(1, program)
}

/// Runs a program that must fail with this status. Returns its sentence.
fn refused_with(status: i32, program: &mut Command) -> String {
    let output = program.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.starts_with("kickless: ") && said.lines().count() == 1, "not one sentence: {said}");
    said
}

/// A directory with an image.
struct Scratch {
    dir: TempDir,
    image: PathBuf,
}

impl Scratch {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let image = dir.path().join("disk.img");
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        Self { dir, image }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn blk(&self, disk: &Path) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .arg("blk")
            // The temporary directory may be on any file system.
            .arg("--cache=writeback")
            .arg(format!("--socket-path={}", self.socket().display()))
            .arg(format!("--blk-file={}", disk.display()));
        command
    }
}

/// A daemon that serves. Killed if the test fails.
struct Daemon(Child);

impl Daemon {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.as_mut().unwrap());
        let mut line = String::new();
        while !line.contains(" serving ") {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended before it served");
            check_sandbox(&line);
        }
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Waits for the end. Returns the exit status, and the log since the daemon serves.
    fn end(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        while self.0.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < LIMIT, "it does not end");
            sleep(Duration::from_millis(5));
        }
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        check_sandbox(&said);
        (self.0.wait().unwrap().code(), said)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let mut said = String::new();
        if let Some(mut log) = self.0.stderr.take() {
            let _ = log.read_to_string(&mut said);
        }
        check_sandbox(&said);
    }
}

#[test]
fn capabilities_are_json_with_nothing_around_it() {
    let output = kickless(&["blk", "--blk-file=/nonexistent", "--print-capabilities"]);
    assert!(output.status.success() && output.stderr.is_empty());
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said, serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
}

#[test]
fn the_name_kickless_blk_implies_the_command_blk() {
    let dir = TempDir::new().unwrap();
    let link = dir.path().join("kickless-blk");
    std::os::unix::fs::symlink(PROGRAM, &link).unwrap();
    let output = Command::new(link).arg("--print-capabilities").output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains("blk-file"));
}

#[test]
fn a_wrong_command_line_is_status_2_and_one_sentence() {
    for arguments in [
        &[][..],
        &["blk"],
        &["blk", "--socket-path=a", "--fd=3", "--blk-file=b"],
        &["blk", "--blk-file=b"],
        &["blk", "--socket-path=a", "--blk-file=b", "--queue-size=100"],
        &["blk", "--socket-path=a", "--blk-file=b", "--engine=spdk"],
        &["blk", "--socket-path=a", "--blk-file=b", "--poll=sometimes"],
        &["blk", "--socket-path=a", "--blk-file=b", "--poll=always", "--poll-stop-idle=3s"],
        &["blk", "--socket-path=a", "--blk-file=b", "--poll-latency=1h"],
        &["blk", "--socket-path=a", "--blk-file=b", "--poll-latency=5"],
        &["blk", "--socket-path=a", "--blk-file=null:1M", "--log-level=kickless=loud"],
    ] {
        let output = kickless(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.starts_with("kickless: ") && said.lines().count() == 1, "{arguments:?}: {said}");
    }
    assert_eq!(kickless(&["--help"]).status.code(), Some(0));
    assert_eq!(kickless(&["--version"]).status.code(), Some(0));
}

#[test]
fn invalid_log_levels_are_refused() {
    let scratch = Scratch::new();
    let null = Path::new("null:1M");
    let typo = refused_with(2, scratch.blk(null).arg("--log-level=ifno"));
    assert!(typo.contains("--log-level=ifno: \"ifno\" is not a level"), "{typo}");
    let variable = refused_with(2, scratch.blk(null).env("KICKLESS_LOG", "bogus"));
    assert!(variable.contains("KICKLESS_LOG=bogus: \"bogus\" is not a level"), "{variable}");
    let part = refused_with(2, scratch.blk(null).arg("--log-level=kickless_vhots=debug"));
    assert!(part.contains("no part \"kickless_vhots\"") && part.contains("kickless_vhost,"), "{part}");
    assert!(!scratch.socket().exists());

    // Errors are printed with any level, and an empty variable counts as absent.
    let missing = scratch.dir.path().join("missing");
    refused(scratch.blk(&missing).arg("--log-level=warning"));
    let daemon = Daemon::start(scratch.blk(null).env("KICKLESS_LOG", ""));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().0, Some(0));
}

#[test]
fn disks_that_cannot_be_served() {
    let scratch = Scratch::new();
    let missing = refused(&mut scratch.blk(&scratch.dir.path().join("missing")));
    assert!(missing.contains("--blk-file") && missing.contains("there is no such file"), "{missing}");
    for (disk, hint) in [
        ("missing.img", "there is no such file: correct the path"),
        ("raw:missing.img", "is its path alone: write missing.img"),
        ("nbd:localhost:10809", "write nbd://localhost:10809/"),
        ("iscsi://host/target", "iscsiadm"),
    ] {
        let said = refused(&mut scratch.blk(Path::new(disk)));
        assert!(said.contains("--blk-file") && said.contains(hint), "{said}");
    }
    let directory = refused(&mut scratch.blk(scratch.dir.path()));
    assert!(directory.contains("directory"), "{directory}");
    let device = refused(&mut scratch.blk(Path::new("/dev/null")));
    assert!(device.contains("character device"), "{device}");
    let empty = scratch.dir.path().join("empty");
    File::create(&empty).unwrap();
    let empty = refused(&mut scratch.blk(&empty));
    assert!(empty.contains("empty"), "{empty}");
    assert!(!scratch.socket().exists());
}

/// Returns `command` without the privileges of root, so that the permissions of files apply.
fn without_privileges(command: &Command) -> Command {
    if !geteuid().is_root() {
        let mut same = Command::new(command.get_program());
        same.args(command.get_args());
        return same;
    }
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--bounding-set=-all", "--inh-caps=-all", "--"]).arg(command.get_program());
    wrapped.args(command.get_args());
    wrapped
}

#[test]
fn disks_without_permission_are_refused() {
    let scratch = Scratch::new();
    fs::set_permissions(&scratch.image, Permissions::from_mode(0o444)).unwrap();
    let read_only = refused(&mut without_privileges(&scratch.blk(&scratch.image)));
    assert!(read_only.contains("may not write it") && read_only.contains("set read-only"), "{read_only}");
    let daemon = Daemon::start(&mut without_privileges(scratch.blk(&scratch.image).arg("--read-only")));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().0, Some(0));

    fs::set_permissions(&scratch.image, Permissions::from_mode(0o000)).unwrap();
    let secret = refused(&mut without_privileges(&scratch.blk(&scratch.image)));
    assert!(secret.contains("may not read it (mode 0000"), "{secret}");
}

#[test]
fn a_locked_image() {
    let scratch = Scratch::new();
    let file = File::options().read(true).write(true).open(&scratch.image).unwrap();
    let lock = ImageLock::acquire(&file, false).unwrap();
    let locked = refused(&mut scratch.blk(&scratch.image));
    assert!(locked.contains("disk.img") && locked.contains("another process"), "{locked}");
    // The program starts with --incoming or without --lock.
    for option in ["--incoming", "--lock=off"] {
        let daemon = Daemon::start(scratch.blk(&scratch.image).arg(option));
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.end().0, Some(0), "{option}");
    }
    drop(lock);
    let daemon = Daemon::start(&mut scratch.blk(&scratch.image));
    // The program holds no lock while no ring runs.
    ImageLock::acquire(&file, false).unwrap();
    daemon.signal(Signal::INT);
    assert_eq!(daemon.end().0, Some(0));
}

#[test]
fn sockets_that_cannot_be_made_are_refused() {
    let scratch = Scratch::new();
    let null = Path::new("null:1M");
    fs::write(scratch.socket(), "a file").unwrap();
    let file = refused(&mut scratch.blk(null));
    assert!(file.contains("--socket-path") && file.contains("not a socket"), "{file}");
    fs::remove_file(scratch.socket()).unwrap();

    let listener = UnixListener::bind(scratch.socket()).unwrap();
    let taken = refused(&mut scratch.blk(null));
    assert!(taken.contains("--socket-path") && taken.contains("listening"), "{taken}");
    // Not by a close: a child that another test starts has a copy until it executes its program.
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();

    // A stale socket is replaced, and the new one is removed at the end.
    let daemon = Daemon::start(&mut scratch.blk(null));
    UnixStream::connect(scratch.socket()).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().0, Some(0));
    assert!(!scratch.socket().exists());

    let path = format!("--socket-path=/tmp/{}", "long".repeat(40));
    let long = refused_with(2, Command::new(PROGRAM).args(["blk", "--blk-file=null:1M", &path]));
    assert!(long.contains("--socket-path") && long.contains("shorter"), "{long}");
}

#[test]
fn modes_and_groups() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(scratch.blk(Path::new("null:1M")).args(["--socket-mode=0620"]));
    assert_eq!(fs::metadata(scratch.socket()).unwrap().permissions().mode() & 0o777, 0o620);
    drop(daemon);
    let group = refused_with(2, scratch.blk(Path::new("null:1M")).arg("--socket-group=no-such-group"));
    assert!(group.contains("--socket-group"), "{group}");
    let cpu = refused_with(2, scratch.blk(Path::new("null:1M")).arg("--cpu=1023"));
    assert!(cpu.contains("--cpu: CPU 1023 does not exist"), "{cpu}");
}

/// Returns `kickless blk --fd=3` with `socket` under that number. A shell sets the number, because std has no
/// safe function for it.
fn with_descriptor(socket: OwnedFd) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "exec 3<&0 0</dev/null; exec \"$0\" blk --fd=3 --blk-file=null:1M", PROGRAM]);
    command.stdin(socket);
    command
}

#[test]
fn inherited_sockets() {
    let scratch = Scratch::new();
    let listener = UnixListener::bind(scratch.socket()).unwrap();
    let daemon = Daemon::start(&mut with_descriptor(listener.into()));
    UnixStream::connect(scratch.socket()).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().0, Some(0));
    // The process that made the name must remove it, so the daemon leaves it.
    assert!(scratch.socket().exists());

    let (ours, theirs) = UnixStream::pair().unwrap();
    let daemon = Daemon::start(&mut with_descriptor(theirs.into()));
    drop(ours);
    let (status, said) = daemon.end();
    assert_eq!(status, Some(0), "{said}");

    let file = refused_descriptor(File::open("/dev/zero").unwrap().into());
    assert!(file.contains("--fd=3") && file.contains("not a socket"), "{file}");
    let missing = refused_with(2, Command::new(PROGRAM).args(["blk", "--fd=77", "--blk-file=null:1M"]));
    assert!(missing.contains("--fd=77"), "{missing}");
}

fn refused_descriptor(descriptor: OwnedFd) -> String {
    let output = with_descriptor(descriptor).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

/// Runs `kickless serve` with this file, which it must refuse. Returns its sentence.
fn refused_config(scratch: &Scratch, config: impl AsRef<[u8]>) -> String {
    let path = scratch.dir.path().join("disks.toml");
    fs::write(&path, config).unwrap();
    let config = format!("--config={}", path.display());
    refused(Command::new(PROGRAM).args(["serve", "--all-or-nothing", &config]))
}

#[test]
fn a_wrong_file_is_one_sentence_with_its_line() {
    let scratch = Scratch::new();
    for (config, said) in [
        ("", "disks.toml: there is no device"),
        ("[pool]\npoll = 'often'\n", "disks.toml:2: poll = 'often': it must be"),
        (
            "[[device]]\nsocket-path = 's'\nblk-file = 'null:1G'\nqueues = 4\n",
            "disks.toml:4: \"queues\" is no key of [[device]]: did you mean num-queues?",
        ),
        ("[[device]]\nblk-file = \n", "disks.toml:2: "),
    ] {
        let sentence = refused_config(&scratch, config);
        assert!(sentence.contains(said), "{config}: {sentence}");
    }
    let binary = refused_config(&scratch, [0xff, 0xfe]);
    assert!(
        binary.contains("disks.toml") && binary.contains("disks.toml:1: it is no text in UTF-8"),
        "{binary}"
    );
    let missing = refused(Command::new(PROGRAM).args(["serve", "--config=/nonexistent/disks.toml"]));
    assert!(
        missing.contains("--config=/nonexistent/disks.toml: there is no directory /nonexistent"),
        "{missing}"
    );
    let directory = refused(Command::new(PROGRAM).args(["serve", "--config=/"]));
    assert!(directory.contains("--config=/"), "{directory}");
}

/// Returns a `[[device]]` that serves `disk` on a socket of this name in the directory.
fn device(scratch: &Scratch, name: &str, disk: &str) -> String {
    let socket = scratch.dir.path().join(name);
    format!("[[device]]\nsocket-path = '{}'\nblk-file = '{disk}'\ncache = 'writeback'\n", socket.display())
}

#[test]
fn a_file_is_checked_without_its_disks() {
    let scratch = Scratch::new();
    let path = scratch.dir.path().join("disks.toml");
    let check = || {
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(format!("--config={}", path.display())).arg("--check").output().unwrap()
    };
    let disk = device(&scratch, "a", "/nonexistent.img") + &device(&scratch, "b", "null:1M");
    let card = "[[device]]\nsocket-path = '/nonexistent/c.sock'\nport = 'null'\n";
    let by_name = "[[device]]\nname = 'd'\nport = 'null'\n";
    for (text, counts) in [
        (disk.clone(), "2 disks and 0 network cards"),
        (disk + card, "2 disks and a network card"),
        (format!("{card}{by_name}"), "0 disks and 2 network cards"),
        ("# Nothing yet.\n".to_owned(), "0 disks and 0 network cards"),
    ] {
        fs::write(&path, &text).unwrap();
        let output = check();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(printed, format!("{}: {counts}\n", path.display()));
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    }
    assert!(!scratch.dir.path().join("b").exists());
    fs::write(&path, "[pool]\nworkers = 0\n").unwrap();
    let output = check();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(said.contains("disks.toml:2: workers = 0: ") && said.lines().count() == 1, "{said}");
}

#[test]
fn all_devices_or_none() {
    let scratch = Scratch::new();
    let good = device(&scratch, "good", "null:1G");
    let socket = scratch.dir.path().join("good");

    let missing = refused_config(&scratch, good.clone() + &device(&scratch, "web", "/nonexistent.img"));
    assert!(missing.contains("disks.toml:7: device web: blk-file: /nonexistent.img"), "{missing}");
    assert!(!socket.exists());

    let file = File::options().read(true).write(true).open(&scratch.image).unwrap();
    let lock = ImageLock::acquire(&file, false).unwrap();
    let locked =
        refused_config(&scratch, good.clone() + &device(&scratch, "web", scratch.image.to_str().unwrap()));
    assert!(locked.contains("device web: blk-file: ") && locked.contains("another process"), "{locked}");
    assert!(!socket.exists());
    drop(lock);

    let _listener = UnixListener::bind(scratch.dir.path().join("web")).unwrap();
    let taken = refused_config(&scratch, good.clone() + &device(&scratch, "web", "null:1G"));
    assert!(taken.contains("device web: socket-path: ") && taken.contains("listening"), "{taken}");
    assert!(!socket.exists());

    let group = refused_config(&scratch, good.clone() + "socket-group = 'no-such-group'\n");
    assert!(group.contains("device good: socket-group: there is no group no-such-group"), "{group}");
}

#[test]
fn devices_of_a_file() {
    let scratch = Scratch::new();
    let path = scratch.dir.path().join("disks.toml");
    let image = scratch.image.to_str().unwrap();
    let config = format!(
        "[pool]\nworkers = 2\n{}socket-mode = '0620'\n{}",
        device(&scratch, "a", "mem:1M"),
        device(&scratch, "b", image)
    );
    fs::write(&path, config).unwrap();
    let serve =
        || Daemon::start(Command::new(PROGRAM).arg("serve").arg(format!("--config={}", path.display())));
    for signal in [Signal::TERM, Signal::INT] {
        let daemon = serve();
        let sockets = ["a", "b"].map(|name| scratch.dir.path().join(name));
        for socket in &sockets {
            UnixStream::connect(socket).unwrap();
        }
        assert_eq!(fs::metadata(&sockets[0]).unwrap().permissions().mode() & 0o777, 0o620);
        daemon.signal(signal);
        let (status, said) = daemon.end();
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains(" device=a\n") && said.contains(" device=b\n"), "{said}");
        assert!(!sockets[0].exists() && !sockets[1].exists());
    }
    // A killed daemon leaves its socket behind, and the next one replaces it.
    let mut daemon = serve();
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    assert!(scratch.dir.path().join("b").exists());
    let daemon = serve();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().0, Some(0));
}

#[test]
fn counters_on_demand() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::start(&mut scratch.blk(Path::new("null:1M")));
    let mut log = BufReader::new(daemon.0.stderr.take().unwrap());
    for _ in 0..2 {
        daemon.signal(Signal::USR1);
        let mut line = String::new();
        while !line.contains(" counters queues_used=0") {
            line.clear();
            assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
        }
    }
    daemon.signal(Signal::TERM);
    let mut rest = String::new();
    log.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(" summary queues_used=0"), "{rest}");
    check_sandbox(&rest);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_signal_while_a_disk_is_being_opened() {
    let scratch = Scratch::new();
    let server = UnixListener::bind(scratch.dir.path().join("nbd")).unwrap();
    let uri = format!("nbd+unix:///?socket={}", scratch.dir.path().join("nbd").display());
    let mut child = scratch.blk(Path::new(&uri)).stderr(Stdio::piped()).spawn().unwrap();
    // The server accepts and never answers. Without a signal, the daemon would fail with status 1 after ten
    // seconds.
    let _connection = server.accept().unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{said}");
    assert!(said.contains("before all disks were open"), "{said}");
    assert!(!scratch.socket().exists());
}

#[test]
fn two_devices_with_one_image() {
    let scratch = Scratch::new();
    let image = scratch.image.to_str().unwrap();
    let path = scratch.dir.path().join("disks.toml");
    for (more, warned) in [("", true), ("incoming = true\n", false), ("lock = 'off'\n", false)] {
        let config = device(&scratch, "a", image) + &device(&scratch, "b", image) + more;
        fs::write(&path, config).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(format!("--config={}", path.display())).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains(" serving ") {
            assert_ne!(log.read_line(&mut said).unwrap(), 0, "{said}");
        }
        let daemon = Daemon(child);
        assert_eq!(said.contains("two devices have the same blk-file"), warned, "{more}: {said}");
        assert_eq!(said.contains(" device=b\n") && said.contains(" other=a "), warned, "{said}");
        drop(daemon);
    }
}
