//! The passt process.

use super::UserOptions;
use kickless_opener::{PasstProcess, StartedPasst, has_passt, start_passt};
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::time::Duration;
use std::{fmt, io};

/// The time in which passt ends after its socket has closed. It takes milliseconds; a process that hangs is
/// killed.
const END_MAX: Duration = Duration::from_secs(2);

/// The program, with its arguments.
#[derive(Clone, Debug)]
pub struct Passt {
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
        if has_passt() { Ok(Self { options }) } else { Err(PasstError::NotInstalled) }
    }

    /// Starts the process. Returns the other ends of its socket and of its standard error too.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn start(&self) -> io::Result<(PasstChild, OwnedFd, OwnedFd)> {
        let StartedPasst { process, socket, errors } = start_passt(self.options.arguments())?;
        Ok((PasstChild(process), socket, errors))
    }
}

/// A process that ends with its owner.
pub(crate) struct PasstChild(PasstProcess);

/// The end of a process.
pub(crate) struct Ended(Option<ExitStatus>);

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
    pub(crate) fn end(self) -> Ended {
        Ended(self.0.end(END_MAX))
    }
}
