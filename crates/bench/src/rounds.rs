//! Runs all loads on all targets, turn by turn.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::options::BackEnds;
use super::progress::Progress;
use super::results::{Load, Results};
use super::scenario::{Scenario, scenarios};
use super::target::Target;
use super::turn::Turn;
use super::{report, run, table};

/// Runs the benchmark, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies, data are wrong, or requests failed.
pub(crate) fn carry_out(bench: BackEnds<'_>, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())
            .context("the handler of SIGINT and SIGTERM cannot be installed")?;
    }
    let targets = targets(bench)?;
    let progress = Progress::new();
    let mut loads = Vec::new();
    for scenario in scenarios(bench) {
        loads.push(Load { turns: rounds(bench, &scenario, &targets, &stop, &progress)?, scenario });
    }
    let results = Results { targets: targets.iter().map(|target| target.name().to_owned()).collect(), loads };
    let load = bench.load();
    if let Some(path) = &load.report {
        write(path, &report::page(&results)?)?;
    }
    if let Some(path) = &load.plot {
        write(path, &report::first_plot(&results)?)?;
    }
    if let Some(path) = &load.plot_rate {
        write(path, &report::over_rate(&results)?)?;
    }
    if let Some(path) = &load.plot_time {
        write(path, &report::over_time(&results)?)?;
    }
    print(&if load.json {
        serde_json::to_string_pretty(&results.to_json())? + "\n"
    } else {
        table::text(&results)
    })?;
    match (results.failed(), results.failure()) {
        (0, _) => Ok(()),
        (count, failure) => {
            bail!("{count} requests failed, the first with: {}", failure.unwrap_or("no reason"))
        }
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

/// Returns the targets, each with a unique name. Starts those that are commands.
fn targets(bench: BackEnds<'_>) -> Result<Vec<Target>> {
    let mut targets: Vec<Target> = Vec::new();
    match bench {
        BackEnds::Blk(blk) => {
            let name = blk.socket_path.to_string_lossy().into_owned();
            targets.push(Target::at(name, blk.socket_path.clone(), blk.pid));
        }
        BackEnds::Compare(compare) => {
            for text in &compare.targets {
                let mut target = Target::parse(text, compare.target_cpu.as_ref())?;
                let taken = |name: &str| targets.iter().any(|other| other.name() == name);
                if taken(target.name()) {
                    let name = target.name().to_owned();
                    let free = (2..).map(|n| format!("{name} {n}")).find(|name| !taken(name));
                    target.rename(free.unwrap_or(name));
                }
                targets.push(target);
            }
        }
    }
    Ok(targets)
}

/// Runs the turns of each target at one load. Each round begins with another target.
fn rounds(
    bench: BackEnds<'_>,
    scenario: &Scenario,
    targets: &[Target],
    stop: &AtomicBool,
    progress: &Progress,
) -> Result<Vec<Vec<Turn>>> {
    let mut turns: Vec<Vec<Turn>> = targets.iter().map(|_| Vec::new()).collect();
    for round in 0..bench.rounds() {
        let first = round as usize % targets.len().max(1);
        for at in (0..targets.len()).map(|at| (at + first) % targets.len()) {
            let (Some(target), Some(turns)) = (targets.get(at), turns.get_mut(at)) else { continue };
            progress.begin(format!(
                "{}, {scenario}, round {} of {}",
                target.name(),
                round + 1,
                bench.rounds()
            ));
            turns.push(run::turn(scenario, target, bench.load(), stop, progress)?);
        }
    }
    Ok(turns)
}
