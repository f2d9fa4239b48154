//! Closed loads whose waits vary, and the throughput that a rule keeps.

use super::chooser::Rule;
use super::load::{Load, SEC, US};
use super::machine::{Machine, Worker};
use super::patterns::{POLLING, closed};
use super::table::{ALWAYS, LATENCY};

/// Returns closed loads with a name each: their think times, or the times of their disk, vary by 0 to 100
/// percent of the mean.
pub(crate) fn loads() -> Vec<(String, Load)> {
    let mut loads = Vec::new();
    for in_flight in [1, 4, 32] {
        for mean in [20 * US, 60 * US, 150 * US, 300 * US] {
            for percent in [0, 25, 50, 100] {
                let times = mean - mean * percent / 100..mean + mean * percent / 100 + 1;
                let name = format!("{in_flight} in flight, {} us and {percent} % more or less", mean / US);
                loads.push((format!("driver: {name}"), closed(in_flight, times.clone())));
                loads.push((format!("disk: {name}"), Load { disk: times, ..closed(in_flight, POLLING) }));
            }
        }
    }
    loads
}

/// Returns the throughput of a rule as a share of that of `always`, and its processor time as a share of a
/// core, in the second second.
pub(crate) fn kept(load: &Load, rule: Rule, seed: u64) -> (f64, f64) {
    let run = |rule| Worker::new(Machine::default(), load.clone(), rule, LATENCY, seed).run(SEC, SEC);
    let (ours, always) = (run(rule), run(ALWAYS));
    (ours.per_sec() / always.per_sec(), ours.cpu_share())
}
