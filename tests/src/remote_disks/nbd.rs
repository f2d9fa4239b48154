//! Creates disks that are not raw images: images in QEMU's format, and NBD servers.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::daemon::child_command;

/// Time limit for the start of a server.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `qemu-img`.
///
/// # Errors
/// `qemu-img` fails.
pub fn qemu_img(words: &[&str], paths: &[&Path]) -> Result<()> {
    let output = Command::new("qemu-img").args(words).args(paths).output().context("cannot run qemu-img")?;
    ensure!(output.status.success(), "qemu-img {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The program that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// nbdkit, on a unix socket.
    Nbdkit,
    /// qemu-nbd, over TCP.
    Qemu,
}

/// A running server of a raw image. Dropping it kills the server.
pub struct NbdServer {
    kind: Kind,
    image: PathBuf,
    child: Child,
    port: u16,
    dir: TempDir,
}

impl NbdServer {
    /// Starts a server.
    ///
    /// # Errors
    /// The server does not start.
    pub fn start(kind: Kind, image: &Path) -> Result<NbdServer> {
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let mut child = spawn(kind, image, dir.path(), port)?;
            // A server that ends at once may have lost its port to another process.
            if starts(dir.path(), &mut child)? {
                return Ok(NbdServer { kind, image: image.to_owned(), child, port, dir });
            }
        }
        bail!("{kind:?} does not start")
    }

    /// Returns its address. Requests wait `seconds` seconds for a server that has gone.
    pub fn uri(&self, seconds: u32) -> String {
        match self.kind {
            Kind::Qemu => format!("nbd://127.0.0.1:{}/disk?reconnect-delay={seconds}", self.port),
            Kind::Nbdkit => {
                let socket = self.dir.path().join("sock");
                format!("nbd+unix:///?socket={}&reconnect-delay={seconds}", socket.display())
            }
        }
    }

    /// Stops the server by a signal. All its threads have stopped when this returns.
    ///
    /// # Errors
    /// The server has ended.
    pub fn stop(&self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::STOP)?;
        let deadline = Instant::now() + LIMIT;
        while !all_threads_stopped(self.child.id())? {
            ensure!(Instant::now() < deadline, "the NBD server does not stop");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Continues the stopped server.
    ///
    /// # Errors
    /// The server has ended.
    pub fn resume(&self) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), Signal::CONT)?)
    }

    /// Kills the server.
    ///
    /// # Errors
    /// The server cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        let _ = self.child.kill();
        self.child.wait()?;
        Ok(())
    }

    /// Kills the server and starts it again with the same image at the same address.
    ///
    /// # Errors
    /// The server does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        for name in ["sock", "there"] {
            let _ = std::fs::remove_file(self.dir.path().join(name));
        }
        self.child = spawn(self.kind, &self.image, self.dir.path(), self.port)?;
        ensure!(starts(self.dir.path(), &mut self.child)?, "{:?} does not start again", self.kind);
        Ok(())
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Returns whether all threads of a process are stopped.
pub(crate) fn all_threads_stopped(process: u32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let stat = std::fs::read_to_string(thread?.path().join("stat"))?;
        if !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn spawn(kind: Kind, image: &Path, dir: &Path, port: u16) -> Result<Child> {
    let mut command = match kind {
        Kind::Nbdkit => {
            let mut command = child_command("nbdkit");
            command.args(["--foreground", "--unix=sock", "--pidfile=there", "file"]).arg(image);
            command
        }
        Kind::Qemu => {
            let mut command = child_command("qemu-nbd");
            command.args(["--persistent", "--shared=8", "--format=raw", "--export-name=disk"]);
            command.args(["--discard=unmap", "--pid-file=there", "--bind=127.0.0.1"]);
            command.arg(format!("--port={port}")).arg(image);
            command
        }
    };
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().with_context(|| format!("cannot run {kind:?}"))
}

/// Waits until the server has written its process id, because it listens then. Returns `false` if it ends
/// first.
fn starts(dir: &Path, child: &mut Child) -> Result<bool> {
    let deadline = Instant::now() + LIMIT;
    while std::fs::metadata(dir.join("there")).map_or(0, |file| file.len()) == 0 {
        if child.try_wait()?.is_some() {
            return Ok(false);
        }
        ensure!(Instant::now() < deadline, "the NBD server does not start");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}
