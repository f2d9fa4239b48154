//! Threads write page after page of 3000 MiB while harvests are taken.
//!
//! The harvester has the first processor, and the writers have the others. If all ran on the same processors,
//! the result would depend on the scheduler.

use crate::contestants::{Guest, Kind, Logged, PAGE};
use crate::{Plan, Spread};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const KINDS: [Kind; 3] = [Kind::Protect, Kind::Marks, Kind::Atomic];
/// Time between two harvests.
const GAP: Duration = Duration::from_millis(10);
/// Writes from one quiescent point to the next.
const SECTION: u64 = 64;

/// The results of one turn, for each harvest.
#[derive(Clone, Copy, Default)]
struct Turn {
    walk_ms: f64,
    wait_ms: f64,
    pages: f64,
    /// Writes per second, during harvests and between them.
    rate: f64,
    /// Writes per second during harvests.
    rate_within: f64,
}

pub(crate) fn run(plan: Plan) {
    let guest = Guest::new(plan.memory);
    for writers in [2, 12] {
        let mut turns = vec![Vec::new(); KINDS.len()];
        for round in 0..plan.rounds {
            for at in 0..KINDS.len() {
                // Another kind begins each round.
                let at = (at + round) % KINDS.len();
                turns[at].push(turn(KINDS[at], &guest, plan, writers));
            }
        }
        report(plan, writers, &turns);
    }
}

fn report(plan: Plan, writers: usize, turns: &[Vec<Turn>]) {
    println!(
        "{writers} writers, {} MiB, {} harvests {GAP:?} apart, {} turns; ms for each harvest",
        plan.memory >> 20,
        plan.harvests,
        plan.rounds
    );
    println!(
        "  {:<24} {:<22} {:<24} {:>8}  {:<24} M writes/s, and during harvests",
        "", "without the wait", "with it", "pages", ""
    );
    let spread = |of: &[Turn], value: fn(&Turn) -> f64| Spread::of(of.iter().map(value));
    for (kind, turns) in KINDS.iter().zip(turns) {
        println!(
            "  {:<24} {:<22} {:<24} {:>8.0}  {:<24} {}",
            kind.name(),
            spread(turns, |t| t.walk_ms).to_string(),
            spread(turns, |t| t.walk_ms + t.wait_ms).to_string(),
            spread(turns, |t| t.pages).median,
            spread(turns, |t| t.rate / 1e6).to_string(),
            spread(turns, |t| t.rate_within / 1e6),
        );
    }
}

/// Returns the processors of the harvester and of the writers.
fn processors() -> (CpuSet, CpuSet) {
    let all = sched_getaffinity(None).unwrap();
    let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu));
    let (Some(first), true) = (each.next(), all.count() > 1) else { return (all, all) };
    let (mut one, mut others) = (CpuSet::new(), all);
    one.set(first);
    others.unset(first);
    (one, others)
}

fn turn(kind: Kind, guest: &Guest, plan: Plan, writers: usize) -> Turn {
    let mut logged = Logged::new(kind, guest);
    let before = sched_getaffinity(None).unwrap();
    let (harvester, others) = processors();
    let stop = AtomicBool::new(false);
    // A cache line for each writer.
    let counts: Vec<[AtomicU64; 16]> = (0..writers).map(|_| [const { AtomicU64::new(0) }; 16]).collect();
    let written = || counts.iter().map(|count| count[0].load(Ordering::Relaxed)).sum::<u64>() as f64;
    let mut sum = Turn::default();
    thread::scope(|scope| {
        for (id, count) in counts.iter().enumerate() {
            let (mut store, stop) = (logged.store(), &stop);
            scope.spawn(move || {
                sched_setaffinity(None, &others).unwrap();
                let pages = plan.memory / PAGE;
                let mut page = pages / writers as u64 * id as u64;
                let mut done = 0;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..SECTION {
                        page = if page + 1 < pages { page + 1 } else { 0 };
                        store.write(page * PAGE, done);
                        done += 1;
                    }
                    store.quiesce();
                    count[0].store(done, Ordering::Relaxed);
                }
            });
        }
        sched_setaffinity(None, &harvester).unwrap();
        thread::sleep(GAP);
        // The first harvest has all pages since the beginning, so it does not count.
        logged.harvest(false);
        let (begun, at_first) = (Instant::now(), written());
        let mut within = (Duration::ZERO, 0.0);
        for _ in 0..plan.harvests {
            thread::sleep(GAP);
            let (start, at_start) = (Instant::now(), written());
            let (took, pages) = logged.harvest(true);
            within.0 += start.elapsed();
            within.1 += written() - at_start;
            sum.walk_ms += took.walk.as_secs_f64() * 1e3;
            sum.wait_ms += took.wait.as_secs_f64() * 1e3;
            sum.pages += pages as f64;
        }
        sum.rate = (written() - at_first) / begun.elapsed().as_secs_f64();
        sum.rate_within = within.1 / within.0.as_secs_f64();
        stop.store(true, Ordering::Relaxed);
    });
    sched_setaffinity(None, &before).unwrap();
    let each = plan.harvests as f64;
    Turn { walk_ms: sum.walk_ms / each, wait_ms: sum.wait_ms / each, pages: sum.pages / each, ..sum }
}
