//! Checks in simulation that the policy keeps its promises. The simulation is deterministic.

use crate::simulation::chooser::Rule;
use crate::simulation::load::{Gaps, Load, MS, SEC, US};
use crate::simulation::machine::{Machine, Outcome, Worker};
use crate::simulation::patterns::{POLLING, Pattern, SLEEPING, all, changing, closed, on_off, open};
use crate::simulation::stuck;
use crate::simulation::table::{ALWAYS, AUTO, LATENCY, NEVER, RATE, auto, run};
use kickless_worker::policy::Nanos;

/// Returns the random seeds with which each promise is checked. `POLICY_SEED=N` uses another one.
fn seeds() -> Vec<u64> {
    let wanted = std::env::var("POLICY_SEED").ok().and_then(|seed| seed.parse().ok());
    wanted.map_or_else(|| vec![1, 2, 3], |seed| vec![seed])
}

fn run_for(machine: Machine, load: &Load, rule: Rule, warm_up: Nanos, time: Nanos, seed: u64) -> Outcome {
    Worker::new(machine, load.clone(), rule, LATENCY, seed).run(warm_up, time)
}

/// Runs the parts one after another from the start, without a warm-up, so that the cost of learning counts.
fn both(load: &Load, rule: Rule, other: Rule, time: Nanos, seed: u64) -> (Outcome, Outcome) {
    let machine = Machine::default();
    (run_for(machine, load, rule, 0, time, seed), run_for(machine, load, other, 0, time, seed))
}

/// Returns the largest share of the rate of `always`.
fn peak(machine: Machine) -> f64 {
    run_for(machine, &closed(64, 100..200), ALWAYS, 0, 20 * MS, 1).per_sec()
}

#[test]
fn closed_loops_are_as_fast_as_with_always() {
    for seed in seeds() {
        for in_flight in [1, 32] {
            for think in [POLLING, SLEEPING, 20 * US..40 * US] {
                let (mut auto, mut always) =
                    both(&closed(in_flight, think.clone()), AUTO, ALWAYS, 300 * MS, seed);
                let share = auto.per_sec() / always.per_sec();
                assert!(share >= 0.975, "{in_flight} in flight, {think:?}: {share}");
                assert!(
                    auto.median_delay() <= always.median_delay() + 500,
                    "{in_flight} in flight, {think:?}"
                );
            }
        }
    }
}

#[test]
fn trials_lose_half_a_percent() {
    for seed in seeds() {
        for (in_flight, think, disk) in
            [(1, POLLING, 0..0), (1, SLEEPING, 0..0), (32, SLEEPING, 0..0), (1, POLLING, 4 * US..4 * US + 1)]
        {
            let load = Load { disk, ..closed(in_flight, think) };
            let rate = |rule| run_for(Machine::default(), &load, rule, SEC, 500 * MS, seed).per_sec();
            let share = rate(AUTO) / rate(ALWAYS);
            assert!(share >= 0.994, "{load:?}: {share}");
        }
    }
}

#[test]
fn a_disk_is_waited_for_by_the_same_rule() {
    for seed in seeds() {
        for in_flight in [1, 32] {
            let load = Load { disk: 60 * US..100 * US, ..closed(in_flight, POLLING) };
            // The policy must first learn that naps make one bunch of 32 requests in flight.
            let auto = run_for(Machine::default(), &load, AUTO, SEC, SEC, seed);
            let always = run_for(Machine::default(), &load, ALWAYS, 0, 200 * MS, seed);
            let share = auto.per_sec() / always.per_sec();
            assert!(share >= 0.975, "{in_flight} in flight: {share}");
        }
        let slow = Load { disk: 4 * MS..6 * MS, ..closed(1, POLLING) };
        let (auto, always) = both(&slow, AUTO, ALWAYS, SEC, seed);
        assert!(auto.per_sec() >= always.per_sec() * 0.975);
        assert!(auto.cpu_share() < 0.01, "{}: so slow a disk is slept for", auto.cpu_share());
    }
}

#[test]
fn open_loops_cost_a_part_of_a_core_and_a_delay_within_what_is_accepted() {
    for seed in seeds() {
        let machine = Machine::default();
        for (part, most) in [(2.0, 0.7), (10.0, 0.3), (100.0, 0.3)] {
            let gap = (1e9 * part / peak(machine)) as Nanos;
            for gaps in [Gaps::Steady(gap), Gaps::Poisson(gap)] {
                let load = open(gaps.clone());
                let mut auto = run_for(machine, &load, AUTO, 2 * SEC, 300 * MS, seed);
                let mut always = run_for(machine, &load, ALWAYS, 0, 100 * MS, seed);
                assert!(auto.cpu_share() <= most, "{gaps:?}: {}", auto.cpu_share());
                assert!(auto.median_delay() <= always.median_delay() + LATENCY, "{gaps:?}");
            }
        }
    }
}

#[test]
fn naps_hardly_ever_delay_by_more_than_is_accepted_and_a_wake() {
    for seed in seeds() {
        let machine = Machine::default();
        let accepted = LATENCY + machine.wake_delay + machine.wake_jitter + 10 * US;
        let mut auto = run_for(machine, &open(Gaps::Poisson(5 * US)), AUTO, 500 * MS, 300 * MS, seed);
        auto.delays.sort_unstable();
        let late = auto.delays.partition_point(|&delay| Nanos::from(delay) <= accepted);
        assert!(late >= auto.delays.len() * 99 / 100);
        assert!(auto.kicks * 20 <= auto.requests, "{} kicks", auto.kicks);
    }
}

#[test]
fn a_delay_shorter_than_a_wake_is_met_by_spinning() {
    for seed in seeds() {
        let latency = 10 * US;
        let rule = auto(latency);
        let load = open(Gaps::Poisson(50 * US));
        let mut auto = Worker::new(Machine::default(), load, rule, latency, seed).run(4 * SEC, SEC);
        assert!(auto.median_delay() <= latency, "{}", auto.median_delay());
    }
}

#[test]
fn a_slow_load_costs_about_as_much_as_with_never() {
    for seed in seeds() {
        for gaps in [Gaps::Steady(10 * MS), Gaps::Poisson(10 * MS)] {
            for disk in [0..0, 60 * US..100 * US] {
                let load = Load { disk: disk.clone(), ..open(gaps.clone()) };
                let (auto, never) = both(&load, AUTO, NEVER, 5 * SEC, seed);
                let ratio = auto.cpu_share() / never.cpu_share();
                assert!(ratio <= 1.2, "{gaps:?}, disk {disk:?}: {ratio}");
            }
        }
    }
}

/// `cargo run --release -p kickless-worker --example policy stuck 16` runs hundreds of them.
#[test]
fn no_load_at_times_of_its_own_holds_the_core_for_long() {
    // Each load has a seed of its own.
    for seed in seeds().into_iter().take(1) {
        for ((name, load), seed) in stuck::loads().into_iter().zip(seed..) {
            let (longest, total) = stuck::held(Machine::default(), &load, AUTO, SEC, seed);
            assert!(
                longest <= 500 * MS && total <= 500 * MS,
                "{name}: {longest} ns at a time, {total} in all"
            );
        }
    }
}

/// The backlog of a stop of the process is served in a hundredth of its time or less.
#[test]
fn neither_a_pause_of_the_process_nor_slow_wakes_hold_the_core_for_long() {
    for (name, machine) in stuck::machines() {
        for gap in [100 * US, 10 * US] {
            let (longest, total) = stuck::held(machine, &open(Gaps::Poisson(gap)), AUTO, 3 * SEC, seeds()[0]);
            assert!(
                longest <= 500 * MS && total <= 800 * MS,
                "{name}, one in {gap} ns: {longest} ns at a time, {total} in all"
            );
        }
    }
}

/// Only naps measure wakes, so the estimate must not keep the policy from napping.
#[test]
fn wakes_that_were_slow_for_a_moment_do_not_end_naps_for_good() {
    for seed in seeds() {
        for slow_wake in [70 * US, 150 * US, 300 * US] {
            let plain = Machine { wake_delay: 50 * US, ..Machine::default() };
            let slow = Machine { slow_until: 20 * MS, slow_wake, ..plain };
            for gap in [10 * US, 3_300] {
                let load = open(Gaps::Poisson(gap));
                let run = |machine| run_for(machine, &load, AUTO, SEC, SEC, seed);
                let (quick, slow) = (run(plain), run(slow));
                let share = slow.cpu_share();
                assert!(share <= quick.cpu_share() * 1.2 + 0.01, "{slow_wake}, one in {gap} ns: {share}");
                assert!(slow.kicks * 20 <= slow.requests, "{slow_wake}, one in {gap} ns");
            }
        }
    }
}

#[test]
fn an_idle_queue_is_armed_and_costs_nothing_then() {
    for seed in seeds() {
        for load in [closed(1, POLLING), closed(32, SLEEPING), open(Gaps::Poisson(5 * US))] {
            let mut load = load;
            // It ends after a second, for good.
            for gate in [
                load.closed.as_mut().map(|closed| &mut closed.gate),
                load.open.as_mut().map(|open| &mut open.gate),
            ]
            .into_iter()
            .flatten()
            {
                (gate.on, gate.off) = (SEC, 1000 * SEC);
            }
            let auto = run_for(Machine::default(), &load, AUTO, SEC + MS, 10 * SEC, seed);
            assert!(auto.cpu <= MS, "{} ns", auto.cpu);
            assert!(auto.last_run <= SEC + 2 * MS, "{}", auto.last_run);
        }
    }
}

#[test]
fn on_off_loads_cost_a_fifth_of_the_time_of_the_original_rule() {
    for seed in seeds() {
        for (in_flight, think) in [(1, POLLING), (1, SLEEPING), (32, SLEEPING)] {
            let (auto, rate) = both(&on_off(in_flight, think.clone()), AUTO, RATE, 4 * SEC, seed);
            let share = auto.per_sec() / rate.per_sec();
            assert!(share >= 0.97, "{in_flight} in flight, {think:?}: {share}");
            let cpu = auto.cpu_share() / rate.cpu_share();
            assert!(cpu <= 0.2, "{in_flight} in flight, {think:?}: {cpu}");
        }
    }
}

#[test]
fn a_contended_core_is_left_to_others() {
    for seed in seeds() {
        let machine = Machine { hog: true, ..Machine::default() };
        for load in
            [closed(1, POLLING), closed(1, SLEEPING), closed(32, SLEEPING), open(Gaps::Poisson(50 * US))]
        {
            let auto = run_for(machine, &load, AUTO, 0, 2 * SEC, seed);
            let never = run_for(machine, &load, NEVER, 0, 2 * SEC, seed);
            let share = auto.per_sec() / never.per_sec();
            assert!(share >= 0.97, "{load:?}: {share}");
        }
    }
}

#[test]
fn a_change_of_load_is_learnt_soon() {
    for seed in seeds() {
        // Half of the time a closed loop, half of the time an open one at a rate that takes a tenth of a
        // core.
        let load = changing(1, POLLING, Gaps::Poisson(5 * US));
        let (auto, always) = both(&load, AUTO, ALWAYS, 4 * SEC, seed);
        let share = auto.per_sec() / always.per_sec();
        assert!(share >= 0.95, "{share}");
        assert!(auto.cpu_share() <= 0.95, "{}", auto.cpu_share());

        // Half a second is hardly enough to learn so slow a load, so only its throughput is promised.
        let load = changing(32, SLEEPING, Gaps::Poisson(50 * US));
        let (auto, always) = both(&load, AUTO, ALWAYS, 4 * SEC, seed);
        let share = auto.per_sec() / always.per_sec();
        assert!(share >= 0.95, "{share}");
    }
}

#[test]
fn bursts_and_slow_requests_are_not_spun_for() {
    for seed in seeds() {
        let bursts = Gaps::Bursts { every: MS, count: 64, spacing: 500 };
        for gaps in [bursts, Gaps::Steady(500 * US), Gaps::Poisson(500 * US)] {
            let load = open(gaps.clone());
            let auto = run_for(Machine::default(), &load, AUTO, 500 * MS, SEC, seed);
            let never = run_for(Machine::default(), &load, NEVER, 0, SEC, seed);
            assert!(auto.cpu_share() <= never.cpu_share() * 1.2, "{gaps:?}: {}", auto.cpu_share());
        }
    }
}

#[test]
fn no_fixed_rule_is_much_better_for_any_load() {
    let mut worst = Vec::new();
    for pattern in all() {
        // Recorded loads cannot react, as their drivers did. And a contended core is not fit for measuring
        // cost.
        if pattern.name.contains("recorded") || pattern.machine.hog {
            continue;
        }
        // A fixed rule has nothing to learn.
        let changes = pattern.name.contains("on-off") || pattern.name.contains("changing");
        let (fixed, ours) = match pattern.time {
            _ if changes => (SEC, 2 * SEC),
            // Few requests in a second.
            time if time > SEC => (300 * MS, 2 * SEC),
            _ => (30 * MS, 500 * MS),
        };
        let short = Pattern { warm_up: 0, time: fixed, seed: seeds()[0], ..pattern };
        let fixed = Rule::fixed().map(|rule| run(&short, rule));
        let best = fixed.min_by(|a, b| a.cost().total_cmp(&b.cost())).unwrap();
        let auto = run(&Pattern { warm_up: pattern.warm_up, time: ours, ..short }, AUTO);
        // A delay that loses no throughput is no cost.
        let admissible = auto.per_sec() >= 0.975 * best.per_sec() && auto.cpu_share() <= best.cpu_share();
        let regret = auto.cost() / best.cost();
        if regret > 1.8 && !admissible {
            worst.push((pattern.name, regret));
        }
    }
    assert!(worst.is_empty(), "{worst:?}");
}

#[test]
fn recorded_loads_are_served_within_bounds() {
    for seed in seeds() {
        for pattern in all().into_iter().filter(|pattern| pattern.name.contains("recorded")) {
            let pattern = Pattern { seed, ..pattern };
            let mut auto = run(&pattern, AUTO);
            let never = run(&pattern, NEVER);
            assert!(auto.cpu_share() <= 0.35, "{}: {}", pattern.name, auto.cpu_share());
            assert!(auto.median_delay() <= LATENCY, "{}", pattern.name);
            // `never` looks again before a sleep, which saves some kicks too.
            assert!(auto.kicks * 50 <= never.kicks * 51, "{}: {} {}", pattern.name, auto.kicks, never.kicks);
        }
    }
}
