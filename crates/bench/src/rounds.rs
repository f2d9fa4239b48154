//! Runs all loads on all targets, turn by turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Error, Result, bail};
use kickless_values::CpuList;

use super::common_options::{BackEnds, LoadKind};
use super::core_latency::{CpuPair, Repeats};
use super::description::Description;
use super::host::Host;
use super::interrupt::Interrupts;
use super::options::LoadOptions;
use super::outputs::Outputs;
use super::progress::{Part, Progress};
use super::results::{Load, Results};
use super::scenario::scenarios;
use super::target::Target;
use super::turn::Turn;
use super::{run, table};

/// The shortest time of an interrupted turn that counts: the least that `--time` may be.
const TURN_MIN: Duration = Duration::from_millis(10);

/// Runs the benchmark of disks, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies, data are wrong, or requests failed.
pub(crate) fn carry_out(bench: &BackEnds<'_, LoadOptions>, print: impl Fn(&str) -> Result<()>) -> Result<()> {
    let loads = scenarios(bench).into_iter().map(|scenario| (scenario.describe(), scenario)).collect();
    // A disk's back-end sleeps without a client, so there is no need to stop it.
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

/// Runs `turn` for each load on each target, in each round. Prints the results of each load as it ends, and
/// writes the requested files. With `stops_others`, the processes of the targets that have no turn are
/// stopped. Repeats rounds in which the core-to-core latency changed. After a signal, prints and writes the
/// results so far.
///
/// # Errors
/// A file cannot be written to, a target cannot be started, a turn fails, requests failed, no frame was
/// counted, or a signal came.
pub(crate) fn run_loads<S, L: LoadKind>(
    bench: &BackEnds<'_, L>,
    scenarios: Vec<(Description, S)>,
    stops_others: bool,
    print: impl Fn(&str) -> Result<()>,
    turn: impl Fn(&S, &Target, &AtomicBool, &Progress) -> Result<Turn>,
) -> Result<()> {
    let output = &bench.load().common().output;
    let outputs = Outputs::open(output)?;
    let interrupts = Interrupts::note()?;
    let host = Host::this();
    let targets = Targets::of(bench)?;
    let progress = Progress::new();
    let descriptions: Vec<&Description> = scenarios.iter().map(|(description, _)| description).collect();
    let rounds = Rounds {
        targets: &targets,
        count: bench.rounds(),
        stops_others,
        stop: &interrupts.stop,
        progress: &progress,
    };
    let mut results = Results::new(host, targets.all.iter().map(|target| target.name().to_owned()).collect());
    let mut tables = table::Tables::new();
    let mut ended = Ok(());
    for (number, (description, scenario)) in scenarios.iter().enumerate() {
        let plan = Plan { number, descriptions: &descriptions };
        let load =
            rounds.load(&plan, description, |target| turn(scenario, target, &interrupts.stop, &progress));
        match load {
            Ok(load) if load.turns.iter().all(Vec::is_empty) => break,
            Ok(load) => {
                if !output.json {
                    print(&tables.load(&results.targets, &load))?;
                }
                results.loads.push(load);
            }
            Err(error) => {
                ended = Err(error);
                break;
            }
        }
        if interrupts.came().is_some() {
            break;
        }
    }
    let interrupted = interrupts.came();
    results.is_interrupted = interrupted.is_some();
    let written =
        if results.loads.is_empty() { Ok(()) } else { show(&results, outputs, output.json, &tables, print) };
    ended?;
    if let Some(interrupted) = interrupted {
        return Err(interrupted.into());
    }
    written?;
    verdict(&results)
}

/// Writes the files, and prints what comes after the last load.
fn show(
    results: &Results,
    outputs: Outputs,
    json: bool,
    tables: &table::Tables,
    print: impl Fn(&str) -> Result<()>,
) -> Result<()> {
    print(&if json { serde_json::to_string_pretty(&results.to_json())? + "\n" } else { tables.note() })?;
    outputs.write(results)
}

/// Returns the error of a benchmark that ran to its end.
///
/// # Errors
/// Requests failed, or no frame was counted.
fn verdict(results: &Results) -> Result<()> {
    match (results.failed(), results.failure()) {
        (0, _) => {}
        (count, failure) => {
            bail!("{count} requests failed, the first with: {}", failure.unwrap_or("no reason"))
        }
    }
    match results.silence() {
        Some(silence) => bail!("{silence}"),
        None => Ok(()),
    }
}

/// A load among all loads.
struct Plan<'a> {
    number: usize,
    descriptions: &'a [&'a Description],
}

impl Plan<'_> {
    /// Returns the parts of the progress line that say which load it is.
    fn parts(&self, description: &Description) -> Vec<Part> {
        let count = self.descriptions.len();
        let label = Part::new(4, description.label(self.descriptions.iter().copied()));
        match count {
            1 => vec![label],
            _ => vec![Part::new(1, format!("load {} of {count}", self.number + 1)), label],
        }
    }

    /// Returns the time of the loads after this one, if each of them has so many turns.
    fn later(&self, turns: u32) -> Duration {
        self.descriptions.iter().skip(self.number + 1).map(|load| load.whole_time * turns).sum()
    }
}

/// The way in which each load is run.
struct Rounds<'a> {
    targets: &'a Targets,
    count: u32,
    stops_others: bool,
    stop: &'a AtomicBool,
    progress: &'a Progress,
}

impl Rounds<'_> {
    /// Runs a load in all rounds. After a signal, the load has the turns so far.
    ///
    /// # Errors
    /// A turn fails.
    fn load(
        &self,
        plan: &Plan<'_>,
        description: &Description,
        turn: impl Fn(&Target) -> Result<Turn>,
    ) -> Result<Load> {
        let mut turns: Vec<Vec<Turn>> = self.targets.all.iter().map(|_| Vec::new()).collect();
        let mut core_latencies = Vec::new();
        let (all, repeats) = rounds_of_a_load(self.count, |round, again| {
            self.round(plan, description, (round, again), &turn)
        })?;
        for round in all {
            for (at, turn) in round.turns {
                if let Some(turns) = turns.get_mut(at) {
                    turns.push(turn);
                }
            }
            core_latencies.push(round.core_latencies);
        }
        Ok(Load { description: description.clone(), turns, core_latencies, repeats })
    }

    /// Runs a turn of each target. `again`: the round is a repeat.
    fn round(
        &self,
        plan: &Plan<'_>,
        description: &Description,
        (round, again): (u32, bool),
        turn: impl Fn(&Target) -> Result<Turn>,
    ) -> Result<Round> {
        let Targets { all: targets, cpu_pair } = self.targets;
        let (mut turns, mut core_latencies) = (Vec::new(), Vec::new());
        // Lossless: the command line has fewer targets.
        let count = targets.len() as u32;
        let turns_of_load = self.count * count;
        for (place, (at, target)) in (1..).zip(in_turn(round, targets)) {
            let left = turns_of_load.saturating_sub(round * count + place);
            let later = plan.later(turns_of_load) + description.whole_time * left;
            self.progress.begin(self.parts(plan.parts(description), target, (round, again)), later);
            if self.stops_others {
                targets.iter().for_each(Target::pause);
            }
            core_latencies.extend(cpu_pair.map(CpuPair::measure).transpose()?);
            if self.stops_others {
                target.resume();
            }
            let turn = turn(target);
            let is_interrupted = self.stop.load(Ordering::Relaxed);
            match turn {
                Err(error) if !is_interrupted || !is_of_driver(&error) => return Err(error),
                Err(_) => {}
                Ok(turn) if turn.is_interrupted && turn.seconds < TURN_MIN.as_secs_f64() => {}
                Ok(turn) => turns.push((at, turn)),
            }
            if is_interrupted {
                return Ok(Round { turns, core_latencies, is_interrupted });
            }
        }
        core_latencies.extend(cpu_pair.map(CpuPair::measure).transpose()?);
        Ok(Round { turns, core_latencies, is_interrupted: false })
    }

    /// Returns the parts of the progress line of a turn.
    fn parts(&self, mut parts: Vec<Part>, target: &Target, (round, again): (u32, bool)) -> Vec<Part> {
        let label = parts.pop();
        let again = if again { " again" } else { "" };
        if self.count > 1 {
            parts.push(Part::new(2, format!("round {} of {}{again}", round + 1, self.count)));
        }
        if self.targets.all.len() > 1 {
            parts.push(Part::new(3, target.name()));
        }
        parts.extend(label);
        parts
    }
}

/// Returns whether the driver has made this error. After a signal, it may come from the end of the back-end.
fn is_of_driver(error: &Error) -> bool {
    error.chain().any(|cause| cause.is::<kickless_driver::Error>())
}

/// The turns of a round with the numbers of their targets, and the core-to-core latencies before, between and
/// after them. `None`: it was not measured, because a CPU was busy.
struct Round {
    turns: Vec<(usize, Turn)>,
    core_latencies: Vec<Option<f64>>,
    /// A signal has ended the round.
    is_interrupted: bool,
}

/// Runs the rounds of a load by `one_round`, which gets the number of the round and whether it is a repeat.
/// Returns the rounds, and how often one was repeated because its latency changed. A round with failed
/// requests or lost frames counts in any case. An interrupted round is the last one.
fn rounds_of_a_load(
    rounds: u32,
    mut one_round: impl FnMut(u32, bool) -> Result<Round>,
) -> Result<(Vec<Round>, u32)> {
    let (mut all, mut repeats) = (Vec::new(), Repeats(rounds));
    for number in 0..rounds {
        let mut round = one_round(number, false)?;
        while !round.is_interrupted
            && round.turns.iter().all(|(_, turn)| turn.failed == 0 && turn.lost == 0)
            && repeats.takes(&round.core_latencies)
        {
            round = one_round(number, true)?;
        }
        let is_last = round.is_interrupted;
        all.push(round);
        if is_last {
            break;
        }
    }
    Ok((all, rounds - repeats.0))
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
            let (turn, latencies) = results.next().unwrap();
            let core_latencies = latencies.map(Some).to_vec();
            Ok(Round { turns: vec![(0, turn)], core_latencies, is_interrupted: false })
        })
        .unwrap();
        assert!(results.next().is_none());
        (all.iter().flat_map(|round| &round.turns).map(|(_, turn)| turn.done).collect(), repeats)
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

    #[test]
    fn an_interrupted_round_is_the_last_one() {
        let mut rounds = 0;
        let (all, repeats) = rounds_of_a_load(5, |_, _| {
            rounds += 1;
            let core_latencies = vec![Some(80.0), Some(400.0)];
            Ok(Round { turns: Vec::new(), core_latencies, is_interrupted: true })
        })
        .unwrap();
        assert_eq!((all.len(), rounds, repeats), (1, 1, 0));
    }
}
