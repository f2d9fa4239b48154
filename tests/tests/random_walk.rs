//! Walks at random through everything that hostile front-ends and guests can do. `kickless_tests::walk`
//! describes the walk.
//!
//! `WALK_REQUESTS`, `WALK_FRAMES` and `WALK_MESSAGES` set how far it goes, and `WALK_SEED` where it begins. A
//! failure prints the seed and the step.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::walk::totals::Goals;
use kickless_tests::walk::walk;
use std::time::Instant;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

#[test]
fn a_random_walk_leaves_the_daemon_and_honest_devices_well() {
    let goals = Goals {
        requests: number("WALK_REQUESTS", 20_000),
        frames: number("WALK_FRAMES", 2_000),
        messages: number("WALK_MESSAGES", 2_000),
    };
    let start = Instant::now();
    match walk(number("WALK_SEED", 1), &goals) {
        Ok(totals) => println!("{totals:#?} in {:.1} s", start.elapsed().as_secs_f64()),
        Err(error) => panic!("{error:#}"),
    }
}
