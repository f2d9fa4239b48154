//! The way of a cache line between two CPUs, there and back, in nanoseconds, once for each turn of 50 ms.
//! Nothing of this crate takes part.
//!
//! Rings are slow while the way is long, whoever serves them. The host of a virtual machine can move its CPUs
//! while it runs, so that the way changes from one second to the next.
//!
//! `cargo run --release -p kickless-worker --example way [TURNS]`

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const TURN: Duration = Duration::from_millis(50);
/// The answer that ends the other thread.
const OVER: u64 = u64::MAX;

/// A line of its own, and its neighbour's too: lines are fetched in pairs.
#[repr(align(128))]
struct Line(AtomicU64);

fn pin(nth: usize) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let cpu = cpus.nth(nth).ok_or_else(|| io::Error::other("two CPUs are needed"))?;
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

fn main() -> io::Result<()> {
    let turns = std::env::args().nth(1).and_then(|turns| turns.parse().ok()).unwrap_or(20);
    let line = Line(AtomicU64::new(0));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| -> io::Result<()> {
            pin(1)?;
            let mut odd = 1;
            loop {
                match line.0.load(Ordering::Acquire) {
                    OVER => return Ok(()),
                    seen if seen == odd => {
                        line.0.store(odd + 1, Ordering::Release);
                        odd += 2;
                    }
                    _ => {}
                }
            }
        });
        let pinned = pin(0);
        let mut even = 0;
        for _ in 0..if pinned.is_ok() { turns } else { 0 } {
            let (begin, first) = (Instant::now(), even);
            while begin.elapsed() < TURN && !other.is_finished() {
                for _ in 0..1000 {
                    line.0.store(even + 1, Ordering::Release);
                    even += 2;
                    while line.0.load(Ordering::Acquire) != even && !other.is_finished() {}
                }
            }
            println!("{:.0} ns", begin.elapsed().as_nanos() as f64 * 2.0 / (even - first) as f64);
        }
        line.0.store(OVER, Ordering::Release);
        pinned.and(other.join().unwrap_or_else(|_| Err(io::Error::other("the other thread failed"))))
    })
}
