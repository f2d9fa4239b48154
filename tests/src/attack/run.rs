//! Runs the program with an attack.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::layout;
use super::table::Setting;
use crate::daemon::{child_command, kickless_binary};

/// The variable that starts an attack.
pub const VARIABLE: &str = "KICKLESS_ATTACK";
/// The time after which an attack that does not end is killed. A failing message waits for a third of it.
const LIMIT: Duration = Duration::from_secs(60);
/// The beginning of a line with an answer.
const PREFIX: &str = "attack: ";

/// An attack that is over.
#[derive(Debug)]
pub struct Outcome {
    /// The names of the tries and their answers, in their order.
    pub answers: Vec<(String, String)>,
    /// All lines of standard error.
    pub log: Vec<String>,
    /// The exit status.
    pub status: ExitStatus,
    /// The files that no device has are as before.
    pub is_untouched: bool,
}

/// Makes the tries with these names. Without names, returns those that there are, in place of answers.
///
/// # Errors
/// The program cannot be run.
pub fn run(mode: &str, setting: Setting, names: &[&str]) -> Result<Outcome> {
    let dir = TempDir::new()?;
    let directory = dir.path().canonicalize()?;
    let has_calls = setting != Setting::Alone;
    layout::make(&directory, &directory, has_calls)?;
    let mut command = child_command(kickless_binary()?);
    command.args(arguments(mode, &directory, has_calls)).env_remove("RUNTIME_DIRECTORY");
    command.env(VARIABLE, format!("{} {}", directory.display(), names.join(" ")));
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("kickless")?;
    let (ended, end) = mpsc::channel::<()>();
    let pid = Pid::from_child(&child);
    thread::spawn(move || {
        if end.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            // It has not ended, so its number is still its own.
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let mut lines = BufReader::new(child.stderr.take().context("no pipe")?).lines();
    let mut log = Vec::new();
    while let Some(line) = lines.next().transpose()? {
        let serves = line.contains(" serving ");
        log.push(line);
        if serves && child.stdin.is_some() {
            layout::change(&directory)?;
            // The attack begins at the end of its standard input.
            drop(child.stdin.take());
        }
    }
    drop(ended);
    let status = child.wait()?;
    Ok(Outcome { answers: answers(&log), log, status, is_untouched: layout::is_untouched(&directory)? })
}

/// Returns the arguments of the program.
pub fn arguments(mode: &str, directory: &Path, has_calls: bool) -> Vec<String> {
    let directory = directory.display();
    let mut arguments =
        vec!["serve".into(), format!("--config={directory}/config/file"), format!("--sandbox={mode}")];
    if has_calls {
        arguments.push(format!("--control={directory}/control/socket"));
    }
    arguments
}

/// Returns the answers of a log.
pub fn answers(log: &[String]) -> Vec<(String, String)> {
    let answers = log.iter().filter_map(|line| line.strip_prefix(PREFIX)?.split_once(' '));
    answers.map(|(name, answer)| (name.to_owned(), answer.to_owned())).collect()
}
