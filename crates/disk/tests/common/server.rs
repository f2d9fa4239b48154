//! Runs the NBD servers nbdkit and qemu-nbd.

use kickless_disk::DiskSpec;
use kickless_testing::eventually;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait for a server's start. It ends only when the server cannot start.
const LIMIT: Duration = Duration::from_secs(60);

/// A server program, and the way the client talks to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// nbdkit, on a unix socket, with structured replies.
    Nbdkit,
    /// nbdkit, with simple replies.
    NbdkitSimple,
    /// qemu-nbd, over TCP.
    Qemu,
}

pub const KINDS: [Kind; 3] = [Kind::Nbdkit, Kind::NbdkitSimple, Kind::Qemu];

/// A server of one image. It is killed when this is dropped.
pub struct Server {
    kind: Kind,
    extra: Vec<String>,
    child: Child,
    port: u16,
    dir: TempDir,
}

impl Server {
    /// Starts a server of an image with these contents. `extra` are further arguments of the program.
    pub fn start(kind: Kind, contents: &[u8], extra: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("image"), contents).unwrap();
        let extra: Vec<String> = extra.iter().map(|&word| word.to_owned()).collect();
        let mut tries = 0;
        loop {
            let stderr = || std::fs::read_to_string(dir.path().join("stderr")).unwrap();
            assert!(tries < 10, "no NBD server: {}", stderr());
            tries += 1;
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut child = command(kind, dir.path(), port, &extra).spawn().unwrap();
            // Another process may have taken the port meanwhile.
            if starts(kind, dir.path(), port, &mut child) {
                return Self { kind, extra, child, port, dir };
            }
        }
    }

    pub fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// Returns the path of a file beside the image.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the URI of the export, with further parameters.
    pub fn uri(&self, parameters: &str) -> String {
        match self.kind {
            Kind::Qemu => format!("nbd://127.0.0.1:{}/disk?{parameters}", self.port),
            _ => format!("nbd+unix:///?socket={}&{parameters}", self.dir.path().join("sock").display()),
        }
    }

    pub fn spec(&self, parameters: &str) -> DiskSpec {
        DiskSpec::Nbd(self.uri(parameters).parse().unwrap())
    }

    /// Stops the process with a signal. Returns when all its threads are stopped.
    pub fn pause(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).unwrap();
        eventually("the NBD server does not stop", || all_threads_stopped(self.child.id()));
    }

    pub fn resume(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Kills the server and starts it at the same address, with the same image.
    pub fn restart(&mut self) {
        self.kill();
        let _ = std::fs::remove_file(self.dir.path().join("sock"));
        self.child = command(self.kind, self.dir.path(), self.port, &self.extra).spawn().unwrap();
        assert!(starts(self.kind, self.dir.path(), self.port, &mut self.child));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns whether a signal has stopped all threads of a process.
fn all_threads_stopped(process: u32) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.all(|thread| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    })
}

fn command(kind: Kind, dir: &Path, port: u16, extra: &[String]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).current_dir(dir);
    match kind {
        Kind::Nbdkit | Kind::NbdkitSimple => {
            let (options, parameters): (Vec<_>, Vec<_>) =
                extra.iter().partition(|word| word.starts_with('-'));
            command.args(["nbdkit", "--foreground", "--unix", "sock"]).args(options);
            if kind == Kind::NbdkitSimple {
                command.arg("--no-sr");
            }
            command.args(["file", "image"]).args(parameters);
        }
        Kind::Qemu => {
            command.args(["qemu-nbd", "--persistent", "--shared=8", "--format=raw", "--export-name=disk"]);
            command.args(["--discard=unmap", "--bind=127.0.0.1", &format!("--port={port}")]);
            command.args(extra).arg("image");
        }
    }
    let stderr = File::create(dir.join("stderr")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    command
}

/// Waits until the server accepts connections or ends. Returns whether it accepts them.
fn starts(kind: Kind, dir: &Path, port: u16, child: &mut Child) -> bool {
    let deadline = Instant::now() + LIMIT;
    loop {
        let accepts = match kind {
            Kind::Qemu => TcpStream::connect(("127.0.0.1", port)).is_ok(),
            _ => UnixStream::connect(dir.join("sock")).is_ok(),
        };
        if accepts {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(Instant::now() < deadline, "the NBD server does not start");
        thread::sleep(Duration::from_millis(5));
    }
}
