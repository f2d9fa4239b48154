//! The processes, their rights and their end.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use kickless_control::Client;
use kickless_testing::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, json};
use tempfile::TempDir;

use super::common::{Daemon, LIMIT, PROGRAM, children, disk};
use super::sandboxed;

/// Returns a field of a status of /proc, such as `CapEff`.
fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name}")).trim().to_owned()
}

fn status(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

fn helpers(daemon: &Daemon) -> BTreeMap<String, u32> {
    helpers_of(daemon.child.id())
}

/// Returns the helpers of a daemon by their names, when all have given themselves one.
fn helpers_of(pid: u32) -> BTreeMap<String, u32> {
    let mut helpers = BTreeMap::new();
    eventually("a helper has no name", || {
        helpers = children(pid).unwrap().into_iter().map(|pid| (field(&status(pid), "Name"), pid)).collect();
        helpers.keys().all(|name| name.starts_with("kickless-"))
    });
    helpers
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
}

/// Returns whether a process has ended. It can be a zombie, until its parent has asked for its status.
fn has_ended(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| field(&status, "State").starts_with('Z'))
        || !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn an_orderly_end_waits_for_the_helpers() {
    let daemon = sandboxed(&[]);
    let helpers = helpers(&daemon);
    assert_eq!(helpers.len(), 2);
    kill_process(Pid::from_raw(daemon.child.id() as i32).unwrap(), Signal::TERM).unwrap();
    assert_eq!(daemon.end(), Some(0));
    // Also not as zombies.
    assert!(helpers.values().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
}

#[test]
fn each_process_has_the_rights_that_it_needs() {
    let daemon = sandboxed(&[]);
    let pid = daemon.child.id();
    let mut tasks = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let name = field(&status, "Name");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(u64::from_str_radix(&field(&status, set), 16), Ok(0), "{set} of {name}");
        }
        assert_eq!(
            (field(&status, "NoNewPrivs"), field(&status, "Seccomp")),
            ("1".into(), "2".into()),
            "{name}"
        );
        tasks += 1;
    }
    assert!(tasks > 5, "{tasks}");
    let helpers = helpers(&daemon);
    assert_eq!(
        helpers.keys().map(String::as_str).collect::<Vec<_>>(),
        ["kickless-launch", "kickless-opener"]
    );
    let opener = status(helpers["kickless-opener"]);
    // CHOWN, DAC_OVERRIDE, FOWNER and NET_ADMIN.
    assert_eq!(u64::from_str_radix(&field(&opener, "CapBnd"), 16).unwrap() & !0x100b, 0);
    assert_eq!((field(&opener, "NoNewPrivs"), field(&opener, "Seccomp")), ("1".into(), "2".into()));
    // passt must be free to mount.
    let launcher = status(helpers["kickless-launch"]);
    let own = status(std::process::id());
    for name in ["NoNewPrivs", "Seccomp", "CapBnd"] {
        assert_eq!(field(&launcher, name), field(&own, name));
    }
}

#[test]
fn one_disk_has_one_helper_and_none_without_a_sandbox() {
    for (mode, expected) in [("on", 1), ("strict", 1), ("off", 0)] {
        let dir = TempDir::new().unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(["blk", "--blk-file=null:1M", &format!("--sandbox={mode}"), "--socket-path"]);
        command.arg(dir.path().join("s"));
        let daemon = Daemon::start(command, dir);
        daemon.wait_for("serving");
        assert_eq!(helpers(&daemon).len(), expected, "{mode}");
    }
}

#[test]
fn a_client_sees_the_sandbox() {
    let daemon = sandboxed(&["--allow-root=/dev"]);
    let info = &daemon.call("daemon.info", json!({}))["sandbox"];
    assert_eq!((&info["mode"], &info["profile"]), (&json!("on"), &json!("data")));
    assert!(info["landlock"].is_u64(), "{info}");
    let directory = daemon.dir.path().canonicalize().unwrap();
    let roots = [Path::new("/dev"), &directory].map(|root| root.to_str().unwrap());
    assert_eq!(info["roots"], json!(roots));

    let daemon = Daemon::serve(&disk("a", ""), &["--sandbox=off"]);
    daemon.wait_for("serving");
    let off = json!({"mode": "off", "landlock": 0, "profile": "none", "roots": []});
    assert_eq!(daemon.call("daemon.info", json!({}))["sandbox"], off);
}

#[test]
fn the_end_of_a_helper_ends_the_daemon() {
    for (name, does) in [("kickless-opener", "opens files"), ("kickless-launch", "starts programs")] {
        let daemon = sandboxed(&[]);
        let helpers = helpers(&daemon);
        kill(helpers[name]);
        daemon.wait_for(&format!("kickless: the process that {does} has ended (killed by signal 9)"));
        assert_eq!(daemon.end(), Some(1));
        helpers.values().for_each(|&pid| eventually("a helper goes on", || has_ended(pid)));
    }
}

#[test]
fn helpers_end_with_the_daemon() {
    let mut daemon = sandboxed(&[]);
    let helpers = helpers(&daemon);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    helpers.values().for_each(|&pid| eventually("a helper goes on", || has_ended(pid)));
}

/// Returns the only child of a process, when it has one.
fn child(pid: u32) -> u32 {
    let mut found = None;
    eventually("there is no child", || {
        found = children(pid).unwrap().first().copied();
        found.is_some()
    });
    found.unwrap()
}

/// Starts a daemon by `unshare`. Returns nothing if this machine gives no namespace.
fn in_namespace(command: Command, dir: TempDir) -> Option<Daemon> {
    let daemon = Daemon::start(command, dir);
    if daemon.log.recv_timeout(LIMIT).is_ok_and(|line| line.contains("unshare: ")) {
        println!("skipped: this needs the right to make a namespace");
        return None;
    }
    Some(daemon)
}

/// As the first process of a container, the daemon gets all processes that lose their parents.
#[test]
fn the_first_process_of_a_container_ends_with_a_helper() {
    for name in ["kickless-opener", "kickless-launch"] {
        let (dir, mut command) = (TempDir::new().unwrap(), Command::new("unshare"));
        command.args(["--pid", "--fork", "--kill-child", "--", PROGRAM, "blk", "--blk-file=null:1M"]);
        for (option, file) in [("--socket-path", "a.sock"), ("--control", "control.sock")] {
            command.arg(format!("{option}={}", dir.path().join(file).display()));
        }
        let Some(daemon) = in_namespace(command, dir) else { return };
        daemon.wait_for("serving");
        assert_eq!(daemon.states(), [("a".into(), "free".into())]);
        kill(helpers_of(child(daemon.child.id()))[name]);
        daemon.wait_for("has ended (killed by signal 9)");
        assert_eq!(daemon.end(), Some(1));
    }
}

/// The first process of a container may wait for no process that it has not started.
#[test]
fn helpers_end_where_no_process_waits_for_them() {
    let (dir, mut command) = (TempDir::new().unwrap(), Command::new("unshare"));
    let script = "\"$0\" \"$@\" & exec sleep 1000";
    command.args(["--pid", "--fork", "--kill-child", "--", "sh", "-c", script, PROGRAM]);
    command.args(["blk", "--blk-file=null:1M"]);
    for (option, file) in [("--socket-path", "a.sock"), ("--control", "control.sock")] {
        command.arg(format!("{option}={}", dir.path().join(file).display()));
    }
    let Some(daemon) = in_namespace(command, dir) else { return };
    daemon.wait_for("serving");
    let pid = child(child(daemon.child.id()));
    let helpers = helpers_of(pid);
    assert_eq!(helpers.len(), 2);
    kill(pid);
    helpers.values().for_each(|&pid| eventually("a helper goes on", || has_ended(pid)));
}

/// A key on the terminal sends the signal to all processes. The helpers go on until the daemon has ended, so
/// that its sockets are removed.
#[test]
fn a_signal_to_all_processes_ends_the_daemon_as_usual() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1] {
        let daemon = sandboxed(&[]);
        for pid in helpers(&daemon).into_values().chain([daemon.child.id()]) {
            kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        }
        if [Signal::HUP, Signal::USR1].contains(&signal) {
            daemon.wait_for(if signal == Signal::HUP { "was read again" } else { "counters" });
            assert_eq!(helpers(&daemon).len(), 2);
            kill_process(Pid::from_child(&daemon.child), Signal::TERM).unwrap();
        }
        let socket = daemon.path("a.sock");
        daemon.wait_for("summary");
        eventually("a socket stays", || !socket.exists());
        assert_eq!(daemon.end(), Some(0));
    }
}

#[test]
fn all_clients_of_control_are_answered() {
    const CLIENTS: usize = 64;
    let daemon = sandboxed(&[]);
    let connect = |_| Client::connect(&daemon.path("control.sock")).unwrap();
    let mut clients: Vec<Client> = (0..CLIENTS).map(connect).collect();
    for client in &mut clients {
        let devices = client.call("device.list", Map::new()).unwrap();
        assert_eq!(devices.as_array().unwrap().len(), 1);
    }
    // A thread for each asks the opener.
    thread::scope(|scope| {
        for (number, client) in clients.iter_mut().enumerate() {
            let (name, socket) = (format!("b{number}"), daemon.path(&format!("b{number}.sock")));
            scope.spawn(move || {
                let disk = json!({"kind": "blk", "name": name, "socket-path": socket, "blk-file": "null:1M"});
                client.call("device.add", disk.as_object().unwrap().clone()).unwrap();
                assert!(socket.exists());
                let removed = json!({"name": name});
                client.call("device.remove", removed.as_object().unwrap().clone()).unwrap();
                assert!(!socket.exists());
            });
        }
    });
}
