//! Runs `kickless bench net` against real cards.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

mod bench_results;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Card, CardOptions, Outgoing};
use kickless_tests::daemon::{CardConfig, Daemon, DaemonConfig, Program, check_sandbox, kickless_binary};
use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let output = Command::new(kickless_binary().unwrap()).arg("bench").args(arguments).output().unwrap();
    // The programs that it starts log there too.
    check_sandbox(String::from_utf8_lossy(&output.stderr).lines()).unwrap();
    output
}

fn on(daemon: &Daemon, arguments: &str) -> Output {
    let socket = format!("--socket-path={}", daemon.socket().display());
    let time = if arguments.contains("--time") { None } else { Some("--time=50ms") };
    let words = ["net", &socket, "--warm-up=5ms"];
    bench(&words.into_iter().chain(time).chain(arguments.split_whitespace()).collect::<Vec<_>>())
}

/// Returns the results of a run, which must succeed.
fn results(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    parsed(output)
}

/// Returns the results of a run, which are as their schema says.
fn parsed(output: &Output) -> Value {
    let results = serde_json::from_slice(&output.stdout).unwrap();
    bench_results::check(&results).unwrap();
    results
}

/// Returns the results of a run that may be too short for a single frame on a busy machine.
fn results_or_silence(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || said.contains("no frame"), "{said}");
    parsed(output)
}

/// Returns the one sentence on standard error of a run, which must fail.
fn sentence(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

fn card(port: &str) -> Daemon {
    Daemon::start_card(&CardConfig::new(port).with(&["--num-queue-pairs=2"])).unwrap()
}

#[test]
fn each_direction_is_measured() {
    let daemon = card("null,rate=20000");
    for rings in ["--packed=off", "--packed=on", "--packed=on --in-order=on", "--mergeable=off"] {
        let loads =
            "--direction=transmit,receive,forward --frame-size=64,1514 --wait=sleep,poll --depth=1,32";
        let options = format!("--pid={} {loads} {rings} --pairs=2 --json", daemon.pid());
        let all = results_or_silence(&on(&daemon, &options));
        let loads = all["loads"].as_array().unwrap();
        assert_eq!(loads.len(), 24);
        let (mut measured, mut lossless) = (0, 0);
        for load in loads {
            let target = &load["targets"][0];
            // On a busy machine, none of the threads may run for a moment, and late frames count as lost.
            measured += usize::from(target["iops"]["median"].as_f64().unwrap() > 0.0);
            lossless += usize::from(target["lost"] == 0);
            assert!(target["driver_cpu_per_request"]["median"].is_number(), "{load}");
            assert!(target["back_end_cpu_per_request"]["median"].is_number(), "{load}");
            assert_eq!(target["failed"], 0, "{load}");
        }
        let half = loads.len() / 2;
        assert!(measured > half && lossless > half, "{measured} and {lossless} of {}", loads.len());
    }
}

#[test]
fn echoed_frames_are_timed() {
    let daemon = card("loop");
    for load in ["--depth=1,32", "--depth=256 --packed=on --frame-size=1514", "--rate=5000", "--wait=sleep"] {
        // On a busy machine, none of the threads may run for a moment.
        let measured = (0..20).any(|_| {
            let all = results_or_silence(&on(&daemon, &format!("--json --pairs=2 {load}")));
            let target = &all["loads"][0]["targets"][0];
            let latency = &target["latency"];
            assert!(latency["p50"].as_u64() <= latency["max"].as_u64(), "{target}");
            target["iops"]["median"].as_f64().unwrap() > 0.0 && latency["p50"].as_u64().unwrap() > 0
        });
        assert!(measured, "{load}");
    }
}

/// Measures a load, and again as long as none of its frames is done: on a busy machine, none of the threads
/// may run for a moment.
fn passes(daemon: &Daemon, load: &str) -> bool {
    (0..20).any(|_| {
        let all = results_or_silence(&on(daemon, &format!("--json {load}")));
        all["loads"][0]["targets"][0]["iops"]["median"].as_f64().unwrap() > 0.0
    })
}

#[test]
fn packets_of_64_kib_with_segmentation_pass_whole() {
    let gso = "--gso-size=1448 --frame-size=65000 --depth=4";
    let looped = card("loop");
    for load in ["--packed=off", "--packed=on", "--mergeable=off"] {
        assert!(passes(&looped, &format!("{gso} {load}")), "{load}");
    }
    assert!(passes(&card("null"), &format!("{gso} --direction=transmit")));
    let on_switch = "port = \"switch:whole\"";
    let three = [("one", on_switch), ("two", on_switch), ("three", on_switch)];
    let two = Daemon::serve("workers = 1", &three).unwrap();
    let mut peer = two.socket_of("one").into_os_string();
    peer.push(".peer");
    symlink(two.socket_of("two"), peer).unwrap();
    // A third card sends frames to all, which are not judged.
    let others = Card::connect(CardOptions::new(two.socket_of("three"))).unwrap();
    let (mut others, is_over) = (others.pair(0).unwrap(), AtomicBool::new(false));
    let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5], &[0; 46]].concat();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                others.send(&[Outgoing::from(&frame[..])]).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let passed = ["--packed=off", "--packed=on"]
            .map(|load| passes(&two, &format!("{gso} {load} --direction=pass")));
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(passed, [true; 2]);
    });
    let without = Daemon::start_card(&CardConfig::new("loop").with(&["--offload=off"])).unwrap();
    assert!(sentence(&on(&without, gso)).contains("VIRTIO_NET_F_CSUM"));
}

#[test]
fn packets_come_back_without_their_checksums() {
    let load = "--partial-checksum --frame-size=64,1514 --depth=4";
    let looped = card("loop");
    for options in ["", "--touch", "--touch --mergeable=off"] {
        assert!(passes(&looped, &format!("{load} {options}")), "{options}");
    }
    let without = Daemon::start_card(&CardConfig::new("loop").with(&["--offload=off"])).unwrap();
    assert!(sentence(&on(&without, load)).contains("VIRTIO_NET_F_CSUM"));
}

/// A card that discards frames loses all that should come back.
#[test]
fn lost_frames_are_counted() {
    let daemon = card("null");
    for rate in ["", "--rate=2000"] {
        let output = on(&daemon, &format!("--depth=16 --json --time=300ms {rate}"));
        // It is an error if all are lost.
        let said = sentence(&output);
        assert!(said.contains("no frame came back: the card has to return frames"), "{said}");
        let all = parsed(&output);
        let target = &all["loads"][0]["targets"][0];
        assert_eq!(target["iops"]["median"].as_f64(), Some(0.0));
        assert!(target["lost"].as_u64().unwrap() >= 16, "{target}");
        let table = String::from_utf8(on(&daemon, &format!("--depth=16 {rate}")).stdout).unwrap();
        assert!(table.contains("packets/s") && table.contains("lost"), "{table}");
    }
}

#[test]
fn a_rate_is_kept() {
    let daemon = card("null");
    let all = results(&on(&daemon, "--direction=transmit --rate=2000 --time=500ms --json --wait=sleep"));
    // 1000 frames are due. Late ones of the time before count too, at most ten.
    let rate = all["loads"][0]["targets"][0]["iops"]["median"].as_f64().unwrap();
    assert!(rate <= 2030.0, "{rate}");
}

#[test]
fn targets_take_turns_and_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let kickless = kickless_binary().unwrap();
    let command = format!("{} net --socket-path={{socket}} --port=null --log-level=warn", kickless.display());
    let report = dir.path().join("report.html");
    let output = bench(&[
        "compare-net",
        &format!("one={command}"),
        &format!("two={command}"),
        "--direction=transmit",
        "--rounds=2",
        "--time=30ms",
        "--warm-up=5ms",
        &format!("--report={}", report.display()),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("one / this") && table.contains("Gbit/s"), "{table}");
    let page = fs::read_to_string(report).unwrap();
    assert!(page.contains("Packets a second") && page.contains("frames of 64 B sent"), "no packets");
}

#[test]
fn a_disk_is_no_card() {
    for program in [Program::Kickless, Program::StorageDaemon] {
        let disk = Daemon::start(&DaemonConfig { program, ..DaemonConfig::new("null:1048576") }).unwrap();
        let said = sentence(&on(&disk, "--time=1000s"));
        assert!(said.contains("it serves a disk: use bench blk or compare"), "{said}");
    }
}

#[test]
fn impossible_options_are_refused() {
    let daemon = card("null");
    for (arguments, named) in [
        ("--pairs=3", "2 queue pairs"),
        ("--pid=4194304", "no process"),
        ("--frame-size=65550 --depth=1 --queue-size=8", "--queue-size"),
    ] {
        let said = sentence(&on(&daemon, arguments));
        assert!(said.contains(named), "{arguments}: {said}");
    }
}
