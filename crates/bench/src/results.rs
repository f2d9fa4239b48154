//! The results of all turns: medians, spreads and ratios.

use serde::Serialize;
use serde_json::{Value, json};

use super::core_latency;
use super::description::{Description, REQUESTS, Units};
use super::host::Host;
use super::turn::{Latencies, Operation, Turn, Verified, latencies};

/// All turns of all targets at all loads.
#[derive(Debug)]
pub(crate) struct Results {
    pub(crate) host: Host,
    /// A signal has ended the benchmark early.
    pub(crate) is_interrupted: bool,
    /// The names of the targets.
    pub(crate) targets: Vec<String>,
    /// The turns of each load.
    pub(crate) loads: Vec<Load>,
}

/// One load and its turns.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) description: Description,
    /// The turns of each target, in the order of the targets.
    pub(crate) turns: Vec<Vec<Turn>>,
    /// The core-to-core latencies in each round: before each turn, and after the last one. `None`: a CPU was
    /// busy. Empty if there are no two CPUs to measure.
    pub(crate) core_latencies: Vec<Vec<Option<f64>>>,
    /// The number of rounds that were repeated, because the latency changed in them.
    pub(crate) repeats: u32,
}

/// The median of some numbers, with the least and the most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    /// Returns the spread of `numbers`, or `None` if there are none.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut numbers: Vec<f64> = numbers.into_iter().collect();
        numbers.sort_by(f64::total_cmp);
        let (least, most) = (*numbers.first()?, *numbers.last()?);
        let middle = numbers.len() / 2;
        let upper = *numbers.get(middle)?;
        let lower = *numbers.get(middle - usize::from(numbers.len().is_multiple_of(2)))?;
        Some(Spread { median: f64::midpoint(lower, upper), least, most })
    }
}

impl Load {
    /// Returns the spread of a figure over the turns of a target.
    pub(crate) fn spread(&self, target: usize, figure: impl Fn(&Turn) -> f64) -> Option<Spread> {
        Spread::of(self.turns.get(target)?.iter().map(figure))
    }

    /// Returns the spread of a figure that some turns may lack.
    pub(crate) fn spread_of_some(
        &self,
        target: usize,
        figure: impl Fn(&Turn) -> Option<f64>,
    ) -> Option<Spread> {
        Spread::of(self.turns.get(target)?.iter().filter_map(figure))
    }

    /// Returns the rate of the first target divided by the rate of this one, round by round.
    pub(crate) fn ratio(&self, target: usize) -> Option<Spread> {
        self.ratio_in(target, |_| true)
    }

    /// Returns the same for some of the rounds.
    pub(crate) fn ratio_in(&self, target: usize, rounds: impl Fn(usize) -> bool) -> Option<Spread> {
        let (first, other) = (self.turns.first()?, self.turns.get(target)?);
        // There is no ratio to a target that has done nothing.
        let counts = |(round, (_, other)): &(usize, (&Turn, &Turn))| rounds(*round) && other.done > 0;
        let turns = first.iter().zip(other).enumerate().filter(counts);
        Spread::of(turns.map(|(_, (first, other))| first.rate() / other.rate()))
    }

    /// Returns the latencies of all turns of a target.
    pub(crate) fn latencies(&self, target: usize) -> Option<Latencies> {
        let mut all = latencies().ok()?;
        for turn in self.turns.get(target)? {
            all.add(&turn.latencies).ok()?;
        }
        Some(all)
    }

    /// Returns the names of the operations that a load has besides one another, such as reads and writes.
    pub(crate) fn operations(&self) -> Vec<&'static str> {
        let first = self.turns.iter().flatten().next();
        first.map(|turn| turn.operations.iter().map(|of| of.name).collect()).unwrap_or_default()
    }

    /// Returns the rate of an operation of a target, and its latencies in all turns.
    pub(crate) fn operation(&self, target: usize, name: &str) -> Option<(Spread, Latencies)> {
        let turns = self.turns.get(target)?;
        let of = |turn: &'_ Turn| turn.operations.iter().position(|of| of.name == name);
        let mut all = Operation::new("").ok()?;
        let mut rates = Vec::new();
        for turn in turns {
            let operation = turn.operations.get(of(turn)?)?;
            all.add(operation).ok()?;
            rates.push(operation.done as f64 / turn.seconds);
        }
        Some((Spread::of(rates)?, all.latencies))
    }

    /// Returns the checks of the data of a target, if the load verifies them.
    pub(crate) fn verified(&self, target: usize) -> Option<Verified> {
        let each = self.turns.get(target)?.iter().filter_map(|turn| turn.verified);
        each.reduce(|mut sum, next| {
            sum += next;
            sum
        })
    }

    /// Returns the number of frames of a target that were sent and did not come back.
    pub(crate) fn lost(&self, target: usize) -> u64 {
        self.turns.get(target).map_or(0, |turns| turns.iter().map(|turn| turn.lost).sum())
    }

    /// Returns the number of failed requests of a target, and the first failure.
    pub(crate) fn failed(&self, target: usize) -> (u64, Option<&str>) {
        let turns = self.turns.get(target).map(Vec::as_slice).unwrap_or_default();
        let count = turns.iter().map(|turn| turn.failed).sum();
        (count, turns.iter().find_map(|turn| turn.failure.as_deref()))
    }
}

impl Results {
    /// Makes the results of these targets, without any load.
    pub(crate) fn new(host: Host, targets: Vec<String>) -> Self {
        Self { host, is_interrupted: false, targets, loads: Vec::new() }
    }

    /// Returns the name of a target, or an empty text if there is no other one.
    pub(crate) fn name_beside_others(&self, target: usize) -> &str {
        match self.targets.len() {
            1 => "",
            _ => self.targets.get(target).map(String::as_str).unwrap_or_default(),
        }
    }

    /// Returns the descriptions of the loads.
    pub(crate) fn descriptions(&self) -> impl Iterator<Item = &Description> + Clone {
        self.loads.iter().map(|load| &load.description)
    }

    /// Returns the error of a load that has done nothing in all turns of a target.
    pub(crate) fn silence(&self) -> Option<String> {
        self.loads.iter().find_map(|load| {
            let sentence = load.description.silence?;
            let of_target = |turns: &Vec<Turn>| turns.iter().all(|turn| turn.submitted == 0);
            let at = load.turns.iter().position(of_target)?;
            Some(format!("{}: {sentence}", self.targets.get(at)?))
        })
    }

    /// Returns the words for what the loads consist of.
    pub(crate) fn units(&self) -> Units {
        self.loads.first().map_or(REQUESTS, |load| load.description.units)
    }

    /// Returns the number of failed requests of all targets.
    pub(crate) fn failed(&self) -> u64 {
        let each = |load: &Load| (0..self.targets.len()).map(|target| load.failed(target).0).sum::<u64>();
        self.loads.iter().map(each).sum()
    }

    /// Returns the first failure.
    pub(crate) fn failure(&self) -> Option<&str> {
        let targets = 0..self.targets.len();
        self.loads.iter().find_map(|load| targets.clone().find_map(|target| load.failed(target).1))
    }

    /// Returns all results as JSON, for other programs. Latencies and processor times are in nanoseconds, the
    /// durations of a load in seconds.
    pub(crate) fn to_json(&self) -> Value {
        let loads: Vec<Value> = self.loads.iter().map(|load| self.load_to_json(load)).collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"), "run": self.host, "interrupted": self.is_interrupted,
            "targets": self.targets, "loads": loads,
        })
    }

    fn load_to_json(&self, load: &Load) -> Value {
        let targets = self.targets.iter().enumerate().map(|(at, name)| {
            let latencies = load.latencies(at).map(|all| latencies_to_json(&all));
            let operations: Vec<Value> = load
                .operations()
                .into_iter()
                .filter_map(|name| {
                    let (iops, latencies) = load.operation(at, name)?;
                    Some(json!({ "name": name, "iops": iops, "latency": latencies_to_json(&latencies) }))
                })
                .collect();
            json!({
                "name": name,
                "iops": load.spread(at, Turn::rate),
                "bytes_per_second": load.spread(at, |turn| turn.rate() * f64::from(load.description.bytes)),
                "first_to_this": load.ratio(at),
                "latency": latencies,
                "operations": operations,
                "verified": load.verified(at),
                "kicks_per_request": load.spread(at, Turn::kicks_per_request),
                "calls_per_request": load.spread(at, Turn::calls_per_request),
                "driver_cpu_per_request": load.spread(at, Turn::driver_cpu_per_request),
                "back_end_cpu_per_request": load.spread_of_some(at, Turn::back_end_cpu_per_request),
                "never_sent": load.turns.get(at).map(|turns| turns.iter().map(|turn| turn.unsent).sum::<u64>()),
                "lost": load.lost(at),
                "failed": load.failed(at).0,
                "failure": load.failed(at).1,
                "back_end_cores": load.spread_of_some(at, Turn::back_end_cores),
                "turns": load.turns.get(at).map(|turns| turns.iter().map(turn_to_json).collect::<Vec<_>>()),
                "rounds": load.turns.get(at).map(|turns| turns.iter().map(Turn::rate).collect::<Vec<_>>()),
                "timelines": load.turns.get(at).map(|turns| turns.iter().map(|turn| turn.timeline.clone()).collect::<Vec<_>>()),
            })
        });
        let targets: Vec<Value> = targets.collect();
        let changed: Vec<bool> =
            load.core_latencies.iter().map(|latencies| !core_latency::is_same(latencies)).collect();
        json!({
            "load": load.description.json, "in_words": load.description.words(), "targets": targets,
            "core_latencies": load.core_latencies, "core_latency_changed": changed,
            "repeated_rounds": load.repeats,
        })
    }
}

/// Returns the figures of a histogram as JSON.
fn latencies_to_json(all: &Latencies) -> Value {
    json!({
        "mean": all.mean(), "p50": all.value_at_quantile(0.5), "p90": all.value_at_quantile(0.9),
        "p99": all.value_at_quantile(0.99), "p99.9": all.value_at_quantile(0.999), "max": all.max(),
    })
}

/// Returns the figures of one turn as JSON.
fn turn_to_json(turn: &Turn) -> Value {
    json!({
        "seconds": turn.seconds,
        "iops": turn.rate(),
        "p50": turn.latency(0.5),
        "p99": turn.latency(0.99),
        "kicks_per_request": turn.kicks_per_request(),
        "calls_per_request": turn.calls_per_request(),
        "driver_cpu_per_request": turn.driver_cpu_per_request(),
        "back_end_cpu_per_request": turn.back_end_cpu_per_request(),
        "back_end_cores": turn.back_end_cores(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([2.0]), Some(Spread { median: 2.0, least: 2.0, most: 2.0 }));
        assert_eq!(Spread::of([3.0, 1.0]), Some(Spread { median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Spread::of([9.0, 1.0, 2.0]), Some(Spread { median: 2.0, least: 1.0, most: 9.0 }));
    }
}
