//! The options of control sockets, for daemons and for clients.

use std::env;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kickless_opener::is_descriptor_name;
use kickless_sandbox::Mode;
use kickless_values::parse_duration;

/// The variable in which systemd passes the runtime directory of a service.
const RUNTIME_VARIABLE: &str = "RUNTIME_DIRECTORY";
/// The runtime directory of a client that no service manager started.
const RUNTIME_DIRECTORY: &str = "/run/kickless";
/// The name of the control socket in the runtime directory.
const CONTROL_NAME: &str = "control.sock";

/// The control sockets of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Control sockets")]
pub(crate) struct ControlOptions {
    /// Serve calls that show and change the daemon on this unix socket [default: control.sock in
    /// $RUNTIME_DIRECTORY for serve, otherwise none]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Serve calls that only show the daemon on this unix socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control_read_only: Option<PathBuf>,
}

impl ControlOptions {
    /// Returns whether devices can be added through a control socket.
    pub(crate) fn is_on(&self) -> bool {
        self.control.is_some()
    }

    /// Adds the default control socket of `kickless serve`.
    pub(crate) fn with_default(self) -> Self {
        let control = self.control.or_else(|| runtime_directory().map(|dir| dir.join(CONTROL_NAME)));
        Self { control, ..self }
    }
}

/// The control socket of a running daemon.
#[derive(Clone, Debug, Args)]
pub(crate) struct ControlPath {
    /// The control socket of the daemon [default: control.sock in $RUNTIME_DIRECTORY or /run/kickless]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl ControlPath {
    /// Returns the path of the control socket.
    pub(crate) fn path(&self) -> PathBuf {
        let default = || runtime_directory().unwrap_or_else(|| RUNTIME_DIRECTORY.into()).join(CONTROL_NAME);
        self.control.clone().unwrap_or_else(default)
    }
}

/// A call on a control socket.
#[derive(Clone, Debug, Args)]
pub(crate) struct Ctl {
    #[command(flatten)]
    pub(crate) control: ControlPath,
    /// Send the inherited descriptor N with the call, in which fd:NAME stands for it. Can be given several
    /// times
    #[arg(long = "fd", value_name = "NAME=N", value_parser = parse_given)]
    pub(crate) fds: Vec<(String, i32)>,
    /// Replace this file with the configuration that config.save returns, as a whole. The file keeps its
    /// permissions and its owner. If the call or the write fails, the file stays as it is
    #[arg(long, value_name = "PATH")]
    pub(crate) output: Option<PathBuf>,
    /// list, show, add, set, remove, drain, resume or resize; or the name of a call, such as daemon.info; or
    /// help, which shows all calls
    #[arg(value_name = "WORD")]
    pub(crate) call: String,
    /// The name of the device, after a short word. Then KEY=VALUE for each parameter, such as iops=5000. A
    /// call also takes its parameters as one JSON object
    #[arg(value_name = "NAME|KEY=VALUE|JSON")]
    pub(crate) words: Vec<String>,
}

/// The way of the metrics of a daemon.
#[derive(Clone, Debug, Args)]
pub(crate) struct Metrics {
    #[command(flatten)]
    pub(crate) control: ControlPath,
    /// Serve the metrics at http://ADDR/metrics, such as 127.0.0.1:9750
    #[arg(long, value_name = "ADDR", conflicts_with = "textfile", value_parser = parse_address)]
    pub(crate) listen: Option<SocketAddr>,
    /// Replace this file, for the node exporter's collector of text files
    #[arg(long, value_name = "PATH", value_parser = parse_textfile)]
    pub(crate) textfile: Option<PathBuf>,
    /// Take the rights that it does not need from a process that serves: on, strict (refuse to start if the
    /// kernel cannot do all of it), or off
    #[arg(long, value_name = "MODE", default_value_t = Mode::On, requires = "listen")]
    pub(crate) sandbox: Mode,
}

/// The way of the figures of a daemon.
#[derive(Clone, Debug, Args)]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) control: ControlPath,
    /// Time between two readings
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_interval)]
    pub(crate) interval: Duration,
    /// Print the figures of one interval, and end. Needs --json
    #[arg(long, requires = "json")]
    pub(crate) once: bool,
    /// Print the figures as JSON. Needs --once
    #[arg(long, requires = "once")]
    pub(crate) json: bool,
}

/// Parses the name and the number of a descriptor.
fn parse_given(text: &str) -> Result<(String, i32), String> {
    let (name, number) = text.split_once('=').ok_or("write NAME=N, such as image=5")?;
    if !is_descriptor_name(name) {
        return Err("a name is a letter, and then up to 31 letters, digits, _ and -".into());
    }
    match number.parse() {
        Ok(number) if number >= 0 => Ok((name.into(), number)),
        _ => Err("N is the number of a descriptor that the program inherits".into()),
    }
}

/// Parses the address of a server.
fn parse_address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "write an address and a port, such as 127.0.0.1:9750 or [::1]:9750")
}

/// Parses the path of a file for a collector of text files.
fn parse_textfile(text: &str) -> Result<PathBuf, &'static str> {
    let path = PathBuf::from(text);
    let is_read = path.extension().is_some_and(|extension| extension == "prom");
    is_read.then_some(path).ok_or("the node exporter reads only files whose names end with .prom")
}

/// Parses the time between two readings.
fn parse_interval(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        interval if (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&interval) => {
            Ok(interval)
        }
        _ => Err("it must be from 100ms to 1m".into()),
    }
}

/// Returns the first of the directories that systemd made for the service.
fn runtime_directory() -> Option<PathBuf> {
    runtime_directories().into_iter().next().filter(|path| path != Path::new(""))
}

/// Returns the directories that the service manager has prepared.
pub(crate) fn runtime_directories() -> Vec<PathBuf> {
    env::var_os(RUNTIME_VARIABLE).map_or_else(Vec::new, |all| env::split_paths(&all).collect())
}
