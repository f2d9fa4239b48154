//! A table with one line for each load: the results of `auto` and of the other rules.

use super::chooser::Rule;
use super::load::US;
use super::machine::{Outcome, Worker};
use super::patterns::Pattern;
use kickless_worker::Poll;
use kickless_worker::policy::Nanos;
use std::fmt;
use std::time::Duration;

/// The worth of a nanosecond of a delay that counts, in nanoseconds of processor time.
pub(crate) const DELAY_WORTH: f64 = 8.0;
/// The delay that the owner accepts.
pub(crate) const LATENCY: Nanos = 100 * US;

pub(crate) const AUTO: Rule = auto(LATENCY);
pub(crate) const ALWAYS: Rule = Rule::Policy(Poll::Always);
pub(crate) const NEVER: Rule = Rule::Policy(Poll::Never);
pub(crate) const RATE: Rule =
    Rule::Policy(Poll::Rate { start_per_sec: Poll::START_PER_SEC, stop_idle: Poll::STOP_IDLE });

pub(crate) const fn auto(latency: Nanos) -> Rule {
    Rule::Policy(Poll::Auto { latency: Duration::from_nanos(latency), kick_price: Poll::KICK_PRICE })
}

pub(crate) fn run(pattern: &Pattern, rule: Rule) -> Outcome {
    Worker::new(pattern.machine, pattern.load.clone(), rule, LATENCY, pattern.seed)
        .run(pattern.warm_up, pattern.time)
}

/// Returns the cheapest fixed rule for this load, and its cost.
pub(crate) fn best_fixed(pattern: &Pattern) -> (Rule, f64) {
    let costs = Rule::fixed().map(|rule| (rule, run(pattern, rule).cost()));
    costs.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((NEVER, f64::INFINITY))
}

/// The results of one load.
pub(crate) struct Line {
    name: &'static str,
    rules: [(Outcome, Nanos); 3],
    best: (Rule, f64),
}

impl Line {
    pub(crate) fn of(pattern: &Pattern) -> Self {
        let rules = [ALWAYS, NEVER, AUTO].map(|rule| {
            let mut outcome = run(pattern, rule);
            let median = outcome.median_delay();
            (outcome, median)
        });
        Self { name: pattern.name, rules, best: best_fixed(pattern) }
    }

    pub(crate) fn head() -> String {
        let head = format!(
            "{:36} | {:>7} {:>7} | {:>7} {:>7} {:>9} {:>9} {:>9} | {:>10} {:>7}",
            "", "always", "never", "auto", "of", "mean", "median", "kicks of", "best", "regret"
        );
        let units = format!(
            "{:36} | {:>7} {:>7} | {:>7} {:>7} {:>9} {:>9} {:>9} | {:>10} {:>7}",
            "load", "CPU %", "CPU %", "CPU %", "always", "added us", "added us", "never's", "fixed rule", ""
        );
        format!("{head}\n{units}")
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kicks = |outcome: &Outcome| outcome.kicks as f64 / outcome.requests.max(1) as f64;
        let [(always, always_median), (never, _), (auto, auto_median)] = &self.rules;
        write!(
            f,
            "{:36} | {:7.1} {:7.1} | {:7.1} {:7.3} {:9.1} {:9.1} {:9.3} | {:>10} {:7.2}",
            self.name,
            always.cpu_share() * 100.0,
            never.cpu_share() * 100.0,
            auto.cpu_share() * 100.0,
            auto.per_sec() / always.per_sec(),
            (auto.mean_delay() - always.mean_delay()) / 1e3,
            (*auto_median as f64 - *always_median as f64) / 1e3,
            kicks(auto) / kicks(never).max(f64::MIN_POSITIVE),
            self.best.0.name(),
            auto.cost() / self.best.1,
        )
    }
}
