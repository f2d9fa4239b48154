//! Processes of passt, the network of a user without rights.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::client::{client, mismatch};
use crate::message;
use crate::wire::{Reply, Request};

/// The name of the program.
const NAME: &str = "passt";
/// The byte that comes with the pipe of standard error.
const ERRORS: &[u8; 1] = b"e";
/// The time between two looks at a process that is ending.
pub(crate) const END_INTERVAL: Duration = Duration::from_millis(5);
/// The longest wait for the end of a process.
pub(crate) const END_MAX: Duration = Duration::from_secs(5);

/// A process of passt. Dropping it kills the process if it has not ended.
#[derive(Debug)]
pub struct PasstProcess {
    pid: u32,
    of: Option<Parent>,
}

/// The process that has it as a child.
#[derive(Debug)]
enum Parent {
    /// This one.
    Here(Child),
    /// The launcher, with this number.
    Launcher(u64),
}

/// Returns whether a directory of PATH has the program.
pub fn has_passt() -> bool {
    match client() {
        Some(client) => {
            matches!(client.ask(&Request::FindPasst {}), Ok((Reply::Found { is_found: true }, _)))
        }
        None => has_passt_here(),
    }
}

/// A process of passt that has started.
#[derive(Debug)]
pub struct StartedPasst {
    /// The process.
    pub process: PasstProcess,
    /// The other end of its socket.
    pub socket: OwnedFd,
    /// The other end of its standard error, a pipe.
    pub errors: OwnedFd,
}

/// Starts passt with these arguments.
///
/// # Errors
/// It is not installed, or it cannot be started.
pub fn start_passt(arguments: &[String]) -> io::Result<StartedPasst> {
    let (process, socket) = match client() {
        None => {
            let (child, socket) = start_passt_here(arguments)?;
            (PasstProcess { pid: child.id(), of: Some(Parent::Here(child)) }, socket)
        }
        Some(client) => match client.ask(&Request::StartPasst { arguments: arguments.to_vec() })? {
            (Reply::Started { child, pid }, Some(socket)) => {
                (PasstProcess { pid, of: Some(Parent::Launcher(child)) }, socket)
            }
            _ => return Err(mismatch()),
        },
    };
    let errors = take_errors(&socket)?;
    Ok(StartedPasst { process, socket, errors })
}

/// Takes the pipe of standard error, which is the first that comes over the socket.
fn take_errors(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut first = [0; ERRORS.len()];
    let mut received = message::receive(socket, &mut first)?;
    match (received.fds.pop(), received.len == ERRORS.len() && first == *ERRORS) {
        (Some(errors), true) => Ok(errors),
        _ => Err(mismatch()),
    }
}

impl PasstProcess {
    /// Returns the number of the process.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Waits for the end of the process, whose socket is closed. Kills it if it does not end by itself in
    /// this time, and returns `None` then.
    pub fn end(mut self, wait: Duration) -> Option<ExitStatus> {
        self.of.take()?.end(wait)
    }
}

impl Drop for PasstProcess {
    fn drop(&mut self) {
        let _ = self.of.take().map(|of| of.end(Duration::ZERO));
    }
}

impl Parent {
    fn end(self, wait: Duration) -> Option<ExitStatus> {
        match self {
            Self::Here(mut child) => {
                let deadline = Instant::now() + wait.min(END_MAX);
                while Instant::now() < deadline {
                    match child.try_wait() {
                        Ok(Some(status)) => return Some(status),
                        Ok(None) => thread::sleep(END_INTERVAL),
                        Err(_) => break,
                    }
                }
                // Both do nothing after its end.
                let _ = child.kill();
                let _ = child.wait();
                None
            }
            Self::Launcher(child) => {
                let wait_ms = wait.min(END_MAX).as_millis() as u32;
                match client()?
                    .give_back(&Request::EndPasst { child, wait_ms }, Duration::from_millis(wait_ms.into()))
                {
                    Ok((Reply::Ended { status }, _)) => status.map(ExitStatus::from_raw),
                    _ => None,
                }
            }
        }
    }
}

/// Returns whether a directory of this process's PATH has the program.
pub(crate) fn has_passt_here() -> bool {
    find_in(&env::var_os("PATH").unwrap_or_default()).is_some()
}

/// Starts passt as a child of this process.
///
/// # Errors
/// It is not installed, or it cannot be started.
pub(crate) fn start_passt_here(arguments: &[String]) -> io::Result<(Child, OwnedFd)> {
    let program = find_in(&env::var_os("PATH").unwrap_or_default()).ok_or(Errno::NOENT)?;
    let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // A reply has one descriptor, the socket. The pipe waits in the socket, before all that passt sends.
    let (errors, its_errors) = pipe_with(PipeFlags::CLOEXEC)?;
    message::send(&its, ERRORS, Some(errors.as_fd()))?;
    let child = Command::new(program)
        .args(["--quiet", "--foreground", "--fd", "0"])
        .args(arguments)
        .stdin(Stdio::from(its))
        .stdout(Stdio::null())
        .stderr(Stdio::from(its_errors))
        .spawn()?;
    Ok((child, ours))
}

fn find_in(paths: &OsStr) -> Option<PathBuf> {
    let mut found = env::split_paths(paths).map(|directory| directory.join(NAME));
    found.find(|path| path.is_file() && access(path, Access::EXEC_OK).is_ok())
}

/// Options of passt that name no file, no user and no descriptor, and do not end it: those with a value or
/// without one.
const HARMLESS: &[&str] = &[
    "address",
    "debug",
    "dhcp-dns",
    "dhcp-search",
    "dns",
    "dns-forward",
    "dns-host",
    "fqdn",
    "freebind",
    "gateway",
    "host-lo-to-ns-lo",
    "hostname",
    "interface",
    "ipv4-only",
    "ipv6-only",
    "mac-addr",
    "map-guest-addr",
    "map-host-loopback",
    "mtu",
    "netmask",
    "no-dhcp",
    "no-dhcp-dns",
    "no-dhcp-search",
    "no-dhcpv6",
    "no-icmp",
    "no-map-gw",
    "no-ndp",
    "no-ra",
    "no-tcp",
    "no-udp",
    "outbound",
    "outbound-if4",
    "outbound-if6",
    "search",
    "stderr",
    "tcp-ports",
    "trace",
    "udp-ports",
];
/// Their letters without a value. Further letters can follow them.
const HARMLESS_FLAGS: &[u8] = b"de46";
/// Their letters with a value.
const HARMLESS_LETTERS: &[u8] = b"aDgHimMnoStu";

/// Returns whether a call may start passt with these arguments. An option must be written in full, because an
/// abbreviation means another option in another version.
pub(crate) fn can_be_in_calls(arguments: &[String]) -> bool {
    arguments.iter().all(|argument| match argument.strip_prefix("--") {
        Some(long) => HARMLESS.contains(&long.split('=').next().unwrap_or_default()),
        None => {
            let mut letters = argument.strip_prefix('-').unwrap_or_default().bytes();
            // Letters without a value, and then perhaps one whose value is the rest.
            let last = letters.find(|letter| !HARMLESS_FLAGS.contains(letter));
            argument.len() > 1
                && argument.starts_with('-')
                && last.is_none_or(|letter| HARMLESS_LETTERS.contains(&letter))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_in_path_is_not_found() {
        assert_eq!(find_in(OsStr::new("/nonexistent:/proc/self")), None);
    }

    #[test]
    fn calls_may_not_name_files_or_users() {
        let can_be = |argument: &str| can_be_in_calls(&["-4".into(), argument.into()]);
        for allowed in ["--tcp-ports=8080:80", "--no-tcp", "-4d", "-tall", "-46m1500", "--mtu=1500"] {
            assert!(can_be(allowed), "{allowed}");
        }
        for refused in [
            "--log-file=/l",
            "--log",
            "--pcap=/p",
            "--runas=root",
            "--repair-path=/r",
            "--socket=/s",
            "--fd=3",
            "--vhost-user",
            "--pid=/p",
            "-l/l",
            "-4l/l",
            "-p/p",
            "-s/s",
            "-P/p",
            "-F3",
            "-dF3",
            "-f",
            "-1",
            "-h",
            "/s",
            "-",
            "--",
            "",
            "8080",
            "--tcp",
            "--=x",
            "-\u{e9}",
        ] {
            assert!(!can_be(refused), "{refused}");
        }
    }
}
