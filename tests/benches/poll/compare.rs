//! `kickless bench compare` as a function.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kickless_tests::daemon::kickless_binary;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::Value;

use crate::common::Plan;

/// How everything is measured.
pub(crate) struct Settings {
    /// Only to see that it works: the figures mean nothing.
    pub(crate) quick: bool,
    /// Turns of each.
    pub(crate) rounds: usize,
    pub(crate) kickless: PathBuf,
    /// Of the driver, and of the back-ends.
    pub(crate) cpus: Option<[usize; 2]>,
}

/// What a back-end serves.
#[derive(Clone, Copy)]
pub(crate) struct Disk {
    pub(crate) name: &'static str,
    /// `--blk-file`.
    pub(crate) file: &'static str,
}

/// What one turn came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Requests a second.
    pub(crate) iops: f64,
    /// Nanoseconds, from when a request was due.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// For each request.
    pub(crate) kicks: f64,
    /// Nanoseconds of the back-end's processor time for each request.
    pub(crate) cpu_each: f64,
    /// Processors that the back-end kept busy.
    pub(crate) cores: f64,
}

/// A way to poll: its name, and the options for it.
pub(crate) type Way = (&'static str, &'static str);

pub(crate) const AUTO: Way = ("auto", "--poll=auto");
pub(crate) const ALWAYS: Way = ("always", "--poll=always");
pub(crate) const NEVER: Way = ("never", "--poll=never");
pub(crate) const RATE: Way = ("rate-3s", "--poll=rate --poll-stop-idle=3s");

/// Before each turn is measured.
const WARM_UP: Duration = Duration::from_millis(600);

impl Settings {
    /// The short form unless `cargo bench` runs it, without `--quick`. `--rounds=N` for more turns than 5, where the machine's own
    /// speed changes from turn to turn.
    pub(crate) fn from_arguments() -> Result<Settings> {
        let quick = Plan::from_arguments().quick;
        let all = sched_getaffinity(None)?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
        let cpus = cpus.next().zip(cpus.next()).map(|(driver, back_ends)| [driver, back_ends]);
        let kickless = kickless_binary()?;
        let said = std::env::args().find_map(|word| word.strip_prefix("--rounds=").map(str::to_owned));
        let rounds = said.map(|rounds| rounds.parse()).transpose().context("--rounds takes a number")?;
        Ok(Settings { quick, rounds: rounds.unwrap_or(if quick { 1 } else { 5 }), kickless, cpus })
    }

    /// What to print above the figures.
    pub(crate) fn about(&self) -> String {
        let remark = if self.quick { "  (short form: not a measurement)" } else { "" };
        let cpus = match self.cpus {
            Some([driver, back_ends]) => format!("driver on CPU {driver}, back-ends on CPU {back_ends}"),
            None => "all on one CPU, which measures the scheduler".into(),
        };
        format!("random reads of 4 KiB, one queue, {} rounds, {cpus}{remark}", self.rounds)
    }

    /// So long, or next to nothing in the short form.
    pub(crate) fn time(&self, time: Duration) -> Duration {
        if self.quick { time.min(Duration::from_millis(50)) } else { time }
    }

    /// Puts the same load on a back-end for each of `ways`, turn by turn: the turns of each.
    ///
    /// # Errors
    /// It cannot be run, or requests failed.
    pub(crate) fn compare(
        &self,
        disk: Disk,
        ways: &[Way],
        time: Duration,
        load: &[&str],
    ) -> Result<Vec<Vec<Figures>>> {
        let back_end = |(name, options): &Way| {
            format!(
                "{name}={} blk --socket-path={{socket}} --blk-file={} --lock=off --log-level=warn {options}",
                self.kickless.display(),
                disk.file
            )
        };
        // What a load is like is found out in that time.
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
        let targets = results["loads"][0]["targets"].as_array().context("no targets in the results")?;
        targets.iter().map(turns).collect()
    }
}

/// What a command of `kickless bench` has to say.
///
/// # Errors
/// It failed, or its output is no JSON.
pub(crate) fn output(mut command: Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("kickless bench")?;
    ensure!(output.status.success(), "{command:?} failed, {}", output.status);
    serde_json::from_slice(&output.stdout).context("kickless bench's output")
}

/// The turns of one target in its results.
///
/// # Errors
/// Something is missing.
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
            })
        })
        .collect()
}
