//! Runs all loads on all targets, turn by turn.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use kickless_values::CpuList;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::common_options::{BackEnds, LoadKind};
use super::core_latency::{CpuPair, Repeats};
use super::description::Description;
use super::options::LoadOptions;
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
pub(crate) fn carry_out(
    bench: &BackEnds<'_, LoadOptions>,
    print: impl FnOnce(&str) -> Result<()>,
) -> Result<()> {
    let loads = scenarios(bench).into_iter().map(|scenario| (scenario.describe(), scenario)).collect();
    // A policy of polling measures its sleeps and waits, and a stop would be one of them.
    let stops_others = false;
    run_loads(bench, loads, stops_others, print, |scenario, target, stop, progress| {
        run::turn(scenario, target, bench.load(), stop, progress)
    })
}

/// The targets of a benchmark. If each of several has its CPU, and the driver another one, the core-to-core
/// latency of these two is measured.
#[derive(Debug)]
struct Targets {
    all: Vec<Target>,
    cpu_pair: Option<CpuPair>,
}

/// Runs `turn` for each load on each target, in each round, writes the requested files, and prints the
/// results. With `stops_others`, the processes of the targets that have no turn are stopped. Repeats rounds
/// in which the core-to-core latency changed.
///
/// # Errors
/// A target cannot be started, a turn fails, or requests failed.
pub(crate) fn run_loads<S, L: LoadKind>(
    bench: &BackEnds<'_, L>,
    scenarios: Vec<(Description, S)>,
    stops_others: bool,
    print: impl FnOnce(&str) -> Result<()>,
    turn: impl Fn(&S, &Target, &AtomicBool, &Progress) -> Result<Turn>,
) -> Result<()> {
    let Targets { all: targets, cpu_pair } = Targets::of(bench)?;
    let rounds = bench.rounds();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, stop.clone())
            .context("the handler of SIGINT and SIGTERM cannot be installed")?;
    }
    let progress = Progress::new();
    let mut loads = Vec::new();
    for (description, scenario) in scenarios {
        let one_round = |round, again| -> Result<Round> {
            let (mut turns, mut core_latencies) = (Vec::new(), Vec::new());
            for (at, target) in in_turn(round, &targets) {
                let words = &description.words;
                let again = if again { " again" } else { "" };
                progress.begin(format!("{}, {words}, round {} of {rounds}{again}", target.name(), round + 1));
                if stops_others {
                    targets.iter().for_each(Target::pause);
                }
                core_latencies.extend(cpu_pair.map(CpuPair::measure).transpose()?);
                if stops_others {
                    target.resume();
                }
                turns.push((at, turn(&scenario, target, &stop, &progress)?));
            }
            core_latencies.extend(cpu_pair.map(CpuPair::measure).transpose()?);
            turns.sort_by_key(|(at, _)| *at);
            Ok(Round { turns: turns.into_iter().map(|(_, turn)| turn).collect(), core_latencies })
        };
        let mut turns: Vec<Vec<Turn>> = targets.iter().map(|_| Vec::new()).collect();
        let mut core_latencies = Vec::new();
        let (all, repeats) = rounds_of_a_load(rounds, one_round)?;
        for round in all {
            turns.iter_mut().zip(round.turns).for_each(|(turns, new)| turns.push(new));
            core_latencies.push(round.core_latencies);
        }
        loads.push(Load { description, turns, core_latencies, repeats });
    }
    let results = Results { targets: targets.iter().map(|target| target.name().to_owned()).collect(), loads };
    let output = &bench.load().common().output;
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

/// The turns of all targets in a round, and the core-to-core latencies before, between and after them.
/// `None`: it was not measured, because a CPU was busy.
struct Round {
    turns: Vec<Turn>,
    core_latencies: Vec<Option<f64>>,
}

/// Runs the rounds of a load by `one_round`, which gets the number of the round and whether it is a repeat.
/// Returns the rounds, and how often one was repeated because its latency changed. A round with failed
/// requests or lost frames counts in any case.
fn rounds_of_a_load(
    rounds: u32,
    mut one_round: impl FnMut(u32, bool) -> Result<Round>,
) -> Result<(Vec<Round>, u32)> {
    let (mut all, mut repeats) = (Vec::new(), Repeats(rounds));
    for number in 0..rounds {
        let mut round = one_round(number, false)?;
        while round.turns.iter().all(|turn| turn.failed == 0 && turn.lost == 0)
            && repeats.takes(&round.core_latencies)
        {
            round = one_round(number, true)?;
        }
        all.push(round);
    }
    Ok((all, rounds - repeats.0))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

impl Targets {
    /// Returns the targets of a benchmark.
    ///
    /// # Errors
    /// A command cannot be started.
    fn of<L: LoadKind>(bench: &BackEnds<'_, L>) -> Result<Targets> {
        match bench {
            BackEnds::One(one) => {
                let name = one.socket_path.to_string_lossy().into_owned();
                Ok(Targets { all: vec![Target::at(name, one.socket_path.clone(), one.pid)], cpu_pair: None })
            }
            BackEnds::Several(several) => {
                let (cpus, driver_cpus) = (several.target_cpu.as_ref(), &several.load.common().rings.cpu);
                let cpu_pair = CpuPair::of(driver_cpus.as_ref(), cpus);
                Ok(Targets { all: compared(&several.targets, cpus)?, cpu_pair })
            }
        }
    }
}

/// Returns the targets of a comparison, each with a unique name. Starts those that are commands on `cpus`.
///
/// # Errors
/// A command cannot be started.
fn compared(texts: &[String], cpus: Option<&CpuList>) -> Result<Vec<Target>> {
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

/// Returns the targets, with their numbers, in the order of a round. Each round begins with another target.
fn in_turn(round: u32, targets: &[Target]) -> impl Iterator<Item = (usize, &Target)> {
    let first = round as usize % targets.len().max(1);
    targets.iter().enumerate().cycle().skip(first).take(targets.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs rounds with these results. Returns the requests of the turns that count, and the repeats.
    fn counted(rounds: u32, results: Vec<(Turn, [f64; 2])>) -> (Vec<u64>, u32) {
        let mut results = results.into_iter();
        let (all, repeats) = rounds_of_a_load(rounds, |_, _| {
            let (turn, latencies) = results.next().context("one round too many")?;
            Ok(Round { turns: vec![turn], core_latencies: latencies.map(Some).to_vec() })
        })
        .unwrap();
        assert!(results.next().is_none());
        (all.iter().flat_map(|round| &round.turns).map(|turn| turn.done).collect(), repeats)
    }

    #[test]
    fn a_round_in_which_the_latency_changed_is_run_again_and_does_not_count() {
        let (same, changed) = ([80.0, 80.0], [80.0, 400.0]);
        let results =
            [(1, changed), (2, changed), (3, same), (4, changed)].map(|(n, each)| (Turn::fake(n), each));
        assert_eq!(counted(2, results.into()), (vec![3, 4], 2));
    }

    #[test]
    fn a_round_with_failures_counts_whatever_its_latency() {
        let failed = Turn { failed: 1, ..Turn::fake(1) };
        let lost = Turn { lost: 1, ..Turn::fake(2) };
        assert_eq!(counted(2, vec![(failed, [80.0, 400.0]), (lost, [400.0, 80.0])]), (vec![1, 2], 0));
    }
}
