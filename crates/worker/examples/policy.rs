//! Prints what the policy comes to in simulation.
//!
//! `cargo run --release -p kickless-worker --example policy [PART OF A NAME]` prints, for each kind of load,
//! the policy beside the best fixed rule: the one that costs least in processor time and delay, chosen in
//! hindsight.
//!
//! With `replay`, it reads a worker's log from standard input and repeats the decisions about leases. The log
//! is that of one busy queue, with `--log-level=kickless_worker=trace`.
//!
//! With `stuck [SEEDS]`, it prints how long the policy holds the core for synthetic loads that do not need
//! it.
//!
//! With `noisy [SEEDS]`, it prints the throughput that the policy keeps for closed loads whose waits vary.
//!
//! With `crowd`, it prints what a worker with many guests takes of its core, and how long requests wait:
//! first for the loads that `cargo bench -p kickless-tests --bench scale` measures, then for 10 000 guests on
//! 64 workers.
//!
//! With `visits [GAP]`, it serves a million requests of a closed load, and nothing but the policy runs: each
//! request comes `GAP` nanoseconds after the answer to the last. `valgrind --tool=callgrind` counts the
//! instructions.

#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../tests/policy/simulation/mod.rs"]
mod simulation;

use kickless_worker::Poll;
use kickless_worker::policy::{Host, Nanos, Policy, Verdict};
use simulation::load::{Gaps, MS, SEC, US};
use simulation::machine::Machine;
use simulation::{crowd, noisy, patterns, stuck, table};

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let seeds = std::env::args().nth(2).and_then(|seeds| seeds.parse().ok()).unwrap_or(4);
    match wanted.as_str() {
        "stuck" => return print_stuck(seeds),
        "noisy" => return print_noisy(seeds),
        "replay" => return replay(),
        "crowd" => return print_crowd(),
        "visits" => {
            return serve_visits(std::env::args().nth(2).map_or(300, |gap| gap.parse().unwrap_or(300)));
        }
        _ => {}
    }
    println!("{}", table::Line::head());
    for pattern in patterns::all().iter().filter(|pattern| pattern.name.contains(&wanted)) {
        println!("{}", table::Line::of(pattern));
    }
}

/// Repeats the decisions of a log.
fn replay() {
    let word = |line: &str, key: &str| {
        line.split_whitespace().find_map(|word| word.strip_prefix(key)).map(str::to_owned)
    };
    let lines = std::io::stdin().lines().map_while(Result::ok);
    let pairs: Vec<(Nanos, f64)> = lines
        .filter(|line| line.contains("polling trial"))
        .filter_map(|line| Some((word(&line, "now=")?.parse().ok()?, word(&line, "share=")?.parse().ok()?)))
        .collect();
    let mut policy = Policy::new(Poll::default(), 256);
    let mut before = pairs.first().map_or(0, |pair| pair.0);
    for (now, share) in pairs {
        let (lease, capital) = policy.replay(now.saturating_sub(std::mem::replace(&mut before, now)), share);
        println!("{now:>15} ns: lost {share:6.3}, capital {capital:7.2}, lease {} us", lease / 1000);
    }
}

/// Lets the policy decide about a million waits of the same length.
fn serve_visits(gap: Nanos) {
    let host = Host::new(8 * US, 30 * US);
    let mut policy = Policy::new(Poll::default(), 256);
    let mut now = 0;
    for _ in 0..1_000_000 {
        let next = now + gap;
        while now < next {
            match policy.empty(now, &host, false) {
                Verdict::Spin { until } => now = until.min(next),
                Verdict::Nap { until, .. } => now = until + host.wake_delay,
                Verdict::Arm => {
                    policy.armed();
                    now = next + host.wake_delay;
                    policy.woken(now, &host);
                }
            }
        }
        policy.found(now, 1);
    }
    println!("{now} ns");
}

/// Prints the share of a core that a worker with many guests takes, and the delays of requests.
fn print_crowd() {
    /// Guests, requests a second of all of them together, and the share that was measured.
    const MEASURED: [(usize, f64, f64); 12] = [
        (8, 10e3, 0.101),
        (8, 30e3, 0.275),
        (8, 100e3, 0.335),
        (8, 300e3, 0.486),
        (64, 10e3, 0.116),
        (64, 30e3, 0.219),
        (64, 100e3, 0.385),
        (64, 300e3, 0.700),
        (512, 10e3, 0.133),
        (512, 30e3, 0.282),
        (512, 100e3, 0.535),
        (512, 300e3, 0.815),
    ];
    const WORKERS: usize = 64;
    const GUESTS: usize = 10_000;
    println!(
        "{:>8} {:>12} {:>8} {:>9} {:>7} {:>8} {:>8}",
        "guests", "a second", "of core", "measured", "kicks", "p50 us", "p99 us"
    );
    let line = |guests: usize, rate: f64, measured: Option<f64>| {
        let (costs, each) = (crowd::Costs::measured(guests), rate / guests as f64);
        let mut served = crowd::Crowd::new(costs, table::AUTO, guests, each, 1).run(4 * SEC);
        let requests = served.requests.max(1) as f64;
        let [middle, late] = [0.5, 0.99].map(|share| served.delay(share) as f64 / 1e3);
        let measured = measured.map_or(String::new(), |measured| format!("{measured:.3}"));
        println!(
            "{guests:>8} {rate:>12.0} {:>8.3} {measured:>9} {:>7.3} {middle:>8.1} {late:>8.1}",
            served.busy,
            served.kicks as f64 / requests,
        );
    };
    for (guests, rate, measured) in MEASURED {
        line(guests, rate, Some(measured));
    }
    println!("{GUESTS} guests on {WORKERS} workers: one of these");
    for each in [10.0, 30.0, 100.0, 300.0, 1e3, 2e3, 3e3, 5e3, 7e3, 10e3] {
        let guests = GUESTS.div_ceil(WORKERS);
        line(guests, guests as f64 * each, None);
    }
}

/// Prints the longest time for which the core is held, for each load and seed, and their number above limits.
fn print_stuck(seeds: u64) {
    let mut all = Vec::new();
    let loads = stuck::loads().into_iter().map(|(name, load)| (name, load, Machine::default()));
    let machines = stuck::machines().into_iter().flat_map(|(name, machine)| {
        [100 * US, 10 * US]
            .map(|gap| (format!("one in {gap} ns, {name}"), patterns::open(Gaps::Poisson(gap)), machine))
    });
    for (name, load, machine) in loads.chain(machines) {
        let held = (1..=seeds).map(|seed| stuck::held(machine, &load, table::AUTO, 6 * SEC, seed));
        let held: Vec<_> = held.map(|(longest, total)| (longest / MS, total / MS)).collect();
        println!("{name:60} held for (longest, in all) ms of 6 s: {held:?}");
        all.extend(held.into_iter().map(|held| held.0));
    }
    for limit in [500, 1000, 2000] {
        let stuck = all.iter().filter(|&&held| held > limit).count();
        println!("{stuck} of {} runs hold the core for more than {limit} ms at a time", all.len());
    }
}

/// Prints the throughput and the processor time of closed loads whose waits vary, means over the seeds.
fn print_noisy(seeds: u64) {
    println!("{:50} {:>12} {:>12}", "", "of `always`", "of a core");
    for (name, load) in noisy::loads() {
        let all: Vec<_> = (1..=seeds).map(|seed| noisy::kept(&load, table::AUTO, seed)).collect();
        let mean = |of: fn(&(f64, f64)) -> f64| all.iter().map(of).sum::<f64>() / seeds.max(1) as f64;
        println!("{name:50} {:12.3} {:12.3}", mean(|kept| kept.0), mean(|kept| kept.1));
    }
}
