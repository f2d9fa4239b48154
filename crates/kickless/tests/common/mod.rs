//! A daemon with a control socket, and `kickless ctl`.
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_kickless");
/// After this time, a test has failed. No machine is so slow.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Returns the children of the main thread of a process.
///
/// # Errors
/// The process has ended.
pub(crate) fn children(pid: u32) -> io::Result<Vec<u32>> {
    let pids = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect())
}

/// Fails the test if the sandbox of a program has refused a system call, by lines of its log.
pub(crate) fn check_sandbox(log: &str) {
    let refused = log.lines().find(|line| line.contains("the sandbox refused"));
    // A test that fails already has its own reason.
    assert!(refused.is_none() || thread::panicking(), "{}", refused.unwrap_or_default());
}

/// Reads a log to its end on a thread, and checks it.
pub(crate) fn checked(
    log: impl Read + Send + 'static,
    mut each: impl FnMut(String) + Send + 'static,
) -> Checked {
    let lines = BufReader::new(log).lines().map_while(Result::ok);
    let read = move || {
        let mut refused = String::new();
        for line in lines {
            if line.contains("the sandbox refused") {
                refused += &line;
            }
            each(line);
        }
        refused
    };
    Checked(Some(thread::spawn(read)))
}

/// A log that is read to its end and checked when it is dropped. The process must have ended before.
pub(crate) struct Checked(Option<JoinHandle<String>>);

impl Drop for Checked {
    fn drop(&mut self) {
        check_sandbox(&self.0.take().unwrap().join().unwrap_or_default());
    }
}

/// A daemon and its directory. Killed if the test fails.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) log: Receiver<String>,
    pub(crate) dir: TempDir,
    _checked: Checked,
}

impl Daemon {
    /// Starts `kickless serve` with this configuration, in a directory with a control socket. `DIR` stands
    /// for the directory.
    pub(crate) fn serve(config: &str, arguments: &[&str]) -> Self {
        let (mut command, dir) = Self::command(config, arguments);
        command.env("RUNTIME_DIRECTORY", dir.path());
        Self::start(command, dir)
    }

    /// Starts `kickless serve` as [`Daemon::serve`] does, without a control socket.
    pub(crate) fn serve_alone(config: &str, arguments: &[&str]) -> Self {
        let (mut command, dir) = Self::command(config, arguments);
        command.env_remove("RUNTIME_DIRECTORY");
        Self::start(command, dir)
    }

    fn command(config: &str, arguments: &[&str]) -> (Command, TempDir) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("kickless.toml");
        fs::write(&path, config.replace("DIR", dir.path().to_str().unwrap())).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg("--config").arg(path);
        command.args(arguments.iter().map(|word| word.replace("DIR", dir.path().to_str().unwrap())));
        (command, dir)
    }

    /// Has the file read again by a signal.
    pub(crate) fn hang_up(&self) {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
    }

    pub(crate) fn start(mut command: Command, dir: TempDir) -> Self {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = channel();
        let each = move |line| {
            // A test can drop the log.
            let _ = sender.send(line);
        };
        let checked = checked(child.stderr.take().unwrap(), each);
        Self { child, log, dir, _checked: checked }
    }

    /// Waits for a line of the log.
    pub(crate) fn wait_for(&self, part: &str) -> String {
        loop {
            let line = self.log.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("no line with {part}"));
            if line.contains(part) {
                return line;
            }
        }
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        command.arg("ctl").args(arguments).env("RUNTIME_DIRECTORY", self.dir.path());
        command.stdin(Stdio::null()).output().unwrap()
    }

    pub(crate) fn call(&self, method: &str, params: Value) -> Value {
        let output = self.ctl(&[method, &params.to_string()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.is_empty(), "{method}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Makes a call that fails, and returns its sentence.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        self.refused_with(1, arguments)
    }

    /// Makes a call that fails with this status, and returns its sentence.
    pub(crate) fn refused_with(&self, status: i32, arguments: &[&str]) -> String {
        let output = self.ctl(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.starts_with("kickless: ") && said.lines().count() == 1, "not one sentence: {said}");
        said
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the configuration file anew.
    pub(crate) fn rewrite(&self, config: &str) {
        fs::write(self.path("kickless.toml"), config.replace("DIR", self.dir.path().to_str().unwrap()))
            .unwrap();
    }

    /// Returns the names and the states of the devices.
    pub(crate) fn states(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let listed = self.call("device.list", json!({}));
        listed.as_array().unwrap().iter().map(|of| (text(&of["name"]), text(&of["state"]))).collect()
    }

    /// Waits until the daemon ends. Returns its status.
    pub(crate) fn end(mut self) -> Option<i32> {
        while self.log.recv_timeout(LIMIT).is_ok() {}
        self.child.wait().unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the table of a disk in the directory of the daemon.
pub(crate) fn disk(name: &str, more: &str) -> String {
    format!("[[device]]\nsocket-path = 'DIR/{name}.sock'\nblk-file = 'null:1M'\n{more}\n")
}
