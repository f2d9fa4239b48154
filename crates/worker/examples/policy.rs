//! Prints what the policy comes to in simulation, for each kind of load, beside the best fixed rule: the one
//! that costs least in processor time and delay, chosen in hindsight.
//!
//! `cargo run --release -p kickless-worker --example policy [PART OF A NAME]`

#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../tests/policy/simulation/mod.rs"]
mod simulation;

use simulation::{patterns, table::Line};

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!("{}", Line::head());
    for pattern in patterns::all().iter().filter(|pattern| pattern.name.contains(&wanted)) {
        println!("{}", Line::of(pattern));
    }
}
