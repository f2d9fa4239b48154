//! Operations of a part, and their measurement.

use std::time::{Duration, Instant};

use anyhow::Result;

/// Operations between two looks at the clock.
const BURST: u32 = 64;

/// Something that is done again and again.
pub(super) struct Operation {
    /// Its name in the table.
    pub(super) name: String,
    /// Does it, and returns the number of things that it did. A figure is for one of these.
    run: Box<dyn FnMut() -> Result<u32>>,
}

impl Operation {
    /// An operation; `run` says of how many it was.
    pub(super) fn new(name: impl Into<String>, run: impl FnMut() -> Result<u32> + 'static) -> Operation {
        Operation { name: name.into(), run: Box::new(run) }
    }

    /// Nanoseconds for one of what it run, over so long a time.
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
