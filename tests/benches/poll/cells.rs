//! Compares `auto` with every fixed way and with `qemu-storage-daemon`, under requests that come at times of
//! their own: two disks, three rates, two kinds of drivers. Each of these cells has a target for the cost and
//! one for the latency.
//!
//! The cost is the share of a core that the back-end takes, and 3 us for each kick: what an exit costs a
//! guest.

use std::time::Duration;

use anyhow::Result;

use crate::common::Spread;
use crate::compare::{ALWAYS, AUTO, Disk, Figures, NEVER, QSD, RATE, Settings};
use crate::loads::{OPEN, POLL_LATENCY, peak, waits};
use crate::report::{Goal, Report};

const TURN: Duration = Duration::from_secs(1);
/// The processor time of a kick in nanoseconds: the default of `--poll-kick-price`.
const KICK: f64 = 3e3;
/// A way may cost a tenth and this part of a core more than the cheapest.
const MARGIN: f64 = 0.02;

/// Returns the cost of a turn, in cores.
fn cost(turn: &Figures) -> f64 {
    turn.cores + turn.kicks * turn.iops * KICK / 1e9
}

/// Measures the twelve cells.
pub(crate) fn cells(settings: &Settings, disks: &[Disk], report: &mut Report) -> Result<()> {
    for disk in disks {
        for (driver, wait) in waits(settings) {
            let half = (peak(settings, *disk, wait)? / 2.0) as u32;
            for rate in [10_000, 100_000, 300_000.min(half.max(1))] {
                cell(settings, *disk, (driver, wait), rate, report)?;
            }
        }
    }
    Ok(())
}

fn cell(
    settings: &Settings,
    disk: Disk,
    (driver, wait): (&str, &str),
    rate: u32,
    report: &mut Report,
) -> Result<()> {
    let ways = [AUTO, NEVER, ALWAYS, RATE, QSD];
    let turns = settings.compare(disk, &ways, TURN, &[OPEN[0], OPEN[1], &format!("--rate={rate}"), wait])?;
    report.table(&format!("{}, {rate} a second, {driver} driver", disk.name), &ways, &turns);
    let Some((auto, others)) = turns.split_first() else { return Ok(()) };
    let median = |turns: &[Figures], figure: fn(&Figures) -> f64| Spread::of(turns.iter().map(figure)).median;
    let cheapest = others.iter().min_by(|a, b| median(a, cost).total_cmp(&median(b, cost)));
    let Some(cheapest) = cheapest else { return Ok(()) };
    let most = median(cheapest, cost) * 1.1 + MARGIN;
    report.check("cores and kicks, auto", auto.iter().map(cost), Goal::AtMost(most));
    let latency = median(cheapest, |turn| turn.p50) + POLL_LATENCY;
    report.check(
        "median latency in us, auto",
        auto.iter().map(|turn| turn.p50 / 1e3),
        Goal::AtMost(latency / 1e3),
    );
    Ok(())
}
