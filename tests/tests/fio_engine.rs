//! Runs fio's engine on the driver with verified data, against kickless and QEMU's storage daemon.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use kickless_tests::daemon::{
    Daemon, DaemonConfig, Program, child_command, repository, wait_for_exit, with_own_profile,
};
use serde_json::Value;
use tempfile::TempDir;

/// Bytes that each job of a run writes and reads.
const SIZE: u64 = 4 << 20;
/// Time limit of one run.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the engine. Builds it once for all tests.
fn engine() -> &'static OsString {
    static ENGINE: OnceLock<OsString> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let mut prepare = Command::new(repository().join("fio/prepare"));
        let output = with_own_profile(&mut prepare).output().unwrap();
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

/// The status, the report and the error output of a run.
struct Run {
    status: ExitStatus,
    report: Value,
    complaints: String,
}

impl Run {
    /// Returns the first job. If the jobs report as a group, it has their sum.
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
        let mut child = child_command("fio")
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
        // fio prints errors that occur during the report in front of it.
        let (said, json) = report.split_at(report.find('{').unwrap_or(report.len()));
        let report = serde_json::from_str(json).unwrap_or_default();
        Run { status, report, complaints: complaints + said }
    }

    /// Returns the bytes that a successful run read and wrote.
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

/// Uses blocks of many sizes with flushes between them, and a ring that is smaller than fio's queue.
fn all_block_sizes(program: Program) {
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
fn all_block_sizes_with_kickless() {
    all_block_sizes(Program::Kickless);
}

#[test]
fn all_block_sizes_with_the_storage_daemon() {
    all_block_sizes(Program::StorageDaemon);
}

#[test]
fn jobs_may_be_processes() {
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
fn trims_reach_the_disk() {
    let served = serve(Program::StorageDaemon);
    let run = served.fio(&["--rw=randtrim", "--bs=64k", "--iodepth=8", "--thread", &size()]);
    assert_eq!(run.job()["trim"]["io_bytes"], SIZE);
}

#[test]
fn packed_rings_work() {
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
fn errors_are_reported() {
    let served = serve(Program::Kickless);
    for (options, sentence) in [
        (&["--rw=read", "--socket=/nowhere/to/be/found"][..], "cannot connect to /nowhere/to/be/found"),
        (&["--rw=read", "--nrfiles=2"], "cannot have several files"),
        (&["--rw=read", "--bs=100", "--size=1000"], "not a multiple of 512"),
        (&["--rw=read", "--thread", "--numjobs=5"], "all 4 are taken"),
        (&["--rw=read", "--packed=maybe"], "maybe"),
        // These blocks were never written, so that verification must fail.
        (&["--rw=write", "--verify=crc32c", "--verify_only", "--verify_fatal=1"], "verify: bad"),
    ] {
        let run = served.fio(options);
        assert!(!run.status.success(), "{options:?}: {}", run.report);
        assert!(run.complaints.contains(sentence), "{options:?}: {}", run.complaints);
    }
}

/// fio's report has the submission times and the number of requests in flight.
#[test]
fn submissions_are_reported() {
    let served = serve(Program::Kickless);
    let run =
        served.fio(&["--rw=read", "--bs=4k", "--iodepth=32", "--iodepth_batch=16", "--thread", &size()]);
    let job = run.job();
    assert_eq!(job["read"]["slat_ns"]["N"].as_u64().unwrap(), SIZE / 4096);
    assert!(job["iodepth_submit"]["16"].as_f64().unwrap() > 0.0, "{}", job["iodepth_submit"]);
}
