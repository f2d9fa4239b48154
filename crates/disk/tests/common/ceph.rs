//! Images of the Ceph cluster that `tools/ceph` sets up, made and looked at by Ceph's own tools.

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

/// Nothing takes the cluster so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Where it keeps its things.
fn dir() -> PathBuf {
    let dir = std::env::var_os("KICKLESS_TEST_CEPH");
    dir.expect("there is no cluster: `make test-rbd` sets one up and runs these tests").into()
}

/// Runs one of Ceph's tools; what it prints.
pub fn run(program: &str, words: &[&str], input: &[u8]) -> Vec<u8> {
    let mut from = tempfile::tempfile().unwrap();
    from.write_all(input).unwrap();
    from.rewind().unwrap();
    let conf = dir().join("ceph.conf");
    let output =
        Command::new(program).env("CEPH_CONF", conf).args(words).stdin(Stdio::from(from)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {said}");
    output.stdout
}

pub fn rbd(words: &[&str]) -> String {
    String::from_utf8(run("rbd", words, &[])).unwrap()
}

/// An image of its own, removed when this is dropped.
pub struct Image {
    /// With its pool.
    pub name: String,
}

impl Image {
    /// One with these contents, in objects that are smaller than a long request.
    pub fn of(contents: &[u8]) -> Self {
        Self::with(contents, &["--object-size=16K"])
    }

    /// One with these contents, made with these options of `rbd import`.
    pub fn with(contents: &[u8], options: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rbd/test-{}-{number}", std::process::id());
        run("rbd", &[&["import", "--no-progress"], options, &["-", &name]].concat(), contents);
        Self { name }
    }

    /// How it is written, with further options.
    pub fn text(&self, options: &str) -> String {
        format!("rbd:{}?conf={}&{options}", self.name, dir().join("ceph.conf").display())
    }

    pub fn spec(&self, options: &str) -> DiskSpec {
        spec(&self.text(options))
    }

    /// What the cluster has of it.
    pub fn contents(&self) -> Vec<u8> {
        run("rbd", &["export", "--no-progress", &self.name, "-"], &[])
    }

    pub fn id(&self) -> String {
        let info = rbd(&["info", &self.name]);
        info.lines().find_map(|line| line.trim().strip_prefix("id: ")).unwrap().to_owned()
    }

    /// How many objects hold its data.
    pub fn objects(&self) -> usize {
        let listed = String::from_utf8(run("rados", &["--pool=rbd", "ls"], &[])).unwrap();
        let prefix = format!("rbd_data.{}.", self.id());
        listed.lines().filter(|name| name.starts_with(&prefix)).count()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // It may be open still, or the test may have failed because nothing answers; it goes with the cluster.
        let mut remove = Command::new("timeout");
        remove.args(["10", "rbd", "remove", "--no-progress", &self.name]);
        remove.env("CEPH_CONF", dir().join("ceph.conf")).stderr(Stdio::null());
        let _ = remove.status();
    }
}

/// A client of the cluster, and the keyring with its key.
pub struct Client {
    id: String,
    keyring: NamedTempFile,
}

impl Client {
    /// One with these capabilities, each after the kind of daemon that grants it.
    pub fn new(name: &str, capabilities: &[&str]) -> Self {
        let id = format!("{name}-{}", std::process::id());
        let entity = format!("client.{id}");
        let text = run("ceph", &[&["auth", "get-or-create", &entity], capabilities].concat(), &[]);
        Self::with(id, &String::from_utf8(text).unwrap())
    }

    /// One who says to be this client, and has the key of another.
    pub fn with_key_of(&self, other: &Self) -> Self {
        let text = std::fs::read_to_string(other.keyring.path()).unwrap();
        Self::with(self.id.clone(), &text.replace(&other.id, &self.id))
    }

    fn with(id: String, text: &str) -> Self {
        let mut keyring = NamedTempFile::new().unwrap();
        keyring.write_all(text.as_bytes()).unwrap();
        Self { id, keyring }
    }

    /// The options of a disk that is opened by this client.
    pub fn options(&self) -> String {
        format!("id={}&keyring={}", self.id, self.keyring.path().display())
    }
}

pub fn spec(text: &str) -> DiskSpec {
    DiskSpec::Rbd(Box::new(text.parse().unwrap()))
}

/// The one OSD, which goes on when this is dropped.
pub struct Osd;

impl Osd {
    fn pid() -> Pid {
        let mut text = String::new();
        File::open(dir().join("run/osd.0.pid")).unwrap().read_to_string(&mut text).unwrap();
        Pid::from_raw(text.trim().parse().unwrap()).unwrap()
    }

    /// Stops it where it is; all of its threads stand still when this returns.
    pub fn stop() -> Self {
        let pid = Self::pid();
        kill_process(pid, Signal::STOP).unwrap();
        let deadline = Instant::now() + LIMIT;
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
        while !std::fs::read_dir(&tasks).unwrap().all(stands) {
            assert!(Instant::now() < deadline, "the OSD does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Self
    }

    /// Kills it; another is started at once by who has started this one.
    pub fn kill() {
        kill_process(Self::pid(), Signal::KILL).unwrap();
    }
}

impl Drop for Osd {
    fn drop(&mut self) {
        let _ = kill_process(Self::pid(), Signal::CONT);
    }
}
