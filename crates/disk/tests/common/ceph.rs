//! Makes and reads images of the Ceph cluster that `tools/ceph` sets up, with Ceph's own tools.

#![allow(clippy::expect_used, reason = "tests")]

use kickless_disk::DiskSpec;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// The longest wait for the OSD to stop. It ends only when the OSD cannot stop.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the directory of the cluster's files.
fn dir() -> PathBuf {
    let dir = std::env::var_os("KICKLESS_TEST_CEPH");
    dir.expect("there is no cluster: `make test-rbd` sets one up and runs these tests").into()
}

/// Runs one of Ceph's tools. Returns its standard output.
pub fn run(program: &str, words: &[&str], input: &[u8]) -> Vec<u8> {
    let mut stdin = tempfile::tempfile().unwrap();
    stdin.write_all(input).unwrap();
    stdin.rewind().unwrap();
    let conf = dir().join("ceph.conf");
    let output =
        Command::new(program).env("CEPH_CONF", conf).args(words).stdin(Stdio::from(stdin)).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {stderr}");
    output.stdout
}

/// Runs the tool `rbd`. Returns its standard output.
pub fn rbd(words: &[&str]) -> String {
    String::from_utf8(run("rbd", words, &[])).unwrap()
}

/// A new image. It is removed when this is dropped.
pub struct Image {
    /// The pool and the name in it.
    pub name: String,
}

impl Image {
    /// Makes an image with these contents, in objects that are smaller than a long request.
    pub fn of(contents: &[u8]) -> Self {
        Self::with(contents, &["--object-size=16K"])
    }

    /// Makes an image with these contents. `options` are for `rbd import`.
    pub fn with(contents: &[u8], options: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rbd/test-{}-{number}", std::process::id());
        run("rbd", &[&["import", "--no-progress"], options, &["-", &name]].concat(), contents);
        Self { name }
    }

    /// Returns the text of the disk's specification, with further options.
    pub fn text(&self, options: &str) -> String {
        format!("rbd:{}?conf={}&{options}", self.name, dir().join("ceph.conf").display())
    }

    pub fn spec(&self, options: &str) -> DiskSpec {
        spec(&self.text(options))
    }

    /// Returns the contents that the cluster has stored.
    pub fn contents(&self) -> Vec<u8> {
        run("rbd", &["export", "--no-progress", &self.name, "-"], &[])
    }

    pub fn id(&self) -> String {
        let info = rbd(&["info", &self.name]);
        info.lines().find_map(|line| line.trim().strip_prefix("id: ")).unwrap().to_owned()
    }

    /// Returns the number of objects that hold the image's data.
    pub fn objects(&self) -> usize {
        let listed = String::from_utf8(run("rados", &["--pool=rbd", "ls"], &[])).unwrap();
        let prefix = format!("rbd_data.{}.", self.id());
        listed.lines().filter(|name| name.starts_with(&prefix)).count()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // The image may still be open, or the test may have failed because the cluster does not answer. In
        // both cases the image is removed with the cluster.
        let mut remove = Command::new("timeout");
        remove.args(["10", "rbd", "remove", "--no-progress", &self.name]);
        remove.env("CEPH_CONF", dir().join("ceph.conf")).stderr(Stdio::null());
        let _ = remove.status();
    }
}

/// A user of the cluster, with the file that holds the user's key.
pub struct Client {
    id: String,
    keyring: NamedTempFile,
}

impl Client {
    /// Makes a user with these capabilities. Each follows the kind of daemon that grants it.
    pub fn new(name: &str, capabilities: &[&str]) -> Self {
        let id = format!("{name}-{}", std::process::id());
        let entity = format!("client.{id}");
        let text = run("ceph", &[&["auth", "get-or-create", &entity], capabilities].concat(), &[]);
        Self::with(id, &String::from_utf8(text).unwrap())
    }

    /// Returns a client with the name of this one and the key of `other`.
    pub fn with_key_of(&self, other: &Self) -> Self {
        let text = std::fs::read_to_string(other.keyring.path()).unwrap();
        Self::with(self.id.clone(), &text.replace(&other.id, &self.id))
    }

    fn with(id: String, text: &str) -> Self {
        let mut keyring = NamedTempFile::new().unwrap();
        keyring.write_all(text.as_bytes()).unwrap();
        Self { id, keyring }
    }

    /// Returns the options of a disk that this client opens.
    pub fn options(&self) -> String {
        format!("id={}&keyring={}", self.id, self.keyring.path().display())
    }
}

pub fn spec(text: &str) -> DiskSpec {
    DiskSpec::Rbd(Box::new(text.parse().unwrap()))
}

/// The only OSD of the cluster, while it is stopped. It continues when this is dropped.
pub struct PausedOsd;

impl PausedOsd {
    fn pid() -> Pid {
        let mut text = String::new();
        File::open(dir().join("run/osd.0.pid")).unwrap().read_to_string(&mut text).unwrap();
        Pid::from_raw(text.trim().parse().unwrap()).unwrap()
    }

    /// Stops the process with a signal. Returns when all its threads are stopped.
    pub fn pause() -> Self {
        let pid = Self::pid();
        kill_process(pid, Signal::STOP).unwrap();
        let deadline = Instant::now() + LIMIT;
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
        while !std::fs::read_dir(&tasks).unwrap().all(is_stopped) {
            assert!(Instant::now() < deadline, "the OSD does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Self
    }

    /// Kills the OSD. `tools/ceph` starts it again at once.
    pub fn kill(&self) {
        kill_process(Self::pid(), Signal::KILL).unwrap();
    }
}

impl Drop for PausedOsd {
    fn drop(&mut self) {
        let _ = kill_process(Self::pid(), Signal::CONT);
    }
}
