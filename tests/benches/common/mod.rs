//! Provides the parts that benchmarks share: turns, processor time, tables.
#![allow(dead_code, reason = "each benchmark uses a part of it")]

pub(crate) mod fio;
pub(crate) mod zram;

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::load::{self, Kind, Load, Run};
use kickless_tests::driver::memory::MEMFD_NAME;
use kickless_tests::frontend::machine::{Machine, Shape};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The extent of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Turns of each contestant.
    pub(crate) rounds: usize,
    /// Length of a turn.
    pub(crate) time: Duration,
    /// The short form, which only shows that the benchmark works. Its figures mean nothing.
    pub(crate) quick: bool,
}

impl Plan {
    /// Returns the short form with `--quick`, with `KICKLESS_BENCH_QUICK=1`, and if `cargo test` runs the
    /// benchmark. Otherwise returns the full form. `--millis=N` sets the length of its turns, for machines
    /// that are free only for a short time.
    pub(crate) fn from_arguments() -> Plan {
        let asked = |word: &str| std::env::args().any(|argument| argument == word);
        let short = std::env::var_os("KICKLESS_BENCH_QUICK").is_some_and(|value| value == "1");
        if short || asked("--quick") || !asked("--bench") {
            Plan { rounds: 1, time: Duration::from_millis(100), quick: true }
        } else {
            let millis = argument("--millis=").and_then(|millis| millis.parse().ok()).unwrap_or(2000);
            Plan { rounds: 7, time: Duration::from_millis(millis), quick: false }
        }
    }

    /// Returns the remark to print with the figures.
    pub(crate) fn remark(&self) -> &'static str {
        if self.quick { "  (short form: not a measurement)" } else { "" }
    }
}

/// Returns the value after `name` in the arguments.
pub(crate) fn argument(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(name).map(str::to_owned))
}

/// CPUs of the contestants: one for the driver and another one for all back-ends. If the scheduler put a
/// back-end onto the CPU of the polling driver, the benchmark would measure the scheduler.
pub(crate) struct Cpus {
    all: CpuSet,
    driver: CpuSet,
    back_ends: CpuSet,
}

impl Cpus {
    /// Returns the first two CPUs that this process may use. With only one CPU, all share it.
    pub(crate) fn get() -> Result<Cpus> {
        let all = sched_getaffinity(None)?;
        let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).map(|cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            one
        });
        let (driver, back_ends) = each.next().zip(each.next()).unwrap_or((all, all));
        Ok(Cpus { all, driver, back_ends })
    }

    /// Moves this thread to the driver's CPU.
    pub(crate) fn for_driver(&self) -> Result<()> {
        Ok(sched_setaffinity(None, &self.driver)?)
    }

    /// Moves this thread to the back-ends' CPU, for back-ends that it starts.
    pub(crate) fn for_back_ends(&self) -> Result<()> {
        Ok(sched_setaffinity(None, &self.back_ends)?)
    }

    /// Moves a thread of another process to the back-ends' CPU.
    pub(crate) fn for_back_end(&self, thread: Pid) -> Result<()> {
        Ok(sched_setaffinity(Some(thread), &self.back_ends)?)
    }

    /// Moves this thread to all CPUs, for other programs that it starts.
    pub(crate) fn for_others(&self) -> Result<()> {
        Ok(sched_setaffinity(None, &self.all)?)
    }
}

/// A back-end under load.
pub(crate) struct Contestant {
    /// Its name in the tables.
    pub(crate) name: String,
    daemon: Daemon,
    machine: Machine,
}

/// One turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// The driver's results.
    pub(crate) run: Run,
    /// Processor seconds that the back-end used per second.
    pub(crate) cpu: f64,
}

impl Turn {
    /// Returns the back-end's processor nanoseconds per request.
    pub(crate) fn cpu_ns_per_request(&self) -> f64 {
        cpu_ns_per_request(self.cpu, self.run.rate())
    }
}

/// Returns the processor nanoseconds per request for `cpu` busy processors and `rate` requests per second.
pub(crate) fn cpu_ns_per_request(cpu: f64, rate: f64) -> f64 {
    cpu / rate * 1e9
}

impl Contestant {
    /// Connects to a daemon.
    ///
    /// # Errors
    /// The daemon does not serve.
    pub(crate) fn new(name: impl Into<String>, daemon: Daemon) -> Result<Contestant> {
        let machine = Machine::start(daemon.socket(), &Shape::LINUX)?;
        Ok(Contestant::over(name, daemon, machine))
    }

    /// Returns a contestant with a connected machine.
    pub(crate) fn over(name: impl Into<String>, daemon: Daemon, machine: Machine) -> Contestant {
        Contestant { name: name.into(), daemon, machine }
    }

    /// Returns the virtual machine that sends the load.
    pub(crate) fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Sends reads of 4 KiB for a turn, `depth` in flight. Each turn begins with an empty queue.
    ///
    /// # Errors
    /// A request fails or is not answered.
    pub(crate) fn turn(&mut self, depth: u16, time: Duration, sector: impl FnMut() -> u64) -> Result<Turn> {
        self.turn_on(1, Kind { depth, block: BLOCK, write: false }, time, sector)
    }

    /// Sends requests to the first `queues` queues for a turn.
    ///
    /// # Errors
    /// A request fails or is not answered.
    pub(crate) fn turn_on(
        &mut self,
        queues: usize,
        kind: Kind,
        time: Duration,
        sector: impl FnMut() -> u64,
    ) -> Result<Turn> {
        let Machine { queues: all, ram, .. } = &mut self.machine;
        let loads = all.iter_mut().take(queues).map(|queue| Load::prepare(queue, ram, kind));
        let mut loads = loads.collect::<Result<Vec<_>>>()?;
        let before = cpu_seconds(self.daemon.pid())?;
        let run = load::run(&mut loads, time, sector)?;
        let cpu = (cpu_seconds(self.daemon.pid())? - before) / run.time.as_secs_f64();
        anyhow::ensure!(run.failed == 0, "{}: {} requests failed", self.name, run.failed);
        Ok(Turn { run, cpu })
    }

    /// Returns the process id of the back-end.
    pub(crate) fn pid(&self) -> u32 {
        self.daemon.pid()
    }
}

/// Bytes of a read.
pub(crate) const BLOCK: u32 = 4096;

/// Returns the processor time of all threads of a process, including the kernel's threads for its I/O.
///
/// # Errors
/// The process does not exist.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    // utime and stime of proc_pid_stat(5).
    stat_seconds(pid, [14, 15])
}

/// Returns the processor time of all ended children of this process.
///
/// # Errors
/// /proc does not exist.
pub(crate) fn cpu_seconds_of_ended_children() -> Result<f64> {
    // cutime and cstime of proc_pid_stat(5).
    stat_seconds(std::process::id(), [16, 17])
}

fn stat_seconds(pid: u32, numbers: [usize; 2]) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name of the program, in parentheses, may have spaces.
    let (_, rest) = stat.rsplit_once(')').context("/proc/PID/stat without a name")?;
    let field = |number: usize| -> Result<f64> {
        let text = rest.split_ascii_whitespace().nth(number - 3).context("/proc/PID/stat is short")?;
        Ok(text.parse::<u64>()? as f64)
    };
    Ok((field(numbers[0])? + field(numbers[1])?) / rustix::param::clock_ticks_per_second() as f64)
}

/// Returns the resident pages of all mappings except the guest's memory, in KiB.
///
/// # Errors
/// The process does not exist.
pub(crate) fn resident_kib(pid: u32) -> Result<u64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut total, mut guest) = (0, false);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        // The first line of a mapping begins with its addresses. Each further line begins with a name and a
        // colon.
        if !first.ends_with(':') {
            guest = line.contains(MEMFD_NAME);
        } else if first == "Rss:" && !guest {
            total += words.next().context("Rss without a number")?.parse::<u64>()?;
        }
    }
    Ok(total)
}

/// The median and the extremes of some values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    /// The middle value, or the mean of the two middle values.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Computes the spread of some values. It is NaN without values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
        let (n, last) = (values.len(), values.len().saturating_sub(1));
        Spread { median: (at(last / 2) + at(n / 2)) / 2.0, min: at(0), max: at(last) }
    }
}

/// Prints the turns of a contestant: rate, kicks, busy processors, and processor time per request.
pub(crate) fn row(name: &str, turns: &[Turn]) {
    let rate = Spread::of(turns.iter().map(|turn| turn.run.rate()));
    println!(
        "  {name:<34} {:>9.0}  {:>9.0} .. {:<9.0} {:>9.4} {:>8.2} {:>10.0}",
        rate.median,
        rate.min,
        rate.max,
        Spread::of(turns.iter().map(|turn| turn.run.kicks_per_request())).median,
        Spread::of(turns.iter().map(|turn| turn.cpu)).median,
        Spread::of(turns.iter().map(Turn::cpu_ns_per_request)).median,
    );
}

/// Prints the heads of the columns of [`row`].
pub(crate) fn head() {
    println!(
        "  {:<34} {:>9}  {:>9} .. {:<9} {:>9} {:>8} {:>10}",
        "", "req/s", "least", "most", "kicks/req", "CPU", "CPU ns/req"
    );
}

/// Returns the ratio of our rate to the other's, turn by turn.
pub(crate) fn ratios(ours: &[Turn], theirs: &[Turn]) -> Spread {
    Spread::of(ours.iter().zip(theirs).map(|(ours, theirs)| ours.run.rate() / theirs.run.rate()))
}
