//! Synthetic loads that do not react to a delay but look as if they did, and the time for which a rule holds
//! the core for one of them.

use super::chooser::Rule;
use super::load::{Gaps, Load, MS, SEC, US};
use super::machine::{Machine, Worker};
use super::patterns::{asleep, open};
use super::table::LATENCY;
use kickless_worker::policy::Nanos;

/// The length of the windows in which use is measured, and the share of the core that holds it.
const STEP: Nanos = 50 * MS;
const HELD: f64 = 0.85;

/// Returns loads that come at times of their own, with a name each. None of them needs a third of the core.
pub(crate) fn loads() -> Vec<(String, Load)> {
    let mut loads = Vec::new();
    for gap in [100 * US, 33 * US, 10 * US, 3_300] {
        let late = |late, deep, slow| Gaps::Late { mean: gap, late, deep, slow };
        let count = u32::try_from(MS / gap).unwrap_or(1);
        let kinds = [
            ("at random times", Gaps::Poisson(gap)),
            ("at regular times", Gaps::Steady(gap)),
            ("late driver", asleep(gap)),
            ("naps delay the driver by 100 us", late(60 * US, 100 * US, 0)),
            ("naps delay the driver by 400 us", late(60 * US, 400 * US, 0)),
            ("naps delay the driver by 1 ms", late(60 * US, MS, 0)),
            ("slow and quick wakes in turn", late(60 * US, 0, 500 * US)),
            ("slow and quick wakes, and naps delay", late(60 * US, 200 * US, 800 * US)),
            ("a burst each ms", Gaps::Bursts { every: MS, count, spacing: 500 }),
        ];
        loads.extend(kinds.map(|(name, gaps)| (format!("one in {gap} ns, {name}"), open(gaps))));
    }
    loads
}

/// Returns machines that stop for a time (a stopped process, a suspended or migrated guest), and machines
/// that are slow to wake, with a name each.
pub(crate) fn machines() -> Vec<(String, Machine)> {
    let plain = Machine::default();
    let stops = [300 * US, 3 * MS, 30 * MS, SEC, 3600 * SEC];
    let stopped =
        |time: Nanos| (format!("stopped for {} us", time / US), Machine { stop: (SEC, time), ..plain });
    let slow = [70 * US, 150 * US, 300 * US];
    let wakes = |time: Nanos| {
        let machine = Machine { slow_until: SEC / 2, slow_wake: time, ..plain };
        (format!("wakes {} us late for half a second", time / US), machine)
    };
    stops.map(stopped).into_iter().chain(slow.map(wakes)).collect()
}

/// Returns the longest time for which the rule holds the core, and the total.
pub(crate) fn held(machine: Machine, load: &Load, rule: Rule, time: Nanos, seed: u64) -> (Nanos, Nanos) {
    let worker = Worker::new(machine, load.clone(), rule, LATENCY, seed);
    let (mut longest, mut run, mut total) = (0, 0, 0);
    for share in worker.shares(time, STEP) {
        run = if share >= HELD { run + STEP } else { 0 };
        total += if share >= HELD { STEP } else { 0 };
        longest = longest.max(run);
    }
    (longest, total)
}
