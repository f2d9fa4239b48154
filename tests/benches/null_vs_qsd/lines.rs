//! Exchanges the cache lines of a request between two threads, one request at a time, without any other
//! work.
//!
//! This is the limit for every device of a split ring with one request in flight. The format makes both
//! ends write and read these lines (virtio 1.3, section 2.7). A reader knows the address of each line only
//! after it has read the line before.

use crate::common::Cpus;
use anyhow::{Result, anyhow};
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A cache line with its neighbour, because CPUs fetch lines in pairs.
#[repr(align(128))]
#[derive(Default)]
struct Line(AtomicU64);

#[derive(Clone, Copy)]
enum Name {
    Header,
    Descriptors,
    AvailEntry,
    AvailIdx,
    Status,
    UsedElement,
    UsedIdx,
}

struct Lines {
    lines: [Line; 7],
    over: AtomicBool,
    /// Zero, as a value that the compiler cannot know.
    zero: u64,
}

impl Lines {
    fn new() -> Self {
        Self { lines: Default::default(), over: AtomicBool::new(false), zero: black_box(0) }
    }

    /// Reads a line whose address depends on an earlier read.
    fn read(&self, name: Name, before: u64) -> u64 {
        let place = name as usize + (before & self.zero) as usize;
        self.lines.get(place).map_or(0, |line| line.0.load(Ordering::Acquire))
    }

    fn write(&self, name: Name, value: u64) {
        self.lines[name as usize].0.store(value, Ordering::Release);
    }

    /// Plays the device.
    fn answer(&self) {
        let mut next = 1;
        loop {
            let idx = self.read(Name::AvailIdx, 0);
            if idx < next {
                if self.over.load(Ordering::Relaxed) {
                    return;
                }
                spin_loop();
                continue;
            }
            let entry = self.read(Name::AvailEntry, idx);
            let descriptors = self.read(Name::Descriptors, entry);
            let header = self.read(Name::Header, descriptors);
            self.write(Name::Status, header);
            self.write(Name::UsedElement, next);
            self.write(Name::UsedIdx, next);
            next += 1;
        }
    }

    /// Plays the driver. Returns the number of answers.
    fn ask(&self, time: Duration) -> u64 {
        let end = Instant::now() + time;
        let mut number = 0;
        while number % 1024 != 0 || Instant::now() < end {
            number += 1;
            self.write(Name::Header, number);
            self.write(Name::Descriptors, number);
            self.write(Name::AvailEntry, number);
            self.write(Name::AvailIdx, number);
            let mut idx = 0;
            while idx < number {
                spin_loop();
                idx = self.read(Name::UsedIdx, 0);
            }
            let element = self.read(Name::UsedElement, idx);
            black_box(self.read(Name::Status, element));
        }
        number
    }
}

/// Returns the requests per second, with the driver and the other end on their CPUs.
pub(crate) fn turn(cpus: &Cpus, time: Duration) -> Result<f64> {
    let lines = Lines::new();
    thread::scope(|scope| {
        cpus.for_back_ends()?;
        let device = scope.spawn(|| lines.answer());
        cpus.for_driver()?;
        let start = Instant::now();
        let asked = lines.ask(time);
        let rate = asked as f64 / start.elapsed().as_secs_f64();
        lines.over.store(true, Ordering::Relaxed);
        device.join().map_err(|_| anyhow!("the other end has panicked"))?;
        Ok(rate)
    })
}
