//! Upgrades beside other events: calls, signals, other users, devices in each state, and what the next
//! process must find as it was.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use kickless_control::{Client, ClientError};
use kickless_driver::{Disk, Options};
use kickless_testing::{LIMIT, eventually, pattern};
use kickless_tests::daemon::{Daemon, Process, is_stopped, kickless_binary, spawn, wait_for_exit};
use kickless_tests::driver::request::Request as MachineRequest;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;
use kickless_tests::hostile_backend::returns_in_time;
use kickless_tests::qcow2::qemu_img;
use rustix::process::Signal;
use serde_json::{Value, json};

const NULL: &str = "blk-file = \"null:1M\"";

fn try_call(daemon: &Daemon, method: &str, params: &Value) -> Result<Value, ClientError> {
    Client::connect(&daemon.socket_of("control"))?.call(method, params.as_object().unwrap().clone())
}

fn call(daemon: &Daemon, method: &str, params: &Value) -> Value {
    try_call(daemon, method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
}

fn code(error: &ClientError) -> i64 {
    match error {
        ClientError::Call(rpc) => rpc.code,
        other => panic!("{other}"),
    }
}

/// Waits until a new process has failed. Returns its last line.
fn fails(mut new: Process) -> String {
    let status = wait_for_exit(&mut new.child, LIMIT).unwrap();
    let lines = new.log.wait_for_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(1), "{lines:?}");
    lines.last().cloned().unwrap_or_default()
}

/// Connects a driver that does not connect again.
fn connect(daemon: &Daemon, device: &str) -> Disk {
    let reconnect_limit = Duration::ZERO;
    let options = Options { queues: 1, reconnect_limit, ..Options::new(daemon.socket_of(device)) };
    Disk::connect(options).unwrap()
}

fn write(disk: &Disk, version: u64) {
    disk.write_at(&pattern(version, 4096), 0).unwrap();
}

fn reads(disk: &Disk, version: u64) -> bool {
    let mut found = vec![0; 4096];
    disk.read_at(&mut found, 0).unwrap();
    found == pattern(version, 4096)
}

/// Begins an upgrade that stops when the new process has the plan, and goes on when `meanwhile` is over.
/// Returns the new process, and the result.
fn while_upgraded<T>(daemon: &Daemon, meanwhile: impl FnOnce(u32) -> T) -> (Process, T) {
    let new = daemon.begin_upgrade(&["KICKLESS_UPGRADE_FAULT=new:2:stop"], &[]).unwrap();
    eventually("the new process does not stop", || is_stopped(new.child.id()));
    let result = meanwhile(new.child.id());
    let pid = rustix::process::Pid::from_raw(new.child.id() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    (new, result)
}

fn takes_over(daemon: &mut Daemon, new: Process) {
    new.log.wait_for("taking over", LIMIT, |line| line.contains("was read again").then_some(())).unwrap();
    let mut old = daemon.becomes(new);
    assert!(wait_for_exit(&mut old.child, LIMIT).unwrap().success(), "{:?}", old.log.lines());
}

#[test]
fn calls_and_signals_wait_or_are_refused_meanwhile() {
    returns_in_time(|| {
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("a", NULL), ("b", NULL)]).unwrap();
        let disk = connect(&daemon, "a");
        let (new, ()) = while_upgraded(&daemon, |_| {
            let socket = daemon.socket_of("c");
            for (method, params) in [
                ("device.add", json!({ "name": "c", "blk-file": "null:1M", "socket-path": socket })),
                ("device.remove", json!({ "name": "b" })),
                ("device.drain", json!({ "name": "a" })),
                ("device.set", json!({ "name": "a", "iops": 5 })),
                ("pool.set", json!({ "poll": "never" })),
                ("log.set", json!({ "filter": "debug" })),
            ] {
                let error = try_call(&daemon, method, &params).unwrap_err();
                assert_eq!(code(&error), -32002, "{method}: {error}");
            }
            // These change nothing.
            assert_eq!(call(&daemon, "device.list", &json!({})).as_array().unwrap().len(), 2);
            call(&daemon, "stats.get", &json!({}));
            // The next process reads the file.
            daemon.reload("", &[("a", NULL), ("b", NULL), ("d", NULL)]).unwrap();
            daemon.signal(Signal::USR1).unwrap();
            // A second upgrade.
            let said = fails(daemon.begin_upgrade(&[], &[]).unwrap());
            assert!(said.contains("is being upgraded"), "{said}");
        });
        takes_over(&mut daemon, new);
        write(&disk, 1);
        assert_eq!(call(&daemon, "device.list", &json!({})).as_array().unwrap().len(), 3);
        drop(disk);
        assert!(daemon.stop().unwrap().0.success());
    });
}

#[test]
fn a_stop_of_either_process_ends_the_upgrade() {
    returns_in_time(|| {
        let daemon = Daemon::serve_with(&["--control"], "", &[("a", NULL)]).unwrap();
        let disk = connect(&daemon, "a");
        // SIGTERM at the new one.
        let (mut new, ()) = while_upgraded(&daemon, |pid| {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, Signal::TERM).unwrap();
        });
        // It may take over before it looks at the signal, and ends then.
        assert!(wait_for_exit(&mut new.child, LIMIT).unwrap().success(), "{:?}", new.log.lines());
        drop((disk, daemon));
        let daemon = Daemon::serve_with(&["--control"], "", &[("a", NULL)]).unwrap();
        let disk = connect(&daemon, "a");
        // SIGTERM at the old one. Its device has a guest, which leaves with it.
        let (new, ()) = while_upgraded(&daemon, |_| {
            daemon.signal(Signal::TERM).unwrap();
            thread::sleep(Duration::from_millis(100));
        });
        fails(new);
        // It ends by itself.
        assert!(daemon.stop().is_ok_and(|(status, _)| status.success()));
        drop(disk);
    });
}

#[test]
fn devices_keep_their_states() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("image");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "idle", "1M"]).unwrap();
        let away = dir.path().join("away");
        let file = |path: &Path| format!("blk-file = \"{}\"", path.display());
        let limited = format!("{NULL}\niops = 100\ngroup = \"two\"");
        let idle = format!("blk-file = \"qcow2:{}\"", dir.path().join("idle").display());
        let devices =
            [("drained", &*file(&image)), ("away", &*file(&away)), ("limited", &*limited), ("idle", &*idle)];
        let mut daemon = Daemon::serve_with(&["--control"], "", &devices).unwrap();
        let state = |daemon: &Daemon, name: &str| {
            call(daemon, "device.get", &json!({ "name": name }))["state"].clone()
        };
        let disk = connect(&daemon, "drained");
        write(&disk, 1);
        call(&daemon, "device.drain", &json!({ "name": "drained" }));
        let (drained, unavailable) = (state(&daemon, "drained"), state(&daemon, "away"));
        assert_eq!(unavailable, "unavailable");
        // A program changes a disk that no guest uses.
        qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "idle", "3M"]).unwrap();
        daemon.upgrade().unwrap();
        assert_eq!((state(&daemon, "drained"), state(&daemon, "away")), (drained, unavailable));
        let listed = call(&daemon, "device.list", &json!({}));
        assert_eq!(listed.as_array().unwrap().len(), devices.len(), "{listed}");
        assert_eq!(connect(&daemon, "idle").size().unwrap(), 3 << 20);
        // The device that is away is tried again.
        File::create_new(&away).unwrap().set_len(1 << 20).unwrap();
        let deadline = Instant::now() + LIMIT;
        while state(&daemon, "away") != "free" {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(20));
        }
        write(&connect(&daemon, "away"), 7);
        call(&daemon, "device.resume", &json!({ "name": "drained" }));
        assert!(reads(&disk, 1));
        drop(disk);
        assert!(daemon.stop().unwrap().0.success());
    });
}

#[test]
fn limits_keep_their_debts() {
    returns_in_time(|| {
        let limited = format!("{NULL}\niops = 20\ngroup = \"two\"");
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("a", &limited), ("b", &limited)]).unwrap();
        let (one, two) = (connect(&daemon, "a"), connect(&daemon, "b"));
        let start = Instant::now();
        for version in 0..40 {
            write(if version % 2 == 0 { &one } else { &two }, version);
            if version % 8 == 7 {
                daemon.upgrade().unwrap();
            }
        }
        // 20 a second, with a tenth of a second at once.
        assert!(start.elapsed() >= Duration::from_millis(1800), "{:?}", start.elapsed());
        drop((one, two));
        assert!(daemon.stop().unwrap().0.success());
    });
}

#[test]
fn a_new_process_with_fewer_rights_is_refused() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("image");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        let root = format!("--allow-root={}", dir.path().display());
        let mut daemon = Daemon::serve_with(&["--control", &root], "", &[("a", NULL)]).unwrap();
        let socket = daemon.socket_of("b");
        let added = json!({ "name": "b", "blk-file": image, "socket-path": socket });
        call(&daemon, "device.add", &added);
        let disk = connect(&daemon, "b");
        write(&disk, 1);
        // Its own command line allows less.
        let words: Vec<_> = daemon.upgrade_words(&[]).into_iter().filter(|word| *word != *root).collect();
        let said = fails(spawn(&words).unwrap());
        assert!(said.contains("--allow-root="), "{said}");
        // A control socket that cannot be made is found before anything stops.
        let mut words = daemon.upgrade_words(&[]);
        words.retain(|word| !word.to_string_lossy().starts_with("--control="));
        words.push("--control=/nonexistent/control.sock".into());
        let said = fails(spawn(&words).unwrap());
        assert!(said.contains("/nonexistent"), "{said}");
        assert!(reads(&disk, 1));
        daemon.upgrade().unwrap();
        assert!(reads(&disk, 1));
        drop(disk);
        assert!(daemon.stop().unwrap().0.success());
    });
}

/// Returns a command line that is run by another user, whose group may use the control socket.
fn as_other_user(words: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=54321",
        "--regid=0",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--",
    ]);
    command.args(words);
    command
}

#[test]
fn another_user_gets_nothing() {
    returns_in_time(|| {
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("a", NULL)]).unwrap();
        let disk = connect(&daemon, "a");
        let control = daemon.socket_of("control");
        let dir = control.parent().unwrap();
        // Another user may not reach the program where it was built.
        let program = dir.join("kickless");
        assert!(Command::new("cp").arg(kickless_binary().unwrap()).arg(&program).status().unwrap().success());
        fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
        let (program, control) = (program.to_str().unwrap(), control.to_str().unwrap());
        let wants = json!({ "formats": [1, 1], "version": "1" }).to_string();
        let asked =
            as_other_user(&[program, "ctl", &format!("--control={control}"), "daemon.upgrade", &wants])
                .output()
                .unwrap();
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(!asked.status.success() && said.contains("only root and the user of the daemon"), "{said}");
        // Its own process refuses before it asks.
        let from = format!("--upgrade-from={control}");
        let config = format!("--config={}", dir.join("disks.toml").display());
        let asked = as_other_user(&[program, "serve", &config, &from]).output().unwrap();
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(!asked.status.success() && said.contains("that of user 0"), "{said}");
        // The same program by another path is another version of it.
        let mut words = daemon.upgrade_words(&[]);
        words[0] = program.into();
        takes_over(&mut daemon, spawn(&words).unwrap());
        write(&disk, 1);
        drop(disk);
        assert!(daemon.stop().unwrap().0.success());
    });
}

#[test]
fn devices_of_descriptors_and_of_a_command_line_go_on() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("image");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        let mut daemon = Daemon::serve_with(&["--control"], "", &[("a", NULL)]).unwrap();
        let file = File::options().read(true).write(true).open(&image).unwrap();
        let added =
            json!({ "name": "given", "blk-file": "fd:image", "socket-path": daemon.socket_of("given") });
        let mut client = Client::connect(&daemon.socket_of("control")).unwrap();
        let params = added.as_object().unwrap().clone();
        client.call_given("device.add", params, &[("image".to_owned(), file.as_fd())]).unwrap();
        drop((client, file));
        let disk = connect(&daemon, "given");
        write(&disk, 5);
        for _ in 0..2 {
            daemon.upgrade().unwrap();
        }
        assert!(reads(&disk, 5));
        drop(disk);
        // Its next guest has it too.
        assert!(reads(&connect(&daemon, "given"), 5));
        assert!(daemon.stop().unwrap().0.success());
    });
}

/// A disk over an image whose writes take this long.
fn slow(image: &Path, delay: &str) -> String {
    format!("blk-file = \"fault:delay={delay}@write:{}\"", image.display())
}

#[test]
fn a_slow_disk_delays_the_others_up_to_the_limit() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("image");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        let devices = [("quick", NULL), ("slow", &*slow(&image, "2s"))];
        let mut daemon = Daemon::serve_with(&["--control"], "", &devices).unwrap();
        let (quick, disk) = (connect(&daemon, "quick"), connect(&daemon, "slow"));
        let writing = |run: &mut dyn FnMut()| {
            thread::scope(|scope| {
                let written = scope.spawn(|| write(&disk, 1));
                thread::sleep(Duration::from_millis(100));
                run();
                written.join().unwrap();
            });
        };
        writing(&mut || {
            let said = fails(daemon.begin_upgrade(&[], &["--upgrade-drain=100ms"]).unwrap());
            assert!(said.contains("the device slow") && said.contains("did not complete in time"), "{said}");
            write(&quick, 1);
        });
        // The final state of the quick device waits longer for that of the slow one than a process answers.
        writing(&mut || {
            let new = daemon.begin_upgrade(&[], &["--upgrade-drain=20s"]).unwrap();
            takes_over(&mut daemon, new);
        });
        assert!(reads(&disk, 1));
        // A daemon that ends is not handed over.
        writing(&mut || {
            daemon.signal(Signal::TERM).unwrap();
            thread::sleep(Duration::from_millis(100));
            let said = fails(daemon.begin_upgrade(&[], &[]).unwrap());
            assert!(said.contains("the daemon is stopping"), "{said}");
        });
        drop((quick, disk));
        assert!(daemon.stop().is_ok_and(|(status, _)| status.success()));
    });
}

#[test]
fn a_device_leaves_before_or_after_an_upgrade() {
    returns_in_time(|| {
        let mut daemon =
            Daemon::serve_with(&["--control"], "", &[("a", NULL), ("b", NULL), ("c", NULL)]).unwrap();
        let (b, c) = (connect(&daemon, "b"), connect(&daemon, "c"));
        daemon.reload("", &[("a", NULL)]).unwrap();
        let leaves =
            |line: &str| (line.contains(" name=c") && line.contains("its front-end has left")).then_some(());
        daemon.log().wait_for("leaving", LIMIT, leaves).unwrap();
        let names = |daemon: &Daemon| {
            let list = call(daemon, "device.list", &json!({}));
            list.as_array()
                .unwrap()
                .iter()
                .map(|device| device["name"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let wait_for = |daemon: &Daemon, wanted: &[&str]| {
            let deadline = Instant::now() + LIMIT;
            while names(daemon) != wanted {
                assert!(Instant::now() < deadline, "{:?}", names(daemon));
                thread::sleep(Duration::from_millis(10));
            }
        };
        let (new, ()) = while_upgraded(&daemon, |_| drop(b));
        takes_over(&mut daemon, new);
        wait_for(&daemon, &["a", "c"]);
        write(&c, 1);
        drop(c);
        wait_for(&daemon, &["a"]);
        assert!(daemon.stop().unwrap().0.success());
    });
}

#[test]
fn a_disk_that_has_stopped_on_an_error_goes_on() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        for keeps_inflight in [true, false] {
            let image = dir.path().join(format!("image-{keeps_inflight}"));
            File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
            // Each process finds no room once.
            let disk =
                format!("blk-file = \"fault:enospc@write+nth=1:{}\"\non-error = \"stop\"", image.display());
            let mut daemon = Daemon::serve_with(&["--control"], "", &[("a", &disk)]).unwrap();
            let shape = Shape { queues: 1, size: 32, returns: true, ..Shape::LINUX };
            let mut machine = Machine::prepare(&daemon.socket_of("a"), &shape).unwrap();
            if keeps_inflight {
                machine.get_and_set_inflight().unwrap();
            }
            machine.resume().unwrap();
            let request = MachineRequest::write(0, &pattern(3, 4096));
            machine.submit(0, &request).unwrap();
            let state =
                |daemon: &Daemon| call(daemon, "device.get", &json!({ "name": "a" }))["state"].clone();
            let stops = |daemon: &Daemon| {
                let deadline = Instant::now() + LIMIT;
                while state(daemon) != "stopped" {
                    assert!(Instant::now() < deadline, "{}", state(daemon));
                    thread::sleep(Duration::from_millis(10));
                }
            };
            stops(&daemon);
            if keeps_inflight {
                daemon.upgrade().unwrap();
                stops(&daemon);
            } else {
                let said = fails(daemon.begin_upgrade(&[], &[]).unwrap());
                assert!(said.contains("the device a cannot be handed over"), "{said}");
            }
            call(&daemon, "device.resume", &json!({ "name": "a" }));
            assert_eq!(machine.outcome(0, &request).unwrap().status, kickless_spec::blk::S_OK);
            assert_eq!(machine.read(0, 0, 4096).unwrap(), pattern(3, 4096));
            drop(machine);
            assert!(daemon.stop().unwrap().0.success());
        }
    });
}
