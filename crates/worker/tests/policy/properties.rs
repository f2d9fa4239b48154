//! Tests properties that hold for any sequence of inputs.

use kickless_worker::Poll;
use kickless_worker::policy::{Host, Nanos, Policy, Pressure, Usage, Verdict};
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::Duration;

/// A call, and the time before it.
#[derive(Clone, Debug)]
enum Step {
    Found(u32),
    Empty(bool),
    Armed,
    Woken,
    Set(Poll),
    Host(Host),
}

fn times() -> impl Strategy<Value = Nanos> {
    prop_oneof![
        4 => Just(0),
        8 => 0..20_000_u64,
        4 => 0..2_000_000_u64,
        1 => 0..10_000_000_000_u64,
        1 => 0..u64::MAX / 512,
    ]
}

fn polls() -> impl Strategy<Value = Poll> {
    prop_oneof![
        Just(Poll::Always),
        Just(Poll::Never),
        (prop_oneof![0..200_u64, Just(u64::MAX)])
            .prop_map(|us| Poll::Auto { latency: Duration::from_micros(us), kick_price: Poll::KICK_PRICE }),
        (any::<u32>(), 0..1_000_000_u64).prop_map(|(start_per_sec, us)| Poll::Rate {
            start_per_sec,
            stop_idle: Duration::from_micros(us)
        }),
        Just(Poll::Rate { start_per_sec: 1, stop_idle: Duration::MAX }),
    ]
}

fn hosts() -> impl Strategy<Value = Host> {
    let cost = || 0..=200_000_u64;
    (cost(), cost(), cost(), any::<bool>()).prop_map(|(kicked_cpu, timed_cpu, wake_delay, contended)| Host {
        kicked_cpu,
        timed_cpu,
        wake_delay,
        contended,
    })
}

fn steps() -> impl Strategy<Value = Vec<(Nanos, Step)>> {
    let step = prop_oneof![
        8 => prop_oneof![8 => 0..64_u32, 1 => any::<u32>()].prop_map(Step::Found),
        12 => any::<bool>().prop_map(Step::Empty),
        3 => Just(Step::Armed),
        4 => Just(Step::Woken),
        1 => polls().prop_map(Step::Set),
        1 => hosts().prop_map(Step::Host),
    ];
    vec((times(), step), 1..400)
}

const HOST: Host = Host { kicked_cpu: 4_000, timed_cpu: 8_000, wake_delay: 30_000, contended: false };

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_verdict_is_possible_to_follow(
        first in polls(), ring_size in any::<u16>(), steps in steps()
    ) {
        let mut policy = Policy::new(first, ring_size);
        let (mut poll, mut host, mut now) = (first, HOST, 0_u64);
        for (pause, step) in steps {
            now = now.saturating_add(pause).min(u64::MAX - 1);
            match step {
                Step::Found(requests) => policy.found(now, requests),
                Step::Woken => policy.woken(now, &host),
                Step::Host(new) => host = new,
                Step::Armed => {
                    policy.armed();
                    prop_assert!(!policy.is_polled());
                }
                Step::Set(new) => {
                    policy.set(new);
                    poll = new;
                }
                Step::Empty(on_disk) => {
                    let before = policy.is_polled();
                    let verdict = policy.empty(now, &host, on_disk);
                    match verdict {
                        Verdict::Spin { until } | Verdict::Nap { until, .. } => {
                            prop_assert!(until > now);
                            prop_assert!(policy.is_polled());
                        }
                        Verdict::Arm => prop_assert_eq!(policy.is_polled(), before),
                    }
                    match (poll, verdict) {
                        (Poll::Always, Verdict::Spin { .. }) | (Poll::Never, Verdict::Arm) => {}
                        // The last look.
                        (Poll::Never, Verdict::Spin { until }) => {
                            prop_assert!(!host.contended && until - now <= host.kicked_cpu);
                        }
                        (Poll::Rate { .. }, Verdict::Spin { .. } | Verdict::Arm) => {}
                        (Poll::Auto { .. }, Verdict::Spin { .. } | Verdict::Arm) => {}
                        (Poll::Auto { latency, .. }, Verdict::Nap { until, ignore_completions }) => {
                            prop_assert!(on_disk || !ignore_completions);
                            prop_assert!(u128::from(until - now) <= latency.as_nanos());
                        }
                        (poll, verdict) => prop_assert!(false, "{:?} under {:?}", verdict, poll),
                    }
                }
            }
        }
    }

    /// The same calls in the same order give the same verdicts as a model that remembers every visit.
    #[test]
    fn rate_is_the_rule(
        start_per_sec in prop_oneof![Just(0), 1..3_000_u32],
        stop_idle in prop_oneof![Just(0), 1..40_000_000_u64],
        looks in vec((prop_oneof![0..3_000_000_u64, 0..100_000_000_u64], any::<bool>(), 0..3_u32), 1..500),
    ) {
        let mut policy =
            Policy::new(Poll::Rate { start_per_sec, stop_idle: Duration::from_nanos(stop_idle) }, 256);
        let mut now = 0;
        let mut polled = false;
        // The times at which requests were found since the queue was notified.
        let mut visits: Vec<Nanos> = Vec::new();
        let mut last_found = 0;
        for (pause, works, requests) in looks {
            now += pause;
            if works {
                policy.found(now, requests);
                if requests > 0 {
                    last_found = now;
                    visits.push(now);
                    let window = |time: Nanos| time / 10_000_000;
                    let in_window = visits.iter().filter(|&&visit| window(visit) == window(now)).count();
                    // A hundredth of a second's worth.
                    if !polled && start_per_sec > 0 && in_window as u64 * 100 >= u64::from(start_per_sec) {
                        polled = true;
                    }
                }
                prop_assert_eq!(policy.is_polled(), polled);
                continue;
            }
            let expected = match polled && now - last_found < stop_idle {
                true => Verdict::Spin { until: last_found + stop_idle },
                false => Verdict::Arm,
            };
            prop_assert_eq!(policy.empty(now, &HOST, requests == 1), expected);
            if expected == Verdict::Arm {
                policy.armed();
                if std::mem::take(&mut polled) {
                    visits.clear();
                }
            }
        }
    }

    #[test]
    fn pressure_takes_any_numbers(
        samples in vec((times(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 1..200)
    ) {
        let mut pressure = Pressure::default();
        let mut now: Nanos = 0;
        for (pause, run_delay, steal, cpu, spun) in samples {
            now = now.saturating_add(pause);
            pressure.sample(now, &Usage { run_delay, steal, cpu }, spun);
            prop_assert!(pressure.next() >= now);
        }
    }
}

/// Serves a queue that gets a request every `gap`. Returns the verdict that most of its waits got.
fn mostly(policy: &mut Policy, now: &mut Nanos, gap: Nanos, times: usize) -> Verdict {
    let mut verdicts = Vec::new();
    for _ in 0..times {
        let relative = match policy.empty(*now, &HOST, false) {
            Verdict::Spin { until } if until < Nanos::MAX => Verdict::Spin { until: 0 },
            other => other,
        };
        verdicts.push(relative);
        *now += gap;
        policy.found(*now, 1);
    }
    let count = |verdict: &Verdict| verdicts.iter().filter(|&other| other == verdict).count();
    verdicts.iter().copied().max_by_key(count).unwrap_or(Verdict::Arm)
}

#[test]
fn a_new_rule_applies_to_the_next_decision() {
    let mut policy = Policy::new(Poll::Never, 256);
    let mut now = 0;
    assert_eq!(mostly(&mut policy, &mut now, 5_000, 100), Verdict::Arm);
    assert!(!policy.is_polled());
    policy.set(Poll::Always);
    assert_eq!(mostly(&mut policy, &mut now, 5_000, 1), Verdict::Spin { until: Nanos::MAX });
    assert!(policy.is_polled());
    policy.set(Poll::Rate { start_per_sec: 0, stop_idle: Duration::ZERO });
    assert_eq!(mostly(&mut policy, &mut now, 5_000, 1), Verdict::Arm);
    policy.set(Poll::default());
    assert!(matches!(mostly(&mut policy, &mut now, 5_000, 100), Verdict::Spin { .. }));
}

#[test]
fn auto_without_history_spins_for_what_a_sleep_costs() {
    let mut policy = Policy::new(Poll::default(), 256);
    let Verdict::Spin { until } = policy.empty(1_000, &HOST, false) else { panic!("it must spin") };
    assert_eq!(until, 1_000 + HOST.kicked_cpu + 3_000, "with the price of a kick");
    let Verdict::Spin { until: again } = policy.empty(5_000, &HOST, false) else { panic!("it must spin") };
    assert_eq!(again, until, "the same wait goes on");
    assert_eq!(policy.empty(until, &HOST, false), Verdict::Arm);
}

#[test]
fn waits_of_an_armed_queue_are_known_without_the_delay_of_the_wake() {
    let mut policy = Policy::new(Poll::default(), 256);
    let mut now = 0;
    // So few that the policy does not yet know that the load does not react.
    for _ in 0..60 {
        policy.empty(now, &HOST, false);
        policy.armed();
        now += 20_000 + HOST.wake_delay;
        policy.woken(now, &HOST);
        policy.found(now, 1);
    }
    let Verdict::Spin { until } = policy.empty(now, &HOST, false) else { panic!("it must spin") };
    assert!(until - now < 280_000, "{}", until - now);
}

#[test]
fn a_contended_core_is_spun_on_for_no_longer_than_a_sleep_takes() {
    let mut policy = Policy::new(Poll::default(), 256);
    let mut now = 0;
    assert!(matches!(mostly(&mut policy, &mut now, 60_000, 20), Verdict::Spin { .. }));
    let contended = Host { contended: true, ..HOST };
    assert_eq!(policy.empty(now, &contended, false), Verdict::Arm, "waits are longer");
    policy.found(now, 1);
    // It spins, or a trial naps.
    assert_ne!(policy.empty(now, &HOST, false), Verdict::Arm, "and back");
}

#[test]
fn a_contended_core_is_not_experimented_on() {
    let contended = Host { contended: true, ..HOST };
    let naps = |host: &Host, policy: &mut Policy, now: &mut Nanos, waits: u32| {
        (0..waits).any(|_| {
            let verdict = policy.empty(*now, host, false);
            *now += 5_000;
            let napped = matches!(verdict, Verdict::Nap { .. });
            if !napped {
                policy.found(*now, 1);
            }
            napped
        })
    };
    let mut policy = Policy::new(Poll::default(), 256);
    let mut now = 0;
    assert!(!naps(&contended, &mut policy, &mut now, 10_000), "no window begins");
    assert!(naps(&HOST, &mut policy, &mut now, 10_000), "a patient window begins");
    assert!(!naps(&contended, &mut policy, &mut now, 10_000), "it ends, and no other begins");
}

#[test]
fn a_nap_ends_before_a_quarter_of_the_ring_is_full() {
    let gap = 5_000;
    let mut policy = Policy::new(Poll::default(), 32);
    let (mut now, mut served, mut longest) = (0, 0, 0);
    for _ in 0..200_000 {
        let come = now / gap;
        if come > served {
            policy.found(now, (come - served) as u32);
            served = come;
            now += 500;
            continue;
        }
        match policy.empty(now, &HOST, false) {
            Verdict::Spin { until } => now = until.min((served + 1) * gap),
            Verdict::Arm => {
                policy.armed();
                now = (served + 1) * gap + HOST.wake_delay;
                policy.woken(now, &HOST);
            }
            Verdict::Nap { until, .. } => {
                longest = longest.max(until - now);
                now = until;
            }
        }
    }
    assert!((7 * gap..=9 * gap).contains(&longest), "{longest}");
}
