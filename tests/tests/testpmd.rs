//! DPDK's `testpmd` as a foreign driver of network cards: its device `virtio_user` in each of its ring
//! variants, and as the end that listens. Skipped where the program is not installed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kickless_tests::daemon::{Daemon, kickless_binary};
use kickless_tests::transcript::Transcript;

/// The limit of a wait. The programs need less, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Frames that a port must get back. The ring of 256 entries wraps several times.
const FRAMES: u64 = 5000;
/// The warning about a split ring whose index from the front-end is not that of the ring.
const CONTINUED: &str = "a split ring continues from its used index";

/// Each variant: the options of the device, and the functions that DPDK then uses to send and to receive.
const VARIANTS: [(&str, [&str; 2]); 11] = [
    ("mrg_rxbuf=0,in_order=0", ["standard Tx", "standard Rx"]),
    ("mrg_rxbuf=1,in_order=0", ["standard Tx", "mergeable buffer Rx"]),
    ("mrg_rxbuf=0,in_order=1", ["inorder Tx", "inorder Rx"]),
    ("mrg_rxbuf=1,in_order=1", ["inorder Tx", "inorder Rx"]),
    ("mrg_rxbuf=0,in_order=0,vectorized=1", ["standard Tx", "vectorized Rx"]),
    ("packed_vq=1,mrg_rxbuf=0,in_order=0", ["packed ring standard Tx", "packed ring standard Rx"]),
    ("packed_vq=1,mrg_rxbuf=1,in_order=0", ["packed ring standard Tx", "packed ring mergeable buffer Rx"]),
    ("packed_vq=1,mrg_rxbuf=0,in_order=1", ["packed ring standard Tx", "packed ring standard Rx"]),
    ("packed_vq=1,mrg_rxbuf=1,in_order=1", ["packed ring standard Tx", "packed ring mergeable buffer Rx"]),
    ("packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1", ["packed ring", "packed ring"]),
    ("packed_vq=1,mrg_rxbuf=0,in_order=1,queue_size=1024", ["packed ring standard Tx", "packed ring"]),
];

/// A running `testpmd`, which sends each frame that a port gets back on the same port.
struct Testpmd {
    child: Child,
    input: ChildStdin,
    output: Transcript,
}

impl Testpmd {
    /// Starts the program with these devices. Its memory is not of huge pages.
    fn start(name: &str, devices: &[String], pairs: u16) -> Testpmd {
        let last = thread::available_parallelism().unwrap().get() - 1;
        // Into a pipe, the program would print at its end only.
        let mut command = Command::new("stdbuf");
        command.args([
            "--output=L",
            "dpdk-testpmd",
            "--no-huge",
            "-m",
            "128",
            "--no-pci",
            "--no-shconf",
            "--no-telemetry",
        ]);
        command.args(["--force-max-simd-bitwidth=512", "--log-level=pmd.net.virtio.init:debug"]);
        command.arg(format!("--lcores=0@(0-{last}),1@(0-{last})"));
        command.arg(format!("--file-prefix=kickless-{name}-{}", std::process::id()));
        command.args(devices.iter().map(|device| format!("--vdev={device}")));
        command.args(["--", "-i", "--forward-mode=io", "--port-topology=loop", "--total-num-mbufs=20000"]);
        command.args([format!("--rxq={pairs}"), format!("--txq={pairs}")]);
        // Both streams go to one pipe, in order.
        let (read, write) = std::io::pipe().unwrap();
        command.stdin(Stdio::piped()).stdout(write.try_clone().unwrap()).stderr(write);
        let mut child = command.spawn().unwrap();
        drop(command);
        let input = child.stdin.take().unwrap();
        Testpmd { child, input, output: Transcript::of("testpmd", read) }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Returns the number of frames that a port has got back.
    fn received(&mut self, port: usize) -> u64 {
        let seen = self.output.len();
        self.tell(&format!("show port stats {port}"));
        let number = |line: &str| {
            let (_, rest) = line.split_once("RX-packets:")?;
            rest.split_whitespace().next()?.parse().ok()
        };
        self.output.wait_from(seen, "statistics", LIMIT, number).unwrap()
    }

    /// Waits until the link of a port is up or down. The program looks for a connection when it is asked. It
    /// drops the frames of packed rings that are sent before it has the next connection.
    fn wait_for_link(&mut self, port: usize, state: &str) {
        let begun = Instant::now();
        loop {
            let seen = self.output.len();
            self.tell(&format!("show port info {port}"));
            let link = |line: &str| Some(line.split_once("Link status: ")?.1.trim() == state);
            if self.output.wait_from(seen, "the link", LIMIT, link).unwrap() {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "the link is not {state}: {:#?}", self.output.lines());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Lets some frames go round on all ports until each port has got back enough of them.
    fn exchange(&mut self, ports: usize) {
        let before: Vec<_> = (0..ports).map(|port| self.received(port)).collect();
        self.tell("start tx_first 2");
        let begun = Instant::now();
        for (port, before) in before.into_iter().enumerate() {
            while self.received(port) < before + FRAMES {
                assert!(begun.elapsed() < LIMIT, "port {port}: {:#?}", self.output.lines());
                thread::sleep(Duration::from_millis(10));
            }
        }
        self.tell("stop");
    }

    /// Ends the program. Returns what it said.
    fn end(mut self) -> Vec<String> {
        self.tell("quit");
        let lines = self.output.wait_for_end(LIMIT).unwrap();
        assert!(self.child.wait().unwrap().success(), "{lines:#?}");
        lines
    }
}

/// Returns whether the program is installed.
fn is_installed() -> bool {
    let found = Command::new("dpdk-testpmd").arg("--help").stdin(Stdio::null()).output().is_ok();
    if !found {
        println!("skipped, because there is no dpdk-testpmd");
    }
    found
}

/// Checks that a daemon has returned frames, and neither it nor a ring of it had trouble.
fn check(log: &[String]) {
    let trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    assert_eq!(log.iter().find(trouble), None);
    let of = |name: &str| -> Vec<u64> {
        let values = log.iter().filter_map(|line| line.split_once(&format!(" {name}=")));
        values.map(|(_, rest)| rest.split(' ').next().unwrap().parse().unwrap()).collect()
    };
    let (sent, received) = (of("sent_frames"), of("received_frames"));
    assert!(!sent.is_empty() && sent.iter().all(|frames| *frames >= FRAMES), "{sent:?}");
    for (sent, received) in sent.iter().zip(received) {
        // The driver may stop before it has taken the last ones.
        assert!(received <= *sent && sent - received <= 256, "{sent} sent, {received} received");
    }
    for name in ["sent_invalid", "sent_refused", "dropped_long", "dropped_offload", "errors", "broken"] {
        assert!(of(name).iter().all(|count| *count == 0), "{name}: {log:#?}");
    }
}

#[test]
fn frames_pass_with_each_ring_variant() {
    if !is_installed() {
        return;
    }
    let names: Vec<_> = (0..VARIANTS.len()).map(|port| format!("p{port}")).collect();
    let tables: Vec<_> = names.iter().map(|name| (name.as_str(), "port = \"loop\"")).collect();
    let daemon = Daemon::serve("", &tables).unwrap();
    let devices = VARIANTS.iter().zip(&names).enumerate().map(|(port, ((options, _), name))| {
        format!("net_virtio_user{port},path={},{options}", daemon.socket_of(name).display())
    });
    let mut testpmd = Testpmd::start("variants", &devices.collect::<Vec<_>>(), 1);
    testpmd.exchange(VARIANTS.len());
    let said = testpmd.end();
    for (port, (options, paths)) in VARIANTS.iter().enumerate() {
        for path in paths {
            let uses = |line: &String| line.contains(path) && line.ends_with(&format!(" on port {port}"));
            assert!(said.iter().any(uses), "{options}: {path}: {said:#?}");
        }
    }
    let (status, log) = daemon.stop().unwrap();
    assert!(status.success());
    check(&log);
}

/// Connects to a driver that listens, and serves it as soon as it does.
fn serve_listener(path: &Path) -> (Child, Transcript) {
    let begun = Instant::now();
    let stream = loop {
        match UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < LIMIT, "{}: {error}", path.display()),
        }
        thread::sleep(Duration::from_millis(10));
    };
    // A shell sets the number of the descriptor, because std has no safe function for it.
    let script = "exec 5<&0 0</dev/null; exec \"$0\" net --fd=5 --port=loop --num-queue-pairs=2";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(kickless_binary().unwrap()).stdin(OwnedFd::from(stream));
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = Transcript::of("kickless", child.stderr.take().unwrap());
    (child, log)
}

/// The driver listens, with two pairs of queues. The first back-end is killed, and a second one goes on. The
/// driver starts a packed ring anew, but says that a split ring begins at 0, although it is in the middle.
#[test]
fn a_driver_that_listens_is_served_again() {
    if !is_installed() {
        return;
    }
    for (rings, continued) in [("packed_vq=0", 4), ("packed_vq=1", 0)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("driver");
        let device = format!("net_virtio_user0,path={},server=1,queues=2,{rings}", path.display());
        let mut testpmd = Testpmd::start(rings, &[device], 2);
        let (mut killed, log) = serve_listener(&path);
        testpmd.exchange(1);
        killed.kill().unwrap();
        killed.wait().unwrap();
        testpmd.wait_for_link(0, "down");
        let is_continued = |line: &String| line.contains(CONTINUED);
        assert_eq!(log.wait_for_end(LIMIT).unwrap().into_iter().find(is_continued), None);
        let (mut child, log) = serve_listener(&path);
        testpmd.wait_for_link(0, "up");
        testpmd.exchange(1);
        testpmd.end();
        let (warnings, log): (Vec<_>, Vec<_>) =
            log.wait_for_end(LIMIT).unwrap().into_iter().partition(is_continued);
        assert!(child.wait().unwrap().success(), "{log:#?}");
        assert_eq!(warnings.len(), continued, "{warnings:#?}");
        check(&log);
    }
}
