//! The options of the sandbox.

use std::path::PathBuf;

use clap::Args;
use kickless_sandbox::Mode;

/// The sandbox of a process that serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Sandbox")]
pub(crate) struct SandboxOptions {
    /// Take the right to open, connect and start things by their names from the process that serves, and
    /// leave it to a helper process: on, strict (refuse to start if the kernel cannot do all of it), or off
    #[arg(long = "sandbox", value_name = "MODE", default_value_t = Mode::On)]
    pub(crate) mode: Mode,
    /// Let calls and images name files below this directory. Can be given several times [default: the
    /// directories of the files and sockets that are named at the start, and $RUNTIME_DIRECTORY for sockets]
    #[arg(long = "allow-root", value_name = "DIR")]
    pub(crate) roots: Vec<PathBuf>,
}
