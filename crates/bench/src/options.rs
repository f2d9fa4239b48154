//! The command line of `kickless bench`.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Subcommand};
use kickless_driver::Choice;
use kickless_values::{CpuList, parse_duration, parse_size};

use super::common_options::{BackEnds, CommonLoad, Comparison, LoadKind, OneBackEnd};
use super::net::options::NetLoadOptions;
use super::pace::OnOff;
use super::pattern::Pattern;
use super::wait::Wait;

/// The refusal of `bench ring` and `bench memory`.
pub(crate) const PARTS_WERE_REMOVED: &str =
    "bench ring and bench memory were removed: use cargo bench -p kickless-virtqueue or kickless-memory";

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Put load on one disk back-end
    Blk(Box<OneBackEnd<LoadOptions>>),
    /// Put the same load on several disk back-ends, turn by turn, and say how they compare
    Compare(Box<Comparison<LoadOptions>>),
    /// Put load on the back-end of a network card
    Net(Box<OneBackEnd<NetLoadOptions>>),
    /// Put the same load on several network cards, turn by turn, and say how they compare
    CompareNet(Box<Comparison<NetLoadOptions>>),
    /// Measure how long a cache line takes from one CPU to another and back, once for each round
    CoreLatency(CoreLatencyOptions),
    /// Refused, with the benchmark that took its place
    #[command(hide = true, disable_help_flag = true, alias = "memory")]
    Ring {
        /// Options that are not looked at
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        ignored: Vec<OsString>,
    },
}

/// The options of `bench core-latency`.
#[derive(Debug, Args)]
pub struct CoreLatencyOptions {
    /// How often to measure
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// The two CPUs [default: the first two that this process may use]
    #[arg(long, value_name = "LIST", value_parser = str::parse::<CpuList>)]
    pub(crate) cpu: Option<CpuList>,
    /// Measure nothing, but say whether a comparison takes these times, such as 80ns,95ns, for the same one
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_duration)]
    pub(crate) same: Vec<Duration>,
}

/// The load of a disk.
#[derive(Debug, Args)]
pub struct LoadOptions {
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
    /// Threads that submit; several share a queue if there are fewer queues [default: one for each queue]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) threads: Option<u16>,
    /// Repeat a period with load and one without, such as 100ms,900ms [default: load all the time]
    #[arg(long, value_name = "ON,OFF", value_parser = parse_on_off)]
    pub(crate) on_off: Option<OnOff>,
    /// Use only this much of the disk, from its start
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) range: Option<u64>,
    /// Check that reads return what was written
    #[arg(long)]
    pub(crate) verify: bool,
    /// Seed of the random offsets; the same seed gives the same offsets
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) common: CommonLoad,
}

impl Bench {
    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Bench::Blk(blk) => BackEnds::One(blk.as_ref()).check(),
            Bench::Compare(compare) => BackEnds::Several(compare.as_ref()).check(),
            Bench::Net(net) => BackEnds::One(net.as_ref()).check(),
            Bench::CompareNet(compare) => BackEnds::Several(compare.as_ref()).check(),
            Bench::CoreLatency(CoreLatencyOptions { cpu: Some(CpuList(cpus)), .. }) if !matches!(cpus[..], [one, other] if one != other) => {
                Err("--cpu: list two CPUs".into())
            }
            Bench::Ring { .. } => Err(PARTS_WERE_REMOVED.into()),
            Bench::CoreLatency(_) => Ok(()),
        }
    }
}

impl LoadKind for LoadOptions {
    fn common(&self) -> &CommonLoad {
        &self.common
    }

    fn check(&self) -> Result<(), String> {
        if let Some(read) = self.read.iter().find(|read| **read < 100 && !self.destroy) {
            return Err(format!("--read={read} overwrites the disk: add --destroy if its data may be lost"));
        }
        let threads = self.threads.unwrap_or(self.queues);
        if threads < self.queues {
            return Err(format!(
                "--threads={threads} leaves some of --queues={} idle: lower --queues",
                self.queues
            ));
        }
        if !self.common.rate.is_empty() && threads > self.queues {
            return Err("--rate needs a queue for each thread: raise --queues or lower --threads".into());
        }
        if self.verify && self.read.contains(&100) {
            return Err("--verify needs writes and --read=100 has none: use --read=50, for example".into());
        }
        if self.common.rings.in_order == Choice::On && threads > self.queues {
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
