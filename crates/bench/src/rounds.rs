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
use super::way::{Repeats, Way};
use super::{report, run, table};

/// Runs the benchmark of disks, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies, data are wrong, or requests failed.
pub(crate) fn carry_out(bench: BackEnds<'_>, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let targets = match bench {
        BackEnds::Blk(blk) => single(&blk.socket_path, blk.pid),
        BackEnds::Compare(compare) => {
            several(&compare.targets, compare.target_cpu.as_ref(), compare.load.rings.cpu.as_ref())?
        }
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

/// The targets of a benchmark. If each of several has its CPU, and the driver another one, the way between
/// these two is measured.
#[derive(Debug)]
pub(crate) struct Targets {
    all: Vec<Target>,
    way: Option<Way>,
}

/// Runs `turn` for each load on each target, `rounds` times, writes the requested files, and prints the
/// results. With `stops_others`, the processes of the targets that have no turn are stopped. Repeats rounds
/// in which the way between the CPUs changed.
///
/// # Errors
/// A turn fails, or requests failed.
pub(crate) fn run_loads<S>(
    Targets { all: targets, way }: Targets,
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
        let one_round = |round| -> Result<(Vec<Turn>, Vec<f64>)> {
            let (mut turns, mut ways) = (Vec::new(), Vec::new());
            for (at, target) in in_turn(round, &targets) {
                let words = &description.words;
                progress.begin(format!("{}, {words}, round {} of {rounds}", target.name(), round + 1));
                if stops_others {
                    targets.iter().for_each(Target::pause);
                }
                ways.extend(measured(way)?);
                if stops_others {
                    target.resume();
                }
                turns.push((at, turn(&scenario, target, &stop, &progress)?));
            }
            ways.extend(measured(way)?);
            turns.sort_by_key(|(at, _)| *at);
            Ok((turns.into_iter().map(|(_, turn)| turn).collect(), ways))
        };
        let mut turns: Vec<Vec<Turn>> = targets.iter().map(|_| Vec::new()).collect();
        let (mut ways, mut repeats) = (Vec::new(), Repeats(rounds));
        for round in 0..rounds {
            let (new_turns, new_ways) = loop {
                let (turns, ways) = one_round(round)?;
                if !repeats.takes(&ways) {
                    break (turns, ways);
                }
            };
            turns.iter_mut().zip(new_turns).for_each(|(turns, new)| turns.push(new));
            ways.push(new_ways);
        }
        loads.push(Load { description, turns, ways });
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

/// Measures the way, if there is one to measure.
///
/// # Errors
/// This process may not use one of its CPUs.
fn measured(way: Option<Way>) -> Result<Option<f64>> {
    way.map_or(Ok(None), Way::measure)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

/// Returns the target of a benchmark of one back-end.
pub(crate) fn single(socket: &Path, pid: Option<u32>) -> Targets {
    let target = Target::at(socket.to_string_lossy().into_owned(), socket.to_owned(), pid);
    Targets { all: vec![target], way: None }
}

/// Returns the targets of a comparison, each with a unique name. Starts those that are commands on `cpus`.
/// The driver's CPUs are for the way between both.
///
/// # Errors
/// A command cannot be started.
pub(crate) fn several(
    texts: &[String],
    cpus: Option<&CpuList>,
    driver_cpus: Option<&CpuList>,
) -> Result<Targets> {
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
    Ok(Targets { all: targets, way: Way::between(driver_cpus, cpus) })
}

/// Returns the targets, with their numbers, in the order of a round. Each round begins with another target.
fn in_turn(round: u32, targets: &[Target]) -> impl Iterator<Item = (usize, &Target)> {
    let first = round as usize % targets.len().max(1);
    targets.iter().enumerate().cycle().skip(first).take(targets.len())
}
