//! Builds the image of the program and serves a disk from a container without privileges, as
//! docs/containers.md describes it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use kickless_testing::{eventually, pattern};
use kickless_tests::daemon::{check_sandbox, child_command, kickless_binary, repository, wait_for_exit};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;
use kickless_tests::transcript::Transcript;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Limit for a step. Loading the image takes the longest.
const LIMIT: Duration = Duration::from_secs(120);
/// The user of the image.
const USER: u32 = 64000;
/// The default profile of podman. It has AIO and landlock, and no io_uring.
const PROFILE: &str = "/usr/share/containers/seccomp.json";

/// The configuration file in the volume.
const DEVICES: &str = "
[[device]]
name = 'disk'
socket-path = '/srv/disk.sock'
blk-file = '/srv/disk.img'
";

/// Returns why no container can run here.
fn is_missing() -> Option<String> {
    for program in ["buildah", "podman", "crun"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
            return Some(format!("there is no {program}"));
        }
    }
    let words = ["--mount", "--pid", "--fork", "mount", "-t", "cgroup2", "none", "/mnt"];
    let mounted = Command::new("unshare").args(words).stderr(Stdio::null()).status();
    let is_root = rustix::process::geteuid().is_root();
    (!is_root || !mounted.is_ok_and(|status| status.success()))
        .then(|| "this needs root, and to mount cgroups".to_owned())
}

/// A container. Dropping it kills all its processes.
struct Container {
    process: Child,
    log: Transcript,
}

impl Container {
    /// Starts a container with these options of `podman run` and these arguments of the program.
    fn start(dir: &Path, archive: &Path, options: &[&str], arguments: &[&str]) -> Container {
        let unshare = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
        let mut process = child_command("unshare")
            .args(unshare)
            .arg(repository().join("tests/fixtures/container/run"))
            .args([dir, archive])
            .args(options)
            .arg("localhost/kickless:0.1.0")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Transcript::of("container", process.stderr.take().unwrap());
        Container { process, log }
    }

    /// Waits for a line of its log.
    fn wait_for(&self, text: &str) {
        let is_there = |line: &str| line.contains(text).then_some(());
        self.log.wait_for(text, LIMIT, is_there).unwrap_or_else(|error| {
            panic!("{error:#}: {:#?}", self.log.lines());
        });
    }

    /// Waits until it has ended well, and returns its log.
    fn ended(mut self) -> Vec<String> {
        assert!(wait_for_exit(&mut self.process, LIMIT).unwrap().success());
        self.log.wait_for_end(LIMIT).unwrap()
    }

    /// Ends it by SIGTERM, which podman passes on, and returns its log.
    fn stop(self) -> Vec<String> {
        let pid = self.process.id();
        let podman = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        assert!(Command::new("kill").arg(podman.trim()).status().unwrap().success());
        self.ended()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            self.log.dump();
        }
    }
}

/// A directory with an image, which containers have as `/srv`.
struct Volume {
    dir: TempDir,
    srv: PathBuf,
}

impl Volume {
    fn new() -> Volume {
        let dir = image_dir().unwrap();
        let srv = dir.path().join("srv");
        fs::create_dir(&srv).unwrap();
        File::create(srv.join("disk.img")).unwrap().set_len(64 << 20).unwrap();
        fs::write(srv.join("devices.toml"), DEVICES).unwrap();
        for path in [&srv, &srv.join("disk.img")] {
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        Volume { dir, srv }
    }

    /// Starts a container. `name` is that of the directory for the files of podman.
    fn start(&self, name: &str, archive: &Path, options: &[&str], arguments: &[&str]) -> Container {
        let dir = self.dir.path().join(name);
        let volume = format!("--volume={}:/srv", self.srv.display());
        let options: Vec<&str> = options.iter().copied().chain([&*volume]).collect();
        Container::start(&dir, archive, &options, arguments)
    }

    fn connect(&self) -> Machine {
        Machine::start(&self.srv.join("disk.sock"), &Shape::default()).unwrap()
    }
}

/// Writes and reads through a disk.
fn check(machine: &mut Machine, seed: u64) {
    let data = pattern(seed, 8192);
    machine.write(0, 8, &data).unwrap();
    assert!(machine.read(0, 8, data.len()).unwrap() == data);
}

/// Serves a disk, and writes and reads through it. Returns the log.
fn serve(archive: &Path, options: &[&str]) -> Vec<String> {
    let volume = Volume::new();
    let words = ["blk", "--socket-path=/srv/disk.sock", "--blk-file=/srv/disk.img"];
    let container = volume.start("one", archive, options, &words);
    container.wait_for(" serving ");
    let mut machine = volume.connect();
    check(&mut machine, 1);
    machine.stop().unwrap();
    drop(machine);
    let log = container.stop();
    eventually("the socket is removed", || !volume.srv.join("disk.sock").exists());
    log
}

/// Writes podman's profile with the three calls of io_uring.
fn with_io_uring(dir: &Path) -> PathBuf {
    let mut profile: Value = serde_json::from_slice(&fs::read(PROFILE).unwrap()).unwrap();
    let names = ["io_uring_setup", "io_uring_enter", "io_uring_register"];
    let allowed = json!({ "names": names, "action": "SCMP_ACT_ALLOW" });
    profile["syscalls"].as_array_mut().unwrap().push(allowed);
    let path = dir.join("seccomp.json");
    fs::write(&path, profile.to_string()).unwrap();
    path
}

/// Builds the image. Returns its archive.
fn build(dir: &Path) -> PathBuf {
    let archive = dir.join("kickless.tar");
    let tool = repository().join("tools/container");
    let built = Command::new(tool).arg(kickless_binary().unwrap()).arg(&archive).status().unwrap();
    assert!(built.success(), "tools/container: {built}");
    archive
}

#[test]
fn a_container_without_privileges() {
    if let Some(why) = is_missing() {
        return println!("skipped: {why}");
    }
    let dir = TempDir::new().unwrap();
    let archive = build(dir.path());
    let by_default = serve(&archive, &[]);
    let profile = format!("--security-opt=seccomp={}", with_io_uring(dir.path()).display());
    let with_profile = serve(&archive, &[&profile]);
    for (log, engine) in [(by_default, "aio"), (with_profile, "io_uring")] {
        check_sandbox(&log).unwrap();
        let find = |text: &str| log.iter().any(|line| line.contains(text));
        assert!(find("sandbox mode=on landlock="), "{log:#?}");
        // The log names the engine only if it is not the best one.
        assert_eq!(find("engine=\"aio\""), engine == "aio", "{log:#?}");
    }
}

/// A process in another container takes over, and the driver goes on. The first container ends.
#[test]
fn an_upgrade_by_another_container() {
    if let Some(why) = is_missing() {
        return println!("skipped: {why}");
    }
    if Command::new("catatonit").arg("--version").stdout(Stdio::null()).status().is_err() {
        return println!("skipped: there is no catatonit, the init process of podman");
    }
    let dir = TempDir::new().unwrap();
    let archive = build(dir.path());
    let volume = Volume::new();
    let words = ["serve", "--config=/srv/devices.toml", "--control=/srv/control.sock"];
    let first = volume.start("one", &archive, &["--init"], &words);
    first.wait_for(" serving ");
    let mut machine = volume.connect();
    check(&mut machine, 1);
    let words = [&words[..], &["--upgrade-from=/srv/control.sock"]].concat();
    let second = volume.start("two", &archive, &["--init"], &words);
    second.wait_for(" took over ");
    check_sandbox(first.ended()).unwrap();
    check(&mut machine, 2);
    machine.stop().unwrap();
    drop(machine);
    check_sandbox(second.stop()).unwrap();
}
