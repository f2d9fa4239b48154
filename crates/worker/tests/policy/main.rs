//! Tests the policy: its properties, and its results in simulation.

mod properties;
#[allow(dead_code, reason = "the example prints more of it")]
mod simulation;
mod targets;
