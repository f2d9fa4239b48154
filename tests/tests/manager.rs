//! Runs the unit of systemd under a small service manager: a reload is an upgrade under verified load.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Disk, Options};
use kickless_tests::daemon::{check_sandbox, kickless_binary};
use kickless_tests::hostile_backend::returns_in_time;
use kickless_tests::manager::{Faults, wait_for};
use kickless_tests::transcript::Transcript;
use kickless_tests::unit;
use kickless_tests::verified_load::{BLOCK, drive_disk};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, fcntl_lock, mknodat};
use rustix::process::{Pid, Signal, getpid, kill_process};

const LIMIT: Duration = Duration::from_secs(60);
const DEPTH: u64 = 16;
const SERVES: &str = " serving ";

/// A unit with two disks.
struct Unit(unit::Unit);

impl Deref for Unit {
    type Target = unit::Unit;

    fn deref(&self) -> &unit::Unit {
        &self.0
    }
}

impl Unit {
    fn new() -> Self {
        let unit = Self(unit::Unit::new(&[]).unwrap());
        unit.write(&[("a", &format!("mem:{}", DEPTH * BLOCK as u64)), ("b", "null:1M")]);
        unit
    }

    /// Writes the configuration file anew, with these names and disks.
    fn write(&self, disks: &[(&str, &str)]) {
        let lines = disks.iter().map(|(name, disk)| (*name, format!("blk-file = '{disk}'")));
        let lines: Vec<_> = lines.collect();
        let devices: Vec<_> = lines.iter().map(|(name, lines)| (*name, lines.as_str())).collect();
        self.0.write(&devices).unwrap();
    }

    fn start(&self) -> Transcript {
        self.0.start().unwrap()
    }

    /// Ends the main process as `systemctl restart` does, before it starts the next one.
    fn store(&self, log: &Transcript) {
        let (status, said) = self.manager.run(&self.store_words()).unwrap();
        assert!(status.success(), "{status} {:?}", said.wait_for_end(LIMIT));
        assert_eq!(self.manager.wait_for_main().unwrap().exit_status(), Some(0));
        has(log, "stored for the next process devices=2");
        check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
        // Two descriptors for each device, and two for the plan.
        let (names, count) = self.manager.stored();
        assert_eq!((names.into_iter().collect::<Vec<_>>(), count), (vec!["kickless-device".to_owned()], 6));
    }

    /// Starts the main process, which finds the devices in the store.
    fn start_from_store(&self) -> Transcript {
        let log = self.manager.start(&self.words(&[])).unwrap();
        let taken = |line: &str| {
            line.split_once("took over from the store devices=2").map(|(_, rest)| rest.to_owned())
        };
        println!("a restart: {}", log.wait_for("that it has taken over", LIMIT, taken).unwrap());
        assert_eq!(self.manager.stored().1, 0);
        log
    }

    /// Runs `work` while a driver writes and reads the disk `a`, and checks each answer. Returns the number
    /// of requests.
    fn under_load(&self, work: impl FnOnce()) -> u64 {
        let disk = Disk::connect(Options::new(self.path("a.sock"))).unwrap();
        let is_over = AtomicBool::new(false);
        let requests = thread::scope(|scope| {
            let (queue, is_over) = (disk.queue(0), &is_over);
            let driver = scope.spawn(move || drive_disk(&queue, DEPTH, is_over));
            let end = EndOnDrop(is_over);
            thread::sleep(Duration::from_millis(50));
            work();
            thread::sleep(Duration::from_millis(50));
            drop(end);
            driver.join().unwrap()
        });
        // The connection is the one from the beginning.
        disk.flush().unwrap();
        requests
    }

    /// Waits for the process that takes over at this command, which has ended or waits.
    fn process_of(&self, command: u32) -> Pid {
        let from = self.reload_words().pop().unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            let of = |entry: fs::DirEntry| {
                let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
                let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
                let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
                let parent: i32 = stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?;
                let is_one = line.contains(self.dir().to_str()?) && line.contains(from.to_str()?);
                let is_child = parent == getpid().as_raw_nonzero().get() && pid as u32 != command;
                Pid::from_raw(pid).filter(|_| is_one && is_child)
            };
            if let Some(pid) = fs::read_dir("/proc").unwrap().flatten().find_map(of) {
                return pid;
            }
            assert!(Instant::now() < deadline, "no process takes over");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Ends the load, also when a test fails.
struct EndOnDrop<'b>(&'b AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn has(log: &Transcript, text: &str) {
    log.wait_for(text, LIMIT, |line| line.contains(text).then_some(())).unwrap();
}

#[test]
fn a_reload_is_an_upgrade() {
    returns_in_time(|| {
        let unit = Unit::new();
        let mut log = unit.start();
        unit.manager.set_faults(Faults { barrier_delay: Duration::from_millis(200), ..Faults::default() });
        let requests = unit.under_load(|| {
            for _ in 0..3 {
                let old = unit.manager.main_pid().unwrap();
                let (status, next) = unit.manager.run(&unit.reload_words()).unwrap();
                assert!(status.success(), "{status}");
                // The old process has ended by itself, and not before the manager knew the new one.
                let ended = wait_for(old).unwrap();
                assert_eq!(ended.exit_status(), Some(0));
                let last = *unit.manager.moves().last().unwrap();
                let new = unit.manager.main_pid().unwrap();
                assert_eq!((last.from, last.to), (old.as_raw_nonzero().get(), new.as_raw_nonzero().get()));
                assert!(last.was_there);
                let lines = log.wait_for_end(LIMIT).unwrap();
                check_sandbox(&lines).unwrap();
                assert!(lines.iter().any(|line| line.contains("handed over devices=2")), "{lines:?}");
                let read = |line: &str| line.contains("was read again").then_some(());
                next.wait_for("that the file was read", LIMIT, read).unwrap();
                log = next;
            }
        });
        assert!(requests > 0);
        assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
        check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
        assert_eq!(unit.manager.strays(), Vec::<String>::new());
    });
}

#[test]
fn a_reload_brings_the_changes_of_the_file() {
    returns_in_time(|| {
        let unit = Unit::new();
        let _log = unit.start();
        unit.write(&[("a", "mem:64K"), ("c", "null:1M")]);
        let (status, _log) = unit.manager.run(&unit.reload_words()).unwrap();
        assert!(status.success(), "{status}");
        assert!(unit.path("c.sock").exists() && !unit.path("b.sock").exists());
    });
}

#[test]
fn a_reload_that_fails_changes_nothing() {
    returns_in_time(|| {
        let unit = Unit::new();
        let _log = unit.start();
        let main = unit.manager.main_pid().unwrap();
        unit.under_load(|| {
            fs::write(unit.path("devices.toml"), "[[device]]\nname = 5\n").unwrap();
            let (status, log) = unit.manager.run(&unit.reload_words()).unwrap();
            let lines = log.wait_for_end(LIMIT).unwrap();
            assert_eq!((status.code(), lines.len()), (Some(1), 1), "{lines:?}");
            assert!(lines[0].starts_with("kickless: ") && lines[0].contains("devices.toml"), "{lines:?}");
        });
        assert_eq!(unit.manager.main_pid().unwrap(), main);
        assert_eq!(unit.manager.moves(), []);
        assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
        // Without a daemon, the sentence says so.
        unit.write(&[("a", "null:1M")]);
        let (status, log) = unit.manager.run(&unit.reload_words()).unwrap();
        let lines = log.wait_for_end(LIMIT).unwrap();
        assert!(status.code() == Some(1) && lines[0].contains("--upgrade-from="), "{status} {lines:?}");
    });
}

#[test]
fn a_command_that_is_killed_takes_its_upgrade_with_it() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        let main = unit.manager.main_pid().unwrap();
        unit.under_load(|| {
            // The old process does not answer until the command is gone.
            kill_process(main, Signal::STOP).unwrap();
            let (mut command, _) = unit.manager.begin(&unit.reload_words()).unwrap();
            let new = unit.process_of(command.id());
            command.kill().unwrap();
            command.wait().unwrap();
            kill_process(main, Signal::CONT).unwrap();
            assert_eq!(wait_for(new).unwrap().exit_status(), Some(1));
            has(&log, "the command that waits for the upgrade has been ended");
        });
        assert_eq!(unit.manager.main_pid().unwrap(), main);
        let (status, _log) = unit.manager.run(&unit.reload_words()).unwrap();
        assert!(status.success(), "{status}");
    });
}

#[test]
fn a_process_that_is_killed_ends_its_command() {
    returns_in_time(|| {
        let unit = Unit::new();
        let _log = unit.start();
        let main = unit.manager.main_pid().unwrap();
        unit.under_load(|| {
            kill_process(main, Signal::STOP).unwrap();
            let (mut command, log) = unit.manager.begin(&unit.reload_words()).unwrap();
            kill_process(unit.process_of(command.id()), Signal::KILL).unwrap();
            assert_eq!(command.wait().unwrap().code(), Some(1));
            has(&log, "the process that was to take over has ended");
            kill_process(main, Signal::CONT).unwrap();
        });
        assert_eq!(unit.manager.main_pid().unwrap(), main);
    });
}

#[test]
fn a_manager_that_does_not_answer_delays_only_the_end_of_the_old_process() {
    returns_in_time(|| {
        let unit = Unit::new();
        let _log = unit.start();
        let old = unit.manager.main_pid().unwrap();
        unit.manager.set_faults(Faults { is_deaf: true, ..Faults::default() });
        unit.under_load(|| {
            let (status, log) = unit.manager.run(&unit.reload_words()).unwrap();
            assert!(status.success(), "{status}");
            has(&log, "systemd may not know the new main process: the service manager does not answer");
            assert_eq!(wait_for(old).unwrap().exit_status(), Some(0));
        });
    });
}

#[test]
fn a_restart_keeps_the_connections() {
    returns_in_time(|| {
        let unit = Unit::new();
        let image = unit.path("a.img");
        fs::write(&image, vec![0; DEPTH as usize * BLOCK]).unwrap();
        for disk in [format!("mem:{}", DEPTH * BLOCK as u64), image.display().to_string()] {
            unit.write(&[("a", &disk), ("b", "null:1M")]);
            let mut log = unit.start();
            let requests = unit.under_load(|| {
                for _ in 0..3 {
                    unit.store(&log);
                    // No other process gets the image in between.
                    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
                    let is_free = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
                    assert_eq!(is_free, disk != image.display().to_string());
                    drop(file);
                    log = unit.start_from_store();
                }
            });
            assert!(requests > 0);
            assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
            check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
        }
        assert_eq!(unit.manager.strays(), Vec::<String>::new());
    });
}

#[test]
fn a_start_that_fails_early_leaves_the_store_to_the_next_one() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        unit.under_load(|| {
            unit.store(&log);
            let file = fs::read(unit.path("devices.toml")).unwrap();
            fs::write(unit.path("devices.toml"), "wrong").unwrap();
            let failing = unit.manager.start(&unit.words(&[])).unwrap();
            assert_eq!(unit.manager.wait_for_main().unwrap().exit_status(), Some(1));
            failing.wait_for_end(LIMIT).unwrap();
            fs::write(unit.path("devices.toml"), file).unwrap();
            let _log = unit.start_from_store();
        });
    });
}

#[test]
fn a_restart_brings_the_changes_of_the_file() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        unit.store(&log);
        unit.write(&[("a", "mem:64K"), ("c", "null:1M")]);
        let log = unit.start_from_store();
        has(&log, "was read again");
        assert!(unit.path("c.sock").exists() && !unit.path("b.sock").exists());
    });
}

#[test]
fn a_stop_closes_what_is_stored() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        let disk = Disk::connect(Options::new(unit.path("a.sock"))).unwrap();
        unit.store(&log);
        unit.manager.empty_store();
        assert!(disk.flush().is_err());
        // A name that has stayed is replaced.
        let _log = unit.start();
        assert!(unit.under_load(|| {}) > 0);
    });
}

#[test]
fn a_manager_without_a_store_is_a_stop() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        unit.manager.set_faults(Faults { has_no_store: true, ..Faults::default() });
        let (status, _) = unit.manager.run(&unit.store_words()).unwrap();
        assert!(status.success(), "{status}");
        assert_eq!(unit.manager.wait_for_main().unwrap().exit_status(), Some(0));
        log.wait_for_end(LIMIT).unwrap();
        assert_eq!(unit.manager.stored().1, 0);
        let _log = unit.start();
        assert!(unit.under_load(|| {}) > 0);
    });
}

#[test]
fn a_store_that_fails_changes_nothing() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        let main = unit.manager.main_pid().unwrap();
        unit.under_load(|| {
            unit.manager.set_faults(Faults { is_deaf: true, ..Faults::default() });
            let (status, said) = unit.manager.run(&unit.store_words()).unwrap();
            assert_eq!(status.code(), Some(1));
            has(&said, "the running daemon goes on: the service manager does not answer");
            has(&log, "the devices cannot be stored for the next process");
            assert_eq!(unit.manager.stored().1, 0);

            // The command is killed in between.
            kill_process(main, Signal::STOP).unwrap();
            let (mut command, _) = unit.manager.begin(&unit.store_words()).unwrap();
            thread::sleep(Duration::from_millis(200));
            command.kill().unwrap();
            command.wait().unwrap();
            kill_process(main, Signal::CONT).unwrap();
        });
        assert_eq!(unit.manager.main_pid().unwrap(), main);
        unit.manager.set_faults(Faults::default());
        assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
    });
}

#[test]
fn a_crash_stores_nothing() {
    returns_in_time(|| {
        let unit = Unit::new();
        let _log = unit.start();
        unit.manager.end_main(Signal::KILL).unwrap();
        let (status, _) = unit.manager.run(&unit.store_words()).unwrap();
        assert!(status.code() == Some(1) && unit.manager.stored().1 == 0, "{status}");
        let _log = unit.start();
        assert!(unit.under_load(|| {}) > 0);
    });
}

#[test]
fn systemd_knows_what_the_daemon_does() {
    returns_in_time(|| {
        let unit = Unit::new();
        let log = unit.start();
        let ready = unit.manager.wait_for("READY", 0, |line| line == "READY=1").unwrap();
        let status = |line: &str| line == "STATUS=Serves 2 devices";
        let mut seen = unit.manager.wait_for("the status", ready, status).unwrap();
        // A unit that has started has its sockets.
        assert!(unit.path("a.sock").exists() && unit.path("control.sock").exists());
        for by_signal in [true, false] {
            if by_signal {
                kill_process(unit.manager.main_pid().unwrap(), Signal::HUP).unwrap();
            } else {
                let control = format!("--control={}", unit.path("control.sock").display());
                let words =
                    [kickless_binary().unwrap().into(), "ctl".into(), control.into(), "daemon.reload".into()];
                assert!(unit.manager.run(&words).unwrap().0.success());
            }
            seen = unit.manager.wait_for("RELOADING", seen, |line| line == "RELOADING=1").unwrap();
            assert!(unit.manager.told()[seen].starts_with("MONOTONIC_USEC="));
            seen = unit.manager.wait_for("READY", seen, |line| line == "READY=1").unwrap();
        }
        assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
        unit.manager.wait_for("STOPPING", seen, |line| line == "STOPPING=1").unwrap();
        check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
        assert_eq!((unit.manager.feeds(), unit.manager.strays()), (0, Vec::new()));
    });
}

#[test]
fn a_worker_that_does_not_get_on_is_not_fed_for() {
    returns_in_time(|| {
        let interval = Duration::from_millis(400);
        let [unit, other] = [Unit::new(), Unit::new()];
        let fifo = unit.path("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        unit.manager.set_variable("KICKLESS_STALL", &fifo);
        [&unit, &other].into_iter().for_each(|unit| unit.manager.set_watchdog(interval));
        let (log, _log) = (unit.start(), other.start());
        let disk = Disk::connect(Options::new(unit.path("b.sock"))).unwrap();
        for _ in 0..3 {
            unit.manager.wait_for_feed().unwrap();
        }
        let mut fifo = fs::File::options().write(true).open(&fifo).unwrap();
        fifo.write_all(b"w").unwrap();
        has(
            &log,
            "a thread does not get on: the watchdog of the service manager is not fed thread=\"worker 0\"",
        );
        let fed = unit.manager.feeds();
        for _ in 0..3 {
            other.manager.wait_for_feed().unwrap();
        }
        assert_eq!(unit.manager.feeds(), fed);
        fifo.write_all(b"g").unwrap();
        has(&log, "all threads get on again");
        unit.manager.wait_for_feed().unwrap();
        disk.flush().unwrap();
    });
}

#[test]
fn the_watchdog_is_fed_by_each_process_in_turn() {
    returns_in_time(|| {
        let unit = Unit::new();
        unit.manager.set_watchdog(Duration::from_millis(400));
        let log = unit.start();
        unit.manager.wait_for_feed().unwrap();
        let mut seen = unit.manager.wait_for("READY", 0, |line| line == "READY=1").unwrap();
        // systemd tells commands of a reload nothing about the watchdog.
        for _ in 0..2 {
            let (status, _log) = unit.manager.run(&unit.reload_words()).unwrap();
            assert!(status.success(), "{status}");
            let is_pinned = |line: &str| line == "WATCHDOG_USEC=400000";
            seen = unit.manager.wait_for("WATCHDOG_USEC", seen, is_pinned).unwrap();
            seen = unit.manager.wait_for("READY", seen, |line| line == "READY=1").unwrap();
            unit.manager.wait_for_feed().unwrap();
            unit.manager.wait_for_feed().unwrap();
        }
        log.wait_for_end(LIMIT).unwrap();
        assert_eq!(unit.manager.strays(), Vec::<String>::new());
    });
}

#[test]
fn a_manager_that_reads_nothing_holds_no_device() {
    returns_in_time(|| {
        let dir = tempfile::Builder::new().prefix("kickless-deaf-").tempdir().unwrap();
        let deaf = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        // The queue is full before the first message.
        let full = UnixDatagram::unbound().unwrap();
        full.set_nonblocking(true).unwrap();
        while full.send_to(b"X=1", dir.path().join("notify")).is_ok() {}
        let socket = dir.path().join("a.sock");
        let mut command = Command::new(kickless_binary().unwrap());
        command.args(["blk", "--blk-file=null:1M"]).arg(format!("--socket-path={}", socket.display()));
        command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "2000");
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = Transcript::of("deaf", child.stderr.take().unwrap());
        log.wait_for("that it serves", LIMIT, |line| line.contains(SERVES).then_some(())).unwrap();
        let disk = Disk::connect(Options::new(&socket)).unwrap();
        for _ in 0..1000 {
            disk.flush().unwrap();
        }
        let mut buffer = [0; 512];
        let is_ready = |text: &[u8]| text.starts_with(b"READY=1\n");
        while !deaf.recv(&mut buffer).is_ok_and(|len| is_ready(&buffer[..len])) {}
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    });
}

/// Passes sockets as a socket unit does.
#[test]
fn a_socket_of_the_unit_is_that_of_its_device() {
    returns_in_time(|| {
        let unit = Unit::new();
        let socket = UnixListener::bind(unit.path("a.sock")).unwrap();
        unit.manager.add_socket("a", socket);
        let without = "[[device]]\nname = 'a'\nblk-file = 'null:1M'\n".to_owned();
        let with = format!("{without}socket-path = '{}'\n", unit.path("a.sock").display());
        for file in [&without, &with] {
            fs::write(unit.path("devices.toml"), file).unwrap();
            let mut log = unit.start();
            let shown = format!("socket={} mode=", unit.path("a.sock").display());
            assert!(
                log.lines().iter().any(|line| line.contains(SERVES) && line.contains(&shown)),
                "{:?}",
                log.lines()
            );
            let disk = Disk::connect(Options::new(unit.path("a.sock"))).unwrap();
            let (status, next) = unit.manager.run(&unit.reload_words()).unwrap();
            assert!(status.success(), "{status}");
            log.wait_for_end(LIMIT).unwrap();
            log = next;
            disk.flush().unwrap();
            let (status, said) = unit.manager.run(&unit.store_words()).unwrap();
            assert!(status.success(), "{status} {:?}", said.wait_for_end(LIMIT));
            assert_eq!(unit.manager.wait_for_main().unwrap().exit_status(), Some(0));
            log.wait_for_end(LIMIT).unwrap();
            let log = unit.manager.start(&unit.words(&[])).unwrap();
            has(&log, "took over from the store devices=1");
            disk.flush().unwrap();
            drop(disk);
            // The next front-end comes by the same socket.
            Disk::connect(Options::new(unit.path("a.sock"))).unwrap().flush().unwrap();
            assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
            check_sandbox(log.wait_for_end(LIMIT).unwrap()).unwrap();
            unit.manager.empty_store();
            // The name belongs to systemd.
            assert!(unit.path("a.sock").exists());
        }
    });
}

#[test]
fn a_disk_that_comes_later_gets_its_socket_then() {
    returns_in_time(|| {
        let unit = Unit::new();
        unit.manager.add_socket("a", UnixListener::bind(unit.path("a.sock")).unwrap());
        let image = unit.path("later.img");
        fs::write(
            unit.path("devices.toml"),
            format!("[[device]]\nname = 'a'\nblk-file = '{}'\n", image.display()),
        )
        .unwrap();
        let log = unit.manager.start(&unit.words(&[])).unwrap();
        has(&log, "the device is unavailable");
        // The list of unavailable devices passes too, with the socket.
        let (status, next) = unit.manager.run(&unit.reload_words()).unwrap();
        assert!(status.success(), "{status}");
        fs::write(&image, [0; 4096]).unwrap();
        next.wait_for("that it serves", LIMIT, |line| line.contains(SERVES).then_some(())).unwrap();
        Disk::connect(Options::new(unit.path("a.sock"))).unwrap().flush().unwrap();
    });
}

#[test]
fn sockets_that_no_device_can_have_are_refused() {
    returns_in_time(|| {
        type Sockets = fn(&Unit) -> Vec<(&'static str, OwnedFd)>;
        let listener = |unit: &Unit, name: &str| OwnedFd::from(UnixListener::bind(unit.path(name)).unwrap());
        let cases: [(Sockets, &str); 6] = [
            (
                |unit| vec![("c", UnixListener::bind(unit.path("c")).unwrap().into())],
                "LISTEN_FDNAMES: \"c\": no device of the file has this name",
            ),
            (
                |unit| {
                    let socket = UnixListener::bind(unit.path("a.sock")).unwrap();
                    vec![("a", socket.try_clone().unwrap().into()), ("a", socket.into())]
                },
                "LISTEN_FDNAMES: \"a\": two sockets have this name",
            ),
            (|_| vec![("a", UnixDatagram::unbound().unwrap().into())], "LISTEN_FDNAMES: \"a\": "),
            (|_| vec![("a", fs::File::open("/dev/null").unwrap().into())], "LISTEN_FDNAMES: \"a\": "),
            (|_| vec![("a", UnixStream::pair().unwrap().0.into())], "LISTEN_FDNAMES: \"a\": "),
            (
                |unit| vec![("a", UnixListener::bind(unit.path("other")).unwrap().into())],
                "device a: socket-path: the service manager passes the socket ",
            ),
        ];
        for (sockets, said) in cases {
            let unit = Unit::new();
            sockets(&unit).into_iter().for_each(|(name, fd)| unit.manager.add_socket(name, fd));
            refused(&unit, said);
        }
        // A device without a path and without a socket, and a number that is wrong.
        let unit = Unit::new();
        fs::write(unit.path("devices.toml"), "[[device]]\nname = 'a'\nblk-file = 'null:1M'\n").unwrap();
        refused(
            &unit,
            "devices.toml:1: socket-path: this [[device]] needs one, unless systemd passes a socket",
        );
        unit.manager.add_socket("a", listener(&unit, "a.sock"));
        unit.manager.set_variable("LISTEN_FDS", "2");
        refused(&unit, "LISTEN_FDS=2: the program inherited no descriptor 4");
    });
}

fn refused(unit: &Unit, said: &str) {
    let log = unit.manager.start(&unit.words(&[])).unwrap();
    assert_eq!(unit.manager.wait_for_main().unwrap().exit_status(), Some(1), "{said}");
    let lines = log.wait_for_end(LIMIT).unwrap();
    assert!(lines.len() == 1 && lines[0].contains(said), "{said}: {lines:?}");
}

/// A command for one device takes the only socket.
#[test]
fn a_device_of_the_command_line_takes_the_only_socket() {
    returns_in_time(|| {
        let unit = Unit::new();
        let words = |more: &[&str]| -> Vec<OsString> {
            let words = ["blk", "--blk-file=null:1M"].iter().chain(more).map(OsString::from);
            std::iter::once(kickless_binary().unwrap().into()).chain(words).collect()
        };
        let fails = |status: i32, said: &str| {
            let log = unit.manager.start(&words(&[])).unwrap();
            assert_eq!(unit.manager.wait_for_main().unwrap().exit_status(), Some(status));
            let lines = log.wait_for_end(LIMIT).unwrap();
            assert!(lines.len() == 1 && lines[0].contains(said), "{lines:?}");
        };
        fails(2, "--socket-path: this command needs it, or --fd");
        // It need not have a name.
        unit.manager.add_socket("unknown", UnixListener::bind(unit.path("c.sock")).unwrap());
        let log = unit.manager.start(&words(&[])).unwrap();
        log.wait_for("that it serves", LIMIT, |line| line.contains(SERVES).then_some(())).unwrap();
        unit.manager.wait_for("READY", 0, |line| line == "READY=1").unwrap();
        Disk::connect(Options::new(unit.path("c.sock"))).unwrap().flush().unwrap();
        assert_eq!(unit.manager.end_main(Signal::TERM).unwrap().exit_status(), Some(0));
        assert!(unit.path("c.sock").exists());
        unit.manager.add_socket("another", fs::File::open("/dev/null").unwrap());
        fails(2, "LISTEN_FDS=2");
    });
}
