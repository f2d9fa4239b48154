//! Measures a driver that stays connected and stops sending requests.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kickless_driver::{Disk as Driver, Options, Request};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};

use crate::common::{BLOCK, Cpus, Spread};
use crate::compare::{AUTO, Disk, NEVER, Settings};
use crate::report::{Goal, Report};

/// Length of the load, and two windows after its end in which the use is measured.
const LOAD: Duration = Duration::from_millis(300);
const SOON: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(1100)];
const LATE: [Duration; 2] = [Duration::from_secs(4), Duration::from_secs(6)];

/// Processor time and sleeps of a process so far.
#[derive(Clone, Copy, Default)]
struct Usage {
    nanoseconds: u64,
    /// Number of times that a thread of the process went to sleep.
    sleeps: u64,
}

/// One round.
#[derive(Default)]
struct Idle {
    /// Share of a core in the first window.
    soon: f64,
    /// Use in the second window.
    late: Usage,
}

/// Measures idle back-ends after a load for which polling paid.
pub(crate) fn idle(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    let Some(disk) = disks.first() else { return Ok(()) };
    let ways = [AUTO, NEVER];
    let mut rounds: Vec<Vec<Idle>> = ways.iter().map(|_| Vec::new()).collect();
    for _ in 0..settings.rounds {
        for (all, idle) in rounds.iter_mut().zip(round(settings, *disk, &ways.map(|(_, options)| options))?) {
            all.push(idle);
        }
    }
    report.begin(&format!("{}, idle after {LOAD:?} of load", disk.name));
    println!(
        "  {:<12} {:>26} {:>26} {:>10}",
        "", "of a core, 0.1 s to 1.1 s", "CPU ns, 4 s to 6 s", "sleeps"
    );
    for ((name, _), idle) in ways.iter().zip(&rounds) {
        let of = |figure: fn(&Idle) -> f64| Spread::of(idle.iter().map(figure)).median;
        println!(
            "  {name:<12} {:>24.3} % {:>26.0} {:>10.0}",
            of(|idle| idle.soon) * 100.0,
            of(|idle| idle.late.nanoseconds as f64),
            of(|idle| idle.late.sleeps as f64)
        );
    }
    let auto = &rounds[0];
    report.check("cores after 100 ms, auto", auto.iter().map(|idle| idle.soon), Goal::AtMost(0.005));
    // A system call would use processor time.
    let used = auto.iter().map(|idle| idle.late.nanoseconds as f64);
    report.check("CPU ns (0: no system call) from 4 s to 6 s, auto", used, Goal::AtMost(0.0));
    Ok(())
}

/// Runs all ways at once, because idle back-ends do not disturb one another.
fn round(settings: &Settings, disk: Disk, ways: &[&str]) -> Result<Vec<Idle>> {
    let cpus = Cpus::get()?;
    let mut served = Vec::new();
    for options in ways {
        cpus.for_back_ends()?;
        let arguments = options.split_whitespace().map(str::to_owned).collect();
        let config =
            DaemonConfig { program: Program::Kickless, queues: 1, arguments, ..DaemonConfig::new(disk.file) };
        let daemon = Daemon::start(&config)?;
        cpus.for_driver()?;
        let driver = Driver::connect(Options { queues: 1, ..Options::new(daemon.socket()) })?;
        let mut data = driver.buffer(BLOCK as usize)?.into();
        let started = Instant::now();
        while started.elapsed() < settings.time(LOAD) {
            data = driver.run(Request::read(0, data))?;
        }
        served.push((daemon, driver));
    }
    cpus.for_others()?;
    let end = Instant::now();
    let usage_at = |after: Duration| -> Result<Vec<Usage>> {
        let after = settings.time(after).min(if settings.quick { after / 100 } else { after });
        thread::sleep(after.saturating_sub(end.elapsed()));
        served.iter().map(|(daemon, _)| usage(daemon.pid())).collect()
    };
    let looks = [usage_at(SOON[0])?, usage_at(SOON[1])?, usage_at(LATE[0])?, usage_at(LATE[1])?];
    let idle = (0..served.len()).map(|at| {
        let [a, b, c, d] = [looks[0][at], looks[1][at], looks[2][at], looks[3][at]];
        let soon = (b.nanoseconds - a.nanoseconds) as f64 / (SOON[1] - SOON[0]).as_nanos() as f64;
        let late = Usage { nanoseconds: d.nanoseconds - c.nanoseconds, sleeps: d.sleeps - c.sleeps };
        Idle { soon, late }
    });
    Ok(idle.collect())
}

/// Returns the sum over all threads. It is exact for sleeping threads.
fn usage(pid: u32) -> Result<Usage> {
    let mut usage = Usage::default();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = thread?.path();
        let time = fs::read_to_string(path.join("schedstat"))?;
        usage.nanoseconds += time.split_whitespace().next().context("schedstat is empty")?.parse::<u64>()?;
        let status = fs::read_to_string(path.join("status"))?;
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        usage.sleeps += sleeps.context("status without switches")?.trim().parse::<u64>()?;
    }
    Ok(usage)
}
