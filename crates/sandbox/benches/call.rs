//! Measures how much longer a system call takes in a process that has a filter.
//!
//! Each turn has three processes: one without a filter, one whose filter allows hardly more than the call,
//! and one with the filter of the data process. Each writes a byte to /dev/null again and again.
//!
//!     cargo bench -p kickless-sandbox --bench call [-- --quick]
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::time::Instant;

use kickless_sandbox::{DATA, Ended, Profile, Row, Stray, fork, lock};

/// Calls of a process: about a second.
const CALLS: u32 = 5_000_000;
const TURNS: usize = 11;

/// Returns the fewest rows of [`DATA`] that allow this benchmark.
fn least() -> Profile {
    let needs = |row: &&Row| {
        let names: Vec<_> = row.calls.iter().map(|call| call.name).collect();
        row.when.is_empty() && ["write", "exit_group"].iter().any(|needed| names.contains(needed))
    };
    let rows: Vec<&'static [Row]> = DATA.rows().filter(needs).map(std::slice::from_ref).collect();
    Profile { stray: Stray::Kill, kill: &[], tables: Box::leak(rows.into_boxed_slice()) }
}

/// Returns the nanoseconds of one call.
fn measure(calls: u32, mut to: impl Write) -> f64 {
    let begin = Instant::now();
    for _ in 0..calls {
        to.write_all(b"1").unwrap();
    }
    begin.elapsed().as_nanos() as f64 / f64::from(calls)
}

/// Returns the nanoseconds of one call in a process with this filter.
fn turn(profile: Option<Profile>, calls: u32) -> f64 {
    let null = File::options().write(true).open("/dev/null").unwrap();
    let (mut from, mut to): (PipeReader, PipeWriter) = pipe().unwrap();
    let process = fork(c"call", &[], move || {
        if let Some(profile) = &profile {
            lock(profile).unwrap();
        }
        to.write_all(&measure(calls, &null).to_le_bytes()).unwrap();
        0
    });
    let mut took = [0; 8];
    from.read_exact(&mut took).unwrap();
    assert_eq!(process.unwrap().wait().unwrap(), Ended::Exited(0));
    f64::from_le_bytes(took)
}

fn main() {
    let is_quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let (calls, turns) = if is_quick { (1000, 1) } else { (CALLS, TURNS) };
    let profiles = [
        ("no filter", None::<fn() -> Profile>),
        ("a filter of two rows", Some(least)),
        ("the filter of the data process", Some(|| Profile { ..DATA })),
    ];
    let mut all = [const { Vec::new() }; 3];
    for _ in 0..turns {
        for ((_, profile), took) in profiles.iter().zip(&mut all) {
            took.push(turn(profile.map(|make| make()), calls));
        }
    }
    for ((name, _), took) in profiles.iter().zip(&mut all) {
        took.sort_by(f64::total_cmp);
        let (low, median, high) = (took[0], took[took.len() / 2], took[took.len() - 1]);
        println!("{name:<31} {median:6.1} ns a call ({low:.1} to {high:.1})");
    }
}
