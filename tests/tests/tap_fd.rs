//! Passes the queues of a TAP to the program as descriptors.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kickless_net_port::Tap;
use kickless_testing::{in_network_namespace, ip};
use kickless_tests::daemon::{card_counter, check_sandbox, kickless_binary};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::card::{Card, CardShape};
use rustix::process::{Pid, Signal, kill_process};

const TRANSMIT: usize = 1;

/// Returns `kickless net` with these descriptors under the numbers 5 and 6. A shell sets the numbers, because
/// std has no safe function for it.
fn with_descriptors(port: &str, socket: &Path, [five, six]: [OwnedFd; 2]) -> Command {
    let mut command = Command::new("sh");
    let script = "exec 5<&0 6>&1 0</dev/null 1>/dev/null; exec \"$0\" net --socket-path=\"$1\" --port=\"$2\"";
    command.args(["-c", script]).arg(kickless_binary().unwrap()).arg(socket).arg(port);
    command.stdin(five).stdout(six).stderr(Stdio::piped());
    command
}

fn queues(tap: &Tap) -> [OwnedFd; 2] {
    [0, 1].map(|pair| tap.queue(pair).unwrap().as_fd().try_clone_to_owned().unwrap())
}

fn send_ten_by_each_pair(socket: &Path) {
    let mut card = Card::prepare(socket, CardShape { pairs: 2, packed: false }).unwrap();
    for ring in [TRANSMIT, TRANSMIT + 2] {
        card.resume(ring).unwrap();
        for _ in 0..10 {
            card.send(ring).unwrap();
        }
    }
}

#[test]
fn frames_are_sent_through_inherited_queues() {
    in_network_namespace(|| {
        let tap = Tap::open("vm", 2).unwrap();
        ip("link set vm up");
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let child = with_descriptors("tap-fd:5,6", &socket, queues(&tap)).spawn().unwrap();
        let begun = Instant::now();
        while !socket.exists() {
            assert!(begun.elapsed() < LIMIT, "no socket");
            sleep(Duration::from_millis(5));
        }
        send_ten_by_each_pair(&socket);
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        let log: Vec<_> = String::from_utf8(output.stderr).unwrap().lines().map(str::to_owned).collect();
        assert_eq!(output.status.code(), Some(0), "{log:#?}");
        check_sandbox(&log).unwrap();
        let counted =
            ["sent_frames", "sent_refused", "sent_down"].map(|name| card_counter(&log, name).unwrap());
        assert_eq!(counted, [20, 0, 0]);
    });
}

#[test]
fn descriptors_that_are_no_queues_are_refused() {
    in_network_namespace(|| {
        let dir = tempfile::tempdir().unwrap();
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let tap = Tap::open("vm", 2).unwrap();
        for (port, fds, status, said) in [
            ("tap-fd:5", [null(), null()], 1, "--port: the descriptor is of no TAP that exists"),
            ("tap-fd:77", [null(), null()], 2, "--port: the program inherited no descriptor 77"),
            ("tap-fd:5,6", [queues(&tap)[0].try_clone().unwrap(), null()], 1, "the descriptor is of no TAP"),
        ] {
            let output = with_descriptors(port, &dir.path().join("socket"), fds).output().unwrap();
            let sentence = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(status), "{sentence}");
            assert!(sentence.contains(said) && sentence.lines().count() == 1, "{sentence}");
        }
    });
}

/// Sends both queues of a TAP with a call, by names.
#[test]
fn a_card_is_added_with_the_queues_of_a_call() {
    in_network_namespace(|| {
        let tap = Tap::open("vm", 2).unwrap();
        ip("link set vm up");
        let dir = tempfile::tempdir().unwrap();
        let (control, socket) = (dir.path().join("control"), dir.path().join("socket"));
        let mut command = Command::new(kickless_binary().unwrap());
        command.args(["serve", "--config=/dev/null"]).arg(format!("--control={}", control.display()));
        let mut daemon = Ended(command.stderr(Stdio::piped()).spawn().unwrap());
        let added = |queues: [OwnedFd; 2]| {
            let config = serde_json::json!({ "name": "card", "socket-path": socket, "port": "tap-fd:q0,q1" });
            let script = "exec 5<&0 6>&1 0</dev/null 1>/dev/null; \
                exec \"$0\" ctl --control=\"$1\" --fd=q0=5 --fd=q1=6 device.add \"$2\"";
            let mut command = Command::new("sh");
            command
                .args(["-c", script])
                .arg(kickless_binary().unwrap())
                .arg(&control)
                .arg(config.to_string());
            let [five, six] = queues;
            command.stdin(five).stdout(six).stderr(Stdio::piped()).output().unwrap()
        };
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let begun = Instant::now();
        loop {
            let output = added([queues(&tap)[0].try_clone().unwrap(), null()]);
            let sentence = String::from_utf8(output.stderr).unwrap();
            if sentence.contains("port: the descriptor is of no TAP that exists") {
                break;
            }
            assert!(begun.elapsed() < LIMIT, "{sentence}");
            sleep(Duration::from_millis(5));
        }
        let output = added(queues(&tap));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        send_ten_by_each_pair(&socket);
        kill_process(Pid::from_child(&daemon.0), Signal::TERM).unwrap();
        let log = io::read_to_string(daemon.0.stderr.take().unwrap()).unwrap();
        let log: Vec<_> = log.lines().map(str::to_owned).collect();
        assert_eq!(daemon.0.wait().unwrap().code(), Some(0), "{log:#?}");
        check_sandbox(&log).unwrap();
        assert_eq!(card_counter(&log, "sent_frames").unwrap(), 20);
    });
}

/// A process that does not outlive the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
