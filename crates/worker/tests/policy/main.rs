//! The policy: its properties, and what it comes to in simulation.

mod properties;
#[allow(dead_code, reason = "the example prints more of it")]
mod simulation;
mod targets;
