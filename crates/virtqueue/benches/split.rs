//! Measures the cost of a request in the ring alone: pop, push and publish of a chain of three descriptors (a
//! header, a page, a status byte), in batches of 32. `cargo bench -p kickless-virtqueue`.
#![allow(clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/model/mod.rs"]
mod model;

use kickless_virtqueue::device::{Options, Queue};
use kickless_virtqueue::{Chain, ChainId};
use model::{Buf, Driver};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BATCH: u16 = 32;

fn bufs() -> [Buf; 3] {
    [(0x1000, 16, false), (0x10_0000, 4096, true), (0x2000, 1, true)].map(|(addr, len, writable)| Buf {
        addr,
        len,
        writable,
    })
}

/// Pops a batch, then pushes and publishes it.
#[inline(never)]
fn round(queue: &mut Queue, driver: &Driver, chain: &mut Chain, ids: &mut Vec<ChainId>) {
    ids.clear();
    while queue.pop(&driver.view, chain).unwrap() {
        black_box((chain.readable(), chain.writable()));
        ids.push(chain.id);
    }
    for &id in ids.iter() {
        queue.push(id, 4097);
    }
    black_box(queue.publish());
}

/// Returns nanoseconds for a request. The best of many short runs counts, because other programs disturb the
/// others.
fn run(indirect: bool, event_idx: bool, rounds: u32, runs: u32) -> f64 {
    let options = Options::new(256, event_idx, indirect).unwrap();
    let mut driver = Driver::new(options, 0);
    let mut queue = driver.device();
    queue.disarm();
    let (mut chain, mut ids) = (Chain::default(), Vec::new());
    // The chains are laid out once and offered again and again, so that the driver is not measured.
    let direct = if indirect { 0 } else { 3 };
    let offered: Vec<u16> = (0..BATCH).map(|_| driver.add(&bufs(), direct).unwrap()).collect();
    driver.publish();
    round(&mut queue, &driver, &mut chain, &mut ids);
    let mut best = f64::MAX;
    for _ in 0..runs {
        let mut spent = Duration::ZERO;
        for _ in 0..rounds {
            for &head in &offered {
                driver.offer(head);
            }
            driver.publish();
            let start = Instant::now();
            round(&mut queue, &driver, &mut chain, &mut ids);
            spent += start.elapsed();
            assert_eq!(ids.len(), usize::from(BATCH));
        }
        best = best.min(spent.as_nanos() as f64 / f64::from(rounds) / f64::from(BATCH));
    }
    best
}

fn main() {
    let (rounds, runs) = if std::env::args().any(|a| a == "--bench") { (500, 1000) } else { (100, 1) };
    println!("pop, push and publish, 3 descriptors a chain, batches of {BATCH}:");
    for (indirect, event_idx) in [(false, false), (false, true), (true, true)] {
        let ns = run(indirect, event_idx, rounds, runs);
        println!(
            "  {:8} {:9} {ns:6.1} ns/request",
            if indirect { "indirect" } else { "direct" },
            if event_idx { "event_idx" } else { "flags" },
        );
    }
}
