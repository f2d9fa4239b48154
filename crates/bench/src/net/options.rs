//! The command line of `kickless bench net` and `kickless bench compare-net`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kickless_driver::Choice;
use kickless_values::{CpuList, SOCKET_PATH_BYTES_MAX, parse_duration, parse_queue_size};
use serde::Serialize;

use super::packet::{GSO_FRAME_MAX, GSO_FRAME_MIN};
use crate::common_options::{OutputOptions, PID_MAX, RingOptions, parse_choice, parse_time};
use crate::wait::Wait;

/// A benchmark of one card or of several.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cards<'a> {
    Net(&'a NetBench),
    Compare(&'a CompareNetBench),
}

/// `kickless bench net`.
#[derive(Debug, Args)]
pub struct NetBench {
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
    pub(crate) load: NetLoadOptions,
}

/// `kickless bench compare-net`.
#[derive(Debug, Args)]
pub struct CompareNetBench {
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
    pub(crate) load: NetLoadOptions,
}

/// The work of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// Send frames to a card that returns them, such as one with the port `loop`
    Echo,
    /// Send frames
    Transmit,
    /// Receive the frames that the card delivers
    Receive,
    /// Receive the frames that the card delivers, and send them back
    Forward,
    /// Send frames to the card, and receive them from a second card, whose socket has the same path and
    /// `.peer` behind it. One thread drives both
    Pass,
}

/// The load, and the form of the results. An option with a list asks for one load for each value, in each
/// combination.
#[derive(Debug, Args)]
pub(crate) struct NetLoadOptions {
    /// The way of the frames
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "echo")]
    pub(crate) direction: Vec<Direction>,
    /// Frames that each thread keeps in flight [default: 32; with --rate, at most 256]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub(crate) depth: Vec<u16>,
    /// Bytes of a frame, from 60 to 65550
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "64", value_parser = clap::value_parser!(u32).range(60..=65550))]
    pub(crate) frame_size: Vec<u32>,
    /// Send frames as TCP packets that the card may cut into segments with so many bytes of data. Both ways
    /// of the card need the offloads for that
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) gso_size: Option<u16>,
    /// How a thread waits for frames and for room
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',', default_value = "poll")]
    pub(crate) wait: Vec<Wait>,
    /// Frames that a thread sends or receives by one call
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) batch: u16,
    /// Queue pairs to use, each with a thread
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=127))]
    pub(crate) pairs: u16,
    /// Descriptors in each queue, a power of two [default: 256, or what the depth needs]
    #[arg(long, value_name = "N", value_parser = parse_queue_size)]
    pub(crate) queue_size: Option<u16>,
    /// Frames a second, all threads together, evenly spread, even while earlier ones are not back;
    /// latencies count from the time when a frame was due [default: a new frame as soon as one is back]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Vec<u32>,
    /// How long to measure [default: 10s, or 2s for each turn of a comparison]
    #[arg(long, value_name = "DURATION", value_parser = parse_time)]
    pub(crate) time: Option<Duration>,
    /// How long to run before measuring
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = parse_duration)]
    pub(crate) warm_up: Duration,
    /// Frames in several receive buffers: auto, on or off
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = parse_choice)]
    pub(crate) mergeable: Choice,
    #[command(flatten)]
    pub(crate) rings: RingOptions,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

impl NetLoadOptions {
    /// Returns `--depth`, or its default.
    pub(crate) fn depths(&self) -> Vec<u16> {
        match (self.depth.is_empty(), self.rate.is_empty()) {
            (false, _) => self.depth.clone(),
            (true, true) => vec![32],
            // With a rate, a low depth would make frames wait for those before them.
            (true, false) => vec![256],
        }
    }
}

impl<'a> Cards<'a> {
    /// Returns the options of the load.
    pub(crate) fn load(self) -> &'a NetLoadOptions {
        match self {
            Cards::Net(net) => &net.load,
            Cards::Compare(compare) => &compare.load,
        }
    }

    /// Returns the number of turns that each target has at each load.
    pub(crate) fn rounds(self) -> u32 {
        match self {
            Cards::Net(net) => net.rounds,
            Cards::Compare(compare) => compare.rounds,
        }
    }

    /// Returns the measured time of a turn.
    pub(crate) fn time(self) -> Duration {
        let default = if matches!(self, Cards::Net(_)) { 10 } else { 2 };
        self.load().time.unwrap_or(Duration::from_secs(default))
    }

    /// Checks what the types of the options cannot express.
    ///
    /// # Errors
    /// One sentence that names the option.
    pub(crate) fn check(self) -> Result<(), String> {
        let load = self.load();
        if let Cards::Net(net) = self
            && net.socket_path.as_os_str().len() > SOCKET_PATH_BYTES_MAX
        {
            return Err(format!(
                "--socket-path: the path of a socket has at most {SOCKET_PATH_BYTES_MAX} bytes: use a shorter one"
            ));
        }
        let sends = |direction: &Direction| {
            matches!(direction, Direction::Echo | Direction::Transmit | Direction::Pass)
        };
        if !load.rate.is_empty() && !load.direction.iter().all(sends) {
            return Err(
                "--rate is for --direction=echo, transmit and pass: the card delivers other frames".into()
            );
        }
        if load.gso_size.is_some() {
            if !load.direction.iter().all(sends) {
                return Err("--gso-size is for --direction=echo, transmit and pass".into());
            }
            if !load.frame_size.iter().all(|size| (GSO_FRAME_MIN..=GSO_FRAME_MAX).contains(size)) {
                return Err(format!(
                    "--gso-size needs packets from {GSO_FRAME_MIN} to {GSO_FRAME_MAX} bytes: choose --frame-size"
                ));
            }
        }
        if load.output.plot_rate.is_some() && load.rate.len() < 2 {
            return Err("--plot-rate needs at least two rates: list them with --rate".into());
        }
        if let (Some(size), Some(depth)) = (load.queue_size, load.depths().iter().max())
            && size < *depth
        {
            return Err(format!("--queue-size={size} is less than --depth={depth}"));
        }
        Ok(())
    }
}
