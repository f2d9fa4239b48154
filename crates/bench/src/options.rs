//! The command line of `kickless bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kickless_driver::Choice;
use kickless_values::{CpuList, SOCKET_PATH_BYTES_MAX, parse_duration, parse_queue_size, parse_size};

use super::pace::OnOff;
use super::pattern::Pattern;
use super::wait::Wait;

/// The largest process number there is (proc(5), `pid_max`).
const PID_MAX: i64 = 1 << 22;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Put load on one back-end
    Blk(Box<BlkBench>),
    /// Put the same load on several back-ends, turn by turn, and say how they compare
    Compare(Box<CompareBench>),
    /// Measure virtqueues alone, both ends in one thread
    Ring(PartOptions),
    /// Measure translation of guest addresses and copies alone
    Memory(PartOptions),
}

/// A part that is measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Virtqueues.
    Ring,
    /// Guest memory.
    Memory,
}

/// What is asked for of any part.
#[derive(Debug, Args)]
pub struct PartOptions {
    /// How often to measure each operation, all of them in turn
    #[arg(long, value_name = "N", default_value = "7", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// How long to measure each operation in a round
    #[arg(long, value_name = "DURATION", default_value = "100ms", value_parser = parse_time)]
    pub(crate) time: Duration,
    /// Print the results as JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// A benchmark of back-ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BackEnds<'a> {
    /// One.
    Blk(&'a BlkBench),
    /// Several.
    Compare(&'a CompareBench),
}

/// `kickless bench blk`.
#[derive(Debug, Args)]
pub struct BlkBench {
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
    pub(crate) load: LoadOptions,
}

/// `kickless bench compare`.
#[derive(Debug, Args)]
pub struct CompareBench {
    /// What to compare with the first of them: sockets, or commands in which {socket} stands for the socket to listen on.
    /// Either can have a name: NAME=SOCKET, NAME=COMMAND
    #[arg(value_name = "TARGET", required = true, num_args = 2..)]
    pub(crate) targets: Vec<String>,
    /// How many turns each has at each load
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Start the commands on these CPUs
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) target_cpu: Option<CpuList>,
    #[command(flatten)]
    pub(crate) load: LoadOptions,
}

/// The load, and what to do with the results. Options that take a list stand for a load of each, and of each combination.
#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Requests that each thread keeps in flight [default: 32; with --rate, at most 256]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub(crate) depth: Vec<u16>,
    /// Bytes of a request
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4K", value_parser = parse_block_size)]
    pub(crate) block_size: Vec<u32>,
    /// How many of a hundred requests read; the others write over the disk, which needs --destroy
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "100", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) read: Vec<u8>,
    /// Allow writes, which destroy what is on the disk
    #[arg(long)]
    pub(crate) destroy: bool,
    /// Where requests go
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "random")]
    pub(crate) pattern: Vec<Pattern>,
    /// What a thread does that has nothing to do until something completes
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "sleep")]
    pub(crate) wait: Vec<Wait>,
    /// Queues to use
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: u16,
    /// Descriptors in each queue, a power of two [default: 256, or what the depth needs]
    #[arg(long, value_name = "N", value_parser = parse_queue_size)]
    pub(crate) queue_size: Option<u16>,
    /// Threads that submit, which share the queues if there are fewer [default: one for each queue]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: Option<u16>,
    /// Requests a second, all threads together, evenly spread, whether or not earlier ones are done; latencies count from
    /// when a request was due [default: a new request as soon as one is done]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Vec<u32>,
    /// Load for so long, then none for so long, over and over, such as 100ms,900ms [default: always]
    #[arg(long, value_name = "ON,OFF", value_parser = parse_on_off)]
    pub(crate) on_off: Option<OnOff>,
    /// How long to measure [default: 10s, or 2s for each turn of a comparison]
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    pub(crate) time: Option<Duration>,
    /// How long to run before measuring
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = parse_duration)]
    pub(crate) warm_up: Duration,
    /// Use only so much of the disk, from its start
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) range: Option<u64>,
    /// Check that reads return what was written
    #[arg(long)]
    pub(crate) verify: bool,
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
    /// Share huge pages, which must have been set aside
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Run the threads on these CPUs, one after the other
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) cpu: Option<CpuList>,
    /// Where random offsets start from, to have the same ones again
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
    /// Print the results as JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the results with plots to this file, as one page of HTML
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
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

impl LoadOptions {
    /// `--depth`, or what it is where nothing is said.
    pub(crate) fn depths(&self) -> Vec<u16> {
        match (self.depth.is_empty(), self.rate.is_empty()) {
            (false, _) => self.depth.clone(),
            (true, true) => vec![32],
            // An open loop that waits for room is none.
            (true, false) => vec![256],
        }
    }
}

impl Bench {
    /// What the options' types cannot say.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Bench::Blk(blk) => BackEnds::Blk(blk).check(),
            Bench::Compare(compare) => BackEnds::Compare(compare).check(),
            Bench::Ring(_) | Bench::Memory(_) => Ok(()),
        }
    }
}

impl<'a> BackEnds<'a> {
    /// The load that was asked for.
    pub(crate) fn load(self) -> &'a LoadOptions {
        match self {
            BackEnds::Blk(blk) => &blk.load,
            BackEnds::Compare(compare) => &compare.load,
        }
    }

    /// How often each target has each load.
    pub(crate) fn rounds(self) -> u32 {
        match self {
            BackEnds::Blk(blk) => blk.rounds,
            BackEnds::Compare(compare) => compare.rounds,
        }
    }

    /// How long a turn is.
    pub(crate) fn time(self) -> Duration {
        let default = if matches!(self, BackEnds::Blk(_)) { 10 } else { 2 };
        self.load().time.unwrap_or(Duration::from_secs(default))
    }

    /// What the options' types cannot say.
    ///
    /// # Errors
    /// One sentence.
    fn check(self) -> Result<(), String> {
        let load = self.load();
        if let Some(read) = load.read.iter().find(|read| **read < 100 && !load.destroy) {
            return Err(format!(
                "--read={read} writes over the disk: add --destroy if nothing on it is needed any more"
            ));
        }
        if let BackEnds::Blk(blk) = self
            && blk.socket_path.as_os_str().len() > SOCKET_PATH_BYTES_MAX
        {
            return Err(format!(
                "--socket-path: a socket's path has up to {SOCKET_PATH_BYTES_MAX} bytes: use a shorter one"
            ));
        }
        let threads = load.threads.unwrap_or(load.queues);
        if threads < load.queues {
            return Err(format!(
                "--threads={threads} leaves some of --queues={} idle: ask for fewer",
                load.queues
            ));
        }
        if !load.rate.is_empty() && threads > load.queues {
            return Err(
                "--rate needs a queue for each thread: ask for more --queues or fewer --threads".into()
            );
        }
        if load.plot_rate.is_some() && load.rate.len() < 2 {
            return Err("--plot-rate draws one load at several rates: name them with --rate".into());
        }
        if load.verify && load.read.contains(&100) {
            return Err(
                "--verify checks what was written, and --read=100 writes nothing: ask for --read=50 or so"
                    .into(),
            );
        }
        if load.in_order == Choice::On && threads > load.queues {
            return Err("--in-order=on needs a queue for each thread".into());
        }
        Ok(())
    }
}

fn parse_block_size(text: &str) -> Result<u32, String> {
    match u32::try_from(parse_size(text)?) {
        Ok(bytes) if bytes > 0 && bytes.is_multiple_of(512) && bytes <= 16 << 20 => Ok(bytes),
        _ => Err("it must be a multiple of 512, at most 16M".into()),
    }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        time if time >= Duration::from_millis(10) => Ok(time),
        _ => Err("it must be 10ms at least".into()),
    }
}

fn parse_on_off(text: &str) -> Result<OnOff, String> {
    let (on, off) = text.split_once(',').ok_or("it must be two durations, such as 100ms,900ms")?;
    let [on, off] = [on, off].map(parse_duration);
    let (on, off) = (on?, off?);
    if on.is_zero() || on + off > Duration::from_secs(3600) {
        return Err("the load must be on for some time, and come back within an hour".into());
    }
    Ok(OnOff { on, off })
}

fn parse_choice(text: &str) -> Result<Choice, String> {
    match text {
        "auto" => Ok(Choice::Auto),
        "on" => Ok(Choice::On),
        "off" => Ok(Choice::Off),
        _ => Err("it must be auto, on or off".into()),
    }
}
