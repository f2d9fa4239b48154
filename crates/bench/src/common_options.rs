//! The options that benchmarks of disks and of network cards share.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kickless_driver::Choice;
use kickless_values::{CpuList, SOCKET_PATH_BYTES_MAX, parse_duration, parse_queue_size};

/// The largest process number (proc(5), `pid_max`).
const PID_MAX: i64 = 1 << 22;
/// Requests or frames in flight by default: without and with a rate. With a rate, a low depth would make
/// them wait for those before them.
const DEPTH: u16 = 32;
const DEPTH_WITH_RATE: u16 = 256;

/// A benchmark of one back-end, with the options of its kind of load.
#[derive(Debug, Args)]
pub struct OneBackEnd<L: Args> {
    /// The unix socket of the back-end
    #[arg(long, value_name = "PATH")]
    pub(crate) socket_path: PathBuf,
    /// The process of the back-end, to say how much processor time it takes
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..=PID_MAX))]
    pub(crate) pid: Option<u32>,
    /// How often to run each load
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    #[command(flatten)]
    pub(crate) load: L,
}

/// A comparison of back-ends, with the options of their kind of load.
#[derive(Debug, Args)]
pub struct Comparison<L: Args> {
    /// The targets to compare with the first one: sockets, or commands in which {socket} stands for the
    /// socket to listen on. Either can have a name: NAME=SOCKET, NAME=COMMAND
    #[arg(value_name = "TARGET", required = true, num_args = 2..)]
    pub(crate) targets: Vec<String>,
    /// How many turns each target has at each load
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Start the commands on these CPUs
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) target_cpu: Option<CpuList>,
    #[command(flatten)]
    pub(crate) load: L,
}

/// A benchmark of one back-end or of several.
#[derive(Debug)]
pub(crate) enum BackEnds<'a, L: Args> {
    One(&'a OneBackEnd<L>),
    Several(&'a Comparison<L>),
}

/// The options of a kind of load.
pub(crate) trait LoadKind: Args {
    /// Returns those that all kinds have.
    fn common(&self) -> &CommonLoad;

    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    fn check(&self) -> Result<(), String>;
}

/// The options that all kinds of load have: how much is in flight and when, for how long, and the form of
/// the results. An option with a list asks for one load for each value, in each combination.
#[derive(Debug, Args)]
pub(crate) struct CommonLoad {
    /// Requests or frames that each thread keeps in flight [default: 32; with --rate, at most 256]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=32768))]
    depth: Vec<u16>,
    /// Descriptors in each queue, a power of two [default: 256, or what the depth needs]
    #[arg(long, value_name = "N", value_parser = parse_queue_size)]
    pub(crate) queue_size: Option<u16>,
    /// Requests or frames a second, all threads together, evenly spread, even while earlier ones are not
    /// back; latencies count from the time when one was due [default: a new one as soon as one is back]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Vec<u32>,
    /// How long to measure [default: 10s, or 2s for each turn of a comparison]
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    time: Option<Duration>,
    /// How long to run before measuring
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = parse_duration)]
    pub(crate) warm_up: Duration,
    #[command(flatten)]
    pub(crate) rings: RingOptions,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// The rings, and the CPUs of the threads.
#[derive(Debug, Args)]
#[command(next_help_heading = "Rings and CPUs")]
pub(crate) struct RingOptions {
    /// Packed rings: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = parse_choice)]
    pub(crate) packed: Choice,
    /// Event indices: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = parse_choice)]
    pub(crate) event_idx: Choice,
    /// Indirect descriptors: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = parse_choice)]
    pub(crate) indirect: Choice,
    /// Completion in the order of submission: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "off", value_parser = parse_choice)]
    pub(crate) in_order: Choice,
    /// Use huge pages, which must be reserved on the host
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Run the threads on these CPUs, one after the other
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) cpu: Option<CpuList>,
}

/// The form of the results.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct OutputOptions {
    /// Print the results as JSON instead of tables
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the results with plots to this file, as one page of HTML
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Write the rates of all loads to this file, as a table of Markdown
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,
    /// Write the report's first plot to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Write a plot of latency and back-end CPU against --rate to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot_rate: Option<PathBuf>,
    /// Write a plot of requests, kicks and back-end CPU over the time of the first load to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot_time: Option<PathBuf>,
}

impl CommonLoad {
    /// Returns `--depth`, or its default.
    pub(crate) fn depths(&self) -> Vec<u16> {
        match (self.depth.is_empty(), self.rate.is_empty()) {
            (false, _) => self.depth.clone(),
            (true, true) => vec![DEPTH],
            (true, false) => vec![DEPTH_WITH_RATE],
        }
    }

    /// Returns the rates, or `None` for a load without one.
    pub(crate) fn rates(&self) -> Vec<Option<u32>> {
        if self.rate.is_empty() { vec![None] } else { self.rate.iter().copied().map(Some).collect() }
    }
}

impl<'a, L: LoadKind> BackEnds<'a, L> {
    /// Returns the options of the load.
    pub(crate) fn load(&self) -> &'a L {
        match self {
            BackEnds::One(one) => &one.load,
            BackEnds::Several(several) => &several.load,
        }
    }

    /// Returns the number of turns that each target has at each load.
    pub(crate) fn rounds(&self) -> u32 {
        match self {
            BackEnds::One(one) => one.rounds,
            BackEnds::Several(several) => several.rounds,
        }
    }

    /// Returns the measured time of a turn.
    pub(crate) fn time(&self) -> Duration {
        let default = if matches!(self, BackEnds::One(_)) { 10 } else { 2 };
        self.load().common().time.unwrap_or(Duration::from_secs(default))
    }

    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let BackEnds::One(one) = self
            && one.socket_path.as_os_str().len() > SOCKET_PATH_BYTES_MAX
        {
            return Err(format!(
                "--socket-path: the path of a socket has at most {SOCKET_PATH_BYTES_MAX} bytes: use a shorter one"
            ));
        }
        let load = self.load();
        if load.common().output.plot_rate.is_some() && load.common().rate.len() < 2 {
            return Err("--plot-rate needs at least two rates: list them with --rate".into());
        }
        load.check()
    }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        time if time >= Duration::from_millis(10) => Ok(time),
        _ => Err("it must be at least 10ms".into()),
    }
}

pub(crate) fn parse_choice(text: &str) -> Result<Choice, String> {
    match text {
        "auto" => Ok(Choice::Auto),
        "on" => Ok(Choice::On),
        "off" => Ok(Choice::Off),
        _ => Err("it must be auto, on or off".into()),
    }
}
