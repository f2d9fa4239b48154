//! Runs all loads on all targets, turn by turn.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use kickless_values::CpuList;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::common_options::OutputOptions;
use super::description::Description;
use super::options::BackEnds;
use super::progress::Progress;
use super::results::{Load, Results};
use super::scenario::scenarios;
use super::target::Target;
use super::turn::Turn;
use super::{report, run, table};

/// Runs the benchmark of disks, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies, data are wrong, or requests failed.
pub(crate) fn carry_out(bench: BackEnds<'_>, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let targets = match bench {
        BackEnds::Blk(blk) => single(&blk.socket_path, blk.pid),
        BackEnds::Compare(compare) => several(&compare.targets, compare.target_cpu.as_ref())?,
    };
    let loads = scenarios(bench).into_iter().map(|scenario| (scenario.describe(), scenario)).collect();
    // A policy of polling measures its sleeps and waits, and a stop would be one of them.
    let stops_others = false;
    run_loads(
        targets,
        loads,
        bench.rounds(),
        stops_others,
        &bench.load().output,
        print,
        |scenario, target, stop, progress| run::turn(scenario, target, bench.load(), stop, progress),
    )
}

/// Runs `turn` for each load on each target, `rounds` times, writes the requested files, and prints the
/// results. With `stops_others`, the processes of the targets that have no turn are stopped.
///
/// # Errors
/// A turn fails, or requests failed.
pub(crate) fn run_loads<S>(
    targets: Vec<Target>,
    scenarios: Vec<(Description, S)>,
    rounds: u32,
    stops_others: bool,
    output: &OutputOptions,
    print: impl FnOnce(&str) -> Result<()>,
    turn: impl Fn(&S, &Target, &AtomicBool, &Progress) -> Result<Turn>,
) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())
            .context("the handler of SIGINT and SIGTERM cannot be installed")?;
    }
    let progress = Progress::new();
    let mut loads = Vec::new();
    for (description, scenario) in scenarios {
        let mut turns: Vec<Vec<Turn>> = targets.iter().map(|_| Vec::new()).collect();
        for (round, at) in in_turn(rounds, targets.len()) {
            let (Some(target), Some(turns)) = (targets.get(at), turns.get_mut(at)) else { continue };
            let words = &description.words;
            progress.begin(format!("{}, {words}, round {} of {rounds}", target.name(), round + 1));
            if stops_others {
                for (other, target) in targets.iter().enumerate() {
                    if other == at { target.resume() } else { target.pause() }
                }
            }
            turns.push(turn(&scenario, target, &stop, &progress)?);
        }
        loads.push(Load { description, turns });
    }
    let results = Results { targets: targets.iter().map(|target| target.name().to_owned()).collect(), loads };
    if let Some(path) = &output.report {
        write(path, &report::page(&results)?)?;
    }
    if let Some(path) = &output.plot {
        write(path, &report::first_plot(&results)?)?;
    }
    if let Some(path) = &output.plot_rate {
        write(path, &report::over_rate(&results)?)?;
    }
    if let Some(path) = &output.plot_time {
        write(path, &report::over_time(&results)?)?;
    }
    print(&if output.json {
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

/// Returns the target of a benchmark of one back-end.
pub(crate) fn single(socket: &Path, pid: Option<u32>) -> Vec<Target> {
    vec![Target::at(socket.to_string_lossy().into_owned(), socket.to_owned(), pid)]
}

/// Returns the targets of a comparison, each with a unique name. Starts those that are commands.
///
/// # Errors
/// A command cannot be started.
pub(crate) fn several(texts: &[String], cpus: Option<&CpuList>) -> Result<Vec<Target>> {
    let mut targets: Vec<Target> = Vec::new();
    for text in texts {
        let mut target = Target::parse(text, cpus)?;
        let taken = |name: &str| targets.iter().any(|other| other.name() == name);
        if taken(target.name()) {
            let name = target.name().to_owned();
            let free = (2..).map(|n| format!("{name} {n}")).find(|name| !taken(name));
            target.rename(free.unwrap_or(name));
        }
        targets.push(target);
    }
    Ok(targets)
}

/// Returns the rounds, and the targets of each in their order. Each round begins with another target.
fn in_turn(rounds: u32, targets: usize) -> impl Iterator<Item = (u32, usize)> {
    (0..rounds).flat_map(move |round| {
        let first = round as usize % targets.max(1);
        (0..targets).map(move |at| (round, (at + first) % targets))
    })
}
