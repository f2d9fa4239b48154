//! Tests disks that stop on an error (`on-error=stop`): with a full file system, an NBD server that goes
//! away, a front-end that stops or migrates, and a daemon that is killed meanwhile.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kickless_spec::blk;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, kickless_binary};
use kickless_tests::driver::request::Request;
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::log::Bitmap;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;
use kickless_tests::remote_disks::nbd::{Kind, NbdServer};
use serde_json::{Value, json};
use tempfile::TempDir;

const LEN: usize = 4096;
/// A request fails here if its disk has a fault.
const FULL: u64 = 8;
const SHAPE: Shape = Shape { queues: 1, size: 32, returns: true, ..Shape::LINUX };

/// A daemon whose disk stops on errors, with a control socket.
struct Stopping {
    daemon: Daemon,
    config: DaemonConfig,
    control: PathBuf,
    _dir: TempDir,
}

impl Stopping {
    fn start(disk: impl Into<std::ffi::OsString>) -> Self {
        Self::start_with(DaemonConfig::new(disk))
    }

    fn start_with(config: DaemonConfig) -> Self {
        let dir = image_dir().unwrap();
        let control = dir.path().join("control.sock");
        let arguments = vec![format!("--control={}", control.display()), "--on-error=stop".into()];
        let config = DaemonConfig { arguments, ..config };
        Self { daemon: Daemon::start(&config).unwrap(), config, control, _dir: dir }
    }

    fn call(&self, method: &str, params: &Value) -> Value {
        let control = format!("--control={}", self.control.display());
        let words = ["ctl", &control, method, &params.to_string()];
        let output = Command::new(kickless_binary().unwrap()).args(words).output().unwrap();
        assert!(output.status.success(), "{method}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Returns the name, the state and the error of the disk.
    fn summary(&self) -> Value {
        self.call("device.list", &json!({}))[0].take()
    }

    fn name(&self) -> String {
        self.summary()["name"].as_str().unwrap().to_owned()
    }

    /// Waits until the disk is in this state. Returns its error.
    fn wait_for(&self, state: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let summary = self.summary();
            if summary["state"] == state {
                return summary["error"].as_str().unwrap_or_default().to_owned();
            }
            assert!(Instant::now() < deadline, "not {state}: {summary}");
            sleep(Duration::from_millis(20));
        }
    }

    fn resume(&self) {
        let resumed = self.call("device.resume", &json!({ "name": self.name() }));
        assert_eq!(resumed, json!({ "resumed": true }));
    }
}

/// Makes a disk of 1 MiB in a file.
fn image(dir: &Path) -> PathBuf {
    let path = dir.join("disk.img");
    File::create_new(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

/// Returns a disk on which writes of [`FULL`] find no room: all of them, or the first.
fn full(path: &Path, which: &str) -> String {
    format!("fault:enospc@write+{FULL}-{}{which}:{}", FULL + 7, path.display())
}

fn write() -> Request {
    Request::write(FULL, &pattern(1, LEN))
}

fn shapes() -> [Shape; 2] {
    [SHAPE, Shape { packed: true, ..SHAPE }]
}

/// The file system is a small one of the daemon's own, so no other program sees that it is full.
#[test]
fn a_full_file_system() {
    for format in ["raw", "qcow2"] {
        let dir = image_dir().unwrap();
        let (full, wrapper) = (dir.path().join("full"), dir.path().join("wrapper"));
        fs::create_dir(&full).unwrap();
        let image = full.join("disk");
        let make = match format {
            "raw" => format!("truncate --size=8M {0}", image.display()),
            _ => format!("qemu-img create -q -f qcow2 {0} 8M", image.display()),
        };
        let script = format!(
            "#!/bin/sh\nset -e\nif [ -z \"$KICKLESS_INSIDE\" ]; then\n  export KICKLESS_INSIDE=1\n  \
             exec unshare --map-root-user --mount \"$0\" \"$@\"\nfi\n\
             mount -t tmpfs -o size=4M none {0}\n{make}\nhead -c 2M /dev/zero >{0}/other\nexec \"$@\"\n",
            full.display()
        );
        fs::write(&wrapper, script).unwrap();
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
        let scheme = if format == "raw" { "" } else { "qcow2:" };
        let config = DaemonConfig {
            wrapper: Some(wrapper),
            ..DaemonConfig::new(format!("{scheme}{}", image.display()))
        };
        let config = DaemonConfig { disk: config.disk.clone(), ..config };
        let stopping = Stopping::start_with(config);
        let mut machine = Machine::start(stopping.daemon.socket(), &SHAPE).unwrap();
        // 3 MiB do not fit beside the other 2.
        let len = 64 << 10;
        let requests: Vec<Request> =
            (0..48_u64).map(|nth| Request::write(nth * 128, &pattern(nth, len))).collect();
        let mut stopped_at = None;
        for (nth, request) in requests.iter().enumerate() {
            machine.submit(0, request).unwrap();
            let deadline = Instant::now() + LIMIT;
            loop {
                if machine.queues[0].wait_used(Instant::now() + Duration::from_millis(100)).is_ok() {
                    break;
                }
                if stopping.summary()["state"] == "stopped" {
                    stopped_at = Some(nth);
                    break;
                }
                assert!(Instant::now() < deadline, "{format}: neither done nor stopped");
            }
            if stopped_at.is_some() {
                break;
            }
        }
        let stopped_at = stopped_at.expect("the file system is not full");
        let error = stopping.wait_for("stopped");
        assert!(error.contains("No space left on device") && error.contains("1 request waits"), "{error}");
        let other = format!("/proc/{}/root{}/other", stopping.daemon.pid(), full.display());
        fs::remove_file(other).unwrap();
        stopping.resume();
        assert_eq!(machine.status(0, &requests[stopped_at]).unwrap(), blk::S_OK, "{format}");
        for request in &requests[stopped_at + 1..] {
            machine.submit(0, request).unwrap();
            assert_eq!(machine.status(0, request).unwrap(), blk::S_OK, "{format}");
        }
        for nth in 0..48 {
            assert!(machine.read(0, nth * 128, len).unwrap() == pattern(nth, len), "{format}: {nth}");
        }
        assert_eq!(stopping.wait_for("connected"), "");
        machine.stop().unwrap();
        let stats = stopping.call("stats.get", &json!({}));
        assert_eq!(stats["devices"][0]["device"]["stops"], 1, "{format}");
        let (status, log) = stopping.daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        assert!(!log.iter().any(|line| line.contains("a request failed")), "{log:#?}");
    }
}

/// Requests wait for `reconnect-delay`, then the disk stops. New requests wait in the ring.
#[test]
fn an_nbd_server_that_goes_away() {
    let dir = image_dir().unwrap();
    let mut server = NbdServer::start(Kind::Qemu, &image(dir.path())).unwrap();
    let stopping = Stopping::start(server.uri(1));
    let mut machine =
        Machine::start(stopping.daemon.socket(), &Shape { queues: 2, returns: false, ..SHAPE }).unwrap();
    machine.write(0, 0, &pattern(3, LEN)).unwrap();
    server.kill().unwrap();
    machine.submit(0, &write()).unwrap();
    stopping.wait_for("stopped");
    // The first write was not flushed, and is lost with the server.
    let flush = Request::flush();
    machine.submit(1, &flush).unwrap();
    server.restart().unwrap();
    let stats = stopping.call("stats.get", &json!({}));
    assert_eq!(stats["devices"][0]["stopped_requests"], 1);
    stopping.resume();
    assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK);
    assert_eq!(machine.status(1, &flush).unwrap(), blk::S_IOERR, "the guest must learn of the lost write");
    machine.submit(0, &flush).unwrap();
    assert_eq!(machine.status(0, &flush).unwrap(), blk::S_IOERR, "each queue reports it");
    assert_eq!(machine.read(0, FULL, LEN).unwrap(), pattern(1, LEN));
    machine.stop().unwrap();
}

/// Stops all rings of a machine, as QEMU does: it disables each before it asks for its base.
fn disable_and_stop(machine: &mut Machine, suspends: bool) {
    for queue in &mut machine.queues {
        machine.frontend.enable(queue, false).unwrap();
        if suspends {
            machine.frontend.suspend(queue).unwrap();
        } else {
            machine.frontend.stop(queue).unwrap();
        }
    }
}

/// Protocol features with which a front-end leaves requests by GET_VRING_BASE, and by a message of its own.
const LEAVES: ProtocolFeatures = ProtocolFeatures::GET_VRING_BASE_INFLIGHT;
const CHOOSES: ProtocolFeatures = LEAVES.union(ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN);

/// A machine that is stopped and saved does not take the buffer along. The next QEMU begins a new one. So
/// each request has its answer before the ring has stopped, even if nothing is logged.
#[test]
fn a_machine_that_is_stopped_and_saved() {
    for (shape, protocol, disables) in [
        (SHAPE, ProtocolFeatures::empty(), false),
        (SHAPE, ProtocolFeatures::empty(), true),
        (Shape { packed: true, ..SHAPE }, ProtocolFeatures::empty(), true),
        // The front-end can leave requests, and chooses not to.
        (SHAPE, CHOOSES, true),
        (Shape { packed: true, ..SHAPE }, CHOOSES, false),
        (Shape { packed: true, ..SHAPE }, CHOOSES, true),
    ] {
        let dir = image_dir().unwrap();
        let path = image(dir.path());
        let (source, destination) =
            (Stopping::start(full(&path, "")), Stopping::start_with(DaemonConfig::new(&path)));
        let mut machine = Machine::prepare(source.daemon.socket(), &Shape { protocol, ..shape }).unwrap();
        let _lost = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.write(0, 64, &pattern(2, LEN)).unwrap();
        machine.submit(0, &write()).unwrap();
        source.wait_for("stopped");
        match disables {
            true => disable_and_stop(&mut machine, false),
            false => machine.stop().unwrap(),
        }
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_IOERR, "{shape:?} {protocol:?}");
        drop(machine.move_to(destination.daemon.socket()).unwrap());
        let _new = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        assert_eq!(machine.queues[0].take_used().unwrap(), None, "a second answer");
        assert_eq!(machine.read(0, 64, LEN).unwrap(), pattern(2, LEN));
        machine.submit(0, &write()).unwrap();
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK);
        machine.stop().unwrap();
    }
}

/// A front-end that takes the buffer along gets the ring at once. The destination does the requests, once.
#[test]
fn a_machine_that_takes_its_requests_along() {
    for (shape, protocol, is_logged) in [
        (SHAPE, LEAVES, false),
        (SHAPE, CHOOSES, true),
        (Shape { packed: true, ..SHAPE }, LEAVES, true),
        (Shape { packed: true, ..SHAPE }, CHOOSES, false),
    ] {
        let dir = image_dir().unwrap();
        let path = image(dir.path());
        let (source, destination) =
            (Stopping::start(full(&path, "")), Stopping::start_with(DaemonConfig::new(&path)));
        let shape = Shape { queues: 2, protocol, ..shape };
        let mut machine = Machine::prepare(source.daemon.socket(), &shape).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.submit(0, &write()).unwrap();
        source.wait_for("stopped");
        if is_logged {
            let bitmap = Bitmap::covering(&machine.ram).unwrap();
            machine.frontend.set_log(&bitmap).unwrap();
            machine.frontend.set_logging(true).unwrap();
        }
        // A request that is in the ring stays there.
        let read = Request::read(FULL, LEN);
        machine.submit(1, &read).unwrap();
        disable_and_stop(&mut machine, protocol == CHOOSES);
        assert_eq!(machine.queues[0].take_used().unwrap(), None, "{shape:?}");
        source.wait_for("connected");
        drop(machine.move_to(destination.daemon.socket()).unwrap());
        machine.frontend.set_inflight(&kept.copy().unwrap()).unwrap();
        machine.resume().unwrap();
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK, "{shape:?}");
        assert_eq!(machine.status(1, &read).unwrap(), blk::S_OK, "{shape:?}");
        assert_eq!(machine.queues[0].take_used().unwrap(), None, "a second answer");
        assert_eq!(machine.read(0, FULL, LEN).unwrap(), pattern(1, LEN));
        machine.stop().unwrap();
        let (status, log) = source.daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
        assert!(!log.iter().any(|line| line.contains("a request failed")), "{log:#?}");
    }
}

/// A machine that is paused and goes on in the same session, and one whose front-end connects again without
/// having asked for a base: the buffer stays with the front-end.
#[test]
fn the_same_process_goes_on_from_the_buffer() {
    for (shape, reconnects) in shapes().into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let dir = image_dir().unwrap();
        let stopping = Stopping::start(full(&image(dir.path()), "+nth=1"));
        let protocol = if reconnects { ProtocolFeatures::empty() } else { LEAVES };
        let mut machine = Machine::prepare(stopping.daemon.socket(), &Shape { protocol, ..shape }).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.submit(0, &write()).unwrap();
        stopping.wait_for("stopped");
        match reconnects {
            true => machine.reconnect(stopping.daemon.socket(), Some(&kept)).unwrap(),
            false => machine.stop().unwrap(),
        }
        assert_eq!(machine.queues[0].take_used().unwrap(), None, "{shape:?}");
        machine.resume().unwrap();
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK, "{shape:?}");
        assert_eq!(machine.read(0, FULL, LEN).unwrap(), pattern(1, LEN));
        machine.stop().unwrap();
        let (status, _) = stopping.daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0));
    }
}

/// A ring does not need its server to stop, if its requests can be left. A flush is answered, because another
/// process would not know that the server has lost writes.
#[test]
fn requests_to_a_server_that_is_away_are_left() {
    // A disk that reports errors must not give up the requests before the ring stops.
    for (on_error, seconds) in [("stop", 1), ("report", 5)] {
        let dir = image_dir().unwrap();
        let mut server = NbdServer::start(Kind::Qemu, &image(dir.path())).unwrap();
        let arguments = vec![format!("--on-error={on_error}")];
        let config = DaemonConfig { arguments, ..DaemonConfig::new(server.uri(seconds)) };
        let daemon = Daemon::start(&config).unwrap();
        // One ring goes on, so the device stays open.
        let shape = Shape { queues: 3, returns: false, protocol: LEAVES, ..SHAPE };
        let mut machine = Machine::prepare(daemon.socket(), &shape).unwrap();
        let _kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.write(2, 0, &pattern(3, LEN)).unwrap();
        server.kill().unwrap();
        let flush = Request::flush();
        machine.submit(0, &write()).unwrap();
        machine.submit(1, &flush).unwrap();
        for queue in [0, 1] {
            machine.frontend.stop(&mut machine.queues[queue]).unwrap();
        }
        assert_eq!(machine.queues[0].take_used().unwrap(), None, "{on_error}");
        assert_eq!(machine.status(1, &flush).unwrap(), blk::S_IOERR, "{on_error}");
        server.restart().unwrap();
        let is_back = |line: &str| line.contains("the NBD server is back").then_some(());
        daemon.log().wait_for("the server", LIMIT, is_back).unwrap();
        machine.frontend.start(&machine.queues[0]).unwrap();
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK, "{on_error}");
        assert_eq!(machine.read(0, FULL, LEN).unwrap(), pattern(1, LEN));
    }
}

/// A migration leaves the buffer behind, so the guest gets the error. The machine goes on elsewhere.
#[test]
fn a_migration_while_stopped() {
    for shape in shapes() {
        let dir = image_dir().unwrap();
        let path = image(dir.path());
        let (source, destination) =
            (Stopping::start(full(&path, "")), Stopping::start_with(DaemonConfig::new(&path)));
        let mut machine = Machine::prepare(source.daemon.socket(), &shape).unwrap();
        let _kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.write(0, 64, &pattern(2, LEN)).unwrap();
        let bitmap = Bitmap::covering(&machine.ram).unwrap();
        machine.frontend.set_log(&bitmap).unwrap();
        machine.frontend.set_logging(true).unwrap();
        machine.submit(0, &write()).unwrap();
        source.wait_for("stopped");
        bitmap.harvest();
        let began = Instant::now();
        machine.stop().unwrap();
        assert!(began.elapsed() >= Duration::from_millis(1500), "the request had no time");
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_IOERR, "{shape:?}");
        assert!(!bitmap.harvest().is_empty(), "the status is not in the log");
        drop(machine.move_to(destination.daemon.socket()).unwrap());
        machine.resume().unwrap();
        assert_eq!(machine.read(0, 64, LEN).unwrap(), pattern(2, LEN));
        machine.submit(0, &write()).unwrap();
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK);
        machine.stop().unwrap();
    }
}

/// The next process finds the request in the buffer, and stops as well while the disk is full.
#[test]
fn a_kill_while_stopped() {
    for shape in shapes() {
        let dir = image_dir().unwrap();
        let path = image(dir.path());
        let mut stopping = Stopping::start(full(&path, ""));
        let mut machine = Machine::prepare(stopping.daemon.socket(), &shape).unwrap();
        let kept = machine.get_and_set_inflight().unwrap();
        machine.resume().unwrap();
        machine.submit(0, &write()).unwrap();
        for is_full in [true, false] {
            stopping.wait_for("stopped");
            let disk = if is_full { full(&path, "") } else { path.display().to_string() };
            let config = DaemonConfig { disk: disk.into(), ..stopping.config.clone() };
            stopping.daemon.kill_and_restart(&config).unwrap();
            machine.reconnect(stopping.daemon.socket(), Some(&kept)).unwrap();
            machine.resume().unwrap();
        }
        assert_eq!(machine.status(0, &write()).unwrap(), blk::S_OK, "{shape:?}");
        assert_eq!(machine.read(0, FULL, LEN).unwrap(), pattern(1, LEN));
        machine.stop().unwrap();
    }
}

/// Without a buffer, a removal gives the request two seconds, and reports its error.
#[test]
fn a_removal_while_stopped() {
    let dir = image_dir().unwrap();
    let stopping = Stopping::start(full(&image(dir.path()), ""));
    let mut machine = Machine::start(stopping.daemon.socket(), &SHAPE).unwrap();
    machine.submit(0, &write()).unwrap();
    stopping.wait_for("stopped");
    let removed = stopping.call("device.remove", &json!({ "name": stopping.name(), "mode": "drain" }));
    assert_eq!(removed, json!({ "removed": true }));
    assert_eq!(machine.status(0, &write()).unwrap(), blk::S_IOERR);
}
