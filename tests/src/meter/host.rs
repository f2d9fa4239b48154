//! Divides the processors of the host between the daemon's worker, the victims and the attackers.

use std::fs;

use anyhow::Result;
use rustix::process::{Pid, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::daemon::Daemon;

/// A side of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The driver of the victims. It has the last processor, and never sleeps. The daemon's worker has the
    /// first.
    Victim,
    /// The driver of an attacker. It gets a tenth of the last processor at most, so that its own time does
    /// not hurt the victims.
    Attacker,
}

impl Role {
    fn priority(self) -> i32 {
        match self {
            Role::Victim => 0,
            // Linux gives it 110 parts, and the other 1024.
            Role::Attacker => 10,
        }
    }
}

/// Returns the processors of this process.
pub fn cpus() -> Vec<usize> {
    let all = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect()
}

/// Gives the calling thread the priority and the processor of its role. Without the right to do that, it
/// stays as it is: the figures are then less steady.
pub fn take_role(role: Role) {
    give_role(None, role);
}

/// Gives a thread, or the calling one, the priority and the processor of a role.
fn give_role(thread: Option<Pid>, role: Role) {
    let _ = setpriority_process(thread, role.priority());
    if let Some(last) = cpus().last() {
        let mut set = CpuSet::new();
        set.set(*last);
        let _ = sched_setaffinity(thread, &set);
    }
}

/// Gives all threads of the daemon but its workers the part of an attacker, and with them the threads that
/// they start. What an attacker makes a session do takes a processor, and a host has one for that.
///
/// # Errors
/// The daemon has ended.
pub fn settle(daemon: &Daemon) -> Result<()> {
    for task in fs::read_dir(format!("/proc/{}/task", daemon.pid()))?.flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let thread = task.file_name().to_str().and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
        if !name.starts_with("worker") && thread.is_some() {
            give_role(thread, Role::Attacker);
        }
    }
    Ok(())
}

/// Puts this session before all others of the host, which its threads alone cannot do where the kernel groups
/// threads by session. Dropping it takes that back.
pub struct FirstSession(String);

impl FirstSession {
    const FILE: &str = "/proc/self/autogroup";

    /// Takes the right, if there is one.
    pub fn take() -> FirstSession {
        let text = fs::read_to_string(Self::FILE).unwrap_or_default();
        // The line ends with "nice" and a number.
        let before = text.split_whitespace().last().unwrap_or("0").to_owned();
        let _ = fs::write(Self::FILE, "-10");
        FirstSession(before)
    }
}

impl Drop for FirstSession {
    fn drop(&mut self) {
        let _ = fs::write(Self::FILE, &self.0);
    }
}
