//! The passt process.

use super::UserOptions;
use rustix::fs::{Access, access};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fmt, io, thread};

const NAME: &str = "passt";
/// The time in which passt ends after its socket has closed. It takes milliseconds; a process that hangs is
/// killed.
const END_MAX: Duration = Duration::from_secs(2);
/// The time between two looks at a process that is ending.
const END_INTERVAL: Duration = Duration::from_millis(5);

/// The program, with its arguments.
#[derive(Clone, Debug)]
pub struct Passt {
    program: PathBuf,
    options: UserOptions,
}

/// The reason for which a port cannot have passt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PasstError {
    /// No directory of PATH has it.
    #[error("the program passt is not installed: install the package passt, as with apt install passt")]
    NotInstalled,
}

impl Passt {
    /// Finds the program in the directories of PATH.
    ///
    /// # Errors
    /// It is not installed.
    pub fn find(options: UserOptions) -> Result<Self, PasstError> {
        let paths = env::var_os("PATH").unwrap_or_default();
        let program = find_in(&paths).ok_or(PasstError::NotInstalled)?;
        Ok(Self { program, options })
    }

    /// Starts the process. Returns the other end of its socket too.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn start(&self) -> io::Result<(PasstChild, OwnedFd)> {
        let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let child = Command::new(&self.program)
            .args(["--quiet", "--foreground", "--fd", "0"])
            .args(self.options.arguments())
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .spawn()?;
        Ok((PasstChild(child), ours))
    }
}

#[expect(clippy::disallowed_methods, reason = "the program is started, not opened")]
fn find_in(paths: &OsStr) -> Option<PathBuf> {
    let mut found = env::split_paths(paths).map(|directory| directory.join(NAME));
    found.find(|path| path.is_file() && access(path, Access::EXEC_OK).is_ok())
}

/// A process that ends with its owner.
pub(crate) struct PasstChild(Child);

/// The end of a process.
pub(crate) struct Ended(Option<std::process::ExitStatus>);

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(status) => status.fmt(f),
            None => f.write_str("it was killed, because it did not end by itself"),
        }
    }
}

impl PasstChild {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits for the end of the process, whose socket is closed. Kills it if it does not end by itself.
    pub(crate) fn end(mut self) -> Ended {
        let deadline = Instant::now() + END_MAX;
        while Instant::now() < deadline {
            match self.0.try_wait() {
                Ok(Some(status)) => return Ended(Some(status)),
                Ok(None) => thread::sleep(END_INTERVAL),
                Err(_) => break,
            }
        }
        Ended(None)
    }
}

/// Kills the process if it has not ended.
impl Drop for PasstChild {
    fn drop(&mut self) {
        // Both do nothing after its end.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_in_path_is_not_installed() {
        assert_eq!(find_in(OsStr::new("/nonexistent:/proc/self")), None);
        let error = PasstError::NotInstalled.to_string();
        assert!(error.contains("install the package passt"));
    }
}
