//! Prints tables and targets.

use crate::common::Spread;
use crate::compare::{Figures, Way};

/// The limit of a figure.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

/// The report with all targets so far.
pub(crate) struct Report {
    /// Whether the figures mean nothing.
    quick: bool,
    load: String,
    held: usize,
    missed: Vec<String>,
}

impl Report {
    /// Creates a report without targets.
    pub(crate) fn new(quick: bool) -> Report {
        Report { quick, load: String::new(), held: 0, missed: Vec::new() }
    }

    /// Prints a load and the results of each way to poll.
    pub(crate) fn table(&mut self, load: &str, ways: &[Way], turns: &[Vec<Figures>]) {
        self.begin(load);
        println!(
            "  {:<12} {:>9}  {:>9} .. {:<9} {:>10} {:>10} {:>10} {:>10} {:>9}",
            "", "reads/s", "least", "most", "p50 us", "p99 us", "kicks/req", "CPU ns/req", "of a core"
        );
        for ((name, _), turns) in ways.iter().zip(turns) {
            let of = |figure: fn(&Figures) -> f64| Spread::of(turns.iter().map(figure));
            let rate = of(|turn| turn.iops);
            println!(
                "  {name:<12} {:>9.0}  {:>9.0} .. {:<9.0} {:>10.2} {:>10.1} {:>10.5} {:>10.0} {:>7.1} %",
                rate.median,
                rate.min,
                rate.max,
                of(|turn| turn.p50).median / 1e3,
                of(|turn| turn.p99).median / 1e3,
                of(|turn| turn.kicks).median,
                of(|turn| turn.cpu_each).median,
                of(|turn| turn.cores).median * 100.0
            );
        }
        Self::core_latencies(turns.first().map(Vec::as_slice).unwrap_or_default());
    }

    /// Prints the core-to-core latency in each round. `kickless bench compare` repeats rounds in which it
    /// changed, but not without end.
    fn core_latencies(turns: &[Figures]) {
        let each: Vec<String> = turns
            .iter()
            .filter_map(|turn| turn.core_latency)
            .map(|[least, most]| format!("{least:.0} to {most:.0}"))
            .collect();
        if !each.is_empty() {
            println!("  core-to-core latency in ns: {}", each.join(", "));
        }
    }

    /// Prints a load. The checks that follow are about it.
    pub(crate) fn begin(&mut self, load: &str) {
        println!("\n{load}");
        self.load = load.into();
    }

    /// Prints a figure of each round beside its target. The median counts.
    pub(crate) fn check(&mut self, what: &str, each: impl IntoIterator<Item = f64>, goal: Goal) {
        let Spread { median, min, max } = Spread::of(each);
        let (words, bound, holds) = match goal {
            Goal::AtLeast(bound) => ("at least", bound, median >= bound),
            Goal::AtMost(bound) => ("at most", bound, median <= bound),
        };
        let verdict = match (self.quick, holds) {
            (true, _) => "",
            (_, true) => ": holds",
            (_, false) => ": MISSED",
        };
        let line = format!("{what} = {median:.3} ({min:.3} .. {max:.3}), target: {words} {bound}");
        println!("  {line}{verdict}");
        if holds {
            self.held += 1;
        } else {
            self.missed.push(format!("{}: {line}", self.load));
        }
    }

    /// Prints the number of met targets, and the missed ones.
    pub(crate) fn close(self) {
        if self.quick {
            return println!("\nall loads run; the short form measures nothing");
        }
        println!("\n=== {} of {} targets hold", self.held, self.held + self.missed.len());
        for line in self.missed {
            println!("  missed: {line}");
        }
    }
}

/// Returns the ratio of `figure` of two contestants, round by round. It is 0 if ours is 0.
pub(crate) fn ratios<'a>(
    ours: &'a [Figures],
    theirs: &'a [Figures],
    figure: impl Fn(&Figures) -> f64 + 'a,
) -> impl Iterator<Item = f64> + 'a {
    ours.iter().zip(theirs).map(move |(ours, theirs)| match (figure(ours), figure(theirs)) {
        (0.0, _) => 0.0,
        (ours, theirs) => ours / theirs,
    })
}
