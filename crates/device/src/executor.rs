//! The contract of what runs tasks.

use crate::{QueueTask, TaskHandle};
use std::io;

/// Runs tasks: a pool of workers.
pub trait Executor: Send + Sync {
    /// Hands a task to a worker. It is looked at once, kick or no kick: QEMU sends none after a reconnection.
    ///
    /// # Errors
    /// The worker cannot take it (it has ended, or the kernel has no room for one more descriptor to wait for).
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>>;
}
