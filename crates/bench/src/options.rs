//! The command line of `kickless bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kickless_driver::Choice;
use kickless_values::{CpuList, SOCKET_PATH_BYTES_MAX, parse_duration, parse_queue_size, parse_size};

use super::common_options::{OutputOptions, PID_MAX, RingOptions, parse_time};
use super::net::options::{Cards, CompareNetBench, NetBench};
use super::pace::OnOff;
use super::pattern::Pattern;
use super::wait::Wait;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Put load on one disk back-end
    Blk(Box<BlkBench>),
    /// Put the same load on several disk back-ends, turn by turn, and say how they compare
    Compare(Box<CompareBench>),
    /// Put load on the back-end of a network card
    Net(Box<NetBench>),
    /// Put the same load on several network cards, turn by turn, and say how they compare
    CompareNet(Box<CompareNetBench>),
    /// Measure virtqueues alone, both ends in one thread
    Ring(PartOptions),
    /// Measure translation of guest addresses and copies alone
    Memory(PartOptions),
    /// Measure how long a cache line takes from one CPU to another and back, once for each round
    Way(WayOptions),
}

/// A part that is measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Virtqueues.
    Ring,
    /// Guest memory.
    Memory,
}

/// The options of `bench ring` and `bench memory`.
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

/// The options of `bench way`.
#[derive(Debug, Args)]
pub struct WayOptions {
    /// How often to measure
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// The two CPUs [default: the first two that this process may use]
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) cpu: Option<CpuList>,
    /// Measure nothing, but say whether a comparison takes these ways, such as 80ns,95ns, for the same one
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_duration)]
    pub(crate) same: Vec<Duration>,
}

/// A benchmark of one back-end or of several.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BackEnds<'a> {
    Blk(&'a BlkBench),
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
    pub(crate) load: LoadOptions,
}

/// The load, and the form of the results. An option with a list asks for one load for each value, in each
/// combination.
#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Requests that each thread keeps in flight [default: 32; with --rate, at most 256]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub(crate) depth: Vec<u16>,
    /// Bytes of a request
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4K", value_parser = parse_block_size)]
    pub(crate) block_size: Vec<u32>,
    /// Percentage of requests that read; the others overwrite the disk, which needs --destroy
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "100", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) read: Vec<u8>,
    /// Allow writes, which destroy the data on the disk
    #[arg(long)]
    pub(crate) destroy: bool,
    /// The order of the offsets of requests
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "random")]
    pub(crate) pattern: Vec<Pattern>,
    /// How a thread waits for completions
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "sleep")]
    pub(crate) wait: Vec<Wait>,
    /// Queues to use
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: u16,
    /// Descriptors in each queue, a power of two [default: 256, or what the depth needs]
    #[arg(long, value_name = "N", value_parser = parse_queue_size)]
    pub(crate) queue_size: Option<u16>,
    /// Threads that submit; several share a queue if there are fewer queues [default: one for each queue]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: Option<u16>,
    /// Requests a second, all threads together, evenly spread, even while earlier ones are not done;
    /// latencies count from the time when a request was due [default: a new request as soon as one is done]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Vec<u32>,
    /// Repeat a period with load and one without, such as 100ms,900ms [default: load all the time]
    #[arg(long, value_name = "ON,OFF", value_parser = parse_on_off)]
    pub(crate) on_off: Option<OnOff>,
    /// How long to measure [default: 10s, or 2s for each turn of a comparison]
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    pub(crate) time: Option<Duration>,
    /// How long to run before measuring
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = parse_duration)]
    pub(crate) warm_up: Duration,
    /// Use only this much of the disk, from its start
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) range: Option<u64>,
    /// Check that reads return what was written
    #[arg(long)]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) rings: RingOptions,
    /// Seed of the random offsets; the same seed gives the same offsets
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

impl LoadOptions {
    /// Returns `--depth`, or its default.
    pub(crate) fn depths(&self) -> Vec<u16> {
        match (self.depth.is_empty(), self.rate.is_empty()) {
            (false, _) => self.depth.clone(),
            (true, true) => vec![32],
            // With a rate, a low depth would make requests wait for completions.
            (true, false) => vec![256],
        }
    }
}

impl Bench {
    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Bench::Blk(blk) => BackEnds::Blk(blk).check(),
            Bench::Compare(compare) => BackEnds::Compare(compare).check(),
            Bench::Net(net) => Cards::Net(net).check(),
            Bench::CompareNet(compare) => Cards::Compare(compare).check(),
            Bench::Way(WayOptions { cpu: Some(CpuList(cpus)), .. }) if !matches!(cpus[..], [one, other] if one != other) => {
                Err("--cpu: list two CPUs".into())
            }
            Bench::Ring(_) | Bench::Memory(_) | Bench::Way(_) => Ok(()),
        }
    }
}

impl<'a> BackEnds<'a> {
    /// Returns the options of the load.
    pub(crate) fn load(self) -> &'a LoadOptions {
        match self {
            BackEnds::Blk(blk) => &blk.load,
            BackEnds::Compare(compare) => &compare.load,
        }
    }

    /// Returns the number of turns that each target has at each load.
    pub(crate) fn rounds(self) -> u32 {
        match self {
            BackEnds::Blk(blk) => blk.rounds,
            BackEnds::Compare(compare) => compare.rounds,
        }
    }

    /// Returns the measured time of a turn.
    pub(crate) fn time(self) -> Duration {
        let default = if matches!(self, BackEnds::Blk(_)) { 10 } else { 2 };
        self.load().time.unwrap_or(Duration::from_secs(default))
    }

    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    fn check(self) -> Result<(), String> {
        let load = self.load();
        if let Some(read) = load.read.iter().find(|read| **read < 100 && !load.destroy) {
            return Err(format!("--read={read} overwrites the disk: add --destroy if its data may be lost"));
        }
        if let BackEnds::Blk(blk) = self
            && blk.socket_path.as_os_str().len() > SOCKET_PATH_BYTES_MAX
        {
            return Err(format!(
                "--socket-path: the path of a socket has at most {SOCKET_PATH_BYTES_MAX} bytes: use a shorter one"
            ));
        }
        let threads = load.threads.unwrap_or(load.queues);
        if threads < load.queues {
            return Err(format!(
                "--threads={threads} leaves some of --queues={} idle: lower --queues",
                load.queues
            ));
        }
        if !load.rate.is_empty() && threads > load.queues {
            return Err("--rate needs a queue for each thread: raise --queues or lower --threads".into());
        }
        if load.output.plot_rate.is_some() && load.rate.len() < 2 {
            return Err("--plot-rate needs at least two rates: list them with --rate".into());
        }
        if load.verify && load.read.contains(&100) {
            return Err("--verify needs writes and --read=100 has none: use --read=50, for example".into());
        }
        if load.rings.in_order == Choice::On && threads > load.queues {
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

fn parse_on_off(text: &str) -> Result<OnOff, String> {
    let (on, off) = text.split_once(',').ok_or("it must be two durations, such as 100ms,900ms")?;
    let [on, off] = [on, off].map(parse_duration);
    let (on, off) = (on?, off?);
    if on.is_zero() || on + off > Duration::from_secs(3600) {
        return Err("the first duration must not be 0, and both together at most an hour".into());
    }
    Ok(OnOff { on, off })
}
