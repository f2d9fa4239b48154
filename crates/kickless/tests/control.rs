//! Runs daemons with control sockets, and `kickless ctl`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{Daemon, LIMIT, PROGRAM, disk};
use kickless_driver::{Card, CardOptions, Disk, Interest, Options, Outgoing};
use kickless_testing::{CaptureContents, parse_pcapng};
use serde_json::{Value, json};
use tempfile::TempDir;

#[test]
fn a_daemon_without_devices_gets_some_and_is_saved() {
    let daemon = Daemon::serve("[pool]\nworkers = 2\n", &[]);
    // The socket is there before the log says anything about devices.
    let mut added = None;
    for _ in 0..600 {
        let disk = json!({ "socket-path": daemon.path("a.sock"), "blk-file": "null:1G", "weight": 2 });
        let output = daemon.ctl(&["device.add", &disk.to_string()]);
        if output.status.success() {
            added = Some(output);
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert!(added.is_some_and(|output| output.stdout.starts_with(b"{")));
    let line = daemon.wait_for("control call");
    let pid = format!("uid={} ", rustix::process::getuid().as_raw());
    assert!(line.contains(&pid) && line.contains("method=device.add name=a"), "{line}");
    assert_eq!(daemon.call("device.list", json!({})), json!([{ "name": "a", "state": "free" }]));
    let mode = fs::metadata(daemon.path("control.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);

    // Save, load, and compare.
    let saved = daemon.call("config.save", json!({}));
    let text = saved["toml"].as_str().unwrap().replace(daemon.dir.path().to_str().unwrap(), "DIR");
    assert_eq!(daemon.call("daemon.stop", json!({})), json!({ "stopping": true }));
    assert_eq!(daemon.end(), Some(0));
    let second = Daemon::serve(&text, &["--control=DIR/other.sock"]);
    second.wait_for("serving");
    let control = second.path("other.sock");
    let control = format!("--control={}", control.display());
    let output = second.ctl(&[&control, "config.save"]);
    let again: Value = serde_json::from_slice(&output.stdout).unwrap();
    let again = again["toml"].as_str().unwrap().replace(second.dir.path().to_str().unwrap(), "DIR");
    assert_eq!(again, text);
}

#[test]
fn a_disk_is_added_by_a_descriptor_of_the_shell() {
    let daemon = Daemon::serve("[pool]\nworkers = 1\n", &["--control=DIR/control.sock"]);
    daemon.wait_for("pool");
    let image = daemon.path("image");
    fs::File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
    let ctl = |arguments: &str| {
        let script = format!("exec \"$0\" ctl {arguments} device.add \"$1\" 5<>\"$2\"");
        let disk = json!({ "name": "a", "socket-path": daemon.path("a.sock"), "blk-file": "fd:image" });
        let mut command = Command::new("sh");
        command.args(["-c", &script, PROGRAM, &disk.to_string()]).arg(&image);
        command.env("RUNTIME_DIRECTORY", daemon.dir.path()).stdin(Stdio::null()).output().unwrap()
    };
    for (arguments, status, said) in [
        ("--fd=image=77", 2, "--fd=image=77: the program inherited no descriptor 77"),
        ("--fd=image=5 --fd=more=5", 2, "--fd=more=5: it is given twice"),
        ("--fd=other=5", 1, "no descriptor image came with the call"),
    ] {
        let output = ctl(arguments);
        let sentence = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{sentence}");
        assert!(sentence.contains(said) && sentence.lines().count() == 1, "{sentence}");
    }
    let output = ctl("--fd=image=5");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let disk = Disk::connect(Options::new(daemon.path("a.sock"))).unwrap();
    disk.write_at(&[7; 512], 0).unwrap();
    assert_eq!(fs::read(&image).unwrap()[..512], [7; 512]);
    assert!(daemon.refused(&["config.save"]).contains("added by descriptors: a"));
    drop(disk);
    assert_eq!(daemon.call("device.remove", json!({ "name": "a" })), json!({ "removed": true }));
}

#[test]
fn a_disk_of_the_command_line_has_a_control_socket() {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["blk", "--blk-file=null:1M"]);
    command.arg(format!("--socket-path={}", dir.path().join("web.sock").display()));
    command.arg(format!("--control={}", dir.path().join("control.sock").display()));
    command.arg(format!("--control-read-only={}", dir.path().join("show.sock").display()));
    let daemon = Daemon::start(command, dir);
    daemon.wait_for("serving");
    assert_eq!(daemon.call("device.list", json!({})), json!([{ "name": "web", "state": "free" }]));
    let show = format!("--control={}", daemon.path("show.sock").display());
    assert!(daemon.refused(&[&show, "daemon.stop"]).contains("read-only"));
    assert!(daemon.ctl(&[&show, "stats.get"]).status.success());
    // The filter of the log changes.
    daemon.call("log.set", json!({ "filter": "off" }));
    daemon.call("log.set", json!({ "filter": "info" }));
    assert!(daemon.refused(&["log.set", "{\"filter\": \"ifno\"}"]).contains("not a level"));
    // Without its device, such a daemon has nothing to do.
    assert_eq!(daemon.call("device.remove", json!({ "name": "web" })), json!({ "removed": true }));
    assert_eq!(daemon.end(), Some(0));
}

#[test]
fn calls_that_cannot_be_made_are_one_sentence() {
    let daemon = Daemon::serve("", &[]);
    let nobody = format!("--control={}", daemon.path("nobody").display());
    assert!(daemon.refused(&[&nobody, "device.list"]).contains("nobody: no daemon listens there"));
    assert!(daemon.refused_with(2, &["device.list", "[]"]).contains("must be a JSON object"));
    assert!(daemon.refused_with(2, &["device.list", "{"]).contains("no JSON"));
    assert_eq!(daemon.ctl(&[]).status.code(), Some(2));
}

#[test]
fn a_control_socket_that_cannot_be_made_is_an_error() {
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("kickless.toml");
    fs::write(&config, "").unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("serve").arg("--config").arg(&config).stderr(Stdio::piped());
    let said = |command: &mut Command| {
        let mut child = command.spawn().unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
        said
    };
    assert!(said(&mut command).contains("no device to serve"));
    command.arg("--control=/nonexistent/control.sock");
    let said = said(&mut command);
    assert!(said.contains("--control=/nonexistent/control.sock: ") && said.contains("directory"), "{said}");
}

#[test]
fn a_device_whose_disk_comes_later_is_served_then() {
    let missing = "[[device]]\nname = 'late'\nsocket-path = 'DIR/late.sock'\nblk-file = 'DIR/late.img'\ncache = 'writeback'\n";
    let daemon = Daemon::serve(&(missing.to_owned() + &disk("a", "")), &[]);
    let line = daemon.wait_for("unavailable");
    assert!(
        line.contains("late.img") && line.contains("blk-file: ") && line.contains("there is no such file"),
        "{line}"
    );
    let state = |name: &str, state: &str| (name.to_owned(), state.to_owned());
    assert_eq!(daemon.states(), [state("a", "free"), state("late", "unavailable")]);
    let shown = daemon.call("device.get", json!({ "name": "late" }));
    assert!(shown["error"].as_str().unwrap().contains("there is no such file"), "{shown}");
    assert!(daemon.call("config.save", json!({}))["toml"].as_str().unwrap().contains("late.img"));
    fs::File::create(daemon.path("late.img")).unwrap().set_len(1 << 20).unwrap();
    daemon.wait_for("serving");
    assert!(daemon.path("late.sock").exists());
    assert_eq!(daemon.states()[1], state("late", "free"));
    // A device whose disk never comes can be removed.
    daemon.rewrite(&missing.replace("late", "never"));
    let reloaded = daemon.call("daemon.reload", json!({}));
    assert_eq!(
        (&reloaded["removed"], &reloaded["failed"][0]["device"]),
        (&json!(["late", "a"]), &json!("never"))
    );
    assert_eq!(daemon.states(), [state("never", "unavailable")]);
    assert_eq!(daemon.call("device.remove", json!({ "name": "never" })), json!({ "removed": true }));
    assert!(daemon.states().is_empty());

    // The strict start.
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("kickless.toml");
    fs::write(&config, missing.replace("DIR", dir.path().to_str().unwrap())).unwrap();
    let mut command = Command::new(PROGRAM);
    let output = command.args(["serve", "--all-or-nothing", "--config"]).arg(&config).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("device late: blk-file"), "{said}");
}

#[test]
fn metrics_are_printed_written_and_served() {
    let device = "[[device]]\nsocket-path = \"DIR/a.sock\"\nblk-file = \"null:1G\"\n";
    let daemon = Daemon::serve(device, &["--control-read-only=DIR/read-only.sock"]);
    daemon.wait_for("serving");
    let socket = daemon.path("read-only.sock");
    let metrics = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.arg("metrics").arg("--control").arg(&socket).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let printed = metrics(&[]).output().unwrap();
    assert!(printed.status.success() && printed.stderr.is_empty());
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert!(
        printed.contains("kickless_device_state{device=\"a\",kickless_device_state=\"free\"} 1\n"),
        "{printed}"
    );
    assert!(printed.contains("\n# TYPE kickless_device_state gauge\n"), "{printed}");

    let file = daemon.path("kickless.prom");
    let text = format!("--textfile={}", file.display());
    assert!(metrics(&[&text]).status().unwrap().success());
    assert!(fs::read_to_string(&file).unwrap().starts_with("# TYPE kickless_build_info gauge\n"));
    let left = fs::read_dir(daemon.dir.path()).unwrap().filter_map(Result::ok);
    assert_eq!(left.filter(|entry| entry.file_name().to_string_lossy().contains(".prom")).count(), 1);
    let refused = metrics(&["--textfile=/nowhere/a.prom"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--textfile=/nowhere/a.prom"));
    // A daemon that does not answer has no metrics.
    let gone = ["metrics", "--control=/nowhere/control.sock", &text];
    assert!(!Command::new(PROGRAM).args(gone).output().unwrap().status.success() && !file.exists());

    for (mode, filters) in [("off", "0"), ("on", "2")] {
        let mut exporter = Exporter::start(metrics(&["--listen=127.0.0.1:0", "--sandbox", mode]));
        let answer = exporter.get();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("# EOF\n"), "{answer}");
        let status = fs::read_to_string(format!("/proc/{}/status", exporter.child.id())).unwrap();
        assert!(status.contains(&format!("\nSeccomp:\t{filters}\n")), "{mode}: {status}");
        if mode == "on" {
            let effective = "\nCapEff:\t0000000000000000\n";
            assert!(status.contains(effective) && status.contains("\nNoNewPrivs:\t1\n"), "{status}");
        }
        assert_eq!(exporter.end(), "", "{mode}");
    }
    // A daemon that is away is told in the answer, also from the sandbox.
    let mut exporter = Exporter::start(metrics(&["--listen=127.0.0.1:0"]));
    drop(daemon);
    let answer = exporter.get();
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("--control="), "{answer}");
    assert!(!exporter.end().contains("refused a system call"));
    let refused = metrics(&["--sandbox=off"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// A process that serves metrics.
struct Exporter {
    child: std::process::Child,
    address: String,
    log: BufReader<std::process::ChildStderr>,
}

impl Exporter {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        let address = line.split("address=").nth(1).unwrap_or_else(|| panic!("{line}")).trim().to_owned();
        Self { child, address, log }
    }

    /// Returns the answer to a request.
    fn get(&mut self) -> String {
        let mut stream = std::net::TcpStream::connect(&self.address).unwrap();
        std::io::Write::write_all(
            &mut stream,
            b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n",
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Ends the process. Returns its log.
    fn end(mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut said = String::new();
        self.log.read_to_string(&mut said).unwrap();
        said
    }
}

/// Returns an Ethernet frame of a length and with contents of its own.
fn frame(number: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    frame.resize(100 + number, number as u8);
    frame
}

/// Sends frames to a loop port until they are back.
fn exchange(daemon: &Daemon, count: usize) {
    let card = Card::connect(CardOptions::new(daemon.path("card.sock"))).unwrap();
    let mut pair = card.pair(0).unwrap();
    for number in 0..count {
        pair.send(&[Outgoing::from(&frame(number)[..])]).unwrap();
    }
    let mut received = 0;
    while received < count {
        assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes");
        pair.receive(count, |got| {
            assert_eq!(got.to_vec(), frame(received));
            received += 1;
        })
        .unwrap();
    }
}

/// Checks with tshark that a capture of the card "card" has `count` frames of [`exchange`] in each direction,
/// and the first `captured` bytes of each.
fn tshark_reads(file: &Path, count: usize, captured: usize) {
    let fields =
        ["frame.interface_name", "frame.packet_flags_direction", "frame.interface_queue", "frame.len"];
    let fields = fields.iter().chain(&["frame.cap_len", "eth.dst", "eth.src", "eth.type", "data.data"]);
    let mut tshark = Command::new("tshark");
    tshark.arg("-r").arg(file).args(["-T", "fields"]).args(fields.flat_map(|field| ["-e", field]));
    let Ok(output) = tshark.output() else {
        println!("{file:?} is not read by tshark, which is not installed");
        return;
    };
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    for direction in ["0x00000001", "0x00000002"] {
        let found: Vec<_> = lines.lines().filter(|line| line.contains(direction)).collect();
        let expected = (0..count).map(|number| {
            let (bytes, len) = (frame(number), 100 + number);
            let bytes = &bytes[..len.min(captured)];
            let data: String = bytes[14..].iter().map(|byte| format!("{byte:02x}")).collect();
            let addresses = "02:00:00:00:00:01\t02:00:00:00:00:02\t0x88b5";
            format!("card\t{direction}\t0\t{len}\t{}\t{addresses}\t{data}", bytes.len())
        });
        assert_eq!(found, expected.collect::<Vec<_>>());
    }
    assert_eq!(lines.lines().count(), 2 * count);
}

#[test]
fn the_frames_of_a_card_are_captured_while_it_runs() {
    let card = |keys: &str| {
        format!("[[device]]\nname = \"card\"\nsocket-path = \"DIR/card.sock\"\nport = \"loop\"\n{keys}")
    };
    let daemon = Daemon::serve(&card("capture = \"DIR/start.pcapng\"\n"), &[]);
    daemon.wait_for("serving");
    let read = |name: &str| -> CaptureContents { parse_pcapng(&fs::read(daemon.path(name)).unwrap()) };
    exchange(&daemon, 3);
    // The next file ends the one before.
    let file = daemon.path("next.pcapng");
    let params = json!({ "name": "card", "capture": file, "capture-length": 20 });
    assert_eq!(daemon.call("device.capture", params), json!({ "capturing": true }));
    let start = read("start.pcapng");
    assert_eq!((start.interface.as_str(), start.frames.len(), start.len_max), ("card", 6, 65_550));
    exchange(&daemon, 5);
    let shown = daemon.call("device.get", json!({ "name": "card" }));
    assert_eq!((&shown["config"]["capture"], &shown["config"]["capture-length"]), (&json!(file), &json!(20)));
    assert_eq!(daemon.call("device.capture", json!({ "name": "card" })), json!({ "capturing": false }));
    assert!(daemon.call("device.get", json!({ "name": "card" }))["config"].get("capture").is_none());
    exchange(&daemon, 1);
    let next = read("next.pcapng");
    assert_eq!((next.frames.len(), next.received, next.dropped), (10, 10, 0));
    assert!(next.frames.iter().all(|frame| frame.bytes.len() == 20));
    tshark_reads(&daemon.path("start.pcapng"), 3, usize::MAX);
    tshark_reads(&file, 5, 20);
    // A file that cannot be written ends the capture, and a file with other contents stays.
    let (config, other) = (daemon.path("kickless.toml"), daemon.path("other"));
    fs::write(&other, "precious").unwrap();
    for (path, why) in [(&other, "is no earlier capture"), (&config, "Operation not permitted")] {
        let params = json!({ "name": "card", "capture": path }).to_string();
        let refused = daemon.refused(&["device.capture", &params]);
        assert!(refused.contains(why), "{refused}");
    }
    for params in [r#"{"name": "card", "capture": ""}"#, r#"{"name": "card", "capture-length": 13}"#] {
        daemon.refused(&["device.capture", params]);
    }
    // The file says so from now on.
    let directory = daemon.dir.path().to_str().unwrap();
    fs::write(&config, card("capture = \"DIR/reload.pcapng\"\n").replace("DIR", directory)).unwrap();
    let reloaded = daemon.call("daemon.reload", json!({}));
    assert_eq!((&reloaded["failed"], &reloaded["needs-restart"]), (&json!([]), &json!([])));
    exchange(&daemon, 2);
    fs::write(&config, card("").replace("DIR", directory)).unwrap();
    daemon.call("daemon.reload", json!({}));
    exchange(&daemon, 1);
    assert_eq!(read("reload.pcapng").frames.len(), 4);
}
