//! Parses the command line.
//!
//! It follows QEMU's conventions for vhost-user back-end programs (QEMU `docs/interop/vhost-user.rst`,
//! "Backend program conventions"), so that tools which use these conventions can start the program.

mod control;
mod device;
mod man;
#[cfg(test)]
mod reference;
mod sandbox;
mod sentence;
#[cfg(test)]
mod tests;
mod upgrade;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use kickless_bench::Bench;
use kickless_daemon::{KindConfig, KindEntry, Mistake, Notation, Words};
use kickless_kinds::kinds;

use crate::log::{LogFormat, check_filter};
use crate::service::Service;
pub(crate) use control::{ControlOptions, ControlPath, Ctl, Metrics, Top, runtime_directories};
use device::DeviceOptions;
pub(crate) use sandbox::SandboxOptions;
pub(crate) use upgrade::UpgradeOptions;

/// The beginning of names of the program that imply the command of a kind, such as `kickless-blk`.
const NAME_OF_KIND: &str = "kickless-";
/// The environment variable that replaces an absent `--log-level`.
const LOG_VARIABLE: &str = "KICKLESS_LOG";
/// The default log filter.
const LOG_LEVEL: &str = "info";

/// Virtual machine disks and network cards over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "kickless", version, max_term_width = 100)]
struct Cli {
    /// The command to execute.
    #[command(subcommand)]
    command: Command,
    /// Level of log lines on standard error: error, warn, info, debug, trace or off; or a list with levels
    /// for single parts, such as info,kickless_vhost=debug
    #[arg(long, global = true, value_name = "FILTER", env = LOG_VARIABLE, default_value = LOG_LEVEL)]
    log_level: String,
    /// Format of log lines: text, json, journal (with priorities and without times), or auto, which is
    /// journal if standard error is that of systemd's journal, and text otherwise
    #[arg(long, global = true, value_enum, value_name = "FORMAT", hide_possible_values = true, default_value_t = LogFormat::Auto)]
    log_format: LogFormat,
}

/// The commands of the program.
#[derive(Debug)]
enum Command {
    /// Serve a device of one kind to the virtual machines that connect, one after the other.
    Device(KindConfig, Box<DeviceOptions>),
    /// Do something else.
    Other(OtherCommand),
}

/// Each kind of device has a command of its name.
impl Subcommand for Command {
    fn augment_subcommands(command: clap::Command) -> clap::Command {
        let of_kind = |command: clap::Command, kind: &dyn KindEntry| {
            let Words { name, one, .. } = kind.words();
            let about = format!("Serve {one} to the virtual machines that connect, one after the other");
            let own = kind.augment(clap::Command::new(*name));
            // The groups of options have descriptions of their own.
            command.subcommand(DeviceOptions::augment_args(own).about(about))
        };
        OtherCommand::augment_subcommands(kinds().commands().fold(command, of_kind))
    }

    fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        kinds().commands().any(|kind| kind.words().name == name) || OtherCommand::has_subcommand(name)
    }
}

impl FromArgMatches for Command {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let kinds = kinds();
        let of_kind = |(name, of)| Some((kinds.commands().find(|kind| kind.words().name == name)?, of));
        match matches.subcommand().and_then(of_kind) {
            Some((kind, matches)) => Ok(Self::Device(
                kind.of_matches(matches)?,
                Box::new(DeviceOptions::from_arg_matches(matches)?),
            )),
            None => OtherCommand::from_arg_matches(matches).map(Self::Other),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The commands that do not serve one device.
#[derive(Debug, Subcommand)]
enum OtherCommand {
    /// Serve the devices that a file describes. They share the workers
    Serve {
        /// Configuration file in TOML, with tables for the pool, for defaults and for each device
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Check the file, print how many devices it has, and serve nothing. Opens no disk and no socket
        #[arg(long)]
        check: bool,
        /// Serve nothing if a disk cannot be opened. Otherwise the disk is tried again, and the other devices
        /// are served
        #[arg(long)]
        all_or_nothing: bool,
        #[command(flatten)]
        control: ControlOptions,
        #[command(flatten)]
        sandbox: SandboxOptions,
        #[command(flatten)]
        upgrade: UpgradeOptions,
    },
    /// List, add, change and remove devices of a running daemon, or make another call on its control socket
    Ctl(Ctl),
    /// Print the counters of a running daemon as text for Prometheus, or serve them to it
    Metrics(Metrics),
    /// Put the devices of a running daemon into the descriptor store of systemd for the next process, and end
    /// the daemon. For ExecStop= of its unit
    Store(ControlPath),
    /// Show what the workers and the devices of a running daemon do
    Top(Top),
    /// Measure back-ends under load
    #[command(subcommand)]
    Bench(Bench),
    /// Print a script for a shell, with which it completes the words of this program's command lines
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write a manual page of each command into a directory, for packagers
    #[command(hide = true)]
    Man {
        /// The directory, which exists
        directory: PathBuf,
    },
}

/// A parsed command line.
#[derive(Debug)]
pub(crate) enum Invocation {
    /// Execute a command.
    Run {
        /// The lines to log.
        log_level: LogLevel,
        /// Their format.
        log_format: LogFormat,
        /// The command.
        work: Work,
    },
    /// Print this text, such as the help.
    Print(String),
}

/// A filter of log lines. Its `Display` shows the option or the variable, and the filter as the operator
/// wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogLevel {
    /// A level, or a list of levels for single parts.
    pub(crate) filter: String,
    from_variable: bool,
}

impl LogLevel {
    fn new(filter: String, source: Option<ValueSource>) -> Self {
        let from_variable = source == Some(ValueSource::EnvVariable);
        // A unit file resets a variable by making it empty.
        let unset = from_variable && filter.trim().is_empty();
        Self { filter: if unset { LOG_LEVEL.into() } else { filter }, from_variable }
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.from_variable { LOG_VARIABLE } else { "--log-level" };
        write!(f, "{name}={}", self.filter)
    }
}

/// The work of a command.
#[derive(Debug)]
pub(crate) enum Work {
    /// Serve devices.
    Serve(Box<Service>),
    /// Serve the devices of a configuration file.
    ServeFile {
        /// The file.
        config: PathBuf,
        /// The control sockets.
        control: ControlOptions,
        /// The sandbox.
        sandbox: SandboxOptions,
        /// The daemon to take over from.
        upgrade: UpgradeOptions,
        /// A device that cannot be opened ends the start.
        all_or_nothing: bool,
    },
    /// Check this configuration file.
    Check(PathBuf),
    /// Make a call on a control socket.
    Ctl(Ctl),
    /// Show the metrics of a daemon.
    Metrics(Metrics),
    /// Show what a daemon does.
    Top(Top),
    /// Put the devices of a daemon into the store of the service manager.
    Store(ControlPath),
    /// Measure back-ends.
    Bench(Box<Bench>),
    /// Print the completions of a shell.
    Completions(Shell),
    /// Write the manual pages into this directory.
    Man(PathBuf),
}

/// Parses a command line, which begins with the name of the program.
///
/// # Errors
/// The command line is wrong. The error is one sentence.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Invocation, String> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let called = arguments.first().map(PathBuf::from);
    let name = called.as_deref().and_then(Path::file_name);
    let kinds = kinds();
    let implied = name.and_then(|name| name.to_str()?.strip_prefix(NAME_OF_KIND));
    if let Some(kind) = kinds.commands().find(|kind| implied == Some(kind.words().name)) {
        arguments.insert(1, kind.words().name.into());
    }
    let is_part = |part: &str| arguments.get(1).is_some_and(|word| word == part);
    let kind = kinds.commands().find(|kind| is_part(kind.words().name));
    // By QEMU's convention, this option makes the program ignore all others.
    if let Some(kind) = kind
        && arguments.iter().any(|word| word == "--print-capabilities")
    {
        return Ok(Invocation::Print(format!("{}\n", kind.capabilities())));
    }
    let usual = kinds.commands().next().map(KindEntry::words);
    let usual = usual.map_or(("", ""), |usual| (usual.name, usual.key));
    let matches = Cli::command().try_get_matches_from(&arguments);
    let source = matches.as_ref().ok().and_then(|matches| matches.value_source("log_level"));
    match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(Cli { command, log_level, log_format }) => {
            let log_level = LogLevel::new(log_level, source);
            check_filter(&log_level.filter).map_err(|why| format!("{log_level}: {why}"))?;
            Ok(Invocation::Run { log_level, log_format, work: command.work()? })
        }
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            Ok(Invocation::Print(error.render().to_string()))
        }
        Err(error) => Err(sentence::of(&error, Cli::command(), &arguments, usual)),
    }
}

/// Writes the manual pages into a directory.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn write_man(directory: &Path) -> io::Result<()> {
    man::write_pages(Cli::command(), directory)
}

/// Returns the script with which a shell completes command lines.
pub(crate) fn completions(shell: Shell) -> String {
    let (mut cli, mut script) = (Cli::command(), Vec::new());
    let name = cli.get_name().to_owned();
    clap_complete::generate(shell, &mut cli, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

impl Command {
    /// Returns the work of the command.
    fn work(self) -> Result<Work, String> {
        match self {
            Command::Device(kind, options) => {
                let service = options.service(kind).map_err(wrong_option)?;
                Ok(Work::Serve(Box::new(service)))
            }
            Command::Other(other) => other.work(),
        }
    }
}

impl OtherCommand {
    /// Returns the work of the command.
    fn work(self) -> Result<Work, String> {
        match self {
            OtherCommand::Serve { config, check: true, .. } => Ok(Work::Check(config)),
            OtherCommand::Serve { config, control, sandbox, upgrade, all_or_nothing, check: false } => {
                let control = control.with_default();
                Ok(Work::ServeFile { config, control, sandbox, upgrade, all_or_nothing })
            }
            OtherCommand::Ctl(ctl) => Ok(Work::Ctl(ctl)),
            OtherCommand::Metrics(metrics) => Ok(Work::Metrics(metrics)),
            OtherCommand::Top(top) => Ok(Work::Top(top)),
            OtherCommand::Store(control) => Ok(Work::Store(control)),
            OtherCommand::Bench(bench) => bench.check().map(|()| Work::Bench(Box::new(bench))),
            OtherCommand::Completions { shell } => Ok(Work::Completions(shell)),
            OtherCommand::Man { directory } => Ok(Work::Man(directory)),
        }
    }
}

/// Returns the sentence about options that cannot be combined.
fn wrong_option(mistake: Mistake) -> String {
    format!("{}: {}", Notation::CommandLine.option(&mistake.option), mistake.why)
}
