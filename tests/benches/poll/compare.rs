//! Runs `kickless bench compare`.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kickless_tests::daemon::kickless_binary;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::Value;

use crate::common::Plan;

/// Settings of all measurements.
pub(crate) struct Settings {
    /// The short form, which only shows that the benchmark works. Its figures mean nothing.
    pub(crate) quick: bool,
    /// Turns of each contestant.
    pub(crate) rounds: usize,
    pub(crate) kickless: PathBuf,
    /// The driver's CPU and the back-ends' CPU.
    pub(crate) cpus: Option<[usize; 2]>,
    /// Parts of the names of disks and drivers to measure.
    disk: String,
    driver: String,
}

/// A disk that the back-ends serve.
#[derive(Clone, Copy)]
pub(crate) struct Disk {
    pub(crate) name: &'static str,
    /// `--blk-file`.
    pub(crate) file: &'static str,
}

/// The results of one turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Latency in nanoseconds, from the time when a request was due.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Kicks per request.
    pub(crate) kicks: f64,
    /// Processor nanoseconds of the back-end per request.
    pub(crate) cpu_each: f64,
    /// Number of processors that the back-end kept busy.
    pub(crate) cores: f64,
    /// The shortest and the longest core-to-core latency in its round, in nanoseconds, if it was measured.
    pub(crate) core_latency: Option<[f64; 2]>,
}

/// A way to poll: its name and its options.
pub(crate) type Way = (&'static str, &'static str);

pub(crate) const AUTO: Way = ("auto", "--poll=auto");
pub(crate) const ALWAYS: Way = ("always", "--poll=always");
pub(crate) const NEVER: Way = ("never", "--poll=never");
pub(crate) const RATE: Way = ("rate-3s", "--poll=rate --poll-stop-idle=3s");

/// The other program. Its options depend on the disk.
pub(crate) const QSD: Way = ("qsd", "");

/// Time before the measurement of each turn.
const WARM_UP: Duration = Duration::from_millis(600);

impl Settings {
    /// Returns the short form in the same cases as [`Plan::from_arguments`]. `--rounds=N` sets the number of
    /// turns, for machines whose speed changes. The default is 5, or 1 in the short form. `--disk=TEXT` and
    /// `--driver=TEXT` choose disks and drivers by parts of their names.
    pub(crate) fn from_arguments() -> Result<Settings> {
        let quick = Plan::from_arguments().quick;
        let all = sched_getaffinity(None)?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let cpus = cpus.next().zip(cpus.next()).map(|(driver, back_ends)| [driver, back_ends]);
        let kickless = kickless_binary()?;
        let said = |key: &str| std::env::args().find_map(|word| word.strip_prefix(key).map(str::to_owned));
        let rounds = said("--rounds=").map(|rounds| rounds.parse()).transpose();
        let rounds = rounds.context("--rounds takes a number")?.unwrap_or(if quick { 1 } else { 5 });
        let [disk, driver] = ["--disk=", "--driver="].map(|key| said(key).unwrap_or_default());
        Ok(Settings { quick, rounds, kickless, cpus, disk, driver })
    }

    /// Returns whether to measure a disk with this name.
    pub(crate) fn takes_disk(&self, name: &str) -> bool {
        name.contains(&self.disk)
    }

    /// Returns whether to measure a driver with this name.
    pub(crate) fn takes_driver(&self, name: &str) -> bool {
        name.contains(&self.driver)
    }

    /// Returns the line to print above the figures.
    pub(crate) fn about(&self) -> String {
        let remark = if self.quick { "  (short form: not a measurement)" } else { "" };
        let cpus = match self.cpus {
            Some([driver, back_ends]) => format!("driver on CPU {driver}, back-ends on CPU {back_ends}"),
            None => "all on one CPU, which measures the scheduler".into(),
        };
        format!("random reads of 4 KiB, one queue, {} rounds, {cpus}{remark}", self.rounds)
    }

    /// Measures the core-to-core latency, in nanoseconds, if there are two CPUs and neither is busy.
    ///
    /// # Errors
    /// The measurement cannot run.
    pub(crate) fn core_latency(&self) -> Result<Option<f64>> {
        let Some([driver, back_ends]) = self.cpus else { return Ok(None) };
        let mut command = Command::new(&self.kickless);
        command.args(["bench", "core-latency", "--rounds=1"]).arg(format!("--cpu={driver},{back_ends}"));
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{command:?} failed, {}", output.status);
        let text = String::from_utf8(output.stdout)?;
        Ok(text.trim_end().strip_suffix(" ns").and_then(|number| number.parse().ok()))
    }

    /// Returns `time`, but at most 50 ms in the short form.
    pub(crate) fn time(&self, time: Duration) -> Duration {
        if self.quick { time.min(Duration::from_millis(50)) } else { time }
    }

    /// Puts the same load on a back-end for each of `ways`, turn by turn. Returns the turns of each.
    ///
    /// # Errors
    /// The benchmark cannot run, or a request failed.
    pub(crate) fn compare(
        &self,
        disk: Disk,
        ways: &[Way],
        time: Duration,
        load: &[&str],
    ) -> Result<Vec<Vec<Figures>>> {
        let back_end = |way: &Way| {
            let (name, options) = way;
            if *way == QSD {
                return format!("{name}={}", storage_daemon(disk));
            }
            format!(
                "{name}={} blk --socket-path={{socket}} --blk-file={} --lock=off --log-level=warn {options}",
                self.kickless.display(),
                disk.file
            )
        };
        // The polling policy learns the load in this time.
        let warm_up = self.time(WARM_UP) / if self.quick { 10 } else { 1 };
        let mut command = Command::new(&self.kickless);
        command.args(["bench", "compare", "--json"]).args(ways.iter().map(back_end)).args(load);
        command.arg(format!("--rounds={}", self.rounds));
        command.arg(format!("--time={}us", self.time(time).as_micros()));
        command.arg(format!("--warm-up={}us", warm_up.as_micros()));
        if let Some([driver, back_ends]) = self.cpus {
            command.arg(format!("--cpu={driver}")).arg(format!("--target-cpu={back_ends}"));
        }
        let results = output(command)?;
        let load = &results["loads"][0];
        let targets = load["targets"].as_array().context("no targets in the results")?;
        let mut all: Vec<Vec<Figures>> = targets.iter().map(turns).collect::<Result<_>>()?;
        let rounds = load["core_latencies"].as_array().context("no latencies in the results")?;
        for turns in &mut all {
            for (turn, latencies) in turns.iter_mut().zip(rounds) {
                turn.core_latency = least_and_most(latencies);
            }
        }
        Ok(all)
    }
}

/// Returns the least and the most of some numbers.
fn least_and_most(numbers: &Value) -> Option<[f64; 2]> {
    let numbers = || numbers.as_array().into_iter().flatten().filter_map(Value::as_f64);
    Some([numbers().reduce(f64::min)?, numbers().reduce(f64::max)?])
}

/// Returns the command of `qemu-storage-daemon` for a disk.
fn storage_daemon(disk: Disk) -> String {
    let block_device = match disk.file.strip_prefix("null:") {
        Some(_) => "driver=null-co,size=1073741824,read-zeroes=off".to_owned(),
        None => format!("driver=host_device,filename={},cache.direct=on,aio=io_uring", disk.file),
    };
    format!(
        "qemu-storage-daemon --object iothread,id=thread --blockdev {block_device},node-name=disk \
         --export vhost-user-blk,id=export,node-name=disk,iothread=thread,addr.type=unix,addr.path={{socket}}"
    )
}

/// Returns the output of a `kickless bench` command.
///
/// # Errors
/// The command failed, or its output is not JSON.
pub(crate) fn output(mut command: Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("kickless bench")?;
    ensure!(output.status.success(), "{command:?} failed, {}", output.status);
    serde_json::from_slice(&output.stdout).context("kickless bench's output")
}

/// Returns the turns of one target from its results.
///
/// # Errors
/// The results are incomplete.
pub(crate) fn turns(target: &Value) -> Result<Vec<Figures>> {
    ensure!(target["failed"] == 0, "{} requests failed: {}", target["failed"], target["failure"]);
    let turns = target["turns"].as_array().context("no turns in the results")?;
    turns
        .iter()
        .map(|turn| {
            let number = |key: &str| turn[key].as_f64().with_context(|| format!("no {key} in the results"));
            Ok(Figures {
                iops: number("iops")?,
                p50: number("p50")?,
                p99: number("p99")?,
                kicks: number("kicks_per_request")?,
                cpu_each: number("back_end_cpu_per_request")?,
                cores: number("back_end_cores")?,
                core_latency: None,
            })
        })
        .collect()
}
