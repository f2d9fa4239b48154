//! Compares the ways to poll, with one device under one load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::common::Spread;
use crate::compare::{ALWAYS, AUTO, Disk, Figures, NEVER, RATE, Settings};
use crate::report::{Goal, Report, ratios};

const TURN: Duration = Duration::from_millis(500);
const WAITS: [(&str, &str); 2] = [("sleeping", "--wait=sleep"), ("polling", "--wait=poll")];
/// Delay that `auto` may add, in nanoseconds: the default of `--poll-latency`.
pub(crate) const POLL_LATENCY: f64 = 100e3;
/// Room for an open loop: requests in flight, and ring size.
pub(crate) const OPEN: [&str; 2] = ["--depth=256", "--queue-size=512"];

/// Returns the drivers to measure, each with its option.
pub(crate) fn waits(settings: &Settings) -> impl Iterator<Item = (&'static str, &'static str)> {
    WAITS.into_iter().filter(|(driver, _)| settings.takes_driver(driver))
}

/// Sends requests as fast as possible.
pub(crate) fn steady(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    for disk in disks {
        for depth in [1, 32] {
            for (driver, wait) in waits(settings) {
                let ways = [AUTO, ALWAYS, NEVER];
                let turns = settings.compare(*disk, &ways, TURN, &[&format!("--depth={depth}"), wait])?;
                report.table(&format!("{}, {depth} in flight, {driver} driver", disk.name), &ways, &turns);
                let [auto, always, never] = &turns[..] else { continue };
                let throughput = ratios(auto, always, |turn| turn.iops);
                report.check("throughput, auto/always", throughput, Goal::AtLeast(0.975));
                if depth == 1 {
                    let latency = ratios(auto, always, |turn| turn.p50);
                    report.check("median latency, auto/always", latency, Goal::AtMost(1.1));
                }
                let kicks = ratios(auto, never, |turn| turn.kicks);
                report.check("kicks per request, auto/never", kicks, Goal::AtMost(0.05));
            }
        }
    }
    Ok(())
}

/// Returns the peak rate of `always`.
pub(crate) fn peak(settings: &Settings, disk: Disk, wait: &str) -> Result<f64> {
    // A comparison takes two.
    let peak = settings.compare(disk, &[AUTO, ALWAYS], TURN / 2, &["--depth=32", wait])?;
    Ok(Spread::of(peak[1].iter().map(|turn| turn.iops)).median)
}

/// Sends requests at a share of the peak rate of `always`.
pub(crate) fn open(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    for disk in disks {
        for (driver, wait) in waits(settings) {
            let ways = [AUTO, ALWAYS];
            let peak = peak(settings, *disk, wait)?;
            for (share, name, cores) in [(0.5, "half", 0.7), (0.1, "a tenth", 0.3)] {
                let rate = (peak * share).max(1.0) as u32;
                let turns = settings.compare(
                    *disk,
                    &ways,
                    TURN,
                    &[OPEN[0], OPEN[1], &format!("--rate={rate}"), wait],
                )?;
                let load = format!("{}, {name} of the peak: {rate} a second, {driver} driver", disk.name);
                report.table(&load, &ways, &turns);
                let [auto, always] = &turns[..] else { continue };
                report.check("cores, auto", auto.iter().map(|turn| turn.cores), Goal::AtMost(cores));
                let added = auto.iter().zip(always).map(|(auto, always)| (auto.p50 - always.p50) / 1e3);
                report.check("median latency in us, auto - always", added, Goal::AtMost(POLL_LATENCY / 1e3));
            }
        }
    }
    Ok(())
}

/// Sends few requests.
pub(crate) fn trickle(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    for disk in disks {
        let ways = [AUTO, NEVER];
        let time = Duration::from_secs(2);
        let turns =
            settings.compare(*disk, &ways, time, &[OPEN[0], OPEN[1], "--rate=100", "--wait=sleep"])?;
        report.table(&format!("{}, 100 a second, sleeping driver", disk.name), &ways, &turns);
        let [auto, never] = &turns[..] else { continue };
        report.check("CPU, auto/never", ratios(auto, never, |turn| turn.cores), Goal::AtMost(1.2));
    }
    Ok(())
}

/// Sends requests for 100 ms, pauses for 900 ms, and so on. The short form has shorter periods.
pub(crate) fn on_off(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    let Some(disk) = disks.first() else { return Ok(()) };
    let (cycle, time) = match settings.quick {
        true => ("--on-off=5ms,20ms", Duration::from_millis(50)),
        false => ("--on-off=100ms,900ms", Duration::from_secs(3)),
    };
    for (depth, (driver, wait)) in
        [1, 32].into_iter().zip(WAITS).filter(|(_, (driver, _))| settings.takes_driver(driver))
    {
        // No policy can do better than `always`: after a pause, the machine is slower for all of them.
        let ways = [AUTO, RATE, ALWAYS];
        let turns = settings.compare(*disk, &ways, time, &[&format!("--depth={depth}"), wait, cycle])?;
        let load = format!("{}, 100 ms on and 900 ms off, {depth} in flight, {driver} driver", disk.name);
        report.table(&load, &ways, &turns);
        let [auto, rate, always] = &turns[..] else { continue };
        report.check("throughput, auto/rate", ratios(auto, rate, |turn| turn.iops), Goal::AtLeast(0.97));
        report.check("throughput, auto/always", ratios(auto, always, |turn| turn.iops), Goal::AtLeast(0.97));
        report.check("CPU, auto/rate", ratios(auto, rate, |turn| turn.cores), Goal::AtMost(0.2));
    }
    Ok(())
}

/// Runs beside a thread that never gives up the back-end's CPU by itself.
pub(crate) fn contended(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    let Some(disk) = disks.first() else { return Ok(()) };
    for depth in [1, 32] {
        for (driver, wait) in waits(settings) {
            let ways = [AUTO, NEVER];
            let load = [&*format!("--depth={depth}"), wait];
            let turns = beside_a_spinner(settings, || settings.compare(*disk, &ways, TURN, &load))?;
            let load = format!("{}, {depth} in flight, {driver} driver, a spinning thread", disk.name);
            report.table(&load, &ways, &turns);
            let [auto, never] = &turns[..] else { continue };
            report.check(
                "throughput, auto/never",
                ratios(auto, never, |turn| turn.iops),
                Goal::AtLeast(0.97),
            );
        }
    }
    Ok(())
}

fn beside_a_spinner(
    settings: &Settings,
    does: impl FnOnce() -> Result<Vec<Vec<Figures>>>,
) -> Result<Vec<Vec<Figures>>> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            if let Some([_, back_ends]) = settings.cpus {
                let mut set = CpuSet::new();
                set.set(back_ends);
                // If this fails, the thread spins on another CPU, and the figures show it.
                let _ = sched_setaffinity(None, &set);
            }
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let done = does();
        stop.store(true, Ordering::Relaxed);
        done
    })
}
