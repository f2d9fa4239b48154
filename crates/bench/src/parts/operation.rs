//! An operation of a part, and its measurement.

use std::time::{Duration, Instant};

use anyhow::Result;

/// The number of operations between two readings of the clock.
const BURST: u32 = 64;

/// An operation that can be repeated.
pub(super) struct Operation {
    /// Its name in the table.
    pub(super) name: String,
    /// Runs the operation and returns how many items it processed. A figure is the time of one item.
    run: Box<dyn FnMut() -> Result<u32>>,
}

impl Operation {
    /// Makes an operation. `run` returns the number of items that it processed.
    pub(super) fn new(name: impl Into<String>, run: impl FnMut() -> Result<u32> + 'static) -> Operation {
        Operation { name: name.into(), run: Box::new(run) }
    }

    /// Repeats the operation for `time` and returns the nanoseconds for one item.
    pub(super) fn measure(&mut self, time: Duration) -> Result<f64> {
        let start = Instant::now();
        let mut count = 0u64;
        loop {
            for _ in 0..BURST {
                count += u64::from((self.run)()?);
            }
            let passed = start.elapsed();
            if passed >= time {
                return Ok(passed.as_nanos() as f64 / count.max(1) as f64);
            }
        }
    }
}
