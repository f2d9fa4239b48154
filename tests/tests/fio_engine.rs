//! fio's engine on the driver, with data verified: against kickless and against QEMU's storage daemon.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use kickless_tests::daemon::{Daemon, DaemonConfig, Program, dying_with_us, repository, wait_for_exit};
use serde_json::Value;
use tempfile::TempDir;

/// What one run of fio writes and reads in each job.
const SIZE: u64 = 4 << 20;
/// For one run.
const LIMIT: Duration = Duration::from_secs(120);

/// The engine, built once for all tests.
fn engine() -> &'static OsString {
    static ENGINE: OnceLock<OsString> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let output = Command::new(repository().join("fio/prepare")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = String::from_utf8(output.stdout).unwrap();
        let mut option = OsString::from("--ioengine=external:");
        option.push(path.trim());
        option
    })
}

/// A back-end with an image of zeroes.
struct Served {
    daemon: Daemon,
    dir: TempDir,
}

fn serve(program: Program) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let image: PathBuf = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    let daemon = Daemon::start(&DaemonConfig { program, ..DaemonConfig::new(&image) }).unwrap();
    Served { daemon, dir }
}

/// How a run ended, its report, and what it complained of.
struct Run {
    status: ExitStatus,
    report: Value,
    complaints: String,
}

impl Run {
    /// The first job's, which is the sum of all where they report as a group.
    fn job(&self) -> &Value {
        let job = &self.report["jobs"][0];
        assert!(self.status.success() && job["error"] == 0, "{}: {}", self.status, self.complaints);
        job
    }
}

impl Served {
    fn fio(&self, options: &[&str]) -> Run {
        let path = |name| self.dir.path().join(name);
        let mut socket = OsString::from("--socket=");
        socket.push(self.daemon.socket());
        let mut child = dying_with_us("fio")
            .arg("--name=job")
            .arg(engine())
            .arg(socket)
            .args(["--output-format=json", "--group_reporting", "--output=report"])
            .args(options)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(path("complaints")).unwrap())
            .spawn()
            .unwrap();
        let ended = wait_for_exit(&mut child, LIMIT);
        let complaints = fs::read_to_string(path("complaints")).unwrap();
        if ended.is_err() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let status = ended.unwrap_or_else(|_| panic!("fio does not end: {complaints}"));
        let report = fs::read_to_string(path("report")).unwrap_or_default();
        // Complaints that it makes while it reports come first.
        let (said, json) = report.split_at(report.find('{').unwrap_or(report.len()));
        let report = serde_json::from_str(json).unwrap_or_default();
        Run { status, report, complaints: complaints + said }
    }

    /// How much was read and written by a run that did well.
    fn bytes(&self, options: &[&str]) -> [u64; 2] {
        let run = self.fio(options);
        ["read", "write"].map(|direction| run.job()[direction]["io_bytes"].as_u64().unwrap())
    }
}

fn size() -> String {
    format!("--size={SIZE}")
}

fn verified(program: Program) {
    let served = serve(program);
    for (depth, threads) in [(1, 1), (1, 2), (32, 1), (32, 2)] {
        let all = SIZE * threads;
        let bytes = served.bytes(&[
            "--rw=randwrite",
            "--bs=4k",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--thread",
            "--offset_increment=8M",
            &size(),
            &format!("--iodepth={depth}"),
            &format!("--numjobs={threads}"),
        ]);
        assert_eq!(bytes, [all, all], "{depth} in flight, {threads} threads");
    }
}

#[test]
fn verified_with_kickless() {
    verified(Program::Kickless);
}

#[test]
fn verified_with_the_storage_daemon() {
    verified(Program::StorageDaemon);
}

/// Sizes of all kinds, flushes between them, and a ring that is too small for all that fio has queued.
fn every_shape(program: Program) {
    let served = serve(program);
    let size = size();
    let common = ["--rw=randrw", "--bsrange=512-256k", "--fsync=8", "--end_fsync=1", "--thread"];
    let verify = ["--verify=crc32c", "--verify_fatal=1", "--iodepth=300", "--iodepth_batch=64"];
    for further in
        [["--indirect=off", "--queues=1"], ["--in_order=auto", "--spin=20"], ["--event_idx=off", "--hipri"]]
    {
        let all = [&common[..], &verify, &further, &[&size]].concat();
        let [read, written] = served.bytes(&all);
        assert!(written > 0 && read >= written, "{read} read, {written} written with {further:?}");
    }
}

#[test]
fn every_shape_with_kickless() {
    every_shape(Program::Kickless);
}

#[test]
fn every_shape_with_the_storage_daemon() {
    every_shape(Program::StorageDaemon);
}

#[test]
fn jobs_that_are_processes() {
    let served = serve(Program::Kickless);
    let bytes = served.bytes(&[
        "--rw=randwrite",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--iodepth=8",
        "--numjobs=3",
        "--offset_increment=8M",
        &size(),
    ]);
    assert_eq!(bytes, [3 * SIZE; 2]);
}

#[test]
fn trims() {
    let served = serve(Program::StorageDaemon);
    let run = served.fio(&["--rw=randtrim", "--bs=64k", "--iodepth=8", "--thread", &size()]);
    assert_eq!(run.job()["trim"]["io_bytes"], SIZE);
}

#[test]
fn packed_rings() {
    let served = serve(Program::Kickless);
    let bytes = served.bytes(&[
        "--rw=randwrite",
        "--verify=crc32c",
        "--packed=on",
        "--iodepth=32",
        &size(),
        "--thread",
    ]);
    assert_eq!(bytes, [SIZE; 2]);
}

#[test]
fn what_goes_wrong_is_said() {
    let served = serve(Program::Kickless);
    for (options, sentence) in [
        (&["--rw=read", "--socket=/nowhere/to/be/found"][..], "cannot connect to /nowhere/to/be/found"),
        (&["--rw=read", "--nrfiles=2"], "cannot have several files"),
        (&["--rw=read", "--bs=100", "--size=1000"], "no multiple of 512"),
        (&["--rw=read", "--thread", "--numjobs=5"], "all 4 are taken"),
        (&["--rw=read", "--packed=maybe"], "maybe"),
        // Nobody has written there, so what is read must be found to be wrong.
        (&["--rw=write", "--verify=crc32c", "--verify_only", "--verify_fatal=1"], "verify: bad"),
    ] {
        let run = served.fio(options);
        assert!(!run.status.success(), "{options:?}: {}", run.report);
        assert!(run.complaints.contains(sentence), "{options:?}: {}", run.complaints);
    }
}

/// Its report says when requests were issued, and how many at once.
#[test]
fn what_was_issued_is_reported() {
    let served = serve(Program::Kickless);
    let run =
        served.fio(&["--rw=read", "--bs=4k", "--iodepth=32", "--iodepth_batch=16", "--thread", &size()]);
    let job = run.job();
    assert_eq!(job["read"]["slat_ns"]["N"].as_u64().unwrap(), SIZE / 4096);
    assert!(job["iodepth_submit"]["16"].as_f64().unwrap() > 0.0, "{}", job["iodepth_submit"]);
}
