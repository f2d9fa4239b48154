//! Compares the cost of the dirty log, for writers and harvesters, with other logs. The contestants take
//! turns. Prints medians and extremes.
//!
//!     cargo bench -p kickless-dirty-log --bench dirty_log [-- PART...]
//!
//! Parts:
//! - `harvest`: threads write 3000 MiB while 20 harvests are taken;
//! - `write`: one write by one thread;
//! - `page`: the first write to a page, and its harvest;
//! - `lookup`: a translation with the log off;
//! - `tables`: memory of the tables of a guest of 1 TiB.
//!
//! Without `--bench`, each part runs in a short form, as a test.
#![allow(clippy::unwrap_used, reason = "a benchmark")]

mod contestants;
mod harvest;
mod single;
mod tables;

use std::env;
use std::fmt;

/// The extent of a measurement.
#[derive(Clone, Copy)]
struct Plan {
    rounds: usize,
    /// Bytes of guest memory.
    memory: u64,
    /// Harvests of one turn.
    harvests: usize,
    /// Writes of one turn.
    writes: u64,
}

impl Plan {
    const FULL: Self = Self { rounds: 7, memory: 3000 << 20, harvests: 20, writes: 4_000_000 };
    const SHORT: Self = Self { rounds: 1, memory: 64 << 20, harvests: 3, writes: 10_000 };
}

/// A median with its extremes.
#[derive(Clone, Copy)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let last = values.len() - 1;
        Self {
            median: (values[last / 2] + values[values.len() / 2]) / 2.0,
            min: values[0],
            max: values[last],
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2} ({:.2} .. {:.2})", self.median, self.min, self.max);
        f.pad(&text)
    }
}

fn main() {
    let parts: Vec<String> = env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let full = env::args().any(|word| word == "--bench");
    let plan = if full { Plan::FULL } else { Plan::SHORT };
    if !full {
        println!("short form: not a measurement");
    }
    type Part = fn(Plan);
    let all: [(&str, Part); 5] = [
        ("harvest", harvest::run),
        ("write", single::writes),
        ("page", single::pages),
        ("lookup", single::lookups),
        ("tables", |_| tables::run()),
    ];
    for (name, part) in all {
        if parts.is_empty() || parts.iter().any(|wanted| wanted == name) {
            part(plan);
            println!();
        }
    }
}
