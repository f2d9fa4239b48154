//! The options that the loads of disks and of network cards share.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kickless_driver::Choice;
use kickless_values::{CpuList, parse_duration};

/// The largest process number (proc(5), `pid_max`).
pub(crate) const PID_MAX: i64 = 1 << 22;

/// The rings, and the CPUs of the threads.
#[derive(Debug, Args)]
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
pub(crate) struct OutputOptions {
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

pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
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
