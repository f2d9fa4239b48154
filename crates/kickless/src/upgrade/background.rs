//! `--background`: the command waits until a process of its own serves. systemd runs it as a reload.
//!
//! ```text
//!   the command                       the process that takes over
//!   forks twice, waits                takes over, and the old process waits for its release
//!   tells systemd of the process      <- serves PID
//!   -> known                          releases the old process, reads the configuration file
//!   ends with status 0                <- done
//! ```
//! The command has all rights of its user, and the process that takes over is in its sandbox, which lets it
//! say nothing about the main process.
//!
//! The line `failed SENTENCE` or the end of the connection end the command with status 1.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{self, ExitCode};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result};
use kickless_sandbox::{Side, detach};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::log;
use crate::notify::Notify;

/// The connection to the command that waits, in the process that takes over.
static WAITING: OnceLock<UnixStream> = OnceLock::new();
/// The longest time that the process waits until the service manager knows it.
const KNOWN_WAIT: Duration = Duration::from_secs(10);

/// Makes the process that takes over. Returns in it. In the process that waits for it, returns the exit
/// status.
///
/// # Errors
/// The host makes no process.
pub(crate) fn enter() -> Result<Option<ExitCode>> {
    let (to_serving, to_waiting) = UnixStream::pair().context("no free descriptor")?;
    match detach()? {
        Side::Copy => {
            // The limit cannot be set later: a filter of system calls has no such call.
            to_waiting.set_read_timeout(Some(KNOWN_WAIT))?;
            drop(to_serving);
            let _ = WAITING.set(to_waiting);
            Ok(None)
        }
        Side::Caller => {
            drop(to_waiting);
            Ok(Some(match wait(&to_serving) {
                Ok(()) => ExitCode::SUCCESS,
                Err(sentence) => {
                    log::print_sentence(&sentence);
                    ExitCode::FAILURE
                }
            }))
        }
    }
}

/// Waits until the process that takes over is done. Returns the sentence of its failure.
fn wait(serving: &UnixStream) -> Result<(), String> {
    let mut lines = BufReader::new(serving).lines();
    loop {
        let line = lines.next().and_then(Result::ok);
        let (word, rest) = line.as_deref().and_then(|line| line.split_once(' ')).unwrap_or_default();
        match word {
            "serves" => {
                tell_manager(rest);
                let mut serving = serving;
                // If this fails, the process has ended, and the next line does not come.
                let _ = serving.write_all(b"\n");
            }
            "done" => return Ok(()),
            "failed" => return Err(rest.to_owned()),
            _ => return Err("the process that was to take over has ended".into()),
        }
    }
}

/// Tells the service manager that the main process of the service is another one now.
fn tell_manager(pid: &str) {
    let told = Notify::connect().and_then(|manager| {
        let Some(manager) = manager else { return Ok(()) };
        manager.tell(&format!("MAINPID={pid}"), &[])?;
        manager.barrier()
    });
    if let Err(error) = told {
        log::print_sentence(&format!("systemd may not know the new main process: {error:#}"));
    }
}

/// Returns the descriptor that helper processes must not keep.
pub(crate) fn fd() -> Option<BorrowedFd<'static>> {
    WAITING.get().map(AsFd::as_fd)
}

/// Checks that the command still waits, or that there is none.
///
/// # Errors
/// It has been ended, perhaps by a service manager for which it took too long.
pub(crate) fn check() -> Result<(), String> {
    let Some(waiting) = WAITING.get() else { return Ok(()) };
    let mut fds = [PollFd::new(waiting, PollFlags::empty())];
    let is_gone = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0);
    if is_gone { Err("the command that waits for the upgrade has been ended".into()) } else { Ok(()) }
}

/// Tells the command that this process serves. Waits until the service manager knows.
pub(crate) fn serves() {
    if let Some(mut waiting) = WAITING.get()
        && say(&format!("serves {}", process::id()))
    {
        // Without an answer, the command has ended.
        let _ = waiting.read(&mut [0]);
    }
}

/// Tells the command that all is done.
pub(crate) fn done() {
    say("done ");
}

/// Tells the command why this process does not serve. Prints the sentence if none waits.
pub(crate) fn fail(sentence: &str) {
    if !say(&format!("failed {sentence}")) {
        log::print_sentence(sentence);
    }
}

fn say(line: &str) -> bool {
    let line = line.replace('\n', " ") + "\n";
    WAITING.get().is_some_and(|mut waiting| waiting.write_all(line.as_bytes()).is_ok())
}
