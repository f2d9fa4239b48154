//! The command line: what can be said, and what it means.
//!
//! QEMU's conventions for vhost-user back-end programs hold (QEMU `docs/interop/vhost-user.rst`, "Backend program
//! conventions"), so that tools which follow them can start us.

mod device;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use kickless_bench::Bench;
use kickless_daemon::{BlkConfig, DeviceKind, Mistake, NetConfig, Notation};

use crate::capabilities;
use crate::service::Service;
use device::DeviceOptions;

/// The name under which the program is the block back-end without being told so.
const BLK_NAME: &str = "kickless-blk";
/// The variable that gives `--log-level` where the command line does not.
const LOG_VARIABLE: &str = "KICKLESS_LOG";
/// The default log filter.
const LOG_LEVEL: &str = "info";

/// Virtual machine disks and network cards over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "kickless", version, max_term_width = 100)]
struct Cli {
    /// What to do.
    #[command(subcommand)]
    command: Command,
    /// Which log lines to print on standard error: error, warn, info, debug, trace or off; or, for single parts, a
    /// list such as info,kickless_vhost=debug
    #[arg(long, global = true, value_name = "FILTER", env = LOG_VARIABLE, default_value = LOG_LEVEL)]
    log_level: String,
}

/// The parts of the program.
#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a disk to the virtual machines that connect, one after the other
    Blk(Box<DeviceOptions<BlkConfig>>),
    /// Serve a network card to the virtual machines that connect, one after the other
    Net(Box<DeviceOptions<NetConfig>>),
    /// Serve many devices, which share the workers, as a file describes them
    Serve {
        /// The file: TOML, with tables for the pool, for defaults and for each device
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Put load on back-ends and measure them
    #[command(subcommand)]
    Bench(Bench),
}

/// What the command line amounts to.
#[derive(Debug)]
pub(crate) enum Request {
    /// Do something.
    Run {
        /// Which log lines to print.
        log_level: LogLevel,
        /// What to do.
        work: Work,
    },
    /// Print this text, which was asked for.
    Print(String),
}

/// Which log lines to print. Shown as it was written, with the option or the variable that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogLevel {
    /// A level, or a list of levels for single parts.
    pub(crate) filter: String,
    from_variable: bool,
}

impl LogLevel {
    fn new(filter: String, source: Option<ValueSource>) -> Self {
        let from_variable = source == Some(ValueSource::EnvVariable);
        // An empty variable is how a unit file takes one back.
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

/// What there is to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Serve this.
    Serve(Service),
    /// Serve what this file says.
    ServeFile(PathBuf),
    /// Measure.
    Bench(Box<Bench>),
}

/// Reads a command line, the program's own name first.
///
/// # Errors
/// What is wrong with it: one sentence.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Request, String> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let called = arguments.first().map(PathBuf::from);
    if called.as_deref().and_then(Path::file_name).is_some_and(|name| name == BLK_NAME) {
        arguments.insert(1, "blk".into());
    }
    // The convention: whatever else is said with this option is ignored.
    let is_part = |part: &str| arguments.get(1).is_some_and(|word| word == part);
    if arguments.iter().any(|word| word == "--print-capabilities") {
        let printed = [("blk", capabilities::blk as fn() -> String), ("net", capabilities::net)];
        if let Some((_, print)) = printed.into_iter().find(|(part, _)| is_part(part)) {
            return Ok(Request::Print(print() + "\n"));
        }
    }
    let part = ["bench", "serve", "net"].into_iter().find(|part| is_part(part)).unwrap_or("blk");
    let matches = Cli::command().try_get_matches_from(arguments);
    let source = matches.as_ref().ok().and_then(|matches| matches.value_source("log_level"));
    match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(Cli { command, log_level }) => {
            Ok(Request::Run { log_level: LogLevel::new(log_level, source), work: command.work()? })
        }
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            Ok(Request::Print(error.render().to_string()))
        }
        Err(error) => Err(sentence(&error, part)),
    }
}

impl Command {
    /// What it amounts to.
    fn work(self) -> Result<Work, String> {
        match self {
            Command::Blk(options) => options.service(DeviceKind::Blk).map(Work::Serve).map_err(wrong_option),
            Command::Net(options) => options.service(DeviceKind::Net).map(Work::Serve).map_err(wrong_option),
            Command::Serve { config } => Ok(Work::ServeFile(config)),
            Command::Bench(bench) => bench.check().map(|()| Work::Bench(Box::new(bench))),
        }
    }
}

/// Returns the sentence about an option that does not go with others.
fn wrong_option(mistake: Mistake) -> String {
    format!("{}: {}", Notation::CommandLine.option(mistake.option), mistake.why)
}

/// What `error` says, without the usage that follows it.
fn sentence(error: &clap::Error, part: &str) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let example =
            if part == "bench" { "blk --socket-path=PATH" } else { "--socket-path=PATH --blk-file=PATH" };
        return format!("say what to do, for example: kickless {part} {example}");
    }
    let text = error.render().to_string();
    let lines = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim);
    let joined = lines.collect::<Vec<_>>().join(" ");
    let said = joined.strip_prefix("error: ").unwrap_or(&joined);
    format!("{said} (see kickless {part} --help)")
}
