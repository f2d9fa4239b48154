//! The loads of the table.

use super::load::{Closed, Gaps, Gate, Load, MS, Open, SEC, US};
use super::machine::Machine;
use kickless_worker::policy::Nanos;
use std::ops::Range;

/// A load on a machine.
pub(crate) struct Pattern {
    pub(crate) name: &'static str,
    pub(crate) load: Load,
    pub(crate) machine: Machine,
    pub(crate) warm_up: Nanos,
    pub(crate) time: Nanos,
    pub(crate) seed: u64,
}

/// Answers come back to a driver that polls.
pub(crate) const POLLING: Range<Nanos> = 500..5 * US;
/// Answers come back to a driver that sleeps.
pub(crate) const SLEEPING: Range<Nanos> = 50 * US..120 * US;

pub(crate) fn closed(in_flight: u32, think: Range<Nanos>) -> Load {
    Load { closed: Some(Closed { in_flight, think, gate: Gate::OPEN }), ..Load::default() }
}

pub(crate) fn open(gaps: Gaps) -> Load {
    Load { open: Some(Open { gaps, gate: Gate::OPEN }), ..Load::default() }
}

/// Returns a load of 100 ms of a closed loop and 900 ms of nothing, repeated.
pub(crate) fn on_off(in_flight: u32, think: Range<Nanos>) -> Load {
    let gate = Gate { from: 0, on: 100 * MS, off: 900 * MS };
    Load { closed: Some(Closed { in_flight, think, gate }), ..Load::default() }
}

/// Returns a load that changes every half second between a closed loop and an open one.
pub(crate) fn changing(in_flight: u32, think: Range<Nanos>, gaps: Gaps) -> Load {
    let half = SEC / 2;
    Load {
        closed: Some(Closed { in_flight, think, gate: Gate { from: 0, on: half, off: half } }),
        open: Some(Open { gaps, gate: Gate { from: half, on: half, off: half } }),
        ..Load::default()
    }
}

/// Returns the gaps of a driver that wakes late, and sometimes very late.
pub(crate) fn asleep(gap: Nanos) -> Gaps {
    Gaps::Asleep { gap, late: 60 * US, stall: 3 * MS }
}

fn on_disk(load: Load, disk: Range<Nanos>) -> Load {
    Load { disk, ..load }
}

/// Gaps in nanoseconds, one a line.
pub(crate) fn recorded(text: &str) -> Gaps {
    Gaps::Recorded(text.lines().filter_map(|line| line.trim().parse().ok()).collect())
}

pub(crate) fn all() -> Vec<Pattern> {
    let pattern =
        |name, load| Pattern { name, load, machine: Machine::default(), warm_up: SEC, time: SEC, seed: 1 };
    let fast = |name, load| Pattern { warm_up: 300 * MS, time: 200 * MS, ..pattern(name, load) };
    let slow = |name, load| Pattern { warm_up: 2 * SEC, time: 8 * SEC, ..pattern(name, load) };
    let hog = |name, load| Pattern {
        machine: Machine { hog: true, ..Machine::default() },
        time: 8 * SEC,
        ..pattern(name, load)
    };
    let bursts = Gaps::Bursts { every: MS, count: 64, spacing: 500 };
    let disk = 60 * US..100 * US;
    vec![
        pattern("closed 1, driver polls", closed(1, POLLING)),
        pattern("closed 32, driver polls", closed(32, POLLING)),
        pattern("closed 1, driver sleeps", closed(1, SLEEPING)),
        pattern("closed 32, driver sleeps", closed(32, SLEEPING)),
        slow("open 2 k/s steady", open(Gaps::Steady(500 * US))),
        slow("open 2 k/s Poisson", open(Gaps::Poisson(500 * US))),
        slow("open 20 k/s steady", open(Gaps::Steady(50 * US))),
        slow("open 20 k/s Poisson", open(Gaps::Poisson(50 * US))),
        pattern("open 200 k/s steady", open(Gaps::Steady(5 * US))),
        pattern("open 200 k/s Poisson", open(Gaps::Poisson(5 * US))),
        fast("open 1 M/s steady", open(Gaps::Steady(US))),
        fast("open 1 M/s Poisson", open(Gaps::Poisson(US))),
        Pattern {
            machine: Machine { service: 150, ..Machine::default() },
            ..fast("open 4 M/s Poisson", open(Gaps::Poisson(250)))
        },
        slow("open 20 k/s, driver sleeps", open(asleep(50 * US))),
        slow("open 200 k/s, driver sleeps", open(asleep(5 * US))),
        slow("trickle 100/s", open(Gaps::Poisson(10 * MS))),
        slow("bursts of 64 each ms", open(bursts)),
        slow("recorded: commits of a database", open(recorded(include_str!("../../data/database.txt")))),
        slow("recorded: a copy of a tree", open(recorded(include_str!("../../data/copy.txt")))),
        slow("recorded: reads, 8 in flight", open(recorded(include_str!("../../data/reads.txt")))),
        slow("on-off, closed 1, driver polls", on_off(1, POLLING)),
        slow("on-off, closed 1, driver sleeps", on_off(1, SLEEPING)),
        slow("on-off, closed 32, driver sleeps", on_off(32, SLEEPING)),
        slow("disk 80 us, closed 1", on_disk(closed(1, POLLING), disk.clone())),
        pattern("disk 80 us, closed 32", on_disk(closed(32, POLLING), disk.clone())),
        slow("disk 80 us, open 20 k/s Poisson", on_disk(open(Gaps::Poisson(50 * US)), disk.clone())),
        slow("disk 80 us, open 200 k/s Poisson", on_disk(open(Gaps::Poisson(5 * US)), disk.clone())),
        slow("disk 80 us, trickle", on_disk(open(Gaps::Poisson(10 * MS)), disk)),
        slow("disk 5 ms, closed 1", on_disk(closed(1, POLLING), 4 * MS..6 * MS)),
        Pattern {
            warm_up: 6 * SEC,
            ..slow("disk 5 ms, closed 32", on_disk(closed(32, POLLING), 4 * MS..6 * MS))
        },
        slow("changing: closed 1, open 200 k/s", changing(1, POLLING, Gaps::Poisson(5 * US))),
        slow("changing: closed 32, open 20 k/s", changing(32, SLEEPING, Gaps::Poisson(50 * US))),
        hog("contended: closed 1, driver polls", closed(1, POLLING)),
        hog("contended: closed 1, driver sleeps", closed(1, SLEEPING)),
        hog("contended: closed 32, driver sleeps", closed(32, SLEEPING)),
        hog("contended: open 20 k/s Poisson", open(Gaps::Poisson(50 * US))),
    ]
}
