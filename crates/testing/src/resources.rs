//! Counts resources of the host that this process holds.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::LIMIT;

/// The resources of the host that this process holds.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads, without those of the engines. The engines start threads on demand, up to a fixed number.
    pub threads: usize,
    /// Mappings of guest memory.
    pub shared: usize,
    /// All mappings. Their number varies with the heaps of threads.
    pub mappings: usize,
}

impl Resources {
    /// Counts the resources that this process holds now.
    pub fn now() -> Self {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let threads = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            threads: threads.filter(|name| !name.starts_with("io-")).count(),
            shared: maps.lines().filter(|line| line.contains("memfd")).count(),
            mappings: maps.lines().count(),
        }
    }

    /// Waits until this process holds no more descriptors, threads and guest memory than `self`, and returns
    /// what it holds then. Resources of an ended thread disappear after a moment.
    ///
    /// # Panics
    /// The process still holds more after [`LIMIT`].
    pub fn wait_until_back(&self) -> Self {
        let start = Instant::now();
        loop {
            let now = Self::now();
            let is_back = now.descriptors <= self.descriptors
                && now.threads <= self.threads
                && now.shared <= self.shared;
            if is_back {
                return now;
            }
            assert!(start.elapsed() < LIMIT, "before: {self:?}, now: {now:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
